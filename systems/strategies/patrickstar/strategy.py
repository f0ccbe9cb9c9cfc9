"""PatrickStar as a policy: the protocol's methods, each a few lines over the modules beside this one."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from pydantic import BaseModel

from systems.planning.caching import CacheRequest, plan_cache
from systems.planning.demand import Residence, demand_of, gradient_profile, minimum_need, reusable, unmovable
from systems.planning.eviction import FarthestNextUse, ModelOrder
from systems.planning.layout import Layout, ModelIndex
from systems.planning.nominal import nominal_trace
from systems.planning.plan import OpKind, Plan, Tier, UpdateRule, optimizer_tiers
from systems.planning.refusal import check_need
from systems.planning.strategy import Eviction, PlanningContext
from systems.planning.timeline import MemTimeline, fitted
from systems.planning.trace import Trace
from systems.planning.validator import validate
from systems.strategies.patrickstar.chunks import Chunker
from systems.strategies.patrickstar.options import PatrickStarOptions, PatrickStarStatistics
from systems.strategies.patrickstar.placement import Placement, Placer
from systems.strategies.patrickstar.tracer import margin


class PatrickStar:
    """See the package's docstring for the paper's words and for what differs."""

    name: ClassVar[str] = "patrickstar"
    summary: ClassVar[str] = "chunks moved by traced memory, gradients in their parameters' place, optimizer in the margin"
    Options: ClassVar[type[BaseModel]] = PatrickStarOptions

    def __init__(self, options: PatrickStarOptions, context: PlanningContext) -> None:
        self._options, self._context = options, context
        self._statistics: PatrickStarStatistics | None = None
        self._index = ModelIndex((), ())
        self.update_rule = UpdateRule.AFTER_NORM if options.nonfinite == "skip" else UpdateRule.WHEN_REDUCED
        self.write_back = True  # chunk memory moves between the tiers: an eviction is a copy
        self.warm_up_share: float | None = options.warmup_share
        self.offloaded_inputs: frozenset[int] = frozenset()
        self.rematerialised: frozenset[int] | None = None

    def layout(self, index: ModelIndex) -> Layout:
        """Raises BudgetError if the largest unit does not fit the device, activations left aside."""
        self._index, context = index, self._context
        self.offloaded_inputs = index.blocks if self._options.activations == "host" else frozenset()
        chunker = Chunker(index, self._options, context)
        layout, found = chunker.layout, chunker.statistics
        trace = nominal_trace(layout, accumulate=context.accumulate)
        in_place = reusable(layout, trace, context)
        residence = Residence(layout, context, unmovable(layout), self.update_rule, in_place)
        need = minimum_need(trace, demand_of(layout, trace, context, in_place), residence)
        check_need(need, context, self.name, self._unit_name, measured=False)
        several = f"ranges: {context.accumulate} micro-batches are added up in fp32"
        self._statistics = PatrickStarStatistics(
            variant=self._options.variant,
            chunk_lists=found.chunk_lists,
            num_chunks=found.num_chunks,
            chunk_size_elements=found.chunk_size_elements,
            chunk_size_bytes=found.chunk_size_elements * context.itemsize,
            utilization=found.utilization,
            fragmentation=1 - found.utilization,
            num_out_of_chunks=found.num_out_of_chunks,
            num_bundles=len(layout.bundles),
            minimum_bytes=need.total_bytes,
            warmup_share=self._options.warmup_share,
            gradients=several if context.accumulate > 1 else "in the parameters' chunks",
        )
        return layout

    def eviction(self, layout: Layout, trace: Trace | None) -> Eviction:
        if trace is None:
            return ModelOrder(last=False)
        return FarthestNextUse(layout, demand_of(layout, trace, self._context).next_use)

    def plan(self, layout: Layout, trace: Trace) -> Plan:
        """A validated plan. Raises BudgetError if the traced step cannot run in the device's budget."""
        return fitted(partial(self._plan, layout, trace), layout, self._context)

    def _plan(self, layout: Layout, trace: Trace, context: PlanningContext) -> tuple[Plan, MemTimeline]:
        in_place = reusable(layout, trace, context)
        demand = demand_of(layout, trace, context, in_place)
        placer = Placer(layout, trace, demand, context, self._options, self.update_rule, self._unit_name)
        placement = placer.place()
        sizes = {b.index: layout.bundle_bytes(b.index) for b in layout.bundles if b.index not in placement.on_device}
        request = CacheRequest(demand, sizes, placement.room, self._options.prefetch, OpKind.WRITE_BACK)
        cache = plan_cache(request)
        plan = Plan(
            signature=trace.signature,
            operations=cache.operations,
            optimizer_tier=optimizer_tiers(layout, placement.on_device),
            resident_at_start=placement.on_device | cache.resident,
            update_rule=self.update_rule,
            in_place=placement.in_place,
        )
        residence = Residence(layout, context, placement.on_device, self.update_rule, placement.in_place)
        self._note(layout, trace, plan, placement, max(gradient_profile(demand, residence)))
        return plan, validate(layout, trace, plan, context)

    def statistics(self) -> BaseModel:
        assert self._statistics is not None, "statistics are there once layout() was called"
        return self._statistics

    def _note(self, layout: Layout, trace: Trace, plan: Plan, placement: Placement, range_bytes: int) -> None:
        """The planned half of the statistics."""
        assert self._statistics is not None
        context, curve = self._context, list(trace.non_model_bytes)
        left = margin(
            layout,
            context.device_budget,
            curve,
            chunk=self._statistics.chunk_size_elements,
            optimizer_itemsize=context.optimizer_itemsize,
        )
        moved = {kind: [p.operation.bundle for p in plan.operations if p.operation.kind is kind] for kind in OpKind}
        trainable = [s for s in layout.segments if s.space.trainable]
        ranged = [b.index for b in layout.bundles if b.trainable and b.index not in placement.in_place | placement.on_device]
        on_host = plan.resident_at_start - placement.on_device
        self._statistics = self._statistics.model_copy(
            update={
                "num_ranged": len(ranged),
                "model_bytes_per_parameter": (sum(self._statistics.chunk_lists.values()) + range_bytes) / self._index.numel(),
                "copied_bytes": sum(map(layout.bundle_bytes, on_host)),
                "margin_bytes": left.size_bytes,
                "margin_chunks": left.chunks,
                "optimizer_share_on_device": sum(s.used for s in trainable if plan.optimizer_tier[s.index] is Tier.DEVICE)
                / max(1, sum(s.used for s in trainable)),
                "non_model_peak_bytes": max(curve),
                "non_model_bytes": curve,
                "resident_bundles": len(plan.resident_at_start),
                "fetches_per_step": len(moved[OpKind.FETCH]),
                "fetched_bytes_per_step": sum(map(layout.bundle_bytes, moved[OpKind.FETCH])),
                "written_back_bytes_per_step": sum(map(layout.bundle_bytes, moved[OpKind.WRITE_BACK])),
            }
        )

    def _unit_name(self, unit: int) -> str:
        names = self._index.units
        return names[unit].name if unit < len(names) else f"number {unit}"
