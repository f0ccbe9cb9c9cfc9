"""Divides the device at every moment (sections 7.1 to 7.3): optimizer chunks in the margin, the rest for parameter chunks.

Note [Untraced]
    What static-partition moves follows from the order of units alone: its room is a share of the device's size, or what a unit
    holds where that is more, and who goes is the first of the chunk list, as in the warm-up. No measured byte is looked at but
    to refuse: where activations do not fit beside the share there is no plan.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, floor

from systems.errors import BudgetError
from systems.planning.policy.division import Division
from systems.planning.policy.optimizer_cache import OptimizerCache
from systems.planning.step.profiles import held_profile, pool_profile
from systems.planning.step.residence import Residence
from systems.sizes import format_need, format_size
from systems.strategies.patrickstar.options import PatrickStarOptions
from systems.strategies.patrickstar.tracer import margin_bytes


@dataclass(frozen=True)
class PatrickStarDivision:
    """residence: who is updated on the device. room: bytes for what comes and goes, one entry a moment."""

    residence: Residence
    room: tuple[int, ...]


def place(division: Division, options: PatrickStarOptions) -> PatrickStarDivision:
    """BudgetError if not even what a unit holds fits."""
    if options.as_published:
        return _as_published(division, options)
    if division.fits(division.everything):
        return PatrickStarDivision(division.everything, (0,) * len(division.trace))
    division.least()
    chosen = beside_parameters(division)
    residence = division.residence(division.base.on_device | chosen)
    return PatrickStarDivision(residence, tuple(division.room(residence)))


def _as_published(division: Division, options: PatrickStarOptions) -> PatrickStarDivision:
    division.least()
    chosen = in_the_margin(division) if options.places_optimizer else frozenset[int]()
    residence = division.residence(division.base.on_device | chosen)
    room = division.room(residence) if options.traces else static_room(division, residence, options.warmup_share)
    return PatrickStarDivision(residence, tuple(room))


def beside_parameters(division: Division) -> frozenset[int]:
    """Optimizer chunks, as many as fit at every moment beside all parameters, so that none is evicted for them: more than in
    the margin, as activations come and go and parameters leave with their gradients.
    """
    return OptimizerCache.beside_parameters(division.trace, division.demand, division.base, division.residence).choose()


def in_the_margin(division: Division) -> frozenset[int]:
    """Optimizer chunks in the order of the chunk list, as many as the margin holds (section 7.2), which is one number for the
    whole step. Fewer where their gradients, which stay in autograd's own buffers here, leave no room for what a unit holds.
    """
    layout, base = division.layout, division.base
    left = margin_bytes(layout, division.context.device_budget, division.trace.non_model_bytes)
    left -= sum(map(base.state_bytes, base.on_device))
    chosen: list[int] = []
    for bundle in (b.index for b in layout.bundles if b.trainable and b.index not in base.on_device):
        size = base.optimizer_bytes(bundle)
        if size <= left:
            chosen.append(bundle)
            left -= size

    def too_many(count: int) -> bool:
        return not _has_room(division, division.residence(base.on_device | frozenset(chosen[:count])))

    return frozenset(chosen[: bisect_left(range(1, len(chosen) + 1), True, key=too_many)])


def _has_room(division: Division, residence: Residence) -> bool:
    """For what is held, beside what this residence has there for good."""
    held = held_profile(division.demand, residence)
    fixed, pool, context = division.fixed(residence), pool_profile(division.demand, residence), division.context
    return max(map(sum, zip(fixed, held, strict=True))) <= context.device_budget and (
        max(map(sum, zip(pool, held, strict=True))) <= context.pool_budget
    )


def static_room(division: Division, residence: Residence, share: float) -> Sequence[int]:
    """Of a share of the device what gradient ranges and states leave, and no less than what is held. See Note [Untraced].
    BudgetError where activations do not fit beside it.
    """
    budget, most = division.context.device_budget, sum(division.sizes(residence).values())
    held, pool = held_profile(division.demand, residence), pool_profile(division.demand, residence)
    room = [max(int(share * budget) - p, h) for p, h in zip(pool, held, strict=True)]
    fixed = division.fixed(residence)
    if any(f + min(r, most) > budget for f, r in zip(fixed, room, strict=True)):
        left = min(budget - f + p for f, p in zip(fixed, pool, strict=True)) / budget
        raise _refusal(division, share, max(map(_least_budget(share, most), fixed, pool, held)), floor(100 * left) / 100)
    return room


def _least_budget(share: float, most: int) -> Callable[[int, int, int], int]:
    """Bytes of a device for fixed bytes, with the pool's part of them, and what is held: it grows with its share, until all
    chunks are there.
    """

    def least(fixed: int, pool: int, held: int) -> int:
        others = fixed - pool
        shared = fixed + most if share == 1 else ceil(others / (1 - share)) + 1
        return min(max(fixed + held, shared), fixed + most)

    return least


def _refusal(division: Division, share: float, need: int, enough: float) -> BudgetError:
    """enough: the largest share beside which there is room."""
    lower = f"lower warmup_share, as `options=dict(warmup_share={enough})`, " if enough > 0 else ""
    needed, given = (division.context.memory_for(nbytes) for nbytes in (need, division.context.device_budget))
    return BudgetError(
        f"{division.system} needs at least {format_need(needed, given)} of device memory with variant=static-partition, where "
        f"{share:.0%} of it is for chunks whatever activations take, {format_size(given)} is given: raise `device_memory`, "
        f"{lower}take a smaller batch or recompute more",
        tier="device",
        need=needed,
        have=given,
    )
