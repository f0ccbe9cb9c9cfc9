"""Divides the device: what lives there for good with its optimizer state, and what is left for the R cache."""

from __future__ import annotations

from dataclasses import dataclass

from systems.errors import BudgetError
from systems.planning.demand import (
    Demand,
    Residence,
    gradient_profile,
    held_profile,
    minimum_need,
    non_model_profile,
    pool_profile,
    room_beside,
    unmovable,
)
from systems.planning.layout import Layout
from systems.planning.optimizer_cache import OptimizerCache, within_working_set
from systems.planning.plan import Plan, Tier, UpdateRule
from systems.planning.refusal import UnitName, check_need
from systems.planning.strategy import PlanningContext
from systems.planning.trace import Trace
from systems.sizes import format_need, format_size
from systems.strategies.elixir.options import ElixirOptions


@dataclass(frozen=True)
class Placement:
    """on_device: bundles updated on the device, or never moved. room: bytes for all others, one entry a moment.

    cache_bytes: C, the constant that room never exceeds.
    """

    on_device: frozenset[int]
    room: tuple[int, ...]
    cache_bytes: int


def resident_plan(layout: Layout, trace: Trace, rule: UpdateRule) -> Plan:
    """Everything on the device for good: no operation, no byte moves."""
    everything = frozenset(b.index for b in layout.bundles)
    return Plan(trace.signature, (), (Tier.DEVICE,) * len(layout.segments), everything, rule)


@dataclass(frozen=True)
class Placer:
    """Decides for one trace. unit_name: for messages."""

    layout: Layout
    trace: Trace
    demand: Demand
    context: PlanningContext
    options: ElixirOptions
    rule: UpdateRule
    unit_name: UnitName

    def place(self) -> Placement | None:
        """None if everything fits on the device. BudgetError if not even what a unit holds fits."""
        limit = self.options.cache
        whole = limit is None or limit == "auto" or limit >= self.layout.param_bytes or not self.options.offload
        everything = self._residence(frozenset(b.index for b in self.layout.bundles))
        peak, pool = max(self._fixed(everything)), max(pool_profile(self.demand, everything))
        if whole and peak <= self.context.device_budget and pool <= self.context.pool_budget:
            return None
        if not self.options.offload:
            needed, given = self.context.memory_for(peak), self.context.memory_for(self.context.device_budget)
            raise BudgetError(
                f"elixir with `options=dict(offload=False)` needs {format_need(needed, given)} of device memory for "
                f"parameters, gradients, optimizer state and activations, {format_size(given)} is given: raise "
                "`device_memory` or allow offload",
                tier="device",
                need=needed,
                have=given,
                final=True,
            )
        base = self._residence(unmovable(self.layout))
        check_need(minimum_need(self.trace, self.demand, base), self.context, "elixir", self.unit_name)
        on_device = base.on_device | self._optimizers(base)
        residence = self._residence(on_device)
        held = held_profile(self.demand, residence)
        room = room_beside(self._fixed(residence), pool_profile(self.demand, residence), held, self.context)
        working = [sum(pair) for pair in zip(held, self._ahead(residence), strict=True)]
        capacity = max(min(room), max(working)) if limit == "auto" else max(room) if limit is None else limit
        if isinstance(limit, int):
            self._check_cache(limit, held_profile(self.demand, base))
            capacity -= sum(self.layout.bundle_bytes(b) for b in on_device - base.on_device)
        return Placement(on_device, tuple(min(r, capacity) for r in room), capacity)

    def _check_cache(self, limit: int, held: list[int]) -> None:
        if max(held) > limit:
            raise BudgetError(
                f"elixir's cache of {format_size(limit)} is less than the {format_size(max(held))} of parameters that "
                "one unit holds: raise cache in `options`, or leave it at auto",
                tier="device",
                need=max(held),
                have=limit,
                final=True,
            )

    def _fixed(self, residence: Residence) -> list[int]:
        """Bytes per moment that are not for the cache to use."""
        non_model = non_model_profile(self.trace, self.demand, residence)
        return [sum(pair) for pair in zip(pool_profile(self.demand, residence), non_model, strict=True)]

    def _ahead(self, residence: Residence) -> list[int]:
        """Bytes per moment of the next bundles that prefetching would like to have beside what is held."""
        uses = [(m, b) for m, bundles in enumerate(self.demand.demanded) for b in bundles if b not in residence.on_device]
        ahead, index, last = [], 0, len(self.demand) - 1
        for moment in range(len(self.demand)):
            while index < len(uses) and uses[index][0] <= moment:
                index += 1
            held, found = set(self.demand.held[moment]), set[int]()
            for _, bundle in uses[index:] if moment < last else uses:
                if len(found) == self.options.prefetch:
                    break
                if bundle not in held:
                    found.add(bundle)
            ahead.append(sum(self.layout.bundle_bytes(b) for b in found))
        return ahead

    def _optimizers(self, base: Residence) -> frozenset[int]:
        """Bundles to update on the device, while working set and prefetches keep their room."""
        working = [sum(pair) for pair in zip(held_profile(self.demand, base), self._ahead(base), strict=True)]
        gradients, static, limit = gradient_profile(self.demand, base), base.static_bytes, self.options.cache
        need = [static + sum(pair) for pair in zip(working, gradients, strict=True)]
        return OptimizerCache(
            self.trace,
            self.demand,
            base,
            self._residence,
            need,
            pool=need,
            stay=lambda b: within_working_set(b, self.demand, base, cost=self.layout.bundle_bytes(b)),
            spare=limit - max(working) if isinstance(limit, int) else self.layout.param_bytes,
        ).choose()

    def _residence(self, on_device: frozenset[int]) -> Residence:
        return Residence(self.layout, self.context, on_device, self.rule)
