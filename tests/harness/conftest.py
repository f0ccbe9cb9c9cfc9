"""Jobs run in the test's own process, and records without a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.channel import Channel, WorkerJob
from harness.record import Record, build
from harness.running import run
from harness.spec import RunSpec
from systems.machine.limits import CGROUP_ROOT


def make_spec(*options: str, **fields: Any) -> RunSpec:
    """A small run of the scripted system."""
    given = {"system": "dummy", "model": "opt-tiny", "device": "cpu", "steps": 4, "warmup": 1, "option": options}
    return RunSpec.model_validate(given | fields)


def make_record(**fields: Any) -> Record:
    given = {"run_id": "20261128T000000.000000Z-dummy-opt-tiny-000000", "status": "ok", "started_at": "2026-11-28"}
    return build(given | {"spec": make_spec()} | fields)


@pytest.fixture
def run_here() -> Iterator[Callable[..., Record]]:
    """Runs a spec as the worker does, without a process of its own."""
    descriptor = os.open(os.devnull, os.O_WRONLY)

    def here(spec: RunSpec, *, host_budget: int | None = 1 << 40, cgroup_root: Path = CGROUP_ROOT) -> Record:
        job = WorkerJob(
            spec=spec,
            run_id="here",
            started_at="2026-11-28",
            replicate=0,
            parent_pid=os.getpid(),
            descriptor=descriptor,
            host_budget_bytes=host_budget,
            cgroup_root=str(cgroup_root),
        )
        return run(job, Channel(descriptor), import_s=0.0)

    yield here
    os.close(descriptor)
