"""What the baselines' tests look at: one process that trains each of them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.baselines.training import Job, Result, Training

EXACT = ("deepspeed-zero3-offload", "deepspeed-zero2-offload", "deepspeed-zero3", "deepspeed-zero2", "deepspeed-twinflow")
TORCH = ("torch-ddp", "fsdp2-offload")
SYSTEMS = (*EXACT, *TORCH)
BF16 = (
    Job("deepspeed-zero3-offload", dtype="bf16", accumulate=1, clip=0.0, recompute="none"),
    Job("deepspeed-zero2-offload", dtype="bf16", accumulate=2, clip=1.0, recompute="none"),
    Job("fsdp2-offload", dtype="bf16", accumulate=1, clip=0.0, recompute="none"),
    Job("torch-ddp", dtype="bf16", accumulate=2, clip=1.0, recompute="none"),
    Job("torch-ddp", dtype="bf16", accumulate=1, clip=0.0, recompute="none", options=("weights=autocast",)),
)
FROZEN = tuple(Job(system, model="frozen-middle") for system in ("deepspeed-zero3", "deepspeed-zero2", *TORCH))
FP32 = tuple(Job(system) for system in SYSTEMS)
SLOW = (
    *(job for job in FP32 if job.system in ("deepspeed-zero3", "deepspeed-zero2", "deepspeed-twinflow")),
    *(job for job in BF16 if job.system in ("deepspeed-zero2-offload", "fsdp2-offload")),
    *(job for job in FROZEN if job.system in ("deepspeed-zero2", "fsdp2-offload")),
)
TRAINING = pytest.StashKey[Training]()


def reference(job: Job) -> Job:
    """The same under resident."""
    return Job("resident", job.model, job.dtype, job.accumulate, job.clip, job.recompute)


def cases(jobs: Iterable[Job]) -> list[Any]:
    """As parameters of tests that look at what they came to. A few of each package tell most of it."""
    return [pytest.param(job, marks=pytest.mark.slow if job in SLOW else ()) for job in jobs]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What looks at trained baselines goes last, so that the process trains them beside all the other tests."""
    items.sort(key=_looks_at_trained)


def _looks_at_trained(item: pytest.Item) -> bool:
    return "trained" in getattr(item, "fixturenames", ())


def pytest_collection_finish(session: pytest.Session) -> None:
    one_of_several = hasattr(session.config, "workerinput")  # each collects all tests, and one will be given these
    if not session.config.option.collectonly and not one_of_several and any(map(_looks_at_trained, session.items)):
        _start(session)


def _start(session: pytest.Session) -> Training:
    config = session.config
    looked_at = {item.callspec.params.get("job") for item in session.items if hasattr(item, "callspec")}
    asked = [job for job in (*FP32, *BF16, *FROZEN) if job not in SLOW or job in looked_at]
    jobs = [*dict.fromkeys(map(reference, asked)), *sorted(asked, key=lambda job: job.system not in TORCH)]
    folder = tempfile.TemporaryDirectory()
    config.add_cleanup(folder.cleanup)
    config.stash[TRAINING] = training = Training(jobs, Path(folder.name))
    config.add_cleanup(training.stop)  # before the folder's: the last one added is the first one called
    return training


@pytest.fixture(scope="session")
def trained(request: pytest.FixtureRequest) -> Callable[[Job], Result]:
    """The result of one of the jobs above or its reference; torch's come first, since DeepSpeed changes torch."""
    training = request.config.stash.get(TRAINING, None) or _start(request.session)
    results = training.results()

    def result(job: Job) -> Result:
        found = results[job]
        assert found.error is None, found.error
        return found

    return result
