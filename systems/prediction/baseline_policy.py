"""Systems that are no strategy of the substrate, as policies: planned like any, with a schedule that goes by their own rules.

A plan says where states are and what moves. What else is different, such as collectives of whole gradients or a step that ends
before the next begins, is an edit of the schedule that the plan is spelt out into (`edited`). It is of the rules, not of the
package: what a package takes beyond them, in time or memory, is in no forecast.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace

from pydantic import BaseModel

from systems.errors import BudgetError, UnsupportedError
from systems.planning.layout import Layout, ModelIndex
from systems.planning.plan import LaneKind, Plan, UpdateRule
from systems.planning.policy.packing import bundle_a_unit
from systems.planning.step.operations import ScheduledOperation, Work
from systems.planning.step.schedule import Schedule, expand
from systems.planning.step.timeline import timeline_of, with_peaks
from systems.planning.strategy import PlanningContext
from systems.planning.trace import NO_UNIT, Trace
from systems.sizes import format_need, format_size


class BaselinePolicy(ABC):
    """A bundle per set of units that share parameters. Every update waits for the norm.

    context: that plan and schedule are made in; one rank's where every rank has all states. offloads: states are on the host.
    """

    name: str
    update_rule = UpdateRule.AFTER_NORM
    to_wait = ""  # it always does
    runs_ahead = False
    rematerialised: frozenset[int] | None = None
    offloaded_inputs: frozenset[int] = frozenset()
    offloads: bool = False

    def __init__(self, options: BaseModel, context: PlanningContext) -> None:
        if context.expert_ranks > 1:
            raise UnsupportedError(
                "no baseline has a forecast for experts that ranks share: leave `expert_ranks` at 1, or take one of this "
                "project's own strategies"
            )
        self.ranks, self.context = context.ranks, context
        self._unit_names: tuple[str, ...] = ()

    def layout(self, index: ModelIndex) -> Layout:
        self._unit_names = tuple(unit.name for unit in index.units)
        return bundle_a_unit(index, self.context)

    def plan(self, layout: Layout, trace: Trace) -> Plan:
        """BudgetError, naming the unit that sets the need, unless what is on the device fits it."""
        plan = self.decide(layout, trace)
        schedule = self.schedule(layout, trace, plan)
        assert not schedule.flaws, schedule.flaws[0]
        memory = timeline_of(schedule, trace)
        budget = self.context.device_budget
        if memory.total_peak > budget:
            moment = memory.device_total_bytes.index(memory.total_peak)
            unit = trace.moments[moment].unit
            where = "the step" if unit == NO_UNIT else f"unit {self._unit_names[unit]!r}"
            needed, given = self.context.memory_for(memory.total_peak), self.context.memory_for(budget)
            raise BudgetError(
                f"{self.name} needs {format_need(needed, given)} of device memory for {where} "
                f"({format_size(memory.pool_peak)} of it for model states), {format_size(given)} is given: raise "
                "`device_memory`, lower the batch, recompute activations, or take a system that offloads",
                tier="device",
                need=needed,
                have=given,
            )
        return with_peaks(plan, memory, layout, self.context)

    @abstractmethod
    def decide(self, layout: Layout, trace: Trace) -> Plan:
        """Where states are, and what moves."""

    def schedule(self, layout: Layout, trace: Trace, plan: Plan) -> Schedule:
        return self.edited(expand(layout, trace, plan, self.context), trace)

    def resting_bytes(self, layout: Layout) -> dict[str, int]:
        """On the device at every moment, though the plan has them on the host: by kind, see needs.py."""
        return {}

    @abstractmethod
    def edited(self, schedule: Schedule, trace: Trace) -> Schedule:
        """By this system's rules."""


def reissued(schedule: Schedule, operations: Iterable[ScheduledOperation]) -> Schedule:
    """With these operations instead, in this order; their waits are derived anew."""
    return replace(schedule, bare=tuple(o._replace(ticket=ticket) for ticket, o in enumerate(operations)))


def one_step_after_the_other(operations: Iterable[ScheduledOperation]) -> list[ScheduledOperation]:
    """A step computes nothing before all that the last one updated and moved at its end is done."""
    found = list(operations)
    last = found[-1].moment
    ending = [o for o in found if o.kind is Work.UPDATE or (o.moment == last and o.lane is not None)]
    awaited = dict.fromkeys(name for o in ending if o.kind is not Work.NORM for name in o.writes)
    first = next(n for n, o in enumerate(found) if o.lane is LaneKind.COMPUTE)
    found[first] = found[first]._replace(reads=(*found[first].reads, *awaited))
    return found
