"""Rules of eviction that several strategies have: who goes when room is needed and no plan says so."""

from __future__ import annotations

import random
from collections.abc import Sequence

from systems.planning.layout import Layout
from systems.planning.step.belady import NextUse


class FarthestNextUse:
    """Belady's rule by a trace, which may be of another step than the one in progress: then this is a guess, as good as any."""

    def __init__(self, layout: Layout, next_use: NextUse) -> None:
        self._next_use = next_use
        self._sizes = {b.index: layout.bundle_bytes(b.index) for b in layout.bundles}

    def choose(self, candidates: Sequence[int], moment: int) -> int:
        return self._next_use.farthest(candidates, moment, self._sizes)


class ModelOrder:
    """Nothing is known of the future: bundles go by their number, the first of them first or the last."""

    def __init__(self, *, last: bool) -> None:
        self._choose = max if last else min

    def choose(self, candidates: Sequence[int], moment: int) -> int:
        return self._choose(candidates)


class RandomOrder:
    """The same on every rank: the seed is shared and candidates come in the same order."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, candidates: Sequence[int], moment: int) -> int:
        return self._random.choice(candidates)
