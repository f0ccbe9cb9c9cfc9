"""Divides the device at every moment (sections 7.1 to 7.3): optimizer chunks in the margin, the rest for parameter chunks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from systems.planning.demand import (
    Demand,
    Residence,
    held_profile,
    minimum_need,
    non_model_profile,
    pool_profile,
    reusable,
    room_beside,
    unmovable,
)
from systems.planning.layout import Layout
from systems.planning.optimizer_cache import OptimizerCache
from systems.planning.plan import UpdateRule
from systems.planning.refusal import UnitName, check_need
from systems.planning.strategy import PlanningContext
from systems.planning.trace import Trace
from systems.strategies.patrickstar.options import PatrickStarOptions


@dataclass(frozen=True)
class Placement:
    """on_device: bundles updated there. room: bytes for all others, one entry a moment."""

    on_device: frozenset[int]
    in_place: frozenset[int]
    room: tuple[int, ...]


@dataclass(frozen=True)
class Placer:
    """Decides for one trace. unit_name: for messages."""

    layout: Layout
    trace: Trace
    demand: Demand
    context: PlanningContext
    options: PatrickStarOptions
    rule: UpdateRule
    unit_name: UnitName

    def place(self) -> Placement:
        """BudgetError if not even what a unit holds fits."""
        everything = self._residence(frozenset(b.index for b in self.layout.bundles))
        fits = max(self._fixed(everything)) <= self.context.device_budget
        if self.options.places_optimizer and fits and max(pool_profile(self.demand, everything)) <= self.context.pool_budget:
            return Placement(everything.on_device, frozenset(), (0,) * len(self.trace))
        base = self._residence(unmovable(self.layout))
        check_need(minimum_need(self.trace, self.demand, base), self.context, "patrickstar", self.unit_name)
        chosen = self._optimizers(base) if self.options.places_optimizer else frozenset[int]()
        residence = self._residence(base.on_device | chosen)
        held = held_profile(self.demand, residence)
        room = room_beside(self._fixed(residence), pool_profile(self.demand, residence), held, self.context)
        if not self.options.traces:
            share = int(self.options.warmup_share * self.context.device_budget)
            room = [min(r, max(share, h)) for r, h in zip(room, held, strict=True)]
        return Placement(residence.on_device, residence.in_place, tuple(room))

    def _residence(self, on_device: frozenset[int]) -> Residence:
        return Residence(self.layout, self.context, on_device, self.rule, self._reusable - on_device)

    @cached_property
    def _reusable(self) -> frozenset[int]:
        return reusable(self.layout, self.trace, self.context)

    def _fixed(self, residence: Residence) -> list[int]:
        """Bytes per moment that no parameter chunk can have."""
        non_model = non_model_profile(self.trace, self.demand, residence)
        return [sum(pair) for pair in zip(pool_profile(self.demand, residence), non_model, strict=True)]

    def _optimizers(self, base: Residence) -> frozenset[int]:
        """Optimizer chunks for the margin: as many as fit beside all parameters, so that none is evicted for them."""
        return OptimizerCache.beside_parameters(self.trace, self.demand, base, self._residence).choose()
