"""What happened, as counters always and as events on request.

Counters are totals since construction. Events (kept only when asked for) feed the race detector, the budget test and traces.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from systems.planning.plan import LaneKind
from systems.planning.step.operations import LaneOperation

COUNTERS = (
    "h2d_bytes",
    "d2h_bytes",
    "gather_bytes",
    "reduce_bytes",
    "disk_read_bytes",
    "disk_write_bytes",
    "skipped_steps",
    "fallbacks",
    "departures",  # steps of several ranks that were not the plan's, and taught nothing
    "retraces",
    "host_syncs",
    "on_demand_fetches",
    "evictions",
    "steps_that_missed",  # updates ran ahead and were dropped, though the step was not skipped
    "steps_that_waited",  # nothing ran ahead, for clipping was expected
    "activation_offload_bytes",  # part of h2d_bytes and d2h_bytes together
)


@dataclass(frozen=True)
class Extent:
    """A range of physical memory: bytes [start, stop) of the address space called `space`."""

    space: str
    start: int
    stop: int


@dataclass(frozen=True)
class LoggedOperation:
    """One operation at issue. waits: tickets it was made to wait on.

    what: the operation of a lane, or what compute is about to do or has done.
    """

    ticket: int
    what: LaneOperation | str
    reads: tuple[Extent, ...]
    writes: tuple[Extent, ...]
    waits: tuple[int, ...]

    @property
    def lane(self) -> str:
        return LaneKind.COMPUTE.value if isinstance(self.what, str) else self.what.lane.value

    @property
    def label(self) -> str:
        return self.what if isinstance(self.what, str) else self.what.label


@dataclass(frozen=True)
class LoggedBytes:
    """Live bytes of a tier right after a change; pool: the substrate's own part of them."""

    tier: str
    live: int
    pool: int
    label: str


class EventLog:
    def __init__(self, *, keep: bool) -> None:
        self.keep = keep
        self.totals: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self.operations: list[LoggedOperation] = []
        self.bytes: list[LoggedBytes] = []
        self._tickets = itertools.count(1)

    def count(self, name: str, amount: int = 1) -> None:
        self.totals[name] += amount

    def next_ticket(self) -> int:
        return next(self._tickets)

    def operation(
        self,
        ticket: int,
        what: LaneOperation | str,
        reads: Sequence[Extent],
        writes: Sequence[Extent],
        waits: Sequence[int],
    ) -> None:
        if self.keep:
            self.operations.append(LoggedOperation(ticket, what, tuple(reads), tuple(writes), tuple(waits)))

    def live_bytes(self, tier: str, live: int, pool: int, label: str) -> None:
        if self.keep:
            self.bytes.append(LoggedBytes(tier, live, pool, label))
