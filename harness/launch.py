"""The parent of a run: fresh processes, one a rank, watched until they end; their record, or one written in its stead.

Note [No process is left]
    The first worker leads a process group of its own, which the others are in. Whatever ends the run (its end, a time-out,
    Ctrl-C, SIGTERM, SIGHUP), the whole group is killed then. A parent that is killed itself cannot do so; for that a worker
    asks the kernel to die with its parent, and a guard in the same group waits for the end of a pipe that only the parent holds
    open, and kills the group: processes that a worker started are in it.

Note [Which rank it was]
    When a rank dies, or tells of an error, the others cannot go on, and find that out in their own ways. So they are listened
    to for a moment and then killed. The cause is the first rank whose error is not that another one was gone.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from harness import trace
from harness.channel import LAUNCHED, LISTEN_S, RANK_TIMEOUT_S, STUCK_S, Lines, WorkerJob
from harness.doubts import Evidence, judge
from harness.failures import LOG_LINES, Death, from_death, from_exception
from harness.live import StepLine
from harness.output import fill_standard_streams
from harness.record import Doubt, Record, build
from harness.redaction import without_secrets
from harness.spec import BadInputError, RunSpec
from harness.stopping import Stop
from harness.store import likely_device, new_run_id
from systems.machine.limits import CGROUP_ROOT, oom_kills, process_memory, read_limits
from systems.messages import printable
from systems.ranks.launchers import launched
from systems.sizes import format_size

_POLL_S = 0.1
_LAST_WORDS_S = 0.5
_EXIT_GRACE_S = 30.0
PROCESS_BYTES = 128 << 20  # that a worker has to itself once it has imported torch
WORKER = ("-P", "-m", "harness.worker")  # -P: the folder it starts in comes last, it may have a models or harness of its own
_GUARD = (
    "import os, signal, sys; sys.stdin.read(); import shutil; [shutil.rmtree(each, True) for each in sys.argv[1:]]; "
    "os.killpg(0, signal.SIGKILL)"
)


@dataclass
class Heard:
    """What the parent has heard and seen of the worker."""

    phase: str = "start"
    partial: dict[str, Any] = field(default_factory=dict)
    record: Record | None = None
    bad_input: str | None = None
    stuck: str | None = None
    log: deque[str] = field(default_factory=lambda: deque(maxlen=LOG_LINES))
    steps_done: int = 0
    rss_bytes: int | None = None
    rss_peak_bytes: int | None = None
    swap_peak_bytes: int = 0


class Worker:
    """The process of one rank with its two pipes: messages, and whatever it prints.

    group: the process group it joins; 0: it leads one of its own. Raises OSError, with nothing left behind, if the machine
    cannot start a process.
    """

    def __init__(self, job: WorkerJob, console: Console, group: int) -> None:
        self.rank, self.seen = job.rank, Heard()
        self._said = StepLine(console) if job.rank == 0 else None
        self._held_back: list[str] | None = []  # until the input is known to be good: bad input is one line
        read_end, write_end = os.pipe()
        try:
            self.process = _start(write_end, group, environment_of(job.spec))
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
            self.process.stdin.write(job.model_copy(update={"descriptor": write_end}).model_dump_json().encode())
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
                seen.steps_done = message["done"]
                if self._said is not None:
                    self._said.step(message["done"], message["steps"], message["loss"])
            case "partial":
                seen.partial = message["fields"]
                if self._said is not None:
                    self._said.tokens_per_step = seen.partial.get("resolved", {}).get("tokens_per_step")
            case "stuck":
                seen.stuck = message["message"]
            case "bad_input":
                seen.bad_input = message["message"]
            case "record":
                seen.record = Record.model_validate(message["record"])

    def _take_output(self, line: str) -> None:
        self.seen.log.append(line)
        self._tell(line)

    def _tell(self, line: str) -> None:
        if self._said is None:
            return
        if self._held_back is None:
            self._said.tell(printable(line))
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

    def ended_badly(self) -> bool:
        """It told of an error, or is gone without a word."""
        record = self.seen.record
        if record is None:
            return self.seen.bad_input is not None or self.process.poll() is not None
        return record.status != "ok"

    def reap(self) -> int:
        """Of one that is killed: take in the last words. Its exit code."""
        code = self.process.wait()
        for _ in range(1000):  # everything written is in the pipes now
            if not self._selector.select(0):
                break
            self.listen(0)
        if self._output.rest():
            self._take_output(self._output.rest())
        if self.seen.bad_input is None:
            self._let_go()
        if self._said is not None:
            self._said.close()
        self._selector.close()
        os.close(self._message_end)
        assert self.process.stdout
        self.process.stdout.close()
        return code


class Crew:
    """The processes of one run on this host, one a rank, with the guard of their group.

    folder: where they meet, which the guard removes if nobody else can. Raises OSError, with nothing left behind, if the
    machine cannot start a process.
    """

    def __init__(self, jobs: Sequence[WorkerJob], console: Console, folder: str | None) -> None:
        self.workers: list[Worker] = []
        self._guard: subprocess.Popen[bytes] | None = None
        self.ended_badly: list[Worker] = []  # in order of that
        try:
            for job in jobs:
                self.workers.append(Worker(job, console, self.workers[0].process.pid if self.workers else 0))
                if self._guard is None:
                    self._guard = _start_guard(self.workers[0].process.pid, folder)
        except OSError:
            self.put_away()
            raise

    @property
    def running(self) -> bool:
        return any(worker.process.poll() is None for worker in self.workers)

    @property
    def told(self) -> bool:
        """Whether each has told its result."""
        return all(worker.seen.record or worker.seen.bad_input for worker in self.workers)

    def listen(self, seconds: float) -> None:
        for number, worker in enumerate(self.workers):
            worker.listen(0 if number else seconds)
            worker.look()
            if worker not in self.ended_badly and worker.ended_badly():
                self.ended_badly.append(worker)

    def ask_where_they_are(self) -> None:
        """Have each print its stack, and wait for it a moment."""
        for worker in self.workers:
            worker.process.send_signal(signal.SIGUSR1)
        until = time.monotonic() + _LAST_WORDS_S
        while time.monotonic() < until:
            self.listen(_POLL_S)

    def put_away(self) -> list[int]:
        """Kill whatever is left of the group and reap it. Each one's exit code."""
        if self.workers:
            with suppress(ProcessLookupError):
                os.killpg(self.workers[0].process.pid, signal.SIGKILL)
        codes = [worker.reap() for worker in self.workers]
        if self._guard is not None:
            self._guard.wait()
            assert self._guard.stdin
            self._guard.stdin.close()
        return codes


