"""A machine that no profile knows, in three commands: its roofs, what fits, and a run of the system that the plan has first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from harness import cli, profile
from systems.planning import hardware
from tests.harness.roofs.test_roofs import HOST_SIZES

WORK = ("--model", "opt-tiny", "--device", "cpu", "--device-memory", "6MiB", "--batch-size", "2", "--seq-len", "32")
LIKE = "h100-80g-x1"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements, on a machine without a device."""
    monkeypatch.setattr(profile, "HostSizes", lambda: HOST_SIZES)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.long
def test_profile_plan_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine, kept = tmp_path / "machine.json", tmp_path / "kept"
    assert cli.main(["profile", "--device", "cpu", "--like", LIKE, "--out", str(machine)]) == 0
    out, err = capsys.readouterr()
    measured = json.loads(out)
    assert f"the device is that of {LIKE}" in err and measured == json.loads(machine.read_text())
    assert cli.main(["plan", "--system", "all", "--hardware", str(machine), *WORK]) == 0
    planned = json.loads(capsys.readouterr().out)
    first = planned["ranking"][0]
    assert first["fits"] and first["plan"]["predicted_step_time_s"] > 0
    assert planned["resolved"]["host_memory"] == measured["host_memory_bytes"]["value"]
    again = ["run", "--system", first["system"], *WORK, "--steps", "13", "--warmup", "12", "--results", str(kept)]
    assert cli.main(again) == 0  # H3T has a plan after ten steps
    (file,) = kept.glob("*.json")
    record = json.loads(file.read_text())
    assert record["status"] == "ok" and record["spec"]["system"] == first["system"]
    assert 0 < record["memory"]["device_peak_bytes"] <= first["plan"]["predicted_device_peak_bytes"] <= 6 << 20


def test_what_is_measured_here_is_not_the_other_machines(tmp_path: Path) -> None:
    machine = tmp_path / "machine.json"
    assert cli.main(["profile", "--device", "cpu", "--like", LIKE, "--out", str(machine)]) == 0
    mine, theirs, told = hardware.load(str(machine)), hardware.load(LIKE), json.loads(machine.read_text())
    assert mine.cpu_adam_bytes_per_s.value == told["cpu_adam_bytes_per_s"]["value"]
    assert mine.host_memory_bytes.value == told["host_memory_bytes"]["value"]
    assert (mine.device_name, mine.matmul_flops_per_s) == (theirs.device_name, theirs.matmul_flops_per_s)


@pytest.mark.parametrize(
    ("device", "like", "said"),
    [(False, "h100-80g-x3", "did you mean h100-80g-x"), (True, LIKE, "there is a device here, and all of it is measured")],
)
def test_whose_device_it_is_is_known_before_anything_is_measured(
    device: bool, like: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "measure_host", lambda *_: pytest.fail("something was measured"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert cli.main(["profile", "--like", like]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and said in err
