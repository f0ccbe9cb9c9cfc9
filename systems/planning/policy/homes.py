"""Where optimizer states go that the host cannot hold: to the disk if there is one, else to the device, for good. Both memories
together may be enough where neither is.

Decided before anything is measured, so only what is certain counts: the host needs a slot for every parameter, and master
weight and moments of each segment that is not updated on the device and not on the disk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from systems.errors import BudgetError
from systems.planning.disk_layout import BUFFERS, PARTS, buffer_bytes, disk_bytes, part_bytes
from systems.planning.layout import PAGE, Bundle, Layout, round_up
from systems.planning.plan import UpdateRule
from systems.planning.policy.nominal import nominal_trace
from systems.planning.step.demand import demand_of
from systems.planning.step.profiles import minimum_need
from systems.planning.step.residence import Residence, unmovable
from systems.planning.strategy import PlanningContext
from systems.planning.trace import Trace
from systems.sizes import format_need, format_size


@dataclass(frozen=True)
class HostNeed:
    """Bytes that the host holds while a layout's unmovable bundles are on the device: a mapping of whole pages for the slots,
    one for each part of the states, and the disk's buffers.

    slots: bytes of this rank's shards as computed with. stated: elements whose master and moments have their home on the
    host; accumulated: elements of accumulators, 0 without.
    """

    slots: int
    stated: int
    accumulated: int
    buffers: int

    @classmethod
    def of(cls, layout: Layout, context: PlanningContext) -> HostNeed:
        movable = [b for b in layout.bundles if b.movable and b.trainable]
        return cls(
            sum(s.shard_numel for s in layout.segments) * layout.itemsize,
            sum(shard_numel(layout, b) for b in movable if b.index not in layout.on_disk),
            sum(shard_numel(layout, b) for b in movable) if context.accumulator_itemsize else 0,
            buffer_bytes(layout),
        )

    @property
    def total(self) -> int:
        parts = self.slots, *[4 * self.stated] * PARTS, 4 * self.accumulated
        return sum(round_up(part, PAGE) for part in parts) + self.buffers

    def less(self, numel: int, *, home: bool = True) -> HostNeed:
        """With the states of so many elements elsewhere. home: accumulators too."""
        return replace(self, stated=self.stated - numel, accumulated=max(0, self.accumulated - (numel if home else 0)))


def shard_numel(layout: Layout, bundle: Bundle) -> int:
    """Of this rank."""
    return sum(layout.segments[s].shard_numel for s in bundle.segments)


def waiting_input_bytes(trace: Trace, units: frozenset[int]) -> int:
    """Of this rank's host, for inputs of these units that wait there: each has whole pages of its own."""
    return sum(round_up(size, PAGE) for unit, size in trace.input_bytes if unit in units)


def host_need(layout: Layout, context: PlanningContext) -> int:
    return HostNeed.of(layout, context).total


def within_host(layout: Layout, context: PlanningContext, rule: UpdateRule) -> Layout:
    """The layout with as many states on the disk, and what it cannot take kept on the device, as the host's budget asks for.

    Raises BudgetError (host) if that is not enough.
    """
    if host_need(layout, context) <= context.host_budget:
        return layout
    return _keep_on_device(_to_disk(layout, context) if context.disk_budget else layout, context, rule)


def _to_disk(layout: Layout, context: PlanningContext) -> Layout:
    """States of the last units first: the next step needs the parameters of the first ones first. Large segments make large
    buffers, so they go only where the smaller ones are not enough.
    """
    whole = HostNeed.of(layout, context)
    bundles = sorted((b for b in layout.bundles if b.movable and b.trainable), key=lambda b: (-min(b.units), -b.index))
    places = {b.index: [part_bytes(layout.segments[s]) for s in b.segments] for b in bundles}
    best, least = frozenset[int](), whole.total
    for largest in sorted({max(mine) for mine in places.values()}):
        need, left, chosen = replace(whole, buffers=BUFFERS * PARTS * largest), context.disk_budget, set[int]()
        for b in (b for b in bundles if max(places[b.index]) <= largest):
            taken = PARTS * sum(places[b.index])
            if need.total > context.host_budget and taken <= left:
                chosen.add(b.index)
                need, left = need.less(shard_numel(layout, b), home=False), left - taken
        if need.total < least:
            best, least = frozenset(chosen), need.total
        if least <= context.host_budget:
            break
    return replace(layout, on_disk=best)


def _keep_on_device(layout: Layout, context: PlanningContext, rule: UpdateRule) -> Layout:
    """With bundles made unmovable until the host holds the rest, those of the first units first."""
    need, kept = HostNeed.of(layout, context), set[int]()
    left = (b for b in layout.bundles if b.movable and b.trainable and b.index not in layout.on_disk)
    for bundle in sorted(left, key=lambda b: (min(b.units), b.index)):
        if need.total <= context.host_budget:
            break
        kept.add(bundle.index)
        need = need.less(shard_numel(layout, bundle))
    found = replace(layout, bundles=tuple(replace(b, movable=b.movable and b.index not in kept) for b in layout.bundles))
    residence = Residence(found, context, unmovable(found), rule)
    trace = nominal_trace(found, accumulate=context.accumulate)
    missing, least = need.total > context.host_budget, minimum_need(trace, demand_of(found, trace, context), residence)
    if missing or (kept and least.total_bytes > context.device_budget):
        raise _refusal(layout, context, missing=missing)
    return found


def _refusal(layout: Layout, context: PlanningContext, *, missing: bool) -> BudgetError:
    """layout: with nothing kept on the device for it."""
    need = HostNeed.of(layout, context)
    total, have = need.total, context.host_budget
    if missing:
        why = "parameters have a place there whatever device and disk hold: raise `host_memory`"
    else:
        why = "the device has no room for the difference: raise `host_memory` or `device_memory`"
        if context.disk_budget:
            why += f" or `disk_memory` ({format_size(disk_bytes(layout))} of {format_size(context.disk_budget)} are taken)"
        else:
            why += ", give room on a disk with `disk`"
    return BudgetError(
        f"the model needs {format_need(total, have)} of host memory ({format_size(need.slots)} for parameters, the "
        f"rest for master weights and moments), {format_size(have)} are there, and {why}, or take a smaller model",
        tier="host",
        need=total,
        have=have,
    )
