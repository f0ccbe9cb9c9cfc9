"""Elixir as a policy: what is different about it, each a few lines over the modules beside this one."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel

from systems.errors import UnsupportedError
from systems.planning.layout import Layout, ModelIndex
from systems.planning.plan import OpKind, Plan
from systems.planning.policy.base import FittedStrategy
from systems.planning.policy.caching import CacheRequest, plan_cache
from systems.planning.policy.division import Division
from systems.planning.policy.eviction import RandomOrder
from systems.planning.policy.options import StrategyStatistics
from systems.planning.strategy import Eviction, PlanningContext
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
            raise UnsupportedError(
                "elixir with `options=dict(scatter=False)` keeps every chunk whole on each of several devices: use "
                "`options=dict(scatter=False, offload=False)` with cache at auto or inf, or `options=dict(scatter=True)`"
            )
        super().__init__(options, context)
        self.write_back = options.variant == "write-back"

    def cut(self, index: ModelIndex) -> Layout:
        chunker = ElixirChunker(index, self._options, self._context)
        self.tell(**chunker.statistics, num_bundles=len(chunker.layout.bundles))
        return chunker.layout

    def first_eviction(self) -> Eviction:
        return RandomOrder(self._context.seed)

    def decide(self, division: Division) -> Plan:
        placement = Placer(division, self._options).place()
        evict = OpKind.WRITE_BACK if self.write_back else OpKind.DROP
        residence, prefetch = placement.residence, self._options.prefetch
        sizes, shards = division.sizes(residence), residence.sharded
        cache = plan_cache(CacheRequest(division.demand, sizes, placement.room, prefetch, evict, shards))
        plan = division.plan(cache.operations, residence, cache.resident)
        self.tell(cache_bytes=placement.cache_bytes, resident_bundles=len(plan.resident_at_start))
        return plan
