"""How a run's process tells its parent what it is doing: JSON lines on one pipe.

The parent knows the phase, and what was resolved so far, even of a process that is killed a moment later. Progress is
dropped rather than waited for when the pipe is full, so that telling never slows a timed step; the record never is.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from pydantic import BaseModel, ConfigDict

from harness.record import Record, to_json
from harness.spec import RunSpec

PROGRESS_PERIOD_S = 0.5
RANK_TIMEOUT_S, STUCK_S = 1800.0, 20.0
LISTEN_S = 2.0  # to the other ranks, after the first that ended badly
LAUNCHED = "env://"  # where ranks meet that a launcher started


class WorkerJob(BaseModel):
    """What the parent hands to the process of a run, on its standard input.

    rank, ranks: which of how many processes this is; local_rank: among those that one launcher started here, and so the number
    of its device. meet: where they find each other, as torch.distributed writes it. rank_timeout_s: how long one waits for
    another. stuck_s: how long a wait is, before it is looked at whether all of them wait.

    host_budget_bytes: the smallest limit in force, for a spec that gives none. cgroup_root: where limits are read.
    advise: look for what would train here where memory is short.
    """

    model_config = ConfigDict(frozen=True)

    spec: RunSpec
    run_id: str
    started_at: str
    replicate: int
    parent_pid: int
    descriptor: int
    host_budget_bytes: int | None
    cgroup_root: str
    advise: bool = False
    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    meet: str | None = None
    rank_timeout_s: float = RANK_TIMEOUT_S
    stuck_s: float = STUCK_S


class Channel:
    """The worker's end. Message kinds: phase, step, partial (record fields known so far), bad_input, stuck, record."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)  # a process that outlives the run must not keep the pipe open
        self._descriptor = descriptor
        self._last_step_s = 0.0
        self.phase = "start"

    def enter(self, phase: str) -> None:
        self.phase = phase
        self._send({"kind": "phase", "phase": phase})

    def step(self, done: int, steps: int, loss: float | None) -> None:
        """Told at most every half second: each telling wakes the parent, which shares this machine's cores."""
        now = time.monotonic()
        if done == steps or now - self._last_step_s >= PROGRESS_PERIOD_S:
            self._last_step_s = now
            self._send({"kind": "step", "done": done, "steps": steps, "loss": loss}, wait=False)

    def partial(self, fields: dict[str, Any]) -> None:
        self._send({"kind": "partial", "fields": fields})

    def bad_input(self, message: str) -> None:
        self._send({"kind": "bad_input", "message": message})

    def stuck(self, message: str) -> None:
        """Ranks wait for each other, and this one will end."""
        self._send({"kind": "stuck", "message": message})

    def record(self, record: Record) -> None:
        self._write(b'{"kind": "record", "record": ' + to_json(record).encode() + b"}\n", wait=True)

    def _send(self, message: dict[str, Any], *, wait: bool = True) -> None:
        self._write(json.dumps(message).encode() + b"\n", wait=wait)

    def _write(self, data: bytes, *, wait: bool) -> None:
        os.set_blocking(self._descriptor, wait)
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except BlockingIOError:
            pass  # a full pipe drops one line of progress, whole: lines this short are written at once or not at all


class Lines:
    """Splits what arrives on a pipe into whole lines; a last one without its end is kept apart."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [line.decode("utf-8", "replace") for line in whole]

    def rest(self) -> str:
        """What came after the last whole line."""
        return self._rest.decode("utf-8", "replace")
