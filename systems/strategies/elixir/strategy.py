"""Elixir as a policy: what is different about it, each a few lines over the modules beside this one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import ClassVar

from pydantic import BaseModel

from systems.errors import UnsupportedError
from systems.planning.layout import Layout, ModelIndex
from systems.planning.plan import OpKind, Plan, PlannedOperation
from systems.planning.policy.base import FittedStrategy
from systems.planning.policy.caching import CachePlan, CacheRequest, demanding, plan_cache
from systems.planning.policy.chunks import for_short_host
from systems.planning.policy.division import Division
from systems.planning.policy.eviction import RandomOrder
from systems.planning.policy.homes import check_host
from systems.planning.policy.nominal import nominal_trace
from systems.planning.policy.options import StrategyStatistics
from systems.planning.strategy import Eviction, PlanningContext
from systems.planning.trace import Trace
from systems.strategies.elixir.chunks import ElixirChunker
from systems.strategies.elixir.options import ElixirOptions, ElixirStatistics
from systems.strategies.elixir.placement import Placer


class Elixir(FittedStrategy):
    """See the package's docstring for the paper's words and for what differs."""

    name: ClassVar[str] = "elixir"
    summary: ClassVar[str] = "chunks of searched size in a cache with Belady eviction and master shards on the host"
    Options: ClassVar[type[BaseModel]] = ElixirOptions
    Statistics: ClassVar[type[StrategyStatistics]] = ElixirStatistics
    smaller: ClassVar[str | None] = "chunk_max"
    _options: ElixirOptions

    def __init__(self, options: ElixirOptions, context: PlanningContext) -> None:
        if context.ranks > 1 and not options.scatter and (options.offload or options.cache not in ("auto", None)):
            whole = "inf" if options.keeps_to_paper else "auto or inf"
            raise UnsupportedError(
                "elixir with `options=dict(scatter=False)` keeps every chunk whole on each of several devices: use "
                f"`options=dict(scatter=False, offload=False)` with cache at {whole}, or `options=dict(scatter=True)`"
            )
        super().__init__(options, context)
        self.write_back = options.variant == "write-back"
        self._staying = frozenset[int]()

    def layout(self, index: ModelIndex) -> Layout:
        """Under `paper` BudgetError too if a unit holds more than the cache, or the host not all that is not in it."""
        layout, context, options = super().layout(index), self._context, self._options
        if options.keeps_to_paper and (options.offload or context.ranks > 1):
            trace = nominal_trace(layout, accumulate=context.accumulate)
            division = self.division(layout, trace, context)
            Placer(division, options, self._staying).check_constant()
            check_host(layout, context, "elixir with `options=dict(variant='paper')`")
            if isinstance(options.cache, int):
                left = context.device_budget - division.base.static_bytes
                self.bounded = True
                self.warm_up_share = min(1.0, options.cache / max(1, left))
        return layout

    def cut(self, index: ModelIndex) -> Layout:
        make, context = partial(ElixirChunker, index, self._options, self._context), self._context
        chunker = make(None) if self._options.keeps_to_paper else for_short_host(make, context, self.update_rule)
        self._staying = chunker.staying
        self.tell(**chunker.statistics, num_bundles=len(chunker.layout.bundles))
        return chunker.layout

    def eviction(self, layout: Layout, trace: Trace | None) -> Eviction:
        rule = super().eviction(layout, trace)
        return Sparing(rule, self._staying) if self._staying else rule

    def first_eviction(self) -> Eviction:
        return RandomOrder(self._context.seed)

    def decide(self, division: Division) -> Plan:
        placement = Placer(division, self._options, self._staying).place()
        evict = OpKind.WRITE_BACK if self.write_back else OpKind.DROP
        residence, prefetch = placement.residence, self._options.prefetch
        sizes, shards = division.sizes(residence), residence.sharded
        staying = {b: sizes.pop(b) for b in sizes.keys() & self._staying}
        cache = plan_cache(CacheRequest(division.demand, sizes, placement.room, prefetch, evict, shards))
        if staying:
            room = (sum(staying.values()),) * len(division.demand)
            cache = _together(cache, plan_cache(CacheRequest(division.demand, staying, room, prefetch=0)))
        plan = division.plan(cache.operations, residence, cache.resident)
        if self._options.variant == "paper":
            plan = replace(plan, barriers=demanding(plan.operations))
        self.tell(cache_bytes=placement.cache_bytes, resident_bundles=len(plan.resident_at_start))
        return plan


class Sparing:
    """A rule of eviction by which these bundles go only where nothing else can."""

    def __init__(self, rule: Eviction, spared: frozenset[int]) -> None:
        self._rule, self._spared = rule, spared

    def choose(self, candidates: Sequence[int], moment: int) -> int:
        others = [bundle for bundle in candidates if bundle not in self._spared]
        return self._rule.choose(others or candidates, moment)


def _together(*caches: CachePlan) -> CachePlan:
    """At each moment the operations of the first, then those of the next."""
    found = sorted((p.trigger, number, p.priority, p) for number, cache in enumerate(caches) for p in cache.operations)
    priorities = count()
    operations = tuple(PlannedOperation(p.trigger, next(priorities), p.operation) for *_, p in found)
    return CachePlan(operations, frozenset[int]().union(*(cache.resident for cache in caches)))
