"""Real processes that die in every way: a record is left, and no process is (cases C36, C48, C49 and C66)."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness import store
from harness.launch import launch
from harness.record import Record
from systems.limits import CGROUP_ROOT
from tests.harness.conftest import make_spec

ROOT = Path(__file__).resolve().parents[2]
MARK = "HARNESS_TEST_MARK"
START_S = 60.0  # a loaded machine takes its time to import torch


def start(*options: str, results: Path, mark: str = "", flags: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "harness", "run", "--system", "dummy", "--model", "opt-tiny", "--device", "cpu"]
    command += ["--steps", "4", "--warmup", "1", "--results", str(results), *flags]
    command += ["--option", *options] if options else []
    environment = os.environ | {MARK: mark, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def marked(mark: str) -> set[int]:
    """Processes that inherited the mark, zombies left out."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.add(int(folder.name))
        except OSError:
            continue
    return found


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def run_apart(*options: str, cgroup_root: Path = CGROUP_ROOT, **fields: Any) -> Record:
    with open(os.devnull, "w") as nowhere:
        return launch(make_spec(*options, **fields), console=Console(file=nowhere), cgroup_root=cgroup_root)


def test_one_json_line_a_run_and_each_in_its_own_process(tmp_path: Path) -> None:
    with start("step_time_s=0.01", results=tmp_path, flags=("--repeat", "2", "--tag", "pair")) as process:
        out, err = process.communicate(timeout=2 * START_S)
    assert process.returncode == 0, err
    printed = [json.loads(line) for line in out.splitlines()]
    assert [record["replicate"] for record in printed] == [0, 1]
    records, unreadable = store.read_all(tmp_path)
    assert unreadable == []
    assert [record.model_dump(mode="json") for record in records] == printed
    assert {record.spec.tag for record in records} == {"pair"}
    assert records[0].metrics.loss == records[1].metrics.loss
    assert records[0].wall_s is not None
    assert "step 4/4" in err


def test_bad_input_that_only_the_worker_sees_is_one_line_too(tmp_path: Path) -> None:
    with start("crash=2", results=tmp_path) as process:
        out, err = process.communicate(timeout=START_S)
    assert (process.returncode, out) == (2, "")
    assert err == "harness: unknown option of dummy 'crash': did you mean crash_at?\n"
    assert list(tmp_path.iterdir()) == []


def test_a_crash_keeps_its_last_lines_and_touches_no_earlier_record(tmp_path: Path) -> None:
    (tmp_path / "earlier.json").write_text("{}")
    before = hashes(tmp_path)
    with start("crash_at=3", results=tmp_path) as process:
        out, err = process.communicate(timeout=START_S)
    assert process.returncode == 1
    record = json.loads(out.splitlines()[-1])
    assert record["status"] == "failed"
    assert record["reason"]["message"] == "RuntimeError: the script says that step 3 crashes"
    assert record["reason"]["log"][-1] == record["reason"]["message"]
    assert 5 < len(record["reason"]["log"]) <= 20
    assert "Traceback" in err
    after = hashes(tmp_path)
    assert after.pop(record["run_id"] + ".json")
    assert after == before


@pytest.mark.parametrize(
    ("options", "signal_name", "exit_code"),
    [
        (("exit_at=2", "exit_code=5"), None, 5),
        (("segfault_at=2",), "SIGSEGV", None),
        (("signal_at=1",), "SIGKILL", None),
    ],
)
def test_a_process_that_dies_without_a_word(options: tuple[str, ...], signal_name: str, exit_code: int) -> None:
    record = run_apart(*options)
    assert record.status == "failed"
    assert record.reason is not None
    assert (record.reason.signal, record.reason.exit_code) == (signal_name, exit_code)
    assert record.reason.phase == ("warm-up" if signal_name == "SIGKILL" else "step")
    assert record.resolved.steps == 4  # what it had told before it died
    assert record.environment.threads.intra_op
    assert record.memory.host_rss_peak_bytes is not None
    assert record.memory.host_rss_peak_bytes > 50 << 20
    if signal_name == "SIGSEGV":
        assert any("Segmentation fault" in line for line in record.reason.log), record.reason.log


def test_a_kill_by_the_kernel_for_memory(tmp_path: Path) -> None:
    """Case C36: SIGKILL and a counter of the process's group that grew meanwhile."""
    (tmp_path / "memory.max").write_text(f"{1 << 30}\n")
    events = tmp_path / "memory.events"
    events.write_text("oom_kill 4\n")
    threading.Timer(0.5, events.write_text, ["oom_kill 5\n"]).start()
    record = run_apart("signal_at=2", cgroup_root=tmp_path)
    assert record.status == "oom"
    assert record.reason is not None
    assert (record.reason.tier, record.reason.have, record.reason.signal) == ("host", 1 << 30, "SIGKILL")
    assert (record.reason.phase, record.reason.rank) == ("step", 0)
    assert "resident" in record.reason.message


def test_a_time_out_says_where_the_run_was() -> None:
    record = run_apart("hang_at=1", "child_at=1", timeout=6)
    assert record.status == "timeout"
    assert record.reason is not None
    assert record.reason.phase in ("start", "warm-up")  # a machine under load may not get far in this time
    assert record.reason.signal is None
    assert record.wall_s is not None
    assert record.wall_s < 6 + 10
    if record.reason.phase == "warm-up":
        assert any("_misbehave" in line for line in record.reason.log)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_its_parent(tmp_path: Path, number: signal.Signals) -> None:
    """Case C49: the worker hangs and has started a process of its own when the parent is told, or killed."""
    mark = uuid.uuid4().hex
    process = start("child_at=2", "hang_at=2", results=tmp_path, mark=mark)
    try:
        assert process.stderr is not None
        while process.stderr.readline() not in ("step\n", ""):
            pass
        # The parent, the worker, the worker's own child, and the guard.
        assert wait_for(lambda: len(marked(mark)) == 4, START_S)
        process.send_signal(number)
        assert wait_for(lambda: not marked(mark), 10)
    finally:
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
        out, _ = process.communicate(timeout=10)
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
        assert list(tmp_path.iterdir()) == []
        return
    assert process.returncode == 1
    record = json.loads(out.splitlines()[-1])
    assert (record["status"], record["reason"]["signal"]) == ("failed", number.name)
    assert record["reason"]["phase"] == "step"
    assert len(list(tmp_path.iterdir())) == 1
