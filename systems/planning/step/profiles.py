"""Bytes of device memory over the moments of a step: of gradients, of what is held, of what the pool has not, and the least
that a step can run in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from systems.planning.step.demand import Demand, Span
from systems.planning.step.residence import Residence
from systems.planning.strategy import PlanningContext
from systems.planning.trace import NO_UNIT, Trace


class Profile:
    """Bytes over moments, built from spans."""

    def __init__(self, length: int) -> None:
        self._steps = [0] * (length + 1)

    def add(self, span: Span, size: int) -> None:
        self._steps[span.begin] += size
        self._steps[span.end] -= size

    def values(self) -> list[int]:
        total, values = 0, []
        for step in self._steps[:-1]:
            total += step
            values.append(total)
        return values


def gradient_profile(demand: Demand, residence: Residence) -> list[int]:
    """Pool bytes per moment of gradient ranges, and of shards that wait for the norm."""
    profile = Profile(len(demand))
    for bundle in demand.gradient_spans:
        if not residence.adopted(bundle):
            for span, size in residence.gradient_bytes(demand, bundle):
                profile.add(span, size)
    return profile.values()


def non_model_profile(trace: Trace, demand: Demand, residence: Residence) -> list[int]:
    """Device bytes per moment beside the pool's: activations, temporaries, adopted gradients. Never too low.

    The lower of the two bounds of `non_model_bounds`. If all gradients are adopted and the trace measured that case it
    is exact: those of earlier intervals by their running sum, those of this interval within the measured peak.
    """
    bounds = [min(pair) for pair in zip(*non_model_bounds(trace, demand, residence), strict=True)]
    if not trace.measured_adopted or not all(map(residence.adopted, demand.gradient_spans)):
        return bounds
    exact, earlier = [], 0
    for peak, produced in zip(trace.adopted_peak_bytes, trace.gradient_bytes, strict=True):
        exact.append(earlier + peak)
        earlier += produced
    return [min(pair) for pair in zip(bounds, exact, strict=True)]


def non_model_bounds(trace: Trace, demand: Demand, residence: Residence) -> tuple[list[int], list[int]]:
    """Two bounds that hold for every plan, per moment. Adopted gradients count with their whole bundle once it has
    begun, and those written in place with all that a unit has of them until its backward ends.

    The peak measured with ranges, plus the adopted gradients of bundles begun by now; and the peak measured with all
    gradients of the interval kept, plus those of bundles begun in earlier intervals.
    """
    begun, earlier = Profile(len(demand)), Profile(len(demand))
    for bundle in filter(residence.adopted, demand.gradient_spans):
        size = residence.layout.bundle_bytes(bundle)
        for span in residence.gradient_spans(demand, bundle):
            begun.add(span, size)
            earlier.add(Span(span.begin + 1, span.end), size)
    open_before: frozenset[int] = frozenset()
    for moment, units in enumerate(demand.backward if residence.in_place else ()):
        now = frozenset(units)
        for profile, those in ((begun, now), (earlier, now & open_before)):
            profile.add(Span(moment, moment + 1), sum(_waiting_bytes(residence, unit) for unit in those))
        open_before = now
    ranged = [sum(pair) for pair in zip(trace.non_model_bytes, begun.values(), strict=True)]
    if not trace.measured_adopted:
        return ranged, ranged
    return ranged, [sum(pair) for pair in zip(trace.adopted_peak_bytes, earlier.values(), strict=True)]


def _waiting_bytes(residence: Residence, unit: int) -> int:
    """Of the unit's gradients that take their parameters' place once its backward ends; until then they are beside them."""
    layout = residence.layout
    bundles = (layout.bundles[b] for b in layout.bundles_of_unit.get(unit, ()) if residence.reuses(b))
    return sum(bundle.read_by(unit) for bundle in bundles) * layout.itemsize


@dataclass(frozen=True)
class Need:
    """The least device memory a step can run in, with the moment that sets it. All sizes in bytes.

    total_bytes is the sum of the others. unit: the unit entering there, NO_UNIT at an exit or at the step's ends.
    """

    moment: int
    unit: int
    total_bytes: int
    static_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    non_model_bytes: int


def minimum_need(trace: Trace, demand: Demand, residence: Residence) -> Need:
    """Only what is held is resident, nothing is fetched ahead. The moment that needs most, the first of equals."""
    layout, static = residence.layout, residence.static_bytes
    gradients = gradient_profile(demand, residence)
    non_model = non_model_profile(trace, demand, residence)
    held = held_profile(demand, residence)
    totals = [static + sum(parts) for parts in zip(held, gradients, non_model, strict=True)]
    moment = max(range(len(totals)), key=lambda m: (totals[m], -m), default=0)
    entering = trace.moments[moment]
    unit = entering.unit if layout.bundles_of_unit.get(entering.unit) else NO_UNIT
    return Need(moment, unit, totals[moment], static, held[moment], gradients[moment], non_model[moment])


def held_profile(demand: Demand, residence: Residence) -> list[int]:
    """Bytes per moment of held parameters that are not on the device for good."""
    sizes = [0 if b.index in residence.whole else residence.layout.bundle_bytes(b.index) for b in residence.layout.bundles]
    return [sum(sizes[bundle] for bundle in bundles) for bundles in demand.held]


def pool_profile(demand: Demand, residence: Residence) -> list[int]:
    """Pool bytes per moment beside bundles that come and go: what is there for good, and gradient ranges."""
    static = residence.static_bytes
    return [static + g for g in gradient_profile(demand, residence)]


def room_beside(fixed: Sequence[int], pool: Sequence[int], held: Sequence[int], context: PlanningContext) -> list[int]:
    """Bytes per moment for bundles that come and go, beside what is fixed: within the device's budget, and, as far as what
    is held allows, within the pool's.

    pool: the pool's part of what is fixed. held: bytes of those bundles that must be there.
    """
    device, most = context.device_budget, context.pool_budget
    return [min(device - f, max(most - p, h)) for f, p, h in zip(fixed, pool, held, strict=True)]


def pool_with(need: Sequence[int], bundle: int, demand: Demand, base: Residence, there: Residence) -> list[int]:
    """Pool bytes per moment once a bundle lives and is updated on the device. need: those before, with what is held.

    base, there: without the bundle on the device, and with it.
    """
    constant = there.resting_bytes(bundle) + there.state_bytes(bundle)
    changes: list[tuple[Span, int]] = []
    if bundle in there.whole:
        size = there.layout.bundle_bytes(bundle)
        changes = [(span, -size) for span in demand.hold_spans.get(bundle, ())]
    changes += [(span, -size) for span, size in base.gradient_bytes(demand, bundle)]
    if not there.adopted(bundle):
        changes += there.gradient_bytes(demand, bundle)
    grown = [n + constant for n in need]
    for span, change in changes:
        for moment in range(span.begin, span.end):
            grown[moment] += change
    return grown
