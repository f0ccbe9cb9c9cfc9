"""What strategies have in common. A strategy derives from one of two classes and says what is different about it.

It says `cut`, how parameters are cut into bundles, and `decide`, what moves when (or, without FittedStrategy, all of `plan`);
with `tell` it hands over what its statistics say. tests/strategies/template_strategy.py is the shortest one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from pydantic import BaseModel

from systems.planning.layout import Layout, ModelIndex
from systems.planning.plan import OpKind, Plan, Tier, UpdateRule
from systems.planning.policy.division import Division
from systems.planning.policy.eviction import FarthestNextUse, ModelOrder
from systems.planning.policy.nominal import nominal_trace
from systems.planning.policy.options import StrategyOptions, StrategyStatistics
from systems.planning.step.demand import demand_of
from systems.planning.step.timeline import MemTimeline, fitted
from systems.planning.step.validator import validate
from systems.planning.strategy import Eviction, PlanningContext
from systems.planning.trace import Trace


class StrategyBase(ABC):
    """Obeys systems.planning.strategy.Strategy.

    Statistics: what `tell` was told fills its fields. smaller: the option that bounds what is moved at once, if there is one.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    Options: ClassVar[type[BaseModel]] = StrategyOptions
    Statistics: ClassVar[type[StrategyStatistics]] = StrategyStatistics
    smaller: ClassVar[str | None] = None

    def __init__(self, options: Any, context: PlanningContext) -> None:
        self._options, self._context = options, context
        self._index = ModelIndex((), ())
        self._told: dict[str, Any] = {}
        self.update_rule = UpdateRule.AFTER_NORM if options.nonfinite == "skip" else UpdateRule.WHEN_REDUCED
        self.to_wait = options.to_wait
        self.runs_ahead: bool = options.run_ahead
        self.max_staleness: int | None = None
        self.write_back = False
        self.warm_up_share: float | None = None
        self.bounded = False
        self.offloaded_inputs: frozenset[int] = frozenset()
        self.rematerialised: frozenset[int] | None = None

    def layout(self, index: ModelIndex) -> Layout:
        """Raises BudgetError if the largest unit does not fit the device, activations left aside."""
        self._index = index
        if getattr(self._options, "activations", "device") == "host":
            self.offloaded_inputs = index.blocks
        layout = self.cut(index)
        trace = nominal_trace(layout, accumulate=self._context.accumulate)
        self.tell(minimum_bytes=self.division(layout, trace, self._context).least(measured=False).total_bytes)
        return layout

    @abstractmethod
    def cut(self, index: ModelIndex) -> Layout:
        """How parameters are cut into segments and bundles."""

    def division(self, layout: Layout, trace: Trace, context: PlanningContext) -> Division:
        return Division(layout, trace, context, self.update_rule, self.name, self.unit_name, self.smaller)

    def eviction(self, layout: Layout, trace: Trace | None) -> Eviction:
        if trace is None:
            return self.first_eviction()
        return FarthestNextUse(layout, demand_of(layout, trace, self._context).next_use)

    def first_eviction(self) -> Eviction:
        """Before any step was traced: in model order, the last ones go first."""
        return ModelOrder(last=True)

    @abstractmethod
    def plan(self, layout: Layout, trace: Trace) -> Plan:
        """A validated plan. Raises BudgetError if the traced step cannot run in the device's budget."""

    def statistics(self) -> BaseModel:
        assert "minimum_bytes" in self._told, "statistics are there once layout() was called"
        return self.Statistics.model_validate(self._told)

    def tell(self, **facts: Any) -> None:
        """Fields of Statistics; later values replace earlier ones."""
        self._told |= facts

    def tell_of(self, plan: Plan, layout: Layout) -> None:
        """What every strategy's statistics say of a plan."""
        fetched = moved(plan, OpKind.FETCH)
        trainable = [s for s in layout.segments if s.space.trainable]
        on_device = sum(s.used for s in trainable if plan.optimizer_tier[s.index] is Tier.DEVICE)
        self.tell(
            optimizer_share_on_device=on_device / max(1, sum(s.used for s in trainable)),
            fetches_per_step=len(fetched),
            fetched_bytes_per_step=sum(map(layout.bundle_bytes, fetched)),
            evictions_per_step=len(moved(plan, OpKind.DROP, OpKind.WRITE_BACK, OpKind.SHRINK)),
        )

    def unit_name(self, unit: int) -> str:
        units = self._index.units
        return units[unit].name if unit < len(units) else f"number {unit}"


class FittedStrategy(StrategyBase):
    """Plans by `decide`, and anew with a smaller pool where pool and activations do not fit side by side."""

    @abstractmethod
    def decide(self, division: Division) -> Plan:
        """What moves when. BudgetError if the step cannot run within the division's context."""

    def plan(self, layout: Layout, trace: Trace) -> Plan:
        def attempt(context: PlanningContext) -> tuple[Plan, MemTimeline]:
            plan = self.decide(self.division(layout, trace, context))
            return plan, validate(layout, trace, plan, context)

        plan = fitted(attempt, layout, self._context)
        self.tell_of(plan, layout)
        return plan


def moved(plan: Plan, *kinds: OpKind) -> list[int]:
    """Bundles of a plan's operations of these kinds, one entry each."""
    return [p.operation.bundle for p in plan.operations if p.operation.kind in kinds]
