"""Keeps on the device for good what the host cannot hold: both memories together may be enough where neither is.

Decided before anything is measured, so only what is certain counts: the host needs a slot for every parameter, and master
weight and moments of each segment that is not updated on the device.
"""

from __future__ import annotations

from dataclasses import replace

from systems.errors import BudgetError
from systems.planning.demand import Residence, demand_of, minimum_need, unmovable
from systems.planning.layout import Bundle, Layout
from systems.planning.nominal import nominal_trace
from systems.planning.plan import UpdateRule
from systems.planning.strategy import PlanningContext
from systems.sizes import format_need, format_size


def slot_bytes(layout: Layout) -> int:
    """Host bytes of this rank's shards as computed with."""
    return sum(s.shard_numel for s in layout.segments) * layout.itemsize


def state_bytes(layout: Layout, bundle: Bundle, context: PlanningContext) -> int:
    """Of a bundle's master weight, moments and accumulator, this rank's shards."""
    segments = (layout.segments[s] for s in bundle.segments)
    return sum(s.shard_numel for s in segments if s.space.trainable) * context.optimizer_itemsize


def host_need(layout: Layout, context: PlanningContext) -> int:
    """Bytes that the host holds while a layout's unmovable bundles are on the device."""
    return slot_bytes(layout) + sum(state_bytes(layout, b, context) for b in layout.bundles if b.movable)


def keep_on_device(layout: Layout, context: PlanningContext, rule: UpdateRule) -> Layout:
    """The layout with as many bundles made unmovable as the host's budget asks for, those of the first units first.

    Raises BudgetError (host) if the rest would not leave the device the room that a step needs.
    """
    missing = host_need(layout, context) - context.host_budget
    if missing <= 0:
        return layout
    kept: set[int] = set()
    for bundle in sorted((b for b in layout.bundles if b.movable and b.trainable), key=lambda b: (min(b.units), b.index)):
        if missing <= 0:
            break
        kept.add(bundle.index)
        missing -= state_bytes(layout, bundle, context)
    found = replace(layout, bundles=tuple(replace(b, movable=b.movable and b.index not in kept) for b in layout.bundles))
    residence = Residence(found, context, unmovable(found), rule)
    trace = nominal_trace(found, accumulate=context.accumulate)
    need = minimum_need(trace, demand_of(found, trace, context), residence)
    if missing > 0 or need.total_bytes > context.device_budget:
        total, have = host_need(layout, context), context.host_budget
        if missing > 0:
            why = "parameters have a place there whatever the device holds: raise --host-memory"
        else:
            why = "the device has no room for the difference: raise --host-memory or --device-memory"
        raise BudgetError(
            f"the model needs {format_need(total, have)} of host memory ({format_size(slot_bytes(layout))} for parameters, the "
            f"rest for master weights and moments), {format_size(have)} are there, and {why}, or take a smaller model",
            tier="host",
            need=total,
            have=have,
        )
    return found
