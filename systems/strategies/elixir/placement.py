"""Divides the device: what lives there for good with its optimizer state, and what is left for the R cache."""

from __future__ import annotations

from dataclasses import dataclass

from systems.errors import BudgetError
from systems.planning.policy.division import Division, added
from systems.planning.policy.optimizer_cache import OptimizerCache, within_working_set
from systems.planning.policy.refusal import refusal
from systems.planning.step.profiles import Profile, gradient_profile, held_profile, minimum_need, pool_profile, room_beside
from systems.planning.step.residence import Residence
from systems.planning.trace import NO_UNIT
from systems.sizes import format_need, format_size
from systems.strategies.elixir.options import ElixirOptions


@dataclass(frozen=True)
class ElixirDivision:
    """residence: who is updated on the device, or never moved. room: bytes for what comes and goes, one entry a moment, the
    fused bundles that stay apart.

    cache_bytes: C, the constant that room never exceeds.
    """

    residence: Residence
    room: tuple[int, ...]
    cache_bytes: int


@dataclass(frozen=True)
class Placer:
    """Decides for one kind of step. staying: fused bundles that the host updates, see ElixirChunker."""

    division: Division
    options: ElixirOptions
    staying: frozenset[int] = frozenset()

    def place(self) -> ElixirDivision:
        """BudgetError if not even what a unit holds fits."""
        division = self.division
        if self._keeps_all() and division.fits(division.everything):
            return ElixirDivision(division.everything, (0,) * len(division.trace), division.layout.param_bytes)
        if not self.options.offload:
            return self._without_offload()
        division.least()
        base = division.base
        on_device = base.on_device | (frozenset() if self.options.keeps_to_paper else self._optimizers(base))
        return self._beside(division.residence(on_device))

    def _keeps_all(self) -> bool:
        """Nothing moves at all, where all of it fits. In the paper chunks that are scattered or offloaded are gathered in the
        step, however much room there is.
        """
        limit, alone = self.options.cache, self.division.context.ranks == 1
        if self.options.keeps_to_paper:
            return not self.options.offload and (alone or not self.options.scatter)
        whole = limit is None or limit == "auto" or limit >= self.division.layout.param_bytes
        return whole or (alone and not self.options.offload)

    def check_constant(self) -> None:
        """BudgetError if a unit holds more than a cache of a constant size. What is held beside parameters that come and go are
        gradients that cannot take their place.
        """
        limit = self.options.cache
        if isinstance(limit, int):
            self._check_cache(limit, added(self._held(self.division.base), self._ranges(self.division.base)), "and gradients ")

    def _held(self, residence: Residence) -> list[int]:
        """Bytes per moment of parameters that are held in the cache."""
        sizes = self.division.sizes(residence)
        return [sum(sizes[b] for b in held if b in sizes and b not in self.staying) for held in self.division.demand.held]

    def _ranges(self, residence: Residence) -> list[int]:
        """Bytes per moment of gradients of the same bundles beside their parameters."""
        profile = Profile(len(self.division.demand))
        for bundle, size in self.division.sizes(residence).items():
            if bundle not in self.staying and not residence.reuses(bundle):
                for span in self.division.demand.gradient_spans.get(bundle, ()):
                    profile.add(span, size)
        return profile.values()

    def _constant(self, residence: Residence) -> ElixirDivision:
        """The R cache as the paper has it: all that comes and goes, parameters and gradients, has C bytes and no more."""
        self.check_constant()
        division, limit = self.division, self.options.cache
        held, ranges = self._held(residence), self._ranges(residence)
        stay = sum(map(division.layout.bundle_bytes, self.staying))
        profiles = division.fixed(residence), pool_profile(division.demand, residence)
        fixed, pool = ([each + stay for each in profile] for profile in profiles)
        need = max(added(fixed, held))
        if stay and need > division.context.device_budget:
            parts = [f"{format_size(stay)} of a fused chunk, which stays", f"{format_size(need - stay)} of all else"]
            raise refusal(need, NO_UNIT, parts, "raise `device_memory`", division.context, division.system, division.unit_name)
        room = room_beside(fixed, pool, held, division.context)
        if not isinstance(limit, int):
            return ElixirDivision(residence, tuple(room), max(room))
        return ElixirDivision(residence, tuple(min(r, limit - g) for r, g in zip(room, ranges, strict=True)), limit)

    def _beside(self, residence: Residence) -> ElixirDivision:
        """The R cache, for what comes and goes."""
        if self.options.keeps_to_paper:
            return self._constant(residence)
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

    def _check_cache(self, limit: int, held: list[int], more: str = "") -> None:
        """more: what is held beside parameters, in words."""
        if max(held) > limit:
            advice = "" if self.options.keeps_to_paper else ", or leave it at auto"
            raise BudgetError(
                f"elixir's cache of {format_size(limit)} is less than the {format_size(max(held))} of parameters {more}that "
                f"one unit holds: raise cache, as `options=dict(cache={max(held)})`{advice}",
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
