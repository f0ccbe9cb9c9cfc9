"""Ranks that wait for each other for ever: seen by what each of them waits in, and told by name.

Note [Stuck ranks]
    A rank that waits long may wait for one that compiles or saves, and then it is right to wait. So each rank writes what it
    waits in onto a board once that is old, and takes it away when it goes on. Where all ranks have written, nobody works; and
    where they have not written the same, none of the waits can end. Libraries free nobody who is inside a collective: all that
    is left to do is to say so and to end.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from systems.machine.device_thread import DeviceThread

STUCK_S = 20.0  # of waiting, before it is looked at
LOOKS = 4  # in that time


class _Wait(NamedTuple):
    number: int
    what: str
    since_s: float


class _Queued(NamedTuple):
    """On a device's queue, where the host waits in nothing. begun, done: whether the device is at it, and behind it."""

    number: int
    what: str
    begun: Callable[[], bool]
    done: Callable[[], bool]


class Waits:
    """What this rank waits in, one a queue: each queue is of one thread."""

    def __init__(self) -> None:
        self._begun: Counter[str] = Counter()
        self._now: dict[str, _Wait] = {}
        self._queued: dict[str, deque[_Queued]] = {}

    @contextmanager
    def of(self, queue: str, what: str) -> Iterator[None]:
        self._begun[queue] += 1
        self._now[queue] = _Wait(self._begun[queue], what, time.monotonic())
        try:
            yield
        finally:
            self._now.pop(queue, None)

    @contextmanager
    def queued(self, queue: str, what: str, mark: Callable[[], Callable[[], bool]]) -> Iterator[None]:
        """Within, a collective is given to a device, which comes to it in its turn; `older_than`, which looks now and then,
        forgets what is done. mark: makes a mark behind all that the device was given; it tells whether the device is there.
        """
        begun = mark()
        yield
        self._begun[queue] += 1
        self._queued.setdefault(queue, deque()).append(_Queued(self._begun[queue], what, begun, mark()))

    def _look(self, now: float) -> None:
        """What each device is at. One that computes has not come to its next collective and waits in nothing; it may have come
        to it just now, so that its wait begins where it was first seen there.
        """
        for queue, queued in self._queued.copy().items():
            while queued and queued[0].done():
                queued.popleft()
            seen = self._now.get(queue)
            if not queued or not queued[0].begun():
                self._now.pop(queue, None)
            elif seen is None or seen.number != queued[0].number:
                self._now[queue] = _Wait(queued[0].number, queued[0].what, now)

    def older_than(self, seconds: float) -> str:
        """In words, each with its number in its queue; "" for none."""
        now = time.monotonic()
        self._look(now)
        old = [(queue, wait) for queue, wait in sorted(self._now.copy().items()) if now - wait.since_s > seconds]
        return ", ".join(f"{wait.what!r} (number {wait.number} of {queue})" for queue, wait in old)


@dataclass(frozen=True)
class Board:
    """What all ranks can read. write: this rank's words. read: those of all, by rank."""

    write: Callable[[str], None]
    read: Callable[[], list[str]]


class StuckWatch:
    """Looks at a rank's waits, in a thread of its own: see Note [Stuck ranks].

    stuck_s: how old a wait has to be. on_stuck: told all ranks' waits, once.
    """

    def __init__(self, waits: Waits, board: Board, stuck_s: float, on_stuck: Callable[[str], None]) -> None:
        self._waits, self._board, self._stuck_s, self._on_stuck = waits, board, stuck_s, on_stuck
        self._over, self._written = threading.Event(), ""
        self._thread = DeviceThread(self._run, "stuck-watch")
        self._thread.start()

    def _run(self) -> None:
        seen = ""
        while not self._over.wait(self._stuck_s / LOOKS):
            mine = self._waits.older_than(self._stuck_s)
            try:
                if mine != self._written:
                    self._board.write(mine)
                    self._written = mine
                told = self._board.read() if mine else []
            except RuntimeError:  # who keeps the board is gone; that is told where it is waited for
                return
            stuck = "; ".join(f"rank {rank} in {waits}" for rank, waits in enumerate(told))
            if all(told) and len(set(told)) > 1 and stuck == seen:
                self._on_stuck(f"ranks wait for each other: {stuck}: does the model do the same on all of them?")
                return
            seen = stuck

    def close(self) -> None:
        """What it wrote is taken away: this rank waits in nothing any more."""
        self._over.set()
        self._thread.join()
        if self._written:
            with contextlib.suppress(RuntimeError):  # as in `_run`
                self._board.write("")


def end_process(told: str) -> None:
    """Say so and end this process, whatever it waits for."""
    sys.stderr.write(f"{told}\n")
    sys.stderr.flush()
    os._exit(1)
