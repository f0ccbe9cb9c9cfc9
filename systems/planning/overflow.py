"""Where optimizer states go that the host cannot hold: to the disk if there is one, else to the device, for good. Both memories
together may be enough where neither is.

Decided before anything is measured, so only what is certain counts: the host needs a slot for every parameter, and master
weight and moments of each segment that is not updated on the device and not on the disk.
"""

from __future__ import annotations

from dataclasses import replace

from systems.errors import BudgetError
from systems.planning.demand import Residence, demand_of, minimum_need, unmovable
from systems.planning.disk import BUFFERS, PARTS, buffer_bytes, disk_bytes, part_bytes
from systems.planning.layout import Bundle, Layout
from systems.planning.nominal import nominal_trace
from systems.planning.plan import UpdateRule
from systems.planning.strategy import PlanningContext
from systems.sizes import format_need, format_size


def slot_bytes(layout: Layout) -> int:
    """Host bytes of this rank's shards as computed with."""
    return sum(s.shard_numel for s in layout.segments) * layout.itemsize


def state_bytes(layout: Layout, bundle: Bundle, context: PlanningContext) -> int:
    """Of a bundle's master weight, moments and accumulator on the host, this rank's shards."""
    segments = (layout.segments[s] for s in bundle.segments)
    each = context.accumulator_itemsize if bundle.index in layout.on_disk else context.optimizer_itemsize
    return sum(s.shard_numel for s in segments if s.space.trainable) * each


def host_need(layout: Layout, context: PlanningContext) -> int:
    """Bytes that the host holds while a layout's unmovable bundles are on the device."""
    states = sum(state_bytes(layout, b, context) for b in layout.bundles if b.movable)
    return slot_bytes(layout) + states + buffer_bytes(layout)


def within_host(layout: Layout, context: PlanningContext, rule: UpdateRule) -> Layout:
    """The layout with as many states on the disk, and what it cannot take kept on the device, as the host's budget asks for.

    Raises BudgetError (host) if that is not enough.
    """
    missing = host_need(layout, context) - context.host_budget
    if missing <= 0:
        return layout
    return _keep_on_device(_to_disk(layout, context) if context.disk_budget else layout, context, rule)


def _to_disk(layout: Layout, context: PlanningContext) -> Layout:
    """States of the last units first: the next step needs the parameters of the first ones first."""
    missing, left, largest = host_need(layout, context) - context.host_budget, context.disk_budget, 0
    chosen: set[int] = set()
    for bundle in sorted((b for b in layout.bundles if b.movable and b.trainable), key=lambda b: (-min(b.units), -b.index)):
        if missing <= 0:
            break
        places = [part_bytes(layout.segments[s]) for s in bundle.segments]
        saved = sum(layout.segments[s].shard_numel for s in bundle.segments) * 4 * PARTS
        grown = max(largest, *places)
        buffers = BUFFERS * PARTS * (grown - largest)
        if saved > buffers and PARTS * sum(places) <= left:
            chosen.add(bundle.index)
            missing += buffers - saved
            left -= PARTS * sum(places)
            largest = grown
    return replace(layout, on_disk=frozenset(chosen))


def _keep_on_device(layout: Layout, context: PlanningContext, rule: UpdateRule) -> Layout:
    """With bundles made unmovable until the host holds the rest, those of the first units first."""
    missing = host_need(layout, context) - context.host_budget
    kept: set[int] = set()
    left = (b for b in layout.bundles if b.movable and b.trainable and b.index not in layout.on_disk)
    for bundle in sorted(left, key=lambda b: (min(b.units), b.index)):
        if missing <= 0:
            break
        kept.add(bundle.index)
        missing -= state_bytes(layout, bundle, context)
    found = replace(layout, bundles=tuple(replace(b, movable=b.movable and b.index not in kept) for b in layout.bundles))
    residence = Residence(found, context, unmovable(found), rule)
    trace = nominal_trace(found, accumulate=context.accumulate)
    need = minimum_need(trace, demand_of(found, trace, context), residence)
    if missing > 0 or (kept and need.total_bytes > context.device_budget):
        raise _refusal(found, context, missing)
    return found


def _refusal(layout: Layout, context: PlanningContext, missing: int) -> BudgetError:
    total, have = host_need(layout, context), context.host_budget
    advice = "raise --host-memory"
    if context.disk_budget:
        advice += f" or --disk-memory (there is {format_size(context.disk_budget)}, {format_size(disk_bytes(layout))} is taken)"
    if missing > 0:
        why = f"parameters have a place there whatever the device holds: {advice}"
    else:
        why = f"the device has no room for the difference: {advice} or --device-memory"
        if not context.disk_budget:
            why += ", give a disk with --disk"
    return BudgetError(
        f"the model needs {format_need(total, have)} of host memory ({format_size(slot_bytes(layout))} for parameters, the "
        f"rest for master weights and moments), {format_size(have)} are there, and {why}, or take a smaller model",
        tier="host",
        need=total,
        have=have,
    )
