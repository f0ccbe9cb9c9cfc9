"""Angel-PTM as a policy: the protocol's methods, each a few lines over the modules beside this one."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from pydantic import BaseModel

from systems.planning.demand import Residence, demand_of, minimum_need, unmovable
from systems.planning.eviction import FarthestNextUse, ModelOrder
from systems.planning.layout import Layout, ModelIndex
from systems.planning.nominal import nominal_trace
from systems.planning.plan import OpKind, Plan, UpdateRule, optimizer_tiers
from systems.planning.refusal import check_need
from systems.planning.strategy import Eviction, PlanningContext
from systems.planning.timeline import MemTimeline, fitted
from systems.planning.trace import Trace
from systems.planning.validator import validate
from systems.strategies.angel_ptm.options import AngelPTMOptions, AngelPTMStatistics
from systems.strategies.angel_ptm.pages import page_layout
from systems.strategies.angel_ptm.placement import Placement, Placer
from systems.strategies.angel_ptm.scheduling import Moves, schedule


class AngelPTM:
    """See the package's docstring for the paper's words and for what differs."""

    name: ClassVar[str] = "angel-ptm"
    summary: ClassVar[str] = "pages scheduled by life-time, optimizer states cached in what the device has left"
    Options: ClassVar[type[BaseModel]] = AngelPTMOptions
    write_back = False  # the host buffers the 16-bit parameters (Algorithm 2), so that leaving the device is a drop
    warm_up_share: float | None = None

    def __init__(self, options: AngelPTMOptions, context: PlanningContext) -> None:
        self._options, self._context = options, context
        self._statistics: AngelPTMStatistics | None = None
        self._unit_names: tuple[str, ...] = ()
        self.update_rule = UpdateRule.AFTER_NORM if options.nonfinite == "skip" else UpdateRule.WHEN_REDUCED
        self.offloaded_inputs: frozenset[int] = frozenset()
        self.rematerialised: frozenset[int] | None = None

    def layout(self, index: ModelIndex) -> Layout:
        """Raises BudgetError if the largest layer does not fit the device, activations left aside."""
        self._unit_names = tuple(unit.name for unit in index.units)
        self.offloaded_inputs = index.blocks if self._options.activations == "host" else frozenset()
        layout, found = page_layout(index, self._options.page, self._context)
        trace = nominal_trace(layout, accumulate=self._context.accumulate)
        residence = Residence(layout, self._context, unmovable(layout), self.update_rule)
        need = minimum_need(trace, demand_of(layout, trace, self._context), residence)
        check_need(need, self._context, self.name, self._unit_name, smaller=None)
        self._statistics = AngelPTMStatistics(
            page_bytes=found.page_bytes,
            num_pages=found.num_pages,
            num_shared_pages=found.num_shared_pages,
            num_small_pages=found.num_small_pages,
            utilization=found.utilization,
            wasted_bytes=found.wasted_bytes,
            num_layers=len(layout.bundles),
            minimum_bytes=need.total_bytes,
        )
        return layout

    def eviction(self, layout: Layout, trace: Trace | None) -> Eviction:
        """The layer moved last (line 8), while all are thought to be moved in model order; with a trace the one used last."""
        if trace is None:
            return ModelOrder(last=True)
        return FarthestNextUse(layout, demand_of(layout, trace, self._context).next_use)

    def plan(self, layout: Layout, trace: Trace) -> Plan:
        """A validated plan. Raises BudgetError if the traced step cannot run in the device's budget."""
        return fitted(partial(self._plan, layout, trace), layout, self._context)

    def _plan(self, layout: Layout, trace: Trace, context: PlanningContext) -> tuple[Plan, MemTimeline]:
        demand = demand_of(layout, trace, context)
        cache = None if self._options.cache == "auto" else self._options.cache
        placement = Placer(layout, trace, demand, context, cache, self.update_rule, self._unit_name).place()
        sizes = {b.index: layout.bundle_bytes(b.index) for b in layout.bundles if b.index not in placement.on_device}
        moves = schedule(demand, sizes, placement.room)
        plan = Plan(
            signature=trace.signature,
            operations=moves.operations,
            optimizer_tier=optimizer_tiers(layout, placement.on_device),
            resident_at_start=placement.on_device | moves.resident,
            update_rule=self.update_rule,
        )
        self._note(layout, plan, placement, moves)
        return plan, validate(layout, trace, plan, context)

    def statistics(self) -> BaseModel:
        assert self._statistics is not None, "statistics are there once layout() was called"
        return self._statistics

    def _note(self, layout: Layout, plan: Plan, placement: Placement, moves: Moves) -> None:
        """The planned half of the statistics."""
        assert self._statistics is not None
        fetched = [p.operation.bundle for p in plan.operations if p.operation.kind is OpKind.FETCH]
        trained = {s.index: s.used for s in layout.segments if s.space.trainable}
        there = sum(used for s, used in trained.items() if layout.bundle_of_segment[s] in placement.on_device)
        self._statistics = self._statistics.model_copy(
            update={
                "cache_bytes": placement.cached,
                "optimizer_share_on_device": there / max(1, sum(trained.values())),
                "resident": len(plan.resident_at_start),
                "moved_at_start": moves.at_start,
                "moved_later": moves.later,
                "advanced": moves.advanced,
                "fetches_per_step": len(fetched),
                "fetched_bytes_per_step": sum(map(layout.bundle_bytes, fetched)),
                "evictions_per_step": len(plan.operations) - len(fetched),
            }
        )

    def _unit_name(self, unit: int) -> str:
        return self._unit_names[unit] if unit < len(self._unit_names) else f"number {unit}"
