"""The parent of a run: one fresh process, watched until it ends; its record, or one written in its stead.

Note [No process is left]
    The worker leads a process group of its own. Whatever ends the run (its end, a time-out, Ctrl-C, SIGTERM, SIGHUP),
    the whole group is killed then. A parent that is killed itself cannot do so; for that the worker asks the kernel to
    die with its parent, and a guard in the same group waits for the end of a pipe that only the parent holds open, and
    kills the group: processes that the worker started are in it.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from harness import trace
from harness.channel import Lines, WorkerJob
from harness.doubts import Evidence, judge
from harness.failures import LOG_LINES, Death, from_death, from_exception
from harness.output import fill_standard_streams
from harness.record import Doubt, Record, build
from harness.spec import BadInputError, RunSpec
from harness.store import new_run_id
from systems.machine.limits import CGROUP_ROOT, oom_kills, process_memory, read_limits

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_S = 0.1
_LAST_WORDS_S = 0.5
_EXIT_GRACE_S = 30.0
WORKER = ("-P", "-m", "harness.worker")  # -P: the folder it starts in comes last, it may have a models or harness of its own
_GUARD = "import os, signal, sys; sys.stdin.read(); os.killpg(0, signal.SIGKILL)"


@dataclass
class Stop:
    """Whether this process was told to stop, and by which signal."""

    number: int | None = None

    @property
    def code(self) -> int:
        """The exit code that says so, as shells give it: 130 for Ctrl-C; 0 if it was not."""
        return 0 if self.number is None else 128 + self.number


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Within, SIGINT, SIGTERM and SIGHUP are noted instead of raised: no moment is a wrong one for them."""
    stop = Stop()

    def note(number: int, frame: FrameType | None) -> None:
        stop.number = stop.number or number

    before = {number: signal.signal(number, note) for number in STOP_SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class Heard:
    """What the parent has heard and seen of the worker."""

    phase: str = "start"
    partial: dict[str, Any] = field(default_factory=dict)
    record: Record | None = None
    bad_input: str | None = None
    log: deque[str] = field(default_factory=lambda: deque(maxlen=LOG_LINES))
    steps_done: int = 0
    rss_bytes: int | None = None
    rss_peak_bytes: int | None = None
    swap_peak_bytes: int = 0


class Worker:
    """The process of one run with its guard and its two pipes: messages, and whatever it prints.

    Raises OSError, with nothing left behind, if the machine cannot start a process.
    """

    def __init__(self, job: WorkerJob, messages: tuple[int, int], console: Console) -> None:
        self.seen = Heard()
        self._console = console
        self._held_back: list[str] | None = []  # until the input is known to be good: bad input is one line
        read_end, write_end = messages
        try:
            self.process, self._guard = _start(write_end)
        except OSError:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        assert self.process.stdin and self.process.stdout
        self._selector = selectors.DefaultSelector()
        self._output = Lines()
        for descriptor, lines, take in (
            (read_end, Lines(), self._take_message),
            (self.process.stdout.fileno(), self._output, self._take_output),
        ):
            os.set_blocking(descriptor, False)
            self._selector.register(descriptor, selectors.EVENT_READ, (lines, take))
        self._message_end = read_end
        try:
            self.process.stdin.write(job.model_dump_json().encode())
            self.process.stdin.close()
        except BrokenPipeError:
            pass  # it died at once; how is found out below

    def listen(self, seconds: float) -> None:
        """Take in what arrives within `seconds`, or at once what is there."""
        for key, _ in self._selector.select(seconds):
            lines, take = key.data
            try:
                data = os.read(key.fd, 1 << 16)
            except BlockingIOError:
                continue
            if not data:
                self._selector.unregister(key.fd)
                continue
            for line in lines.feed(data):
                take(line)

    def _take_message(self, line: str) -> None:
        message, seen = json.loads(line), self.seen
        match message["kind"]:
            case "phase":
                seen.phase = message["phase"]
                if seen.phase not in ("start", "resolve"):
                    self._let_go()
                self._tell(seen.phase)
            case "step":
                loss = "" if message["loss"] is None else f"  loss {message['loss']:.4f}"
                seen.steps_done = message["done"]
                self._tell(f"step {message['done']}/{message['steps']}{loss}")
            case "partial":
                seen.partial = message["fields"]
            case "bad_input":
                seen.bad_input = message["message"]
            case "record":
                seen.record = Record.model_validate(message["record"])

    def _take_output(self, line: str) -> None:
        self.seen.log.append(line)
        self._tell(line)

    def _tell(self, line: str) -> None:
        if self._held_back is None:
            self._console.print(line, markup=False)
        else:
            self._held_back.append(line)

    def _let_go(self) -> None:
        held_back, self._held_back = self._held_back or [], None
        for line in held_back:
            self._tell(line)

    def look(self) -> None:
        """The worker's memory: resident for the record of one that is killed, swapped for any."""
        memory = process_memory(self.process.pid)
        self.seen.swap_peak_bytes = max(self.seen.swap_peak_bytes, memory.get("VmSwap", 0))
        self.seen.rss_bytes = memory.get("VmRSS", self.seen.rss_bytes)
        self.seen.rss_peak_bytes = memory.get("VmHWM", self.seen.rss_peak_bytes)

    def ask_where_it_is(self) -> None:
        """Have the worker print its stack, and wait for it a moment."""
        self.process.send_signal(signal.SIGUSR1)
        until = time.monotonic() + _LAST_WORDS_S
        while time.monotonic() < until:
            self.listen(_POLL_S)

    def put_away(self) -> int:
        """Kill whatever is left of the group, take in the last words, reap. The worker's exit code."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        self._guard.wait()
        for _ in range(1000):  # everything written is in the pipes now
            if not self._selector.select(0):
                break
            self.listen(0)
        if self._output.rest():
            self._take_output(self._output.rest())
        if self.seen.bad_input is None:
            self._let_go()
        self._selector.close()
        os.close(self._message_end)
        for pipe in (self.process.stdout, self._guard.stdin):
            assert pipe
            pipe.close()
        return code


def _start(write_end: int) -> tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]:
    """The worker, with one end of the pipe for its messages, and the guard in its group."""
    root = str(Path(__file__).resolve().parents[1])
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")]), os.curdir])
    environment["PYTHONUNBUFFERED"] = "1"
    worker = subprocess.Popen(
        [sys.executable, *WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        pass_fds=(write_end,),
        process_group=0,
    )
    try:
        guard = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=worker.pid,
        )
    except OSError:
        worker.kill()
        worker.communicate()
        raise
    return worker, guard


def launch(
    spec: RunSpec,
    *,
    replicate: int = 0,
    console: Console,
    stop: Stop | None = None,
    cgroup_root: Path = CGROUP_ROOT,
    advise: bool = False,
) -> Record:
    """Run a spec in a fresh process and return its record, whatever becomes of the process. Raises BadInputError.

    advise: where memory is short, look for what would train here.
    """
    now, started_s = datetime.now(UTC), time.monotonic()
    fill_standard_streams()
    messages = os.pipe()
    job = WorkerJob(
        spec=spec,
        run_id=new_run_id(spec.system, spec.model, now),
        started_at=now.isoformat(),
        replicate=replicate,
        parent_pid=os.getpid(),
        descriptor=messages[1],
        host_budget_bytes=read_limits(cgroup_root=cgroup_root).host_budget_bytes,
        cgroup_root=str(cgroup_root),
        advise=advise,
    )
    kills_before = oom_kills(cgroup_root=cgroup_root)
    stop = stop or Stop()
    try:
        worker = Worker(job, messages, console)
    except OSError as error:
        status, reason = from_exception(error, "start", rank=0)
        why = reason.model_copy(update={"message": f"no process could be started: {reason.message}"})
        return build({**_identity(job), "status": status, "reason": why, "wall_s": time.monotonic() - started_s})
    try:
        timed_out = _watch(worker, spec.timeout, stop)
        exited = worker.process.poll() is not None
    finally:
        code = worker.put_away()
        if spec.trace is not None:
            trace.clear(Path(spec.trace), worker.process.pid)
        if spec.checkpoint is not None and worker.seen.phase == "save" and worker.seen.record is None:
            from systems.checkpoint import remove_unfinished  # which imports torch, as nothing else here does

            remove_unfinished(spec.checkpoint)
    seen = worker.seen
    if seen.bad_input is not None:
        raise BadInputError(seen.bad_input)
    kills_after = oom_kills(cgroup_root=cgroup_root)
    death = Death(
        exit_code=code,
        phase=seen.phase,
        log=list(seen.log),
        timed_out_s=spec.timeout if timed_out else None,
        stopped_by=stop.number,
        oom_kills=None if kills_before is None or kills_after is None else kills_after - kills_before,
        host_bytes=seen.rss_bytes,
        host_budget=job.host_budget_bytes if spec.host_memory is None else spec.host_memory,
    )
    return _finish(job, seen, death, exited=exited, wall_s=time.monotonic() - started_s)


def _watch(worker: Worker, timeout_s: float | None, stop: Stop) -> bool:
    """Listen until the worker ends, or must be ended. True if its time is up."""
    started_s = time.monotonic()
    told_s: float | None = None
    while worker.process.poll() is None and stop.number is None:
        worker.listen(_POLL_S)
        worker.look()
        now = time.monotonic()
        if worker.seen.record or worker.seen.bad_input:
            told_s = told_s or now
            if now - told_s > _EXIT_GRACE_S:
                return False
        elif timeout_s is not None and now - started_s > timeout_s:
            worker.ask_where_it_is()
            return True
    return False


def _identity(job: WorkerJob) -> dict[str, Any]:
    return {"run_id": job.run_id, "started_at": job.started_at, "replicate": job.replicate, "spec": job.spec}


def _swap_doubt(seen: Heard) -> list[Doubt]:
    """The worker itself knows only what is swapped out when it ends."""
    known = seen.record.doubts if seen.record else []
    if any(doubt.code == "swap_in_use" for doubt in known):
        return known
    return [*known, *judge(Evidence(timed_step_s=(), threads=1, cores=1, swap_bytes=seen.swap_peak_bytes))]


def _finish(job: WorkerJob, seen: Heard, death: Death, *, exited: bool, wall_s: float) -> Record:
    """The worker's record with what only the parent knows, or one in its stead."""
    if seen.record is None:
        status, reason = from_death(death)
        own = {"status": status, "reason": reason, "wall_s": wall_s, "doubts": _swap_doubt(seen)}
        memory = {"host_rss_peak_bytes": seen.rss_peak_bytes, "host_budget_bytes": death.host_budget}
        notes = [f"{seen.steps_done} steps were done when it was last heard of"] if seen.steps_done else []
        return build({**_identity(job), **seen.partial, **own, "memory": memory, "notes": notes})
    changes: dict[str, Any] = {"wall_s": wall_s, "doubts": _swap_doubt(seen)}
    if seen.record.reason is not None:
        changes["reason"] = seen.record.reason.model_copy(update={"log": [*death.log, *seen.record.reason.log]})
    if not exited:
        why = "was stopped" if death.stopped_by else f"did not end within {_EXIT_GRACE_S:g} s of its result and was killed"
        changes["notes"] = [*seen.record.notes, f"the process {why}"]
    elif death.exit_code != 0:
        changes["notes"] = [*seen.record.notes, f"the process ended with exit code {death.exit_code} after its result"]
    return seen.record.model_copy(update=changes)
