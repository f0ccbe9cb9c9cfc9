"""How fast lanes move and update, while a plan wants to know: bytes and seconds of copies and of the host's updates.

A copy on a CUDA stream is timed by events there, so that what it waits for is not in it; all else by the clock of the thread
that does it. The host's lane may have two jobs in hand at once, which take what they take together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from systems.planning.layout import Layout
from systems.planning.plan import LaneKind
from systems.planning.step.operations import LaneOperation, Work
from systems.planning.trace import LaneTime

TIMED = (Work.FETCH, Work.MOVE, Work.OFFLOAD, Work.UPDATE)


class LaneTimes:
    """LaneTimes is what has ended since it was last asked, from any thread."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout, self._cuda = layout, device.type == "cuda"
        self._lock = threading.Lock()
        self._spans: dict[LaneKind, list[tuple[int, float, float]]] = {}  # bytes, begin and end in seconds
        self._events: list[tuple[LaneKind, int, torch.cuda.Event, torch.cuda.Event]] = []

    def around(self, operation: LaneOperation, work: Callable[[], None]) -> Callable[[], None]:
        """The same work, timed where it is of a kind that is."""
        if operation.kind not in TIMED or operation.bundle < 0:
            return work
        on_stream = self._cuda and operation.lane is not LaneKind.CPU
        return self._by_events(operation, work) if on_stream else self._by_clock(operation, work)

    def _by_clock(self, operation: LaneOperation, work: Callable[[], None]) -> Callable[[], None]:
        def timed() -> None:
            begin = time.perf_counter()
            work()
            span = self._nbytes(operation), begin, time.perf_counter()
            with self._lock:
                self._spans.setdefault(operation.lane, []).append(span)

        return timed

    def _by_events(self, operation: LaneOperation, work: Callable[[], None]) -> Callable[[], None]:
        def timed() -> None:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            with self._lock:
                self._events.append((operation.lane, self._nbytes(operation), begin, end))

        return timed

    def _nbytes(self, operation: LaneOperation) -> int:
        """Of parameters, this rank's part."""
        if operation.segment < 0:
            return self._layout.shard_bytes(operation.bundle)
        return self._layout.segments[operation.segment].shard_numel * self._layout.itemsize

    def take(self) -> tuple[LaneTime, ...]:
        """Of each lane that did something, what has ended since the last call."""
        ended: list[tuple[LaneKind, int, torch.cuda.Event, torch.cuda.Event]] = []
        with self._lock:
            spans, self._spans = self._spans, {}
            waiting, self._events = self._events, []
            for each in waiting:
                (ended if each[3].query() else self._events).append(each)
        found = {lane: (sum(size for size, _, _ in mine), _together(mine)) for lane, mine in spans.items()}
        for lane, size, begin, end in ended:
            nbytes, seconds = found.get(lane, (0, 0.0))
            found[lane] = nbytes + size, seconds + begin.elapsed_time(end) / 1000
        return tuple(LaneTime(lane.value, *found[lane]) for lane in LaneKind if lane in found)


def _together(spans: list[tuple[int, float, float]]) -> float:
    """Seconds in which at least one of them ran."""
    seconds, until = 0.0, 0.0
    for _, begin, end in sorted(spans, key=lambda span: span[1]):
        seconds += max(0.0, end - max(begin, until))
        until = max(until, end)
    return seconds
