"""Proves a plan safe before it runs: it fits, nothing is used before it is there or freed while held, nothing can hang.

A plan that fails here is a bug of its strategy, not of the user: the message names moment, bundle and bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from systems.planning.layout import Layout
from systems.planning.plan import OpKind, Plan, Tier, UpdateRule, queue_of
from systems.planning.step.operations import ScheduledOperation, Work
from systems.planning.step.running_ahead import hindrance, last_flushes
from systems.planning.step.schedule import Schedule, expand
from systems.planning.step.timeline import MemTimeline, timeline_of
from systems.planning.strategy import PlanningContext
from systems.planning.trace import Phase, Trace


class PlanError(ValueError):
    """A plan that must not run."""


def validate(layout: Layout, trace: Trace, plan: Plan, context: PlanningContext) -> MemTimeline:
    """Raise PlanError for the first thing wrong with `plan`; the timeline of a good one."""
    check_shape(layout, trace, plan)
    check_ranks(plan, context)
    check_pages(layout, plan, context)
    check_staying(layout, plan, context)
    schedule = expand(layout, trace, plan, context)
    check_ahead(trace, plan, schedule)
    check_waits(trace, schedule)
    for flaw in schedule.flaws:
        raise PlanError(f"{describe(trace, flaw.moment)}: bundle {flaw.bundle} {flaw.what}")
    check_steady(plan, schedule)
    memory = timeline_of(schedule, trace)
    check_budgets(trace, memory, context)
    return memory


def describe(trace: Trace, moment: int) -> str:
    entering = trace.moments[moment]
    unit = "" if entering.unit < 0 else f" of unit {entering.unit}"
    return f"moment {moment} ({entering.phase.value}{unit}, micro-step {entering.micro_step})"


def check_shape(layout: Layout, trace: Trace, plan: Plan) -> None:
    """The plan speaks of this layout and this trace, and the order of its operations is the same on every rank."""
    if plan.signature != trace.signature:
        raise PlanError("the plan's signature is not the trace's: it was made for another step")
    if trace.moments[0].phase is not Phase.STEP_BEGIN or trace.moments[-1].phase is not Phase.STEP_END:
        raise PlanError("a trace begins with STEP_BEGIN and ends with STEP_END")
    if len(plan.optimizer_tier) != len(layout.segments):
        raise PlanError(f"the plan has {len(plan.optimizer_tier)} optimizer tiers for {len(layout.segments)} segments")
    if Tier.DISK in plan.optimizer_tier:
        raise PlanError(f"segment {plan.optimizer_tier.index(Tier.DISK)} is updated on disk: only device and host are")
    for bundle in layout.bundles:
        tiers = {plan.optimizer_tier[s] for s in bundle.segments}
        if len(tiers) != 1:
            raise PlanError(f"bundle {bundle.index} has segments updated on different tiers")
        if not bundle.movable and tiers != {Tier.DEVICE}:
            raise PlanError(f"bundle {bundle.index} never moves, yet its update is on the {tiers.pop().value}")
        if bundle.index in plan.sharded and not (bundle.movable and tiers == {Tier.DEVICE}):
            raise PlanError(f"bundle {bundle.index} rests as a shard, yet it never moves, or is updated on the host")
    for number in sorted(plan.ahead):
        if not 0 <= number < len(layout.bundles):
            raise PlanError(f"the update of bundle {number} is to run ahead of the norm, and there is no such bundle")
    for moment in sorted(plan.barriers):
        if not 0 <= moment < len(trace):
            raise PlanError(f"a barrier is at moment {moment} of {len(trace)} moments")
    places: set[tuple[int, int]] = set()
    for p in plan.operations:
        if not 0 <= p.trigger < len(trace):
            raise PlanError(f"an operation of bundle {p.operation.bundle} has trigger {p.trigger} of {len(trace)} moments")
        if not 0 <= p.operation.bundle < len(layout.bundles):
            raise PlanError(f"{describe(trace, p.trigger)}: there is no bundle {p.operation.bundle}")
        if (p.trigger, p.priority) in places:
            raise PlanError(
                f"{describe(trace, p.trigger)}: two operations have priority {p.priority}, one of them on bundle "
                f"{p.operation.bundle}: ranks could issue their collectives in different orders"
            )
        places.add((p.trigger, p.priority))


def check_ranks(plan: Plan, context: PlanningContext) -> None:
    """Shards are parts of bundles on several ranks alone."""
    shards = plan.sharded | plan.shards_at_start
    if shards and context.ranks == 1:
        raise PlanError(f"bundle {min(shards)} is to rest as a shard, and of one rank that is all of it")
    both = plan.shards_at_start & plan.sharded
    if both:
        raise PlanError(f"bundle {min(both)} has its home on the device, and is to be moved there for the step's start")


def check_pages(layout: Layout, plan: Plan, context: PlanningContext) -> None:
    """Pages are a part of one bundle, of one rank. See Note [Pages]."""
    found = [(p.operation.bundle, run) for p in plan.operations for run in p.operation.pages]
    found += [(layout.bundle_of_segment[run.first], run) for run in sorted(plan.pages_at_start)]
    for bundle, run in found:
        if context.ranks > 1:
            raise PlanError(f"bundle {bundle} is to come and go by pages, and of several ranks it does so as shards")
        segments = layout.bundles[bundle].segments
        if not segments[0] <= run.first < run.stop <= segments[-1] + 1:
            there = f"it has {segments[0]} to {segments[-1] + 1}"
            raise PlanError(f"bundle {bundle} has no pages {run.first} to {run.stop}: {there}")
    for p in plan.operations:
        pages, kind = p.operation.pages, p.operation.kind
        if pages and kind is not OpKind.SHRINK and (kind is not OpKind.MOVE or len(pages) > 1):
            raise PlanError(f"a {kind.value} of bundle {p.operation.bundle} names pages: a shrink may, and a move of one run")
        if any(one.stop >= other.first for one, other in pairwise(pages)):
            raise PlanError(f"bundle {p.operation.bundle} shrinks to pages that touch, or are in no order")


def check_staying(layout: Layout, plan: Plan, context: PlanningContext) -> None:
    """A gradient stays where it was written over parameters, is complete, and is neither summed nor updated before the end."""
    if not plan.staying:
        return
    first = min(plan.staying)
    if context.ranks > 1 or context.accumulate > 1:
        raise PlanError(f"the gradient of bundle {first} is to stay, with several ranks or micro-batches")
    if plan.update_rule is UpdateRule.WHEN_REDUCED:
        raise PlanError(f"the gradient of bundle {first} is to stay, yet its update does not wait for the norm")
    for bundle in sorted(plan.staying):
        if bundle not in plan.in_place:
            raise PlanError(f"the gradient of bundle {bundle} is to stay where its parameters were, yet it has a range")
        if plan.optimizer_tier[layout.bundles[bundle].segments[0]] is Tier.DEVICE:
            raise PlanError(f"the gradient of bundle {bundle} is to stay until the host's update, yet the device makes it")


def check_ahead(trace: Trace, plan: Plan, schedule: Schedule) -> None:
    """Every bundle whose update is to run ahead of the norm has one that can."""
    if plan.ahead and plan.update_rule is UpdateRule.WHEN_REDUCED:
        raise PlanError(f"the update of bundle {min(plan.ahead)} is to run ahead of a norm for which no update waits")
    residence = schedule.residence
    flushes = last_flushes(trace, residence.context.accumulate)
    for bundle in sorted(plan.ahead):
        why = hindrance(bundle, flushes, residence, schedule.demand)
        if why is not None:
            raise PlanError(f"the update of bundle {bundle} is to run ahead of the norm, yet {why}")


def check_steady(plan: Plan, schedule: Schedule) -> None:
    """The step ends as it began, so that the plan holds for the next one."""
    missing = sorted(schedule.residence.whole - plan.resident_at_start)
    if missing:
        raise PlanError(f"bundle {missing[0]} stays on the device, yet the plan does not have it resident at the start")
    for bundle in sorted(schedule.resident_at_end ^ plan.resident_at_start):
        where = (
            "is on the device at the end of the step but not"
            if bundle in schedule.resident_at_end
            else "is not at the end of the step but"
        )
        raise PlanError(f"bundle {bundle} {where} at its start: the plan does not repeat")
    for bundle in sorted(schedule.shards_at_end ^ plan.shards_at_start):
        raise PlanError(f"bundle {bundle} is on the device as a shard at one end of the step alone: the plan does not repeat")
    for run in sorted(schedule.pages_at_end ^ plan.pages_at_start):
        where = f"pages {run.first} to {run.stop} are on the device"
        raise PlanError(f"{where} at one end of the step alone: the plan does not repeat")


def check_budgets(trace: Trace, memory: MemTimeline, context: PlanningContext) -> None:
    for tier, values, budget in (
        ("device", memory.device_total_bytes, context.device_budget),
        ("host", memory.host_bytes, context.host_budget),
        ("disk", memory.disk_bytes, context.disk_budget),
    ):
        moment = max(range(len(values)), key=values.__getitem__)
        if values[moment] > budget:
            pool = f", {memory.device_pool_peak_bytes[moment]} of it in the pool" if tier == "device" else ""
            raise PlanError(f"{describe(trace, moment)}: {values[moment]} bytes on the {tier}{pool}, budget {budget}")


def check_waits(trace: Trace, schedule: Schedule) -> None:
    """No circular wait; nothing on a lane waits for an update of this step ahead of this step's last fetch on it."""
    cycle = circular_wait(schedule.operations, one_copy_queue=schedule.one_copy_queue)
    if cycle:
        names = " -> ".join(f"{o.kind.value} {o.bundle} at moment {o.moment}" for o in cycle[:6])
        raise PlanError(f"{describe(trace, cycle[0].moment)}: circular wait over bundle {cycle[0].bundle}: {names}")
    updates = {o.ticket for o in schedule.operations if o.kind in (Work.UPDATE, Work.UPDATE_AHEAD)}
    last = len(trace) - 1
    waiting: dict[object, ScheduledOperation] = {}
    for o in schedule.operations:
        if o.moment == last or o.kind not in (Work.FETCH, Work.MOVE):
            continue
        if o.lane in waiting:
            first = waiting[o.lane]
            raise PlanError(
                f"{describe(trace, first.moment)}: the {first.kind.value} of bundle {first.bundle} waits for an update "
                f"of this step ahead of the fetch of bundle {o.bundle} at moment {o.moment}, on the same lane"
            )
        if updates.intersection(o.waits):
            waiting[o.lane] = o


