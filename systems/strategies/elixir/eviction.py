"""Who goes when room is needed and no plan says so: anybody in the warm-up step, with a trace the one used last."""

from __future__ import annotations

import random
from collections.abc import Sequence

from systems.planning.belady import NextUse
from systems.planning.layout import Layout


class RandomEviction:
    """The same on every rank: the seed is shared and candidates come in the same order."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, candidates: Sequence[int], moment: int) -> int:
        return self._random.choice(candidates)


class BeladyEviction:
    """The trace may be of another step than the one in progress; then this is a guess, and as good as any."""

    def __init__(self, layout: Layout, next_use: NextUse) -> None:
        self._next_use = next_use
        self._sizes = {b.index: layout.bundle_bytes(b.index) for b in layout.bundles}

    def choose(self, candidates: Sequence[int], moment: int) -> int:
        return self._next_use.farthest(candidates, moment, self._sizes)