def environment_of(spec: RunSpec) -> dict[str, str]:
    """Of a worker. On the emulated device threads that wait for each other sleep, unless the user says how they shall: where
    others use the cores, each one that spins keeps from its core the one that it waits for, at every operation.
    """
    root = str(Path(__file__).resolve().parents[1])
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")]), os.curdir])
    environment["PYTHONUNBUFFERED"] = "1"
    if likely_device(spec) == "cpu" and not environment.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
    return environment


def _start(write_end: int, group: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """A worker, with one end of the pipe for its messages."""
    return subprocess.Popen(
        [sys.executable, *WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        pass_fds=(write_end,),
        process_group=group,
    )


def _start_guard(group: int, folder: str | None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", _GUARD, *([] if folder is None else [folder])],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=group,
    )


def launch(
    spec: RunSpec,
    *,
    replicate: int = 0,
    console: Console,
    stop: Stop | None = None,
    cgroup_root: Path = CGROUP_ROOT,
    advise: bool = False,
    rank_timeout_s: float = RANK_TIMEOUT_S,
    stuck_s: float = STUCK_S,
) -> Record:
    """Run a spec in fresh processes, one a rank, and return its record, whatever becomes of them. Raises BadInputError.

    Where a launcher started this process as one of several, the worker of its rank alone is started here.
    advise: where memory is short, look for what would train here. rank_timeout_s, stuck_s: as in WorkerJob.
    """
    now, started_s = datetime.now(UTC), time.monotonic()
    fill_standard_streams()
    told = launched()
    job = WorkerJob(
        spec=spec,
        run_id=new_run_id(spec.system, spec.model, now),
        started_at=now.isoformat(),
        replicate=replicate,
        parent_pid=os.getpid(),
        descriptor=-1,
        host_budget_bytes=read_limits(cgroup_root=cgroup_root).host_budget_bytes,
        cgroup_root=str(cgroup_root),
        advise=advise,
        rank_timeout_s=rank_timeout_s,
        stuck_s=stuck_s,
    )
    if told is not None:
        who = {"rank": told.rank, "ranks": told.size, "local_rank": told.local_rank}
        return _run([job.model_copy(update={**who, "meet": LAUNCHED})], console, stop or Stop(), started_s, None)
    _check_room_for_processes(spec.ranks, job.host_budget_bytes)
    if spec.ranks == 1:
        return _run([job], console, stop or Stop(), started_s, None)
    with tempfile.TemporaryDirectory(prefix="harness-ranks-", ignore_cleanup_errors=True) as folder:
        all_ranks = {"ranks": spec.ranks, "meet": f"file://{folder}/meet"}
        jobs = [job.model_copy(update={**all_ranks, "rank": rank, "local_rank": rank}) for rank in range(spec.ranks)]
        return _run(jobs, console, stop or Stop(), started_s, folder)


def _check_room_for_processes(ranks: int, host_bytes: int | None) -> None:
    """Before hundreds of them take all of a machine. Raises BadInputError."""
    most = ranks if host_bytes is None else max(1, host_bytes // PROCESS_BYTES)
    if ranks > most:
        raise BadInputError(
            f"--ranks {ranks}: each is a process of {format_size(PROCESS_BYTES)} and more, of which this host holds {most}: "
            "lower it, or start ranks on several hosts by torchrun"
        )


def _run(jobs: list[WorkerJob], console: Console, stop: Stop, started_s: float, folder: str | None) -> Record:
    """Without what the environment keeps secret: processes that die print whatever they hold."""
    return without_secrets(_run_through(jobs, console, stop, started_s, folder))


def _run_through(jobs: list[WorkerJob], console: Console, stop: Stop, started_s: float, folder: str | None) -> Record:
    spec, cgroup_root = jobs[0].spec, Path(jobs[0].cgroup_root)
    kills_before = oom_kills(cgroup_root=cgroup_root)
    try:
        crew = Crew(jobs, console, folder)
    except OSError as error:
        status, reason = from_exception(error, "start", rank=jobs[0].rank)
        why = reason.model_copy(update={"message": f"no process could be started: {reason.message}"})
        return build({**_identity(jobs[0]), "status": status, "reason": why, "wall_s": time.monotonic() - started_s})
    first = crew.workers[0]
    try:
        timed_out = _watch(crew, spec.timeout, stop)
        exited = [worker.process.poll() is not None for worker in crew.workers]
    finally:
        codes = crew.put_away()
        if spec.trace is not None:
            trace.clear(Path(spec.trace), first.process.pid)
        if spec.checkpoint is not None and first.seen.phase == "save" and first.seen.record is None:
            from systems.checkpoint import remove_unfinished  # which imports torch, as nothing else here does

            remove_unfinished(spec.checkpoint)
    for worker in crew.workers:
        if worker.seen.bad_input is not None:
            raise BadInputError(worker.seen.bad_input)
    kills_after = oom_kills(cgroup_root=cgroup_root)
    ends = [
        End(
            seen=worker.seen,
            exited=gone,
            death=Death(
                rank=worker.rank,
                exit_code=code,
                phase=worker.seen.phase,
                log=list(worker.seen.log),
                timed_out_s=spec.timeout if timed_out else None,
                stopped_by=stop.number,
                stuck=worker.seen.stuck,
                oom_kills=None if kills_before is None or kills_after is None else kills_after - kills_before,
                host_bytes=worker.seen.rss_bytes,
                host_budget=jobs[0].host_budget_bytes if spec.host_memory is None else spec.host_memory,
            ),
        )
        for worker, code, gone in zip(crew.workers, codes, exited, strict=True)
    ]
    badly = [crew.workers.index(worker) for worker in crew.ended_badly]
    if jobs[0].ranks == 1:
        return _finish(jobs[0], ends[0], wall_s=time.monotonic() - started_s)
    return _finish_ranks(jobs[0], ends, badly, wall_s=time.monotonic() - started_s)


def _watch(crew: Crew, timeout_s: float | None, stop: Stop) -> bool:
    """Listen until the workers end, or must be ended. True if their time is up."""
    started_s = time.monotonic()
    told_s: float | None = None
    alone_s: float | None = None  # since when some do without a rank
    while crew.running and stop.number is None:
        crew.listen(_POLL_S)
        stop.look()
        now = time.monotonic()
        if crew.ended_badly and len(crew.workers) > 1:
            alone_s = alone_s or now
            if now - alone_s > LISTEN_S:
                return False
        if crew.told:
            told_s = told_s or now
            if now - told_s > _EXIT_GRACE_S:
                return False
        elif timeout_s is not None and now - started_s > timeout_s:
            crew.ask_where_they_are()
            return True
    crew.listen(0)
    return False


def _identity(job: WorkerJob) -> dict[str, Any]:
    return {"run_id": job.run_id, "started_at": job.started_at, "replicate": job.replicate, "spec": job.spec}


def _swap_doubt(seen: Heard) -> list[Doubt]:
    """The worker itself knows only what is swapped out when it ends."""
    known = seen.record.doubts if seen.record else []
    if any(doubt.code == "swap_in_use" for doubt in known):
        return known
    return [*known, *judge(Evidence(timed_step_s=(), threads=1, cores=1, swap_bytes=seen.swap_peak_bytes))]


@dataclass(frozen=True, kw_only=True)
class End:
    """How one process ended. exited: of itself."""

    seen: Heard
    exited: bool
    death: Death


def _finish(job: WorkerJob, end: End, *, wall_s: float) -> Record:
    """The worker's record with what only the parent knows, or one in its stead."""
    seen, death = end.seen, end.death
    if seen.record is None:
        status, reason = from_death(death)
        own = {"status": status, "reason": reason, "wall_s": wall_s, "doubts": _swap_doubt(seen)}
        memory = {"host_rss_peak_bytes": seen.rss_peak_bytes, "host_budget_bytes": death.host_budget}
        notes = [f"{seen.steps_done} steps were done when it was last heard of"] if seen.steps_done else []
        return build({**_identity(job), **seen.partial, **own, "memory": memory, "notes": notes})
    changes: dict[str, Any] = {"wall_s": wall_s, "doubts": _swap_doubt(seen)}
    if seen.record.reason is not None:
        changes["reason"] = seen.record.reason.model_copy(update={"log": [*death.log, *seen.record.reason.log]})
    if not end.exited:
        why = "was stopped" if death.stopped_by else f"did not end within {_EXIT_GRACE_S:g} s of its result and was killed"
        changes["notes"] = [*seen.record.notes, f"the process {why}"]
    elif death.exit_code != 0:
        changes["notes"] = [*seen.record.notes, f"the process ended with exit code {death.exit_code} after its result"]
    return seen.record.model_copy(update=changes)


def _as_ended_here(end: End) -> End:
    """One that was ended for another's sake after it had told its result."""
    if end.exited or end.seen.record is None:
        return end
    return replace(end, exited=True, death=replace(end.death, exit_code=0))


def _finish_ranks(job: WorkerJob, ends: Sequence[End], badly: Sequence[int], *, wall_s: float) -> Record:
    """The first rank's record, with the end of the rank that was the cause: Note [Which rank it was]. badly: who ended so, in
    order. What all say alike is no rank's own."""
    finished = [_finish(job, _as_ended_here(end) if badly else end, wall_s=wall_s) for end in ends]
    first = finished[0]
    causes = [finished[each] for each in badly if (why := finished[each].reason) is not None and not why.follows]
    if not badly:
        return first
    cause = causes[0] if causes else finished[badly[0]]
    if cause.reason is None:
        return first
    rank, reason = cause.reason.rank, cause.reason
    said = [each.reason and each.reason.message for each in finished]  # of some ranks only, where a launcher started them
    if said == [reason.message] * job.ranks:
        reason = reason.model_copy(update={"rank": None})
    elif rank is not None:
        reason = reason.model_copy(update={"message": f"rank {rank}: {reason.message}"})
    return first.model_copy(update={"status": cause.status, "reason": reason})