def circular_wait(operations: Sequence[ScheduledOperation], *, one_copy_queue: bool = False) -> list[ScheduledOperation]:
    """Operations of one cycle of the queues' order, data dependences and waits for room; empty if there is none.

    waits may point forward: to an operation that is issued later.
    """
    before: dict[int, set[int]] = {}
    tail: dict[str, int] = {}
    by_ticket = {o.ticket: o for o in operations if o.lane is not None}
    for o in by_ticket.values():
        assert o.lane is not None
        queue = queue_of(o.lane, one_copy_queue=one_copy_queue)
        before[o.ticket] = {t for t in (*o.waits, *o.room_waits) if t in by_ticket}
        if queue in tail:
            before[o.ticket].add(tail[queue])
        tail[queue] = o.ticket
    after: dict[int, list[int]] = {ticket: [] for ticket in before}
    for ticket, others in before.items():
        for other in others:
            after[other].append(ticket)
    missing = {ticket: len(others) for ticket, others in before.items()}
    ready = [ticket for ticket, count in missing.items() if not count]
    while ready:
        ticket = ready.pop()
        del missing[ticket]
        for later in after[ticket]:
            missing[later] -= 1
            if not missing[later]:
                ready.append(later)
    if not missing:
        return []
    path: list[int] = []
    step = min(missing)
    while step not in path:
        path.append(step)
        step = min(t for t in before[step] if t in missing)
    return [by_ticket[t] for t in path[path.index(step) :]]
