"""A parent and the process of its run, which dies in every way: a record is left, and no process is (cases C36, C48, C49, C66).

The process is a stand-in that trains nothing and starts in a moment; `test_end_to_end` has the real one.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shlex
import signal
import subprocess
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness import launch, store
from harness.failures import LOG_LINES
from harness.record import Record
from systems.machine.limits import CGROUP_ROOT
from tests.harness.conftest import make_spec
from tests.harness.processes import LIGHT, ROOT, START_S, command_line, dummy, environment, marked, start, wait_for


@pytest.fixture(autouse=True)
def _light_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "WORKER", LIGHT)


def run_apart(*options: str, cgroup_root: Path = CGROUP_ROOT, **fields: Any) -> Record:
    with open(os.devnull, "w") as nowhere:
        return launch.launch(make_spec(*options, **fields), console=Console(file=nowhere), cgroup_root=cgroup_root)


@pytest.mark.parametrize(
    ("options", "phase", "signal_name", "exit_code"),
    [
        (("exit_at=0", "exit_code=5"), "initialize", None, 5),
        (("exit_at=2", "exit_code=3"), "step", None, 3),
        (("segfault_at=0",), "initialize", "SIGSEGV", None),
        (("segfault_at=2",), "step", "SIGSEGV", None),
        (("signal_at=0",), "initialize", "SIGKILL", None),
        (("signal_at=1",), "warm-up", "SIGKILL", None),
        (("signal_at=2", f"signal={int(signal.SIGBUS)}"), "step", "SIGBUS", None),
        (("crash_at=2",), "step", None, 1),
    ],
)
def test_a_process_that_dies_without_a_record(
    options: tuple[str, ...], phase: str, signal_name: str | None, exit_code: int | None
) -> None:
    """Case C48."""
    record = run_apart(*options)
    reason = record.reason
    assert (record.status, reason and reason.phase) == ("failed", phase)
    assert reason is not None
    assert (reason.signal, reason.exit_code, reason.rank) == (signal_name, exit_code, 0)
    assert record.resolved.steps == 4  # what it had told before it died
    assert record.environment.threads.intra_op == 1
    assert "import" in record.phases_s
    assert record.memory.host_rss_peak_bytes is not None
    assert record.memory.host_rss_peak_bytes > 5 << 20
    assert record.memory.host_budget_bytes
    if signal_name == "SIGSEGV":
        assert any("Segmentation fault" in line for line in reason.log), reason.log
    if exit_code == 1:
        assert reason.log[-1] == "RuntimeError: the script says that step 2 crashes"


@pytest.mark.parametrize("held", [False, True])
def test_what_a_killed_process_has_not_finished_to_save_goes(held: bool, tmp_path: Path) -> None:
    """Unless somebody else saves there."""
    folder = tmp_path / "kept"
    if held:
        folder.mkdir()
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    record = run_apart("signal_at=5", checkpoint=str(folder))
    assert (record.status, record.reason and record.reason.phase) == ("failed", "save")
    if held:
        os.close(descriptor)
        assert os.listdir(folder) == ["data-0123456789abcdef"]
    else:
        assert os.listdir(tmp_path) == []


def test_a_folder_with_packages_of_the_same_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what else is in it can be imported, as a user's own model may have to."""
    for name in ("harness", "models", "systems"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('these are the user\\'s own')")
    (tmp_path / "of_the_user.py").touch()
    monkeypatch.chdir(tmp_path)
    record = run_apart("import=of_the_user")
    assert record.status == "ok", record.reason


def test_bad_input_that_only_the_worker_sees_is_one_line_too(tmp_path: Path) -> None:
    with start(*dummy(tmp_path, "--data", "bad"), light=True) as process:
        out, err = process.communicate(timeout=START_S)
    assert (process.returncode, out, err) == (2, "", "harness: a_word\n")
    assert list(tmp_path.iterdir()) == []


def test_a_crash_is_printed_kept_and_touches_no_earlier_record(tmp_path: Path) -> None:
    earlier = tmp_path / "earlier.json"
    earlier.write_text("{}")
    with start(*dummy(tmp_path, options=("crash_at=3",)), light=True) as process:
        out, err = process.communicate(timeout=START_S)
    assert process.returncode == 1
    record = json.loads(out.splitlines()[-1])
    assert 2 < len(record["reason"]["log"]) <= LOG_LINES
    assert "a package has something to say" in err
    assert "Traceback" in err
    assert earlier.read_text() == "{}"
    assert {path.name for path in tmp_path.iterdir()} == {"earlier.json", record["run_id"] + ".json"}


def test_a_kill_by_the_kernel_for_memory(tmp_path: Path) -> None:
    """Case C36: SIGKILL and a counter of the process's group that grew meanwhile."""
    (tmp_path / "memory.max").write_text(f"{1 << 30}\n")
    events = tmp_path / "memory.events"
    events.write_text("oom_kill 4\n")
    threading.Timer(0.3, events.write_text, ["oom_kill 5\n"]).start()
    record = run_apart("signal_at=2", "step_time_s=1", cgroup_root=tmp_path)
    assert record.status == "oom"
    assert record.reason is not None
    assert (record.reason.tier, record.reason.have, record.reason.signal) == ("host", 1 << 30, "SIGKILL")
    assert (record.reason.phase, record.reason.rank) == ("step", 0)
    assert "resident" in record.reason.message
    assert record.reason.last_known_bytes
    assert record.notes == ["1 steps were done when it was last heard of"]


def test_an_out_of_memory_error_in_a_package_s_own_thread() -> None:
    record = run_apart("thread_oom_at=2")
    assert record.status == "oom"
    assert record.reason is not None
    assert (record.reason.tier, record.reason.need, record.reason.have) == ("device", 2 << 30, 1 << 30)
    assert (record.reason.phase, record.reason.exit_code, record.reason.signal) == ("step", 1, None)
    assert "Tried to allocate 2.00 GiB" in record.reason.log[-1]


def test_a_time_out_says_where_the_run_was() -> None:
    record = run_apart("hang_at=2", "child_at=1", timeout=2)
    assert record.status == "timeout"
    assert record.reason is not None
    assert record.reason.signal is None
    assert record.wall_s is not None
    assert record.wall_s < 2 + 10
    assert record.reason.phase in ("start", "step")  # a machine under load may not get far in this time
    if record.reason.phase == "step":
        assert any("misbehave" in line for line in record.reason.log)


@pytest.mark.parametrize(
    ("number", "status", "tier"),
    [(errno.ENOMEM, "oom", "host"), (errno.EAGAIN, "failed", None), (errno.ENOENT, "failed", None)],
)
def test_a_process_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch, number: int, status: str, tier: str) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    descriptors = len(os.listdir("/proc/self/fd"))
    record = run_apart()
    assert record.status == status
    assert record.reason is not None
    assert (record.reason.tier, record.reason.phase) == (tier, "start")
    assert record.reason.message.startswith("no process could be started: ")
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize("options", [(), ("exit_at=2",)])
def test_swap_in_mid_run_is_flagged(monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]) -> None:
    """Case C37: at its end nothing may be swapped out any more."""
    looks = iter([{"VmRSS": 1 << 20, "VmSwap": 3 << 20}])
    monkeypatch.setattr(launch, "process_memory", lambda pid: next(looks, {"VmRSS": 1 << 20, "VmSwap": 0}))
    assert [doubt.code for doubt in run_apart(*options).doubts] == ["swap_in_use"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_its_parent(tmp_path: Path, number: signal.Signals) -> None:
    """Case C49: the worker hangs and has started a process of its own when the parent is told, or killed."""
    mark = uuid.uuid4().hex
    process = start(*dummy(tmp_path, options=("child_at=2", "hang_at=2")), light=True, mark=mark)
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
    assert process.returncode == 128 + number
    record = json.loads(out.splitlines()[-1])
    assert (record["status"], record["reason"]["signal"]) == ("interrupted", number.name)
    assert record["reason"]["phase"] == "step"
    assert len(list(tmp_path.iterdir())) == 1


def test_what_is_finished_stays_when_the_parent_is_killed(tmp_path: Path) -> None:
    """Case C66: a kill after the third of ten."""
    process = start(*dummy(tmp_path, "--repeat", "10"), light=True)
    with process:
        assert process.stdout is not None
        printed = [json.loads(process.stdout.readline())["run_id"] for _ in range(3)]
        process.kill()
    records, unreadable = store.read_all(tmp_path)
    assert [record.run_id for record in records][:3] == printed
    assert len(records) <= 4
    assert unreadable == []


@pytest.mark.parametrize(
    ("pipe", "code"),
    [
        ("{run} | tee {copy}", 1),
        ("{run} 2>&1 | tee {copy}", 1),
        ("{run} | head -c 1 > {copy}", 1),
        ("{run} 2>&1 | head -n 1 > {copy}", 1),
        ("{run} 2> /dev/full > {copy}", 1),
        ("{run} >&- 2>&- ; rc=$?; touch {copy}; (exit $rc)", 1),
    ],
)
def test_a_reader_that_goes_away_ends_no_run(tmp_path: Path, pipe: str, code: int) -> None:
    """Case C48: the exit code is the run's, its record is kept, whoever reads what it says."""
    results, copy = tmp_path / "results", tmp_path / "copy"
    run = shlex.join(command_line(*dummy(results, "--repeat", "2", options=("exit_at=3",)), light=True))
    script = "set -o pipefail; " + pipe.format(run=run, copy=shlex.quote(str(copy)))
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, env=environment(), timeout=START_S, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    records, unreadable = store.read_all(results)
    assert [record.status for record in records] == ["failed", "failed"]
    assert unreadable == []
    if "| tee" in pipe:
        assert json.loads(copy.read_text().splitlines()[-1])["run_id"] == records[-1].run_id


def test_threads_of_the_emulated_device_sleep_while_they_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those that spin made steps of resident twenty times as long where others use the cores. A GPU's runs stay as they are."""
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    cpu, any_device = make_spec(device="cpu"), make_spec(device=None)
    monkeypatch.setattr("harness.store.DRIVER", tmp_path / "none")
    assert launch.environment_of(cpu)["OMP_WAIT_POLICY"] == launch.environment_of(any_device)["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setattr("harness.store.DRIVER", tmp_path)
    assert launch.environment_of(cpu)["OMP_WAIT_POLICY"] == "PASSIVE"
    for spec in (any_device, make_spec(device="cuda")):
        assert "OMP_WAIT_POLICY" not in launch.environment_of(spec)
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "7")
        assert launch.environment_of(cpu).get("OMP_WAIT_POLICY") in (None, "7")
        monkeypatch.delenv(name)
