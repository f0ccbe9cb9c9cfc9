"""`resident` as a policy, so that it is planned and simulated like any strategy: everything on the device, nothing moves."""

from __future__ import annotations

from pydantic import BaseModel

from systems.errors import BudgetError, UnsupportedError
from systems.planning.layout import Layout, ModelIndex
from systems.planning.plan import Plan, Tier, UpdateRule
from systems.planning.policy.packing import bundle_a_unit
from systems.planning.step.timeline import timeline, with_peaks
from systems.planning.strategy import PlanningContext
from systems.planning.trace import NO_UNIT, Trace
from systems.sizes import format_need, format_size


class ResidentPolicy:
    """A bundle per set of units that share parameters."""

    update_rule = UpdateRule.AFTER_NORM
    runs_ahead = False
    rematerialised: frozenset[int] | None = None
    offloaded_inputs: frozenset[int] = frozenset()

    def __init__(self, options: BaseModel, context: PlanningContext) -> None:
        if context.ranks != 1:
            raise UnsupportedError("resident runs on one rank: leave `ranks` at 1")
        self._context = context
        self._unit_names: tuple[str, ...] = ()

    def layout(self, index: ModelIndex) -> Layout:
        self._unit_names = tuple(unit.name for unit in index.units)
        return bundle_a_unit(index, self._context)

    def plan(self, layout: Layout, trace: Trace) -> Plan:
        """BudgetError, naming the unit that sets the need, unless states and activations fit the device."""
        everything = frozenset(bundle.index for bundle in layout.bundles)
        plan = Plan(trace.signature, (), (Tier.DEVICE,) * len(layout.segments), everything, self.update_rule)
        memory = timeline(layout, trace, plan, self._context)
        budget = self._context.device_budget
        if memory.total_peak > budget:
            moment = memory.device_total_bytes.index(memory.total_peak)
            unit = trace.moments[moment].unit
            where = "the step" if unit == NO_UNIT else f"unit {self._unit_names[unit]!r}"
            needed, given = self._context.memory_for(memory.total_peak), self._context.memory_for(budget)
            raise BudgetError(
                f"resident needs {format_need(needed, given)} of device memory for {where} "
                f"({format_size(memory.pool_peak)} of it for model states), {format_size(given)} is given: raise "
                "`device_memory`, lower the batch, recompute activations, or take a system that offloads",
                tier="device",
                need=needed,
                have=given,
            )
        return with_peaks(plan, memory, layout, self._context)
