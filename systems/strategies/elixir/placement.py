"""Divides the device: what lives there for good with its optimizer state, and what is left for the R cache."""

from __future__ import annotations

from dataclasses import dataclass

from systems.errors import BudgetError
from systems.planning.demand import (
    Demand,
    Residence,
    gradient_profile,
    held_profile,
    in_order_of_use,
    minimum_need,
    non_model_bounds,
    non_model_profile,
    pool_profile,
    pool_with,
    room_beside,
    unmovable,
)
from systems.planning.layout import Layout
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
        everything = Residence(self.layout, self.context, frozenset(b.index for b in self.layout.bundles), self.rule)
        peak, pool = max(self._fixed(everything)), max(pool_profile(self.demand, everything))
        if whole and peak <= self.context.device_budget and pool <= self.context.pool_budget:
            return None
        if not self.options.offload:
            needed, given = self.context.memory_for(peak), self.context.memory_for(self.context.device_budget)
            raise BudgetError(
                f"elixir with offload=false needs {format_need(needed, given)} of device memory for parameters, gradients, "
                f"optimizer state and activations, {format_size(given)} is given: raise "
                "--device-memory or allow offload",
                tier="device",
                need=needed,
                have=given,
                final=True,
            )
        base = Residence(self.layout, self.context, unmovable(self.layout), self.rule)
        check_need(minimum_need(self.trace, self.demand, base), self.context, "elixir", self.unit_name)
        on_device = base.on_device | self._optimizers(base)
        residence = Residence(self.layout, self.context, on_device, self.rule)
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
                "one unit holds: raise --option cache, or leave it at auto",
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
        """Bundles to update on the device: first units first, while working set and prefetches keep their room.

        The first units' gradients arrive last and their parameters are needed first, so their updates are the ones that
        the next step would wait for.
        """
        working = [sum(pair) for pair in zip(held_profile(self.demand, base), self._ahead(base), strict=True)]
        gradients = gradient_profile(self.demand, base)
        static = base.static_bytes
        rest = [static + sum(pair) for pair in zip(working, gradients, strict=True)]
        bounds = non_model_bounds(self.trace, self.demand, base)
        ranged, kept = ([sum(pair) for pair in zip(rest, bound, strict=True)] for bound in bounds)
        budget, chosen = self.context.device_budget, set[int]()
        cache = self.options.cache
        spare = cache - max(working) if isinstance(cache, int) else self.layout.param_bytes
        movable = (b for b in self.demand.gradient_spans if b not in base.on_device)
        for bundle in in_order_of_use(movable, self.demand):
            size = self.layout.bundle_bytes(bundle)
            grown = self._with(base, ranged, bundle, delay=0), self._with(base, kept, bundle, delay=1)
            there = Residence(self.layout, self.context, base.on_device | {bundle}, self.rule)
            pool = pool_with(rest, bundle, self.demand, base, there)
            if size <= spare and max(pool) <= self.context.pool_budget and max(map(min, *grown)) <= budget:
                chosen.add(bundle)
                ranged, kept = grown
                rest, spare = pool, spare - size
        return frozenset(chosen)

    def _with(self, base: Residence, need: list[int], bundle: int, *, delay: int) -> list[int]:
        """`need` once this bundle lives and is updated on the device.

        delay: moments after its BACKWARD_ENTER from which an adopted gradient counts (see non_model_bounds).
        """
        size = self.layout.bundle_bytes(bundle)
        there = Residence(self.layout, self.context, base.on_device | {bundle}, self.rule)
        delay = delay if there.adopted(bundle) else 0
        constant = size + there.state_bytes(bundle)
        grown = [n + constant for n in need]
        changes = [(span.begin, span.end, -size) for span in self.demand.hold_spans.get(bundle, ())]
        changes += [(span.begin, span.end, -size) for span in base.gradient_spans(self.demand, bundle)]
        changes += [(span.begin + delay, span.end, size) for span in there.gradient_spans(self.demand, bundle)]
        for begin, end, change in changes:
            for moment in range(begin, end):
                grown[moment] += change
        return grown
