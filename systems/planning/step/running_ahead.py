"""Whose updates may run ahead of the norm (Plan.ahead): the one rule for the validator and for what chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from systems.planning.step.demand import Demand
from systems.planning.step.residence import Residence
from systems.planning.trace import Trace


def last_flushes(trace: Trace, accumulate: int) -> dict[int, list[int]]:
    """Bundle to the moments of its flushes in the last micro-step, in the order of the first of each."""
    found: dict[int, list[int]] = {}
    for number, (moment, bundles) in enumerate(zip(trace.moments, trace.flushes, strict=True)):
        for bundle in bundles if moment.micro_step == accumulate - 1 else ():
            found.setdefault(bundle, []).append(number)
    return found


def hindrance(bundle: int, flushes: Mapping[int, Sequence[int]], residence: Residence, demand: Demand) -> str | None:
    """Why the bundle's update cannot run ahead of the norm; None if it can. flushes: `last_flushes`.

    A use behind the flush would read the master in the middle of a step, of which there would be two.
    """
    layout, moments = residence.layout, flushes.get(bundle, ())
    if not layout.bundles[bundle].trainable:
        return "it is not trained"
    if bundle in residence.on_device:
        return "it is updated on the device"
    if bundle in residence.staying:
        return "its gradient stays on the device until the end of the step"
    if bundle in layout.on_disk:
        return "its states have their home on the disk"
    if not moments:
        return "its gradient is not flushed in the last micro-step"
    if len(moments) > 1:
        return f"its gradient is flushed {len(moments)} times in the last micro-step"
    if demand.next_use.after(bundle, moments[0]) < len(demand):
        return "it is used again after its last flush"
    return None
