"""Divides the device at every moment (sections 7.1 to 7.3): optimizer chunks in the margin, the rest for parameter chunks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from systems.planning.demand import (
    Demand,
    Residence,
    Span,
    gradient_profile,
    held_profile,
    in_order_of_use,
    minimum_need,
    non_model_bounds,
    non_model_profile,
    pool_profile,
    pool_with,
    reusable,
    room_beside,
    unmovable,
)
from systems.planning.layout import Layout
from systems.planning.plan import UpdateRule
from systems.planning.refusal import UnitName, check_need
from systems.planning.strategy import PlanningContext
from systems.planning.trace import Trace
from systems.strategies.patrickstar.options import PatrickStarOptions
from systems.strategies.patrickstar.tracer import away, parameters_profile


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
        """Optimizer chunks for the margin: as many as fit beside all parameters, so that none is evicted for them.

        Those of the first units first: their gradients arrive last and their parameters are needed first, so their updates
        are the ones that the next step would wait for.
        """
        parameters, gradients = parameters_profile(self.demand, base), gradient_profile(self.demand, base)
        states = sum(map(base.state_bytes, base.on_device))
        rest = [states + sum(pair) for pair in zip(parameters, gradients, strict=True)]
        bounds = non_model_bounds(self.trace, self.demand, base)
        ranged, kept = ([sum(pair) for pair in zip(rest, bound, strict=True)] for bound in bounds)
        budget, chosen = self.context.device_budget, set[int]()
        pool = [sum(pair) for pair in zip(held_profile(self.demand, base), pool_profile(self.demand, base), strict=True)]
        for bundle in in_order_of_use((b for b in self.demand.gradient_spans if b not in base.on_device), self.demand):
            grown = self._with(base, ranged, bundle, delay=0), self._with(base, kept, bundle, delay=1)
            with_it = pool_with(pool, bundle, self.demand, base, self._residence(base.on_device | {bundle}))
            if max(with_it) <= self.context.pool_budget and max(map(min, *grown)) <= budget:
                chosen.add(bundle)
                ranged, kept = grown
                pool = with_it
        return frozenset(chosen)

    def _with(self, base: Residence, need: list[int], bundle: int, *, delay: int) -> list[int]:
        """`need` once this bundle is updated on the device: its optimizer state comes, and it never leaves.

        delay: moments after its BACKWARD_ENTER from which an adopted gradient counts (see non_model_bounds).
        """
        size, last = self.layout.bundle_bytes(bundle), len(self.demand) - 1
        there = self._residence(base.on_device | {bundle})
        leaves = next((m for m, bundles in enumerate(self.demand.stale) if bundle in bundles), last)
        changes = [(span, size) for span in away(leaves, last)]
        if not base.reuses(bundle):
            changes += [(span, -size) for span in base.gradient_spans(self.demand, bundle)]
        late = delay if there.adopted(bundle) else 0
        changes += [(Span(s.begin + late, s.end), size) for s in there.gradient_spans(self.demand, bundle)]
        state = there.state_bytes(bundle)
        grown = [n + state for n in need]
        for span, change in changes:
            for moment in range(span.begin, span.end):
                grown[moment] += change
        return grown
