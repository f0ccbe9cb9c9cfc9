"""Divides the device at every moment (sections 7.1 to 7.3): optimizer chunks in the margin, the rest for parameter chunks."""

from __future__ import annotations

from dataclasses import dataclass

from systems.planning.policy.division import Division
from systems.planning.policy.optimizer_cache import OptimizerCache
from systems.planning.step.profiles import held_profile
from systems.planning.step.residence import Residence
from systems.strategies.patrickstar.options import PatrickStarOptions


@dataclass(frozen=True)
class PatrickStarDivision:
    """residence: who is updated on the device. room: bytes for what comes and goes, one entry a moment."""

    residence: Residence
    room: tuple[int, ...]


def place(division: Division, options: PatrickStarOptions) -> PatrickStarDivision:
    """BudgetError if not even what a unit holds fits."""
    if options.places_optimizer and division.fits(division.everything):
        return PatrickStarDivision(division.everything, (0,) * len(division.trace))
    division.least()
    chosen = in_the_margin(division) if options.places_optimizer else frozenset[int]()
    residence = division.residence(division.base.on_device | chosen)
    room = division.room(residence)
    if not options.traces:
        share = int(options.warmup_share * division.context.device_budget)
        held = held_profile(division.demand, residence)
        room = [min(r, max(share, h)) for r, h in zip(room, held, strict=True)]
    return PatrickStarDivision(residence, tuple(room))


def in_the_margin(division: Division) -> frozenset[int]:
    """Optimizer chunks, as many as fit beside all parameters, so that none is evicted for them."""
    return OptimizerCache.beside_parameters(division.trace, division.demand, division.base, division.residence).choose()
