"""What several ranks tell each other once a step: who is updated, what the norm is of, and what the next plan is made of.

All of it is called on all ranks alike; where they did different things, each of them raises RuntimeError with two ranks' names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce

from systems.errors import HiddenUseError, UnsupportedError
from systems.planning.layout import Layout, space_of
from systems.planning.strategy import PlanningContext
from systems.planning.trace import Moment, Trace
from systems.ranks.expert_exchange import check_swapped, swapped
from systems.ranks.group_names import WORLD
from systems.ranks.ranks import Ranks
from systems.substrate.batch_shape import BatchShape
from systems.substrate.recorder import merged

READ_ALIKE = "let modules read the same weights of others on all ranks"


class Agreement:
    """alone: there is one rank, and nobody to ask. to_wait: see Strategy."""

    def __init__(self, ranks: Ranks, layout: Layout, to_wait: str = "") -> None:
        self._ranks, self._layout, self._to_wait = ranks, layout, to_wait
        self.alone, self._experts = ranks.size == 1, ranks.expert_ranks
        self._reads: list[str] = []  # since the last step's end

    def reads(self, what: str) -> None:
        """A module turned out to read what another owns, which changes collectives from here on: tags say so, and the step's
        end, so that ranks of which one alone does so are told which, and what it reads.
        """
        if not self.alone:
            self._reads.append(what)
            self._ranks.link.remind(f", since {' and '.join(self._reads)}")

    def fired(self, mine: Sequence[int], reduced: Sequence[int], updated: frozenset[int]) -> list[int]:
        """Parameters that got a gradient in this step on any rank, in model order. mine: here. reduced: bundles whose gradients
        were summed over ranks, in order. updated: bundles that were updated before this was known.
        """
        issued = reduced, self._ranks.link.chain
        here = (mine, issued, updated), self._reads, swapped(self._ranks)
        told, reads, swaps = zip(*self._ranks.exchange("gradients", here), strict=True)
        self._check_reads(reads)
        check_swapped(swaps, self._ranks)
        other = next((rank for rank, (_, theirs, _) in enumerate(told) if theirs != told[0][1]), None)
        if other is not None:
            (theirs, _), (first, _) = told[other][1], told[0][1]
            what = "brought together" if theirs == first else "summed the gradients of"
            raise RuntimeError(
                f"rank 0 and rank {other} {what} different bundles, or in another order: does the model do the same on both?"
            )
        fired = [self._heard(expert, [theirs for theirs, _, _ in told]) for expert in range(self._experts)]
        for rank, (theirs, _, early) in enumerate(told):
            self._check_updated(rank, fired[rank % self._experts] - frozenset(theirs), early)
        return sorted(fired[self._ranks.expert_rank])

    def _heard(self, expert: int, told: Sequence[Sequence[int]]) -> set[int]:
        """What ranks of that expert rank hear of those that each says fired: of experts those alone that have the same."""
        if self._experts == 1:
            return {parameter for theirs in told for parameter in theirs}
        experts, layout = self._experts, self._layout
        return {
            parameter
            for other, theirs in enumerate(told)
            for parameter in theirs
            if other % experts == expert or space_of(layout, layout.bundle_of_parameter[parameter]).group == WORLD
        }

    def _check_reads(self, told: Sequence[list[str]]) -> None:
        """HiddenUseError unless they were the same on all ranks, in the same order."""
        for rank, theirs in enumerate(told):
            for reader, what, other in [(rank, what, 0) for what in theirs] + [(0, what, rank) for what in told[0]]:
                if what not in told[other]:
                    raise HiddenUseError(f"rank {reader}: {what}, and rank {other} does not: {READ_ALIKE}")
            if theirs != told[0]:
                raise HiddenUseError(f"rank {rank}: {theirs[0]}, and rank 0 does so in another order: {READ_ALIKE}")
        self._reads = []
        self._ranks.link.remind("")

    def _check_updated(self, rank: int, elsewhere: set[int], updated: frozenset[int]) -> None:
        """UnsupportedError where a bundle that a rank has updated got more on others than it knew of. elsewhere: parameters."""
        for parameter in sorted(elsewhere):
            bundle = self._layout.bundle_of_parameter[parameter]
            if bundle in updated:
                raise UnsupportedError(
                    f"a parameter of {self._layout.bundle_names[bundle]} that had no gradient in the step before got one, and "
                    f"not on rank {rank}, whose updates do not wait to hear of it (nonfinite=stop): use {self._to_wait}"
                )

    def sums(self, mine: Callable[[], Mapping[int, float]]) -> dict[int, float]:
        """Of squares by parameter. Each element is in one rank's; they are added in rank order. What `mine` raises, all do."""
        sums: dict[int, float] = {}
        for each in self._ranks.together("sums of squares", mine):
            for parameter, value in each.items():
                sums[parameter] = sums.get(parameter, 0.0) + value
        return sums

    def largest(self, shape: BatchShape) -> BatchShape:
        """Of the pass that begins on all ranks: what holds each rank's batch."""
        return reduce(BatchShape.join, self._ranks.exchange("the batch's shape", shape))

    def allowed(self, mine: frozenset[int] | None) -> frozenset[int] | None:
        """Bundles whose updates may run ahead on all ranks. None: any."""
        told = [theirs for theirs in self._ranks.exchange("what may run ahead", mine) if theirs is not None]
        return frozenset.intersection(*told) if told else None

    def trace(self, moments: tuple[Moment, ...], mine: Trace | None, *, followed: bool) -> tuple[bool, Trace | None]:
        """Whether all ranks' steps were alike; and of them the largest memory of any, and the first one's times, None if any
        did not measure the step. followed: a plan was in force to the end, so that steps may differ.
        """
        told = self._ranks.exchange("the step", (moments, mine, followed))
        other = next((rank for rank, (theirs, *_) in enumerate(told) if theirs != moments), None)
        if any(theirs != told[0][0] for theirs, *_ in told) and all(each for *_, each in told):
            return False, None
        if other is not None:
            one, another = sorted((self._ranks.rank, other))
            raise RuntimeError(
                f"rank {one} and rank {another} took different steps: a unit ran on one of them alone, or in another order"
            )
        traces = [trace for _, trace, _ in told if trace is not None]
        if len(traces) < len(told):
            return True, None

        def with_first_times(one: Trace, more: Trace) -> Trace:
            return replace(merged(one, more), compute_time_s=one.compute_time_s, lane_times=one.lane_times)

        return True, reduce(with_first_times, traces)


def lay_out_alike(ranks: Ranks, context: PlanningContext, layout: Layout) -> None:
    """UnsupportedError on all ranks where one plans with other numbers than the first, or cuts the model's memory otherwise."""
    if ranks.size == 1:
        return
    names = layout.unit_names if context.expert_ranks == 1 else ()  # experts have their own: see FirstValuesAlike
    parts = layout.itemsize, layout.segments, layout.bundles, sorted(layout.in_place), sorted(layout.on_disk), names
    mine = vars(context) | {"layout": hashlib.sha256(repr(parts).encode()).hexdigest()}
    first, *_ = told = ranks.exchange("the layout", mine)
    for rank, theirs in enumerate(told):
        for name, value in theirs.items():
            if value != first[name]:
                raise UnsupportedError(
                    f"ranks 0 and {rank} do not plan alike: {name} is {first[name]} on rank 0 and {value} on rank {rank}: give "
                    "all ranks the same model, devices and versions"
                )
