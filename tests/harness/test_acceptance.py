"""From a request to its record: elixir under half of resident's memory trains bit for bit like resident."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.record import Record
from harness.spec import RunSpec
from tests.harness.processes import start

Run = Callable[..., dict[str, Any]]


def by_command_line(folder: Path) -> Run:
    """The record on the last line of stdout; it must also lie in the results folder."""

    def harness_run(**given: Any) -> dict[str, Any]:
        flags = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        with start("run", *flags, "--device", "cpu", "--results", str(folder)) as process:
            out, err = process.communicate(timeout=280)
        assert process.returncode == 0, err[-3000:]
        record: dict[str, Any] = json.loads(out.splitlines()[-1])
        assert json.loads((folder / f"{record['run_id']}.json").read_text())["run_id"] == record["run_id"]
        return record

    return harness_run


def assert_elixir_equals_resident(harness_run: Run, **same: Any) -> None:
    same |= {"dtype": "fp32", "steps": 6, "seed": 1}
    resident = harness_run(system="resident", **same)
    peak = resident["memory"]["device_peak_bytes"]
    tight = harness_run(system="elixir", device_memory=peak // 2, **same)
    assert tight["metrics"]["loss"] == resident["metrics"]["loss"]
    assert len(tight["metrics"]["loss"]) == 6
    assert tight["traffic"]["h2d_bytes"] > 0
    assert tight["memory"]["device_peak_bytes"] <= peak // 2
    ample = harness_run(system="elixir", device_memory=peak + 1, **same)
    assert ample["metrics"]["loss"] == resident["metrics"]["loss"]
    assert ample["traffic"]["h2d_bytes"] == ample["traffic"]["d2h_bytes"] == 0


def test_opt_tiny(run_here: Callable[[RunSpec], Record], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def here(**given: Any) -> dict[str, Any]:
        record = run_here(RunSpec(device="cpu", **given))
        assert record.status == "ok", record.reason
        return record.model_dump(mode="json")

    assert_elixir_equals_resident(here, model="opt-tiny")


@pytest.mark.slow
def test_opt_tiny_by_the_command_line(tmp_path: Path) -> None:
    assert_elixir_equals_resident(by_command_line(tmp_path), model="opt-tiny")


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("accumulate", ["1", "2"])
@pytest.mark.parametrize("clip", ["0", "1.0"])
@pytest.mark.parametrize("model", ["opt-tiny", "gpt-tiny"])
def test_flags(tmp_path: Path, model: str, recompute: str, accumulate: str, clip: str) -> None:
    assert_elixir_equals_resident(by_command_line(tmp_path), model=model, recompute=recompute, accumulate=accumulate, clip=clip)
