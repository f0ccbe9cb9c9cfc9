"""MemTimeline: the bytes a plan takes in every tier at every moment, added up from its schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from systems.errors import BudgetError
from systems.planning.allowance import EXACT
from systems.planning.disk_layout import disk_bytes
from systems.planning.layout import Layout
from systems.planning.plan import Plan
from systems.planning.step.profiles import non_model_profile
from systems.planning.step.schedule import Schedule, expand
from systems.planning.strategy import PlanningContext
from systems.planning.trace import Trace

ROUNDS = 3  # of planning again with less


@dataclass(frozen=True)
class MemTimeline:
    """One entry a moment. DEVICE is split into the pool (parameters, gradient ranges, states) and the rest.

    device_pool_bytes: between this moment and the next. device_pool_peak_bytes: highest value that an operation of this
    moment leaves. device_non_model_bytes: bound on what comes on top between this moment and the next.
    device_total_bytes: bound on pool and rest together, at the moment and after it.
    """

    device_pool_bytes: tuple[int, ...]
    device_pool_peak_bytes: tuple[int, ...]
    device_non_model_bytes: tuple[int, ...]
    device_total_bytes: tuple[int, ...]
    host_bytes: tuple[int, ...]
    disk_bytes: tuple[int, ...]

    @property
    def pool_peak(self) -> int:
        """Exactly what the pool's account will have seen after a steady step."""
        return max(self.device_pool_peak_bytes)

    @property
    def total_peak(self) -> int:
        """Never less than the device's peak in a steady step like the traced one."""
        return max(self.device_total_bytes)


def with_peaks(plan: Plan, memory: MemTimeline, layout: Layout, context: PlanningContext) -> Plan:
    """The plan with the peaks that its timeline predicts; of the device, with what the allocator takes on top."""
    total, others = memory.total_peak, max(memory.device_non_model_bytes)
    if context.allowance != EXACT:
        total = context.allowance.expected_peak(_slab(memory, layout, context), others, _budget(context))
    return replace(
        plan,
        predicted_device_peak_bytes=total,
        predicted_model_peak_bytes=memory.pool_peak,
        predicted_non_model_peak_bytes=others,
    )


def excess_bytes(memory: MemTimeline, layout: Layout, context: PlanningContext) -> int:
    """By how much a plan with this timeline passes the device's budget; not above 0 if it fits. See Note [Allowance]."""
    over = memory.total_peak - context.device_budget
    if context.allowance == EXACT:
        return over
    room = context.allowance.beside(max(memory.device_non_model_bytes), _budget(context))
    return max(over, _slab(memory, layout, context) - room)


def _slab(memory: MemTimeline, layout: Layout, context: PlanningContext) -> int:
    return context.allowance.slab(memory.pool_peak, layout.largest_movable_bytes, _budget(context))


def _budget(context: PlanningContext) -> int:
    """Bytes that slab and all others share."""
    return context.memory_for(context.device_budget)


def fitted(make: Callable[[PlanningContext], tuple[Plan, MemTimeline]], layout: Layout, context: PlanningContext) -> Plan:
    """What `make` plans within a context, with its peaks; planned again with a smaller pool while that passes the budget.

    Raises what `make` raises of the first plan. Where no smaller pool does, the last plan stands.
    """
    asked, found = context, None
    for _ in range(ROUNDS):
        try:
            plan, memory = make(asked)
        except BudgetError:
            if found is None:
                raise
            return found
        found = with_peaks(plan, memory, layout, context)
        over = excess_bytes(memory, layout, context)
        if over <= 0:
            return found
        asked = replace(asked, pool_budget=min(memory.pool_peak, asked.pool_budget) - over)  # which a plan may have passed
    assert found is not None
    return found


def timeline(layout: Layout, trace: Trace, plan: Plan, context: PlanningContext) -> MemTimeline:
    return timeline_of(expand(layout, trace, plan, context), trace)


def timeline_of(schedule: Schedule, trace: Trace) -> MemTimeline:
    """At a moment itself no more activations live than at the peak of either interval that it bounds."""
    non_model = non_model_profile(trace, schedule.demand, schedule.residence)
    moments = len(trace)
    after, peaks, now = [schedule.initial_device_bytes] * moments, [0] * moments, schedule.initial_device_bytes
    done = -1
    for operation in schedule.bare:
        while done < operation.moment - 1:  # moments without operations
            done += 1
            after[done], peaks[done] = now, max(peaks[done], now)
        now += operation.device_delta
        if operation.device_delta:
            peaks[operation.moment] = max(peaks[operation.moment], now)
    for moment in range(done + 1, moments):
        after[moment], peaks[moment] = now, max(peaks[moment], now)
    totals = [
        max(after[m] + non_model[m], peaks[m] + min(non_model[m], non_model[m - 1] if m else non_model[m]))
        for m in range(moments)
    ]
    layout, residence = schedule.residence.layout, schedule.residence
    return MemTimeline(
        device_pool_bytes=tuple(after),
        device_pool_peak_bytes=tuple(peaks),
        device_non_model_bytes=tuple(non_model),
        device_total_bytes=tuple(totals),
        host_bytes=(residence.host_bytes,) * moments,
        disk_bytes=(disk_bytes(layout),) * moments,
    )
