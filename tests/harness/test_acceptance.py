"""From the command line to the record: elixir under half of resident's memory trains bit for bit like resident."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def harness_run(folder: Path, *arguments: str) -> dict[str, Any]:
    """The record on the last line of stdout; it must also lie in the results folder."""
    command = [sys.executable, "-m", "harness", "run", *arguments, "--device", "cpu", "--results", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert json.loads((folder / f"{record['run_id']}.json").read_text())["run_id"] == record["run_id"]
    return record


def compare(folder: Path, *flags: str) -> None:
    same = ("--dtype", "fp32", "--steps", "6", "--seed", "1", *flags)
    resident = harness_run(folder, "--system", "resident", *same)
    peak = resident["memory"]["device_peak_bytes"]
    tight = harness_run(folder, "--system", "elixir", "--device-memory", str(peak // 2), *same)
    assert tight["metrics"]["loss"] == resident["metrics"]["loss"]
    assert len(tight["metrics"]["loss"]) == 6
    assert tight["traffic"]["h2d_bytes"] > 0
    assert tight["memory"]["device_peak_bytes"] <= peak // 2
    ample = harness_run(folder, "--system", "elixir", "--device-memory", str(peak + 1), *same)
    assert ample["metrics"]["loss"] == resident["metrics"]["loss"]
    assert ample["traffic"]["h2d_bytes"] == ample["traffic"]["d2h_bytes"] == 0


def test_opt_tiny(tmp_path: Path) -> None:
    compare(tmp_path, "--model", "opt-tiny")


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("accumulate", ["1", "2"])
@pytest.mark.parametrize("clip", ["0", "1.0"])
@pytest.mark.parametrize("model", ["opt-tiny", "gpt-tiny"])
def test_flags(tmp_path: Path, model: str, recompute: str, accumulate: str, clip: str) -> None:
    compare(tmp_path, "--model", model, "--recompute", recompute, "--accumulate", accumulate, "--clip", clip)
