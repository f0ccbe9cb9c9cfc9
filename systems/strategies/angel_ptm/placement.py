"""Divides the device: optimizer states that are cached there (section 4.2), and what is left for the layers' pages."""

from __future__ import annotations

from dataclasses import dataclass

from systems.planning.policy.division import Division, added
from systems.planning.policy.optimizer_cache import OptimizerCache, within_working_set
from systems.planning.step.profiles import held_profile, pool_profile
from systems.planning.step.residence import Residence


@dataclass(frozen=True)
class AngelPtmDivision:
    """residence: who is updated on the device. room: bytes for what comes and goes, one entry a moment. cached: bytes of
    optimizer states."""

    residence: Residence
    room: tuple[int, ...]
    cached: int


def place(division: Division, cache: int | None) -> AngelPtmDivision:
    """cache: bytes for optimizer states, None for what is left. BudgetError if not even what a layer holds fits."""
    everything = division.everything
    states = sum(map(everything.state_bytes, everything.on_device))
    if (cache is None or states <= cache) and division.fits(everything):
        return AngelPtmDivision(everything, (0,) * len(division.trace), states)
    division.least()
    residence = division.residence(division.base.on_device | _cached(division, cache))
    states = sum(map(residence.state_bytes, residence.on_device))
    return AngelPtmDivision(residence, tuple(division.room(residence)), states)


def _cached(division: Division, cache: int | None) -> frozenset[int]:
    """Layers whose optimizer states the device caches: in what no parameter needs in its life-time; as many bytes as were
    asked for, beside no more than what is computed with, if a number was given.
    """
    trace, demand, base = division.trace, division.demand, division.base
    if cache is None:
        return OptimizerCache.beside_parameters(trace, demand, base, division.residence).choose()
    working = added(held_profile(demand, base), pool_profile(demand, base))
    return OptimizerCache(
        trace,
        demand,
        base,
        division.residence,
        need=working,
        pool=working,
        stay=lambda b, there: within_working_set(b, demand, there, cost=base.optimizer_bytes(b)),
        spare=cache,
    ).choose()
