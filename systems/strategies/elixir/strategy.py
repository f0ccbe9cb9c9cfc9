"""Elixir as a policy: the protocol's methods, each a few lines over the modules beside this one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import ClassVar

from pydantic import BaseModel

from systems.errors import UnsupportedError
from systems.planning.caching import CacheRequest, plan_cache
from systems.planning.demand import Residence, demand_of, minimum_need, unmovable
from systems.planning.eviction import FarthestNextUse, RandomOrder
from systems.planning.layout import Layout, ModelIndex
from systems.planning.nominal import nominal_trace
from systems.planning.plan import OpKind, Plan, UpdateRule, optimizer_tiers
from systems.planning.refusal import check_need
from systems.planning.strategy import Eviction, PlanningContext
from systems.planning.timeline import MemTimeline, fitted
from systems.planning.trace import Trace
from systems.planning.validator import validate
from systems.strategies.elixir.chunks import Chunker
from systems.strategies.elixir.options import ElixirOptions, ElixirStatistics
from systems.strategies.elixir.placement import Placer, resident_plan


class Elixir:
    """See the package's docstring for the paper's words and for what differs."""

    name: ClassVar[str] = "elixir"
    summary: ClassVar[str] = "chunks of searched size in a cache with Belady eviction and master shards on the host"
    Options: ClassVar[type[BaseModel]] = ElixirOptions
    warm_up_share: float | None = None

    def __init__(self, options: ElixirOptions, context: PlanningContext) -> None:
        if context.ranks > 1 and not options.scatter:
            raise UnsupportedError(
                "elixir with `options=dict(scatter=False)` and several ranks is not built: use `options=dict(scatter=True)`"
            )
        self._options, self._context = options, context
        self._statistics: ElixirStatistics | None = None
        self._unit_names: tuple[str, ...] = ()
        self.update_rule = UpdateRule.AFTER_NORM if options.nonfinite == "skip" else UpdateRule.WHEN_REDUCED
        self.write_back = options.variant == "write-back"
        self.offloaded_inputs: frozenset[int] = frozenset()
        self.rematerialised: frozenset[int] | None = None

    def layout(self, index: ModelIndex) -> Layout:
        """Raises BudgetError if the largest unit does not fit the device, activations left aside."""
        self._unit_names = tuple(unit.name for unit in index.units)
        self.offloaded_inputs = index.blocks if self._options.activations == "host" else frozenset()
        chunker = Chunker(index, self._options, self._context)
        layout = chunker.layout
        trace = nominal_trace(layout, accumulate=self._context.accumulate)
        residence = Residence(layout, self._context, unmovable(layout), self.update_rule)
        need = minimum_need(trace, demand_of(layout, trace, self._context), residence)
        check_need(need, self._context, self.name, self._unit_name)
        self._statistics = ElixirStatistics(
            num_chunks=chunker.statistics.num_chunks,
            chunk_size_bytes=chunker.statistics.chunk_size_bytes,
            utilization=chunker.statistics.utilization,
            wasted_bytes=chunker.statistics.wasted_bytes,
            num_private=chunker.statistics.num_private,
            num_fused=chunker.statistics.num_fused,
            num_bundles=len(layout.bundles),
            minimum_bytes=need.total_bytes,
        )
        return layout

    def eviction(self, layout: Layout, trace: Trace | None) -> Eviction:
        if trace is None:
            return RandomOrder(self._context.seed)
        return FarthestNextUse(layout, demand_of(layout, trace, self._context).next_use)

    def plan(self, layout: Layout, trace: Trace) -> Plan:
        """A validated plan. Raises BudgetError if the traced step cannot run in the device's budget."""
        plan = fitted(partial(self._plan, layout, trace), layout, self._context)
        if self._statistics is not None:
            self._statistics = self._statistics.model_copy(update=plan.notes)
        return plan

    def _plan(self, layout: Layout, trace: Trace, context: PlanningContext) -> tuple[Plan, MemTimeline]:
        demand = demand_of(layout, trace, context)
        placer = Placer(layout, trace, demand, context, self._options, self.update_rule, self._unit_name)
        placement = placer.place()
        if placement is None:
            plan = resident_plan(layout, trace, self.update_rule)
            plan = replace(plan, notes=_notes(layout, plan, cache_bytes=layout.param_bytes))
        else:
            managed = {b.index: layout.bundle_bytes(b.index) for b in layout.bundles if b.index not in placement.on_device}
            evict = OpKind.WRITE_BACK if self.write_back else OpKind.DROP
            cache = plan_cache(CacheRequest(demand, managed, placement.room, self._options.prefetch, evict))
            plan = Plan(
                signature=trace.signature,
                operations=cache.operations,
                optimizer_tier=optimizer_tiers(layout, placement.on_device),
                resident_at_start=placement.on_device | cache.resident,
                update_rule=self.update_rule,
            )
            plan = replace(plan, notes=_notes(layout, plan, cache_bytes=placement.cache_bytes))
        return plan, validate(layout, trace, plan, context)

    def statistics(self) -> BaseModel:
        assert self._statistics is not None, "statistics are there once layout() was called"
        return self._statistics

    def _unit_name(self, unit: int) -> str:
        return self._unit_names[unit] if unit < len(self._unit_names) else f"number {unit}"


def _notes(layout: Layout, plan: Plan, *, cache_bytes: int) -> dict[str, float]:
    """The planned half of ElixirStatistics."""
    fetched = [p.operation.bundle for p in plan.operations if p.operation.kind is OpKind.FETCH]
    trainable = [s for s in layout.segments if s.space.trainable]
    on_device = sum(s.used for s in trainable if plan.optimizer_tier[s.index].value == "device")
    return {
        "cache_bytes": cache_bytes,
        "resident_bundles": len(plan.resident_at_start),
        "optimizer_share_on_device": on_device / max(1, sum(s.used for s in trainable)),
        "fetches_per_step": len(fetched),
        "fetched_bytes_per_step": sum(layout.bundle_bytes(b) for b in fetched),
        "evictions_per_step": len(plan.operations) - len(fetched),
    }
