"""Angel-PTM as a policy: what is different about it, each a few lines over the modules beside this one."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pydantic import BaseModel

from systems.planning.layout import Layout, ModelIndex
from systems.planning.plan import Plan
from systems.planning.policy.base import FittedStrategy
from systems.planning.policy.division import Division
from systems.planning.policy.homes import all_on_disk
from systems.planning.policy.options import StrategyStatistics
from systems.planning.strategy import PlanningContext
from systems.strategies.angel_ptm.gathering import schedule_on_ranks
from systems.strategies.angel_ptm.options import AngelPTMOptions, AngelPTMStatistics
from systems.strategies.angel_ptm.pages import page_layout
from systems.strategies.angel_ptm.paging import LayerPages, schedule_pages
from systems.strategies.angel_ptm.placement import AngelPtmDivision, place
from systems.strategies.angel_ptm.scheduling import Moves, schedule


class AngelPTM(FittedStrategy):
    """See the package's docstring for the paper's words and for what differs.

    The host buffers the 16-bit parameters (Algorithm 2), so that leaving the device is a drop. While nothing was traced the
    layer moved last goes first (line 8), all being thought to be moved in model order.
    """

    name: ClassVar[str] = "angel-ptm"
    summary: ClassVar[str] = "pages scheduled by life-time, optimizer states cached in what the device has left"
    Options: ClassVar[type[BaseModel]] = AngelPTMOptions
    Statistics: ClassVar[type[StrategyStatistics]] = AngelPTMStatistics
    _options: AngelPTMOptions
    _fetched_bytes: int | None = None

    def __init__(self, options: AngelPTMOptions, context: PlanningContext) -> None:
        super().__init__(options, context)
        self.max_staleness = options.max_staleness
        if self.max_staleness is not None:
            self.to_wait = "no max_staleness in `options`"

    def cut(self, index: ModelIndex) -> Layout:
        layout, found = page_layout(index, self._options.page, self._context)
        self.tell(**vars(found), num_layers=len(layout.bundles), variant=self._options.variant)
        layout = replace(layout, max_staleness=self.max_staleness)
        return all_on_disk(layout, self._context) if self._options.states == "disk" else layout

    def decide(self, division: Division) -> Plan:
        placement = place(division, None if self._options.cache == "auto" else self._options.cache)
        residence = placement.residence
        moves = self._schedule(division, placement)
        self._fetched_bytes = moves.fetched_bytes
        plan = division.plan(moves.operations, residence, moves.resident, moves.shards, moves.pages)
        self.tell(
            cache_bytes=placement.cached,
            resident=len(plan.resident_at_start),
            moved_at_start=moves.at_start,
            moved_later=moves.later,
            advanced=moves.advanced,
        )
        return plan

    def tell_of(self, plan: Plan, layout: Layout) -> None:
        """See StrategyBase; a fetch that finds pages there brings what is missing."""
        super().tell_of(plan, layout)
        if self._fetched_bytes is not None:
            self.tell(fetched_bytes_per_step=self._fetched_bytes)

    def _schedule(self, division: Division, placement: AngelPtmDivision) -> Moves:
        sizes, sharded = division.sizes(placement.residence), placement.residence.sharded
        as_printed = self._options.variant == "paper"
        if self._context.ranks == 1 and as_printed:
            layers = {bundle: LayerPages.of(division.layout, bundle, self._options.page) for bundle in sizes}
            return schedule_pages(division.demand, layers, placement.room, division.room_for_merging(placement.residence))
        if self._context.ranks == 1:
            return schedule(division.demand, sizes, placement.room)
        parts = {bundle: division.layout.shard_bytes(bundle) for bundle in sizes}
        return schedule_on_ranks(division.demand, sizes, parts, placement.room, sharded, as_printed=as_printed)
