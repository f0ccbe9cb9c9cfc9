"""Divides the device: optimizer states that are cached there (section 4.2), and what is left for the layers' pages."""

from __future__ import annotations

from dataclasses import dataclass

from systems.planning.demand import (
    Demand,
    Residence,
    held_profile,
    minimum_need,
    non_model_profile,
    pool_profile,
    room_beside,
    unmovable,
)
from systems.planning.layout import Layout
from systems.planning.optimizer_cache import OptimizerCache, within_working_set
from systems.planning.plan import UpdateRule
from systems.planning.refusal import UnitName, check_need
from systems.planning.strategy import PlanningContext
from systems.planning.trace import Trace


@dataclass(frozen=True)
class Placement:
    """on_device: bundles updated there. room: bytes for all others, one entry a moment. cached: bytes of optimizer states."""

    on_device: frozenset[int]
    room: tuple[int, ...]
    cached: int


@dataclass(frozen=True)
class Placer:
    """Decides for one trace. cache: bytes for optimizer states, None for what is left. unit_name: for messages."""

    layout: Layout
    trace: Trace
    demand: Demand
    context: PlanningContext
    cache: int | None
    rule: UpdateRule
    unit_name: UnitName

    def place(self) -> Placement:
        """BudgetError if not even what a layer holds fits."""
        everything = self._residence(frozenset(b.index for b in self.layout.bundles))
        states = sum(map(everything.state_bytes, everything.on_device))
        fits = max(self._fixed(everything)) <= self.context.device_budget
        fits = fits and max(pool_profile(self.demand, everything)) <= self.context.pool_budget
        if fits and (self.cache is None or states <= self.cache):
            return Placement(everything.on_device, (0,) * len(self.trace), states)
        base = self._residence(unmovable(self.layout))
        need = minimum_need(self.trace, self.demand, base)
        check_need(need, self.context, "angel-ptm", self.unit_name, smaller=None)
        residence = self._residence(base.on_device | self._cached(base))
        held = held_profile(self.demand, residence)
        room = room_beside(self._fixed(residence), pool_profile(self.demand, residence), held, self.context)
        return Placement(residence.on_device, tuple(room), sum(map(residence.state_bytes, residence.on_device)))

    def _residence(self, on_device: frozenset[int]) -> Residence:
        return Residence(self.layout, self.context, on_device, self.rule)

    def _fixed(self, residence: Residence) -> list[int]:
        """Bytes per moment that no page of parameters can have."""
        non_model = non_model_profile(self.trace, self.demand, residence)
        return [sum(pair) for pair in zip(pool_profile(self.demand, residence), non_model, strict=True)]

    def _cached(self, base: Residence) -> frozenset[int]:
        """Layers whose optimizer states the device caches: in what no parameter needs in its life-time; as many bytes as were
        asked for, beside no more than what is computed with, if a number was given.
        """
        if self.cache is None:
            return OptimizerCache.beside_parameters(self.trace, self.demand, base, self._residence).choose()
        held, pool = held_profile(self.demand, base), pool_profile(self.demand, base)
        working = [sum(pair) for pair in zip(held, pool, strict=True)]
        return OptimizerCache(
            self.trace,
            self.demand,
            base,
            self._residence,
            need=working,
            pool=working,
            stay=lambda b: within_working_set(b, self.demand, base, cost=base.optimizer_bytes(b)),
            spare=self.cache,
        ).choose()
