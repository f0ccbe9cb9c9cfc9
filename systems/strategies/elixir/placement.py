"""Divides the device: what lives there for good with its optimizer state, and what is left for the R cache."""

from __future__ import annotations

from dataclasses import dataclass

from systems.errors import BudgetError
from systems.planning.policy.division import Division, added
from systems.planning.policy.optimizer_cache import OptimizerCache, within_working_set
from systems.planning.step.profiles import gradient_profile, held_profile, minimum_need
from systems.planning.step.residence import Residence
from systems.sizes import format_need, format_size
from systems.strategies.elixir.options import ElixirOptions


@dataclass(frozen=True)
class ElixirDivision:
    """residence: who is updated on the device, or never moved. room: bytes for what comes and goes, one entry a moment.

    cache_bytes: C, the constant that room never exceeds.
    """

    residence: Residence
    room: tuple[int, ...]
    cache_bytes: int


@dataclass(frozen=True)
class Placer:
    """Decides for one kind of step."""

    division: Division
    options: ElixirOptions

    def place(self) -> ElixirDivision:
        """BudgetError if not even what a unit holds fits."""
        division, limit, parameters = self.division, self.options.cache, self.division.layout.param_bytes
        alone = division.context.ranks == 1
        whole = limit is None or limit == "auto" or limit >= parameters or (alone and not self.options.offload)
        if whole and division.fits(division.everything):
            return ElixirDivision(division.everything, (0,) * len(division.trace), parameters)
        if not self.options.offload:
            return self._without_offload()
        division.least()
        base = division.base
        on_device = base.on_device | self._optimizers(base)
        return self._beside(division.residence(on_device))

    def _beside(self, residence: Residence) -> ElixirDivision:
        """The R cache, for what comes and goes."""
        division, limit, base = self.division, self.options.cache, self.division.base
        room = division.room(residence)
        working = added(held_profile(division.demand, residence), self._ahead(residence))
        capacity = max(min(room), max(working)) if limit == "auto" else max(room) if limit is None else limit
        if isinstance(limit, int):
            self._check_cache(limit, held_profile(division.demand, base))
            capacity -= sum(division.layout.bundle_bytes(b) for b in residence.whole - base.whole)
        return ElixirDivision(residence, tuple(min(r, capacity) for r in room), capacity)

    def _without_offload(self) -> ElixirDivision:
        """Of several ranks each has its shards on the device, and the cache the bundles that were brought together. BudgetError
        where that does not fit, or there is one rank.
        """
        division, context = self.division, self.division.context
        everything = division.everything
        shards = division.residence(everything.on_device)
        need = max(division.fixed(everything))
        if context.ranks > 1:
            need = minimum_need(division.trace, division.demand, shards).total_bytes
            if need <= context.device_budget:
                return self._beside(shards)
        needed, given = context.memory_for(need), context.memory_for(context.device_budget)
        advice = "allow offload" if self.options.scatter or context.ranks == 1 else "use `options=dict(scatter=True)`"
        raise BudgetError(
            f"elixir with `options=dict(offload=False)` needs {format_need(needed, given)} of device memory for "
            f"parameters, gradients, optimizer state and activations, {format_size(given)} is given: raise "
            f"`device_memory` or {advice}",
            tier="device",
            need=needed,
            have=given,
            final=True,
        )

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

    def _ahead(self, residence: Residence) -> list[int]:
        """Bytes per moment of the next bundles that prefetching would like to have beside what is held."""
        demand, sizes = self.division.demand, self.division.layout.bundle_bytes
        uses = [(m, b) for m, bundles in enumerate(demand.demanded) for b in bundles if b not in residence.whole]
        ahead, index, last = [], 0, len(demand) - 1
        for moment in range(len(demand)):
            while index < len(uses) and uses[index][0] <= moment:
                index += 1
            held, found = set(demand.held[moment]), set[int]()
            for _, bundle in uses[index:] if moment < last else uses:
                if len(found) == self.options.prefetch:
                    break
                if bundle not in held:
                    found.add(bundle)
            ahead.append(sum(map(sizes, found)))
        return ahead

    def _optimizers(self, base: Residence) -> frozenset[int]:
        """Bundles to update on the device, while working set and prefetches keep their room."""
        layout, demand, limit = self.division.layout, self.division.demand, self.options.cache
        working = added(held_profile(demand, base), self._ahead(base))
        need = [base.static_bytes + size for size in added(working, gradient_profile(demand, base))]
        return OptimizerCache(
            self.division.trace,
            demand,
            base,
            self.division.residence,
            need,
            pool=need,
            stay=lambda b, there: within_working_set(b, demand, there, cost=layout.bundle_bytes(b) if b in there.whole else 0),
            spare=limit - max(working) if isinstance(limit, int) else layout.param_bytes,
        ).choose()
