"""Times compute from moment to moment, without what it stood still for other lanes.

The emulated device computes in the thread that runs the step, so there the host's clock is right. A CUDA device runs behind the
host: there events on the compute stream are the clock, and they are read once, when the step is over.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch


class Stopwatch(Protocol):
    """Stopped until `start`; then `lap` ends one interval and begins the next."""

    def start(self) -> None: ...

    def lap(self) -> None: ...

    def waiting(self) -> AbstractContextManager[object]:
        """Around whatever makes compute wait for another lane."""

    def stop(self) -> tuple[float, ...]:
        """Seconds of each interval since `start`; nothing if it was not started."""


class HostStopwatch:
    def __init__(self) -> None:
        self._laps: list[float] = []
        self._last = self._waited = 0.0

    def start(self) -> None:
        self._laps, self._waited, self._last = [], 0.0, time.perf_counter()

    def lap(self) -> None:
        now = time.perf_counter()
        self._laps.append(max(now - self._last - self._waited, 0.0))
        self._last, self._waited = now, 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._waited += time.perf_counter() - began

    def stop(self) -> tuple[float, ...]:
        laps, self._laps = tuple(self._laps), []
        return laps


class CudaStopwatch:
    """Events on the current stream of the calling thread."""

    def __init__(self) -> None:
        self._marks: list[torch.cuda.Event] = []
        self._waits: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = []

    def start(self) -> None:
        self._marks, self._waits = [_now()], [[]]

    def lap(self) -> None:
        self._marks.append(_now())
        self._waits.append([])

    def waiting(self) -> AbstractContextManager[object]:
        return self._timed_wait() if self._marks else contextlib.nullcontext()

    @contextmanager
    def _timed_wait(self) -> Iterator[None]:
        began = _now()
        try:
            yield
        finally:
            self._waits[-1].append((began, _now()))

    def stop(self) -> tuple[float, ...]:
        marks, waits, self._marks, self._waits = self._marks, self._waits, [], []
        if not marks:
            return ()
        marks[-1].synchronize()
        found = []
        for begin, end, stood in zip(marks, marks[1:], waits, strict=False):
            milliseconds = begin.elapsed_time(end) - sum(a.elapsed_time(b) for a, b in stood)
            found.append(max(milliseconds / 1e3, 0.0))
        return tuple(found)


def _now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
