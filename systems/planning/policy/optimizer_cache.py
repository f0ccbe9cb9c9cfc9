"""Which bundles are updated on the device, where memory is left beside what a strategy wants for parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from systems.planning.step.demand import Demand, Span, in_order_of_use
from systems.planning.step.profiles import Profile, gradient_profile, held_profile, non_model_bounds, pool_profile, pool_with
from systems.planning.step.residence import Residence
from systems.planning.trace import Trace

Changes = list[tuple[Span, int]]


@dataclass(frozen=True)
class Stay:
    """What it takes, in bytes, that a bundle's parameters never leave the device: at every moment, in some spans on top, and
    of what may be spent on such bundles in all."""

    constant: int
    changes: Changes
    cost: int = 0


@dataclass(frozen=True)
class OptimizerCache:
    """base: what lives on the device in any case. residence: of a set of bundles updated there.

    need: bytes per moment of parameters, states and gradient ranges as they are wanted without any bundle more. pool: those of
    the pool that must be there. stay: of a bundle, in the residence in which it is updated on the device. spare: for all costs
    together, None for no limit.
    """

    trace: Trace
    demand: Demand
    base: Residence
    residence: Callable[[frozenset[int]], Residence]
    need: Sequence[int]
    pool: Sequence[int]
    stay: Callable[[int, Residence], Stay]
    spare: int | None = None

    @classmethod
    def beside_parameters(
        cls, trace: Trace, demand: Demand, base: Residence, residence: Callable[[frozenset[int]], Residence]
    ) -> OptimizerCache:
        """In what is left if all parameters stay, each until its gradient leaves for the host: none is evicted for a state."""
        parameters, gradients = _parameters_profile(demand, base), gradient_profile(demand, base)
        states = sum(base.state_bytes(b) + (base.resting_bytes(b) if b in base.sharded else 0) for b in base.on_device)
        need = [states + sum(pair) for pair in zip(parameters, gradients, strict=True)]
        pool = [sum(pair) for pair in zip(held_profile(demand, base), pool_profile(demand, base), strict=True)]
        return cls(trace, demand, base, residence, need, pool, stay=lambda b, there: _beside_all_parameters(b, demand, there))

    def choose(self) -> frozenset[int]:
        """Bundles beside the base's: first units first, as far as budgets allow.

        The first units' gradients arrive last and their parameters are needed first, so their updates are the ones that
        the next step would wait for.
        """
        bounds = non_model_bounds(self.trace, self.demand, self.base)
        ranged, kept = ([sum(pair) for pair in zip(self.need, bound, strict=True)] for bound in bounds)
        context, pool, spare, chosen = self.base.context, list(self.pool), self.spare, set[int]()
        movable = (b for b in self.demand.gradient_spans if b not in self.base.on_device)
        for bundle in in_order_of_use(movable, self.demand):
            there = self.residence(self.base.on_device | {bundle})
            stay = self.stay(bundle, there)
            grown = self._with(ranged, bundle, there, stay, delay=0), self._with(kept, bundle, there, stay, delay=1)
            with_it = pool_with(pool, bundle, self.demand, self.base, there)
            affordable = spare is None or stay.cost <= spare
            if affordable and max(with_it) <= context.pool_budget and max(map(min, *grown)) <= context.device_budget:
                chosen.add(bundle)
                ranged, kept = grown
                pool = with_it
                spare = None if spare is None else spare - stay.cost
        return frozenset(chosen)

    def _with(self, need: Sequence[int], bundle: int, there: Residence, stay: Stay, *, delay: int) -> list[int]:
        """`need` once this bundle lives and is updated on the device.

        delay: moments after its BACKWARD_ENTER from which an adopted gradient counts (see non_model_bounds).
        """
        changes = list(stay.changes)
        changes += [(span, -size) for span, size in self.base.gradient_bytes(self.demand, bundle)]
        late = delay if there.adopted(bundle) else 0
        changes += [(Span(s.begin + late, s.end), size) for s, size in there.gradient_bytes(self.demand, bundle)]
        constant = stay.constant + there.state_bytes(bundle)
        grown = [n + constant for n in need]
        for span, change in changes:
            for moment in range(span.begin, span.end):
                grown[moment] += change
        return grown


def within_working_set(bundle: int, demand: Demand, there: Residence, *, cost: int = 0) -> Stay:
    """Where the need counts parameters while they are held: this one is there all the time now, or a shard beside it."""
    if bundle in there.sharded:
        return Stay(there.resting_bytes(bundle), [], cost)
    size = there.layout.bundle_bytes(bundle)
    return Stay(size, [(span, -size) for span in demand.hold_spans.get(bundle, ())], cost)


def _beside_all_parameters(bundle: int, demand: Demand, there: Residence) -> Stay:
    """Where the need counts all parameters (`_parameters_profile`): this one no longer leaves with its gradient, or it does
    and a shard beside it stays.
    """
    if bundle in there.sharded:
        return Stay(there.resting_bytes(bundle), [])
    size, last = there.layout.bundle_bytes(bundle), len(demand) - 1
    leaves = next((m for m, bundles in enumerate(demand.stale) if bundle in bundles), last)
    return Stay(0, [(span, size) for span in _away(leaves, last)])


def _parameters_profile(demand: Demand, residence: Residence) -> list[int]:
    """Bytes per moment of all parameters, had each a place until its gradient leaves for the host, if it does."""
    last, layout = len(demand) - 1, residence.layout
    leaves = {b: moment for moment, bundles in enumerate(demand.stale) for b in bundles}
    profile = Profile(len(demand))
    for bundle in (b for b in layout.bundles if b.index not in residence.whole):
        for span in _away(leaves.get(bundle.index, last), last):
            profile.add(span, -layout.bundle_bytes(bundle.index))
    return [layout.param_bytes + change for change in profile.values()]


def _away(leaves: int, last: int) -> list[Span]:
    """When a bundle updated on the host is not on the device: from its flush to the end of the step."""
    return [Span(leaves, last)] if leaves < last else []
