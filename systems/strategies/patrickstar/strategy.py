"""PatrickStar as a policy: what is different about it, each a few lines over the modules beside this one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import ClassVar

from pydantic import BaseModel

from systems.planning.layout import Layout, ModelIndex
from systems.planning.plan import OpKind, Plan
from systems.planning.policy.base import FittedStrategy
from systems.planning.policy.caching import CacheRequest, demanding, plan_cache
from systems.planning.policy.chunks import for_short_host
from systems.planning.policy.division import Division
from systems.planning.policy.eviction import ModelOrder
from systems.planning.policy.options import StrategyStatistics
from systems.planning.step.profiles import gradient_profile
from systems.planning.step.residence import Residence
from systems.planning.strategy import Eviction, PlanningContext
from systems.planning.trace import Trace
from systems.strategies.patrickstar.chunks import PatrickStarChunker
from systems.strategies.patrickstar.options import PatrickStarOptions, PatrickStarStatistics
from systems.strategies.patrickstar.placement import place
from systems.strategies.patrickstar.tracer import margin
from systems.strategies.patrickstar.warm_up import warm_up_share


class PatrickStar(FittedStrategy):
    """See the package's docstring for the paper's words and for what differs."""

    name: ClassVar[str] = "patrickstar"
    summary: ClassVar[str] = "chunks moved by traced memory, gradients in their parameters' place, optimizer in the margin"
    Options: ClassVar[type[BaseModel]] = PatrickStarOptions
    Statistics: ClassVar[type[StrategyStatistics]] = PatrickStarStatistics
    smaller: ClassVar[str | None] = "chunk_max"
    _options: PatrickStarOptions

    def __init__(self, options: PatrickStarOptions, context: PlanningContext) -> None:
        super().__init__(options, context)
        self.write_back = True  # chunk memory moves between the tiers: an eviction is a copy
        self.warm_up_share = options.warmup_share
        several = f"ranges: {context.accumulate} micro-batches are added up in fp32"
        gradients = several if context.accumulate > 1 else "in the parameters' chunks"
        self.tell(variant=options.variant, warmup_share=options.warmup_share, gradients=gradients)

    def layout(self, index: ModelIndex) -> Layout:
        layout = super().layout(index)
        if self._options.as_published:
            self.warm_up_share = warm_up_share(layout, self._context, self.update_rule, self._options.warmup_share)
        return layout

    def cut(self, index: ModelIndex) -> Layout:
        make, context = partial(PatrickStarChunker, index, self._options, self._context), self._context
        chunker = make(None) if self._options.as_published else for_short_host(make, context, self.update_rule)
        self._chunk, self._lists_bytes = chunker.chunk, sum(chunker.statistics["chunk_lists"].values())
        self.tell(**chunker.statistics, num_bundles=len(chunker.layout.bundles))
        return chunker.layout

    def first_eviction(self) -> Eviction:
        return ModelOrder(last=False)

    def eviction(self, layout: Layout, trace: Trace | None) -> Eviction:
        return super().eviction(layout, trace if self._options.traces else None)

    def division(self, layout: Layout, trace: Trace, context: PlanningContext) -> Division:
        return replace(super().division(layout, trace, context), gradients_stay=self._options.as_published)

    def decide(self, division: Division) -> Plan:
        placement = place(division, self._options)
        residence, prefetch = placement.residence, self._options.prefetch
        sizes, shards = division.sizes(residence), residence.sharded
        order = None if self._options.traces else self.first_eviction()
        asked = CacheRequest(division.demand, sizes, placement.room, prefetch, OpKind.WRITE_BACK, shards, order)
        cache = plan_cache(asked)
        plan = division.plan(cache.operations, residence, cache.resident)
        if self._options.as_published:
            plan = replace(plan, barriers=demanding(plan.operations))
        self._tell_step(division, plan, residence)
        return plan

    def _tell_step(self, division: Division, plan: Plan, residence: Residence) -> None:
        layout, curve = division.layout, list(division.trace.non_model_bytes)
        each = self._context.optimizer_itemsize
        left = margin(layout, self._context.device_budget, curve, chunk=self._chunk, optimizer_itemsize=each)
        ranged = [b.index for b in layout.bundles if b.trainable and b.index not in plan.in_place | residence.on_device]
        range_bytes = max(gradient_profile(division.demand, residence))
        flushed = {b: moment for moment, bundles in enumerate(division.trace.flushes) for b in bundles if b in plan.staying}
        written = [p for p in plan.operations if p.operation.kind is OpKind.WRITE_BACK]
        parameters = [p.operation.bundle for p in written if p.trigger < flushed.get(p.operation.bundle, p.trigger + 1)]
        self.tell(
            num_ranged=len(ranged),
            kept_gradients=len(plan.staying),
            model_bytes_per_parameter=(self._lists_bytes + range_bytes) / max(1, self._index.numel()),
            copied_bytes=sum(map(layout.bundle_bytes, plan.resident_at_start - residence.on_device)),
            margin_bytes=left.size_bytes,
            margin_chunks=left.chunks,
            non_model_peak_bytes=max(curve),
            non_model_bytes=curve,
            resident_bundles=len(plan.resident_at_start),
            written_back_bytes_per_step=sum(map(layout.bundle_bytes, parameters)),
        )
