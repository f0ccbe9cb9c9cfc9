"""`--disk` on the command line: what a run keeps of it, what a plan foresees, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import cli
from harness.record import Record
from tests.harness.conftest import make_spec

WORK: dict[str, Any] = {"model": "opt-tiny", "dtype": "fp32", "device_memory": 6 << 20, "option": ("page=64KiB",)}


def test_a_run_through_files_trains_as_one_without(run_here: Callable[..., Record], tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    plain = run_here(make_spec(system="angel-ptm", **WORK))
    short = run_here(make_spec(system="angel-ptm", disk=str(tmp_path / "disk"), host_memory=9 << 20, **WORK))
    assert plain.status == short.status == "ok"
    assert plain.metrics.loss == short.metrics.loss
    assert plain.memory.disk_peak_bytes == plain.traffic.disk_read_bytes == 0
    assert plain.memory.disk_direct is None
    assert short.memory.disk_peak_bytes is not None and short.memory.disk_peak_bytes > 8 << 20
    assert short.traffic.disk_read_bytes == short.traffic.disk_write_bytes
    assert 0 < (short.traffic.disk_read_bytes or 0) <= short.memory.disk_peak_bytes
    assert (short.memory.host_peak_bytes or 0) <= 9 << 20
    assert list((tmp_path / "disk").iterdir()) == []


@pytest.mark.long
def test_a_plan_foresees_what_the_disk_holds_and_its_bound(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--system", "angel-ptm", "--model", "opt-1.3b", "--hardware", "h100-80g-x1", "--recompute", "full"]
    arguments += ["--set", "num_layers=6", "--batch-size", "1", "--seq-len", "512"]
    small = [*arguments, "--host-memory", "2GiB", "--device-memory", "2GiB"]
    assert cli.main([*small, "--disk", "x"]) == 0
    captured = capsys.readouterr()
    told = json.loads(captured.out.splitlines()[-1])
    assert told["tiers"]["disk"]["need_bytes"] > 4e9
    assert told["tiers"]["host"]["need_bytes"] <= 2 << 30
    assert "limited by disk" in captured.err
    assert cli.main(small) == 1
    assert cli.main([*small, "--disk-memory", "1GiB"]) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "--system", "elixir", "--disk-memory", "1GiB"), "needs a folder: name it with --disk"),
        (("run", "--system", "elixir", "--disk-rate", "1MiB"), "needs a folder: name it with --disk"),
        (
            ("run", "--system", "elixir", "--disk", "x", "--disk-rate", "0"),
            "--disk-rate 0: input should be greater than or equal to 1",
        ),
        (("plan", "--system", "resident", "--disk", "x", "--hardware", "h100-80g-x1"), "resident keeps no states on a disk"),
        (("plan", "--system", "elixir", "--disk", "x", "--hardware", "h3t-a100-40g-x8"), "profile h3t-a100-40g-x8 has no disk"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*arguments, "--model", "opt-tiny"]) == 2
    complaint = capsys.readouterr().err
    assert said in complaint
    assert complaint.count("\n") == 1


def test_a_system_that_keeps_no_states_there_says_so(run_here: Callable[..., Record], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--disk: resident keeps no states on a disk"):
        run_here(make_spec(system="resident", disk=str(tmp_path)))


def test_a_folder_that_is_not_there_is_refused(run_here: Callable[..., Record], tmp_path: Path) -> None:
    record = run_here(make_spec(system="angel-ptm", disk=str(tmp_path / "none"), host_memory=9 << 20, **WORK))
    assert record.status == "refused"
    assert record.reason is not None and record.reason.tier == "disk"
    assert "name a folder on a disk" in record.reason.message
