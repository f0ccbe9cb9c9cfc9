"""The race detector: a vector-clock replay of issued work finds accesses to one resource that nothing puts in order.

Two operations are ordered if they are on the same lane, or if one waits (through any chain of lanes and waits) on the
other. That one was issued first is no order: lanes run on their own. The replay works on schedules and on the runtime's
event log alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from systems.device.watch.events import Extent, LoggedOperation
from systems.planning.step.operations import IssuedOperation


@dataclass(frozen=True)
class Race:
    """Two accesses of a resource, at least one a write, in no order. first was issued before second."""

    resource: str
    first: int
    second: int

    def __str__(self) -> str:
        return f"operations {self.first} and {self.second} access {self.resource}, one writes, and neither waits"


@dataclass
class _LastAccesses:
    """Latest accesses as (ticket, lane number, position in lane); the last reader on a lane stands for all on it."""

    write: tuple[int, int, int] | None = None
    reads: dict[int, tuple[int, int, int]] = field(default_factory=dict)


def find_races(operations: Iterable[IssuedOperation]) -> list[Race]:
    """All unordered pairs among each access and the latest earlier ones of its resource; empty if there is no race at
    all.

    A wait on a ticket lower than the first one is on work before the log begins and orders nothing in it. ValueError
    for a wait on a ticket that is not issued before, and for a ticket issued twice.
    """
    lanes: dict[str, int] = {}
    lane_clocks: list[list[int]] = []
    clocks: dict[int, list[int]] = {}
    resources: dict[str, _LastAccesses] = {}
    races: list[Race] = []
    first_ticket: int | None = None
    for operation in operations:
        first_ticket = operation.ticket if first_ticket is None else first_ticket
        lane = lanes.setdefault(operation.lane, len(lanes))
        if lane == len(lane_clocks):
            lane_clocks.append([])
        clock = list(lane_clocks[lane])
        for ticket in operation.waits:
            if ticket in clocks:
                _join(clock, clocks[ticket])
            elif ticket >= first_ticket:
                raise ValueError(f"operation {operation.ticket} waits on {ticket}, which was not issued before it")
        clock.extend([0] * (lane + 1 - len(clock)))
        clock[lane] += 1
        if operation.ticket in clocks:
            raise ValueError(f"ticket {operation.ticket} was issued twice")
        clocks[operation.ticket] = lane_clocks[lane] = clock
        access = (operation.ticket, lane, clock[lane])
        for name in operation.reads:
            resource = resources.setdefault(name, _LastAccesses())
            if resource.write is not None and not _before(resource.write, clock):
                races.append(Race(name, resource.write[0], operation.ticket))
            resource.reads[lane] = access
        for name in operation.writes:
            resource = resources.setdefault(name, _LastAccesses())
            earlier = [*resource.reads.values(), *([resource.write] if resource.write is not None else [])]
            races.extend(
                Race(name, other[0], operation.ticket)
                for other in earlier
                if other[0] != operation.ticket and not _before(other, clock)
            )
            resource.write, resource.reads = access, {}
    return races


def _join(clock: list[int], other: list[int]) -> None:
    """clock becomes the later of both, component by component."""
    clock.extend([0] * (len(other) - len(clock)))
    for lane, position in enumerate(other):
        if position > clock[lane]:
            clock[lane] = position


def _before(access: tuple[int, int, int], clock: list[int]) -> bool:
    """True if the access happened before the operation that has this clock."""
    _, lane, position = access
    return lane < len(clock) and position <= clock[lane]


def issued_operations(operations: Sequence[LoggedOperation]) -> list[IssuedOperation]:
    """The log in the race detector's terms: physical ranges cut into atoms, so that reuse of memory is seen as such."""
    cuts: dict[str, set[int]] = {}
    for op in operations:
        for extent in (*op.reads, *op.writes):
            cuts.setdefault(extent.space, set()).update((extent.start, extent.stop))
    ordered = {space: sorted(points) for space, points in cuts.items()}
    rank = {space: {point: i for i, point in enumerate(points)} for space, points in ordered.items()}

    def atoms(extents: Sequence[Extent]) -> tuple[str, ...]:
        names = []
        for extent in extents:
            place = rank[extent.space]
            names += [f"{extent.space}:{i}" for i in range(place[extent.start], place[extent.stop])]
        return tuple(names)

    return [
        IssuedOperation(ticket=op.ticket, lane=op.lane, reads=atoms(op.reads), writes=atoms(op.writes), waits=op.waits)
        for op in operations
    ]
