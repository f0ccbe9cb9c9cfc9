"""Where goes what the host cannot hold: optimizer states to the disk if there is one, else whole bundles to the device, for
good. Both memories together may be enough where neither is.

Decided before anything is measured, so only what is certain counts: the host needs a slot for each segment that may leave the
device, and its master weight and moments if they are not on the disk.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from systems.errors import BudgetError, UnsupportedError
from systems.planning.disk_layout import BUFFERS, buffer_bytes, disk_bytes, part_bytes, parts_of
from systems.planning.layout import PAGE, Bundle, Layout, round_up
from systems.planning.plan import UpdateRule
from systems.planning.policy.nominal import nominal_trace
from systems.planning.step.demand import demand_of
from systems.planning.step.profiles import minimum_need
from systems.planning.step.residence import Residence, lock_free_bytes, slot_bytes, unmovable
from systems.planning.strategy import PlanningContext
from systems.planning.trace import Trace
from systems.sizes import format_need, format_size

NO_ROOM = "the device has no room for the difference: raise `host_memory` or `device_memory`"


@dataclass(frozen=True)
class HostNeed:
    """Bytes that the host holds of a layout's bundles that may move: a mapping of whole pages for the slots, one for each part
    of the states, and the disk's buffers.

    slots: bytes of this rank's shards as computed with. stated: elements whose master and moments have their home on the
    host; accumulated: elements of accumulators, 0 without. parts: of a state. behind: bytes for updates behind the steps.
    """

    slots: int
    stated: int
    accumulated: int
    buffers: int
    parts: int
    behind: int

    @classmethod
    def of(cls, layout: Layout, context: PlanningContext) -> HostNeed:
        trained = [b for b in layout.bundles if b.movable and b.trainable]
        return cls(
            slot_bytes(layout),
            sum(layout.shard_numel(b.index) for b in trained if b.index not in layout.on_disk),
            sum(layout.shard_numel(b.index) for b in trained) if context.accumulator_itemsize else 0,
            buffer_bytes(layout),
            parts_of(layout),
            lock_free_bytes(layout, context, [b.index for b in trained] if layout.max_staleness is not None else ()),
        )

    @property
    def total(self) -> int:
        parts = self.slots, *[4 * self.stated] * self.parts, 4 * self.accumulated
        return sum(round_up(part, PAGE) for part in parts) + self.buffers + self.behind

    def less(self, numel: int) -> HostNeed:
        """With master and moments of so many elements elsewhere."""
        return replace(self, stated=self.stated - numel)


def waiting_input_bytes(trace: Trace, units: frozenset[int]) -> int:
    """Of this rank's host, for inputs of these units that wait there: each has whole pages of its own."""
    return sum(round_up(size, PAGE) for unit, size in trace.input_bytes if unit in units)


def host_need(layout: Layout, context: PlanningContext) -> int:
    return HostNeed.of(layout, context).total


def within_host(layout: Layout, context: PlanningContext, rule: UpdateRule) -> Layout:
    """The layout with as many states on the disk, and what it cannot take kept on the device, as the host's budget asks for.
    One that has states there already has all that can be: `all_on_disk`.

    Raises BudgetError (host) if that is not enough.
    """
    if layout.moments != context.moments:
        layout = replace(layout, moments=context.moments)
    if host_need(layout, context) <= context.host_budget:
        return layout
    more = context.disk_budget and not layout.on_disk
    return _keep_on_device(_to_disk(layout, context) if more else layout, context, rule)


def all_on_disk(layout: Layout, context: PlanningContext) -> Layout:
    """With all states of what may move at home there. UnsupportedError without a disk, BudgetError (disk) on a small one."""
    if not context.disk_budget:
        raise UnsupportedError("`options=dict(states='disk')` needs room on a disk: name a folder there with `disk`")
    chosen = frozenset(b.index for b in layout.bundles if b.movable and b.trainable and b.numel)
    found = replace(layout, on_disk=chosen, moments=context.moments)
    need, have = disk_bytes(found), context.disk_budget
    if need > have:
        raise BudgetError(
            f"`options=dict(states='disk')` needs {format_need(need, have)} of disk for master weights and moments, "
            f"{format_size(have)} are there: raise `disk_memory`, or leave `options=dict(states='disk')` out",
            tier="disk",
            need=need,
            have=have,
        )
    return found


