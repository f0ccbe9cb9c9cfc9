"""A schedule as text, to be read and to be compared: its moments, and under each what happens there, with the waits.

    7 backward-enter model.layers.1
         h2d          12 fetch bundle 4 (model.layers.0)  131,072 B  behind 3 9, room 10, before 41

Numbers in front of operations are tickets of this step; `behind` are those it waits for, `room` those whose memory it takes
over, `before` those of the step before. An operation that the plan should have asked for and did not is marked `unplanned`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from systems.planning.step.operations import ScheduledOperation
from systems.planning.step.schedule import Schedule
from systems.planning.trace import NO_UNIT, Trace


def text_of(schedule: Schedule, trace: Trace) -> str:
    """trace: the one that it was made from."""
    return "\n".join(_lines(schedule, trace)) + "\n"


def _lines(schedule: Schedule, trace: Trace) -> Iterator[str]:
    layout, last = schedule.residence.layout, -1
    resting = _numbers(sorted(schedule.resident_at_end))
    yield f"{schedule.initial_device_bytes:,} B on the device, bundles {resting} at rest there"
    for operation in schedule.operations:
        while last < operation.moment:
            last += 1
            moment = trace.moments[last]
            unit = "" if moment.unit == NO_UNIT else f" {layout.unit_name(moment.unit)}"
            yield f"{last} {moment.phase.value}{unit}"
        yield f"    {_line(operation)}"


def _line(operation: ScheduledOperation) -> str:
    if operation.lane is None:
        change = f"  {operation.device_delta:+,} B" if operation.device_delta else ""
        return f"{'':12}{'':5} {operation.label}{change}"
    size = f"  {operation.bytes:,} B" if operation.bytes else ""
    pairs = (("behind", operation.waits), ("room", operation.room_waits), ("before", operation.previous_waits))
    waits = ", ".join(f"{word} {_numbers(tickets)}" for word, tickets in pairs if tickets)
    unplanned = "" if operation.planned else "  unplanned"
    return f"{operation.lane.value:12}{operation.ticket:5} {operation.label}{size}{'  ' if waits else ''}{waits}{unplanned}"


def _numbers(numbers: Iterable[int]) -> str:
    return " ".join(map(str, numbers)) or "none"
