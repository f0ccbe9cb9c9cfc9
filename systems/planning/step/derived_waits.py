"""The waits of a schedule, derived from what its operations read, write and allocate over two steady steps in a row."""

from __future__ import annotations

from collections.abc import Sequence

from systems.planning.plan import DEVICE_LANES, LaneKind
from systems.planning.step.operations import ScheduledOperation, Work, grad, param
from systems.planning.step.waits import Accesses, Barriers, FreedRoom, Waits, merge


def with_waits(
    operations: Sequence[ScheduledOperation], unused_bytes: int = 0, late: Sequence[tuple[int, int]] = ()
) -> list[ScheduledOperation]:
    """Derive waits over two steps in a row and keep those of the second, whose past is a whole step.

    late: fetches that need an update issued after them (a flaw); their wait points forward, so that the cycle shows.
    """
    accesses, room = Accesses(), FreedRoom(max(0, unused_bytes), LaneKind.COMPUTE.value)
    barriers = Barriers(lane.value for lane in DEVICE_LANES)
    count, found = len(operations), []
    updates = {o.bundle: o.ticket for o in operations if o.kind is Work.UPDATE}
    forward = {ticket: updates[bundle] for ticket, bundle in late if updates.get(bundle, -1) > ticket}
    for step in range(2):
        awaited: Waits = {}  # for memory of gradient ranges: their first writer is the next compute
        for o in operations:
            ticket = step * count + o.ticket
            taken: Waits = {}
            if o.device_delta > 0:
                taken = room.take(o.device_delta, own=o.kind in (Work.ALLOCATE, Work.SHRINK, Work.MERGE))
            elif o.device_delta < 0:
                usual = grad(o.bundle) if o.kind is Work.FREE else param(o.bundle)
                room.free(-o.device_delta, accesses.latest(o.reads[0] if o.reads else usual))
            if o.kind is Work.BARRIER:
                barriers.join()
            if o.lane is None:
                merge(awaited, taken)
                if step:
                    found.append(o)
                continue
            lane = o.lane.value
            if o.lane is LaneKind.COMPUTE:
                merge(taken, awaited)
                awaited = {}
            waits = accesses.record(ticket, lane, o.reads, o.writes)
            merge(waits, barriers.record(ticket, lane))
            taken.pop(lane, None)
            if step:
                data = [t - count for t in waits.values() if t >= count] + [forward[t] for t in (o.ticket,) if t in forward]
                memory = [t - count for t in taken.values() if t >= count]
                previous = {t for t in (*waits.values(), *taken.values()) if t < count}
                found.append(
                    o._replace(
                        waits=tuple(sorted(data)),
                        room_waits=tuple(sorted(set(memory) - set(data))),
                        previous_waits=tuple(sorted(previous)),
                    )
                )
    return found