def check_host(layout: Layout, context: PlanningContext, system: str) -> None:
    """BudgetError (host) where host and disk do not hold all that may leave the device. Else `within_host` keeps nothing there.

    system: in words, the one that does not let the device have what they lack.
    """
    if layout.moments != context.moments:
        layout = replace(layout, moments=context.moments)
    held = _to_disk(layout, context) if context.disk_budget and host_need(layout, context) > context.host_budget else layout
    if host_need(held, context) > context.host_budget:
        raise _refusal(layout, context, f"{system} keeps nothing of it on the device: raise `host_memory`")


def _to_disk(layout: Layout, context: PlanningContext) -> Layout:
    """States of the last units first: the next step needs the parameters of the first ones first. Large segments make large
    buffers, so they go only where the smaller ones are not enough.
    """
    whole = HostNeed.of(layout, context)
    bundles = sorted(
        (b for b in layout.bundles if b.movable and b.trainable and b.numel), key=lambda b: (-min(b.units), -b.index)
    )
    places = {b.index: [part_bytes(layout.segments[s]) for s in b.segments] for b in bundles}
    parts = parts_of(layout)
    best, least = frozenset[int](), whole.total
    for largest in sorted({max(mine) for mine in places.values()}):
        need, left, chosen = replace(whole, buffers=BUFFERS * parts * largest), context.disk_budget, set[int]()
        for b in (b for b in bundles if max(places[b.index]) <= largest):
            taken = parts * sum(places[b.index])
            if need.total > context.host_budget and taken <= left:
                chosen.add(b.index)
                need, left = need.less(layout.shard_numel(b.index)), left - taken
        if need.total < least:
            best, least = frozenset(chosen), need.total
        if least <= context.host_budget:
            break
    return replace(layout, on_disk=best)


def _keep_on_device(layout: Layout, context: PlanningContext, rule: UpdateRule) -> Layout:
    """With bundles made unmovable until the host holds the rest, those of the first units first: trained ones, then frozen
    ones, and at last those whose states the disk would have, for the sake of their slots.
    """
    order = sorted(
        (b for b in layout.bundles if b.movable),
        key=lambda b: (b.index in layout.on_disk, not b.trainable, min(b.units), b.index),
    )
    most = bisect_left(
        range(len(order)), True, key=lambda n: host_need(_kept(layout, order[:n]), context) <= context.host_budget
    )
    found = _kept(layout, order[:most])
    residence = Residence(found, context, unmovable(found), rule)
    trace = nominal_trace(found, accumulate=context.accumulate)
    least = minimum_need(trace, demand_of(found, trace, context), residence)
    if most and least.total_bytes > context.device_budget:
        raise _refusal(layout, context)
    return found


def left_unused(layout: Layout, context: PlanningContext, rule: UpdateRule) -> int | None:
    """Bytes of the host's budget that have no use as whole bundles are kept on the device for what the host lacks: 0 where none
    is kept. None where both memories are not enough.
    """
    try:
        found = within_host(layout, context, rule)
    except BudgetError:
        return None
    return 0 if unmovable(found) == unmovable(layout) else context.host_budget - host_need(found, context)


def _kept(layout: Layout, bundles: Sequence[Bundle]) -> Layout:
    """With these on the device for good."""
    kept = frozenset(b.index for b in bundles)
    there = tuple(replace(b, movable=b.movable and b.index not in kept) for b in layout.bundles)
    return replace(layout, bundles=there, on_disk=layout.on_disk - kept)


def _refusal(layout: Layout, context: PlanningContext, why: str = NO_ROOM) -> BudgetError:
    """layout: with nothing kept on the device for it."""
    need = HostNeed.of(layout, context)
    total, have = need.total, context.host_budget
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
