"""Transfers whose waits are derived, so that no caller can forget one.

Note [Derived waits]
    Every operation names the memory it reads and writes. Before it is issued, its lane is made to wait for the last writer
    of each, and for all readers of what it writes; after issue its ticket is left there. Freed memory keeps its tickets,
    so the next owner's first write waits for whatever the last owner had in flight. Compute is one more lane: `compute`
    orders it after the tickets and leaves one. A plan's barrier is no other way to wait: compute is ordered after the last
    ticket of every lane of the device, and what a lane is given next after compute. Nobody else ever waits, records or
    synchronises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from systems.device.lanes.compute import ComputeLane
from systems.device.lanes.lane import Lane
from systems.device.lanes.ticket import Ticket
from systems.device.watch.events import EventLog, Extent
from systems.device.watch.labels import issuing
from systems.device.watch.lane_times import LaneTimes
from systems.device.watch.phases import PhaseClock
from systems.planning.plan import DEVICE_LANES, LaneKind
from systems.planning.step.operations import LaneOperation

MAX_READERS = 32  # finished readers are forgotten beyond this many


class TrackedMemory:
    """A range of memory with the tickets of who used it last."""

    __slots__ = ("extent", "readers", "writer")

    def __init__(self, extent: Extent, inherited: Iterable[Ticket] = ()) -> None:
        self.extent = extent
        self.writer: Ticket | None = None
        self.readers: list[Ticket] = list(inherited)

    def wait_for(self, ticket: Ticket) -> None:
        """Whoever reads it does."""
        self.writer = ticket

    def tickets(self) -> list[Ticket]:
        """Everybody the next owner of this memory has to wait for."""
        return self.readers if self.writer is None else [self.writer, *self.readers]

    def part(self, extent: Extent) -> TrackedMemory:
        """Of this memory, used by the same until now."""
        made = TrackedMemory(extent, self.readers)
        made.writer = self.writer
        return made


class Transfers:
    """Issues operations on lanes. All calls come from the thread that runs the step, one at a time.

    clock: of phased steps, in which each operation is waited for; None in all others.
    one_copy_queue: copies from the device are carried out by the lane of those to it, see Plan. Waits are the same, so that it
    may change at any time. times: of what is issued while there is one.
    """

    def __init__(self, lanes: Mapping[LaneKind, Lane], compute: ComputeLane, log: EventLog) -> None:
        self._lanes, self._compute, self._log = lanes, compute, log
        self.clock: PhaseClock | None = None
        self.one_copy_queue = False
        self.times: LaneTimes | None = None
        self._last: dict[LaneKind, Ticket] = {}  # of the device's lanes
        self._owed: dict[LaneKind, Ticket] = {}  # what a lane's next operation waits for since the last barrier

    def watch(self, clock: PhaseClock | None) -> None:
        self.clock = clock

    def copy_in_one_queue(self, together: bool) -> None:
        """From now on, or each way by itself."""
        self.one_copy_queue = together

    def time(self, times: LaneTimes | None) -> None:
        """What is issued from now on; None: nothing."""
        self.times = times

    def issue(
        self,
        operation: LaneOperation,
        work: Callable[[], None],
        *,
        reads: Sequence[TrackedMemory] = (),
        writes: Sequence[TrackedMemory] = (),
        priority: int = 0,
    ) -> Ticket:
        """Queue `work` on the operation's lane after everything it depends on. See Note [Derived waits]."""
        if self.clock is None:
            return self._issue(operation, work, reads, writes, priority)
        with self.clock.around(operation):
            return self._issue(operation, work, reads, writes, priority)

    def _issue(
        self,
        operation: LaneOperation,
        work: Callable[[], None],
        reads: Sequence[TrackedMemory],
        writes: Sequence[TrackedMemory],
        priority: int,
    ) -> Ticket:
        lane, waits = operation.lane, _waits(reads, writes)
        if self.times is not None:
            work = self.times.around(operation, work)
        queue = LaneKind.H2D if self.one_copy_queue and lane is LaneKind.D2H else lane
        if lane in self._owed:
            waits.append(self._owed.pop(lane))
        with issuing(operation):
            ticket = self._lanes[queue].submit(work, waits, id=self._log.next_ticket(), priority=priority, operation=operation)
        if lane in DEVICE_LANES:
            self._last[lane] = ticket
        self._leave(ticket, operation, reads, writes, waits)
        return ticket

    def order_compute(self, *, reads: Sequence[TrackedMemory], label: str) -> None:
        """Compute is about to read this memory: later compute comes after its writers. `compute` must follow the use."""
        waits = _waits(reads, ())
        for ticket in waits:
            self._compute.order(ticket)
        if self._log.keep:
            extents = [m.extent for m in reads]
            self._log.operation(self._log.next_ticket(), label, extents, [], [t.id for t in waits])

    def compute(self, *, reads: Sequence[TrackedMemory] = (), writes: Sequence[TrackedMemory] = (), label: str) -> None:
        """Compute is about to use, or has just used, this memory: orders it and leaves its ticket."""
        waits = _waits(reads, writes)
        for ticket in waits:
            self._compute.order(ticket)
        if not reads and not writes:
            return
        mark = self._compute.mark(self._log.next_ticket())
        self._leave(mark, label, reads, writes, waits)

    def barrier(self, *, label: str) -> Ticket:
        """The device's lanes wait for each other: what any of them is given from now on comes after all given before."""
        last = list(self._last.values())
        for ticket in last:
            self._compute.order(ticket)
        mark = self._compute.mark(self._log.next_ticket())
        self._owed = {lane: mark for lane in self._lanes if lane in DEVICE_LANES}
        self._log.operation(mark.id, label, [], [], [t.id for t in last])
        return mark

    def _leave(
        self,
        ticket: Ticket,
        what: LaneOperation | str,
        reads: Sequence[TrackedMemory],
        writes: Sequence[TrackedMemory],
        waits: Sequence[Ticket],
    ) -> None:
        for memory in reads:
            if len(memory.readers) >= MAX_READERS and not self._log.keep:
                memory.readers = [t for t in memory.readers if not t.done()]
            memory.readers.append(ticket)
        for memory in writes:
            memory.writer, memory.readers = ticket, []
        if self._log.keep:
            read, written = [m.extent for m in reads], [m.extent for m in writes]
            self._log.operation(ticket.id, what, read, written, [t.id for t in waits])


def _waits(reads: Sequence[TrackedMemory], writes: Sequence[TrackedMemory]) -> list[Ticket]:
    found = {id(m.writer): m.writer for m in (*reads, *writes) if m.writer is not None}
    found |= {id(t): t for m in writes for t in m.readers}
    return list(found.values())
