"""Who goes when room is needed and no plan says so (section 7.3)."""

from __future__ import annotations

from collections.abc import Sequence

from systems.planning.belady import NextUse
from systems.planning.layout import Layout


class ChunkListOrder:
    """The warm-up step: nothing is known of the future, so chunks go in the order of their list."""

    def choose(self, candidates: Sequence[int], moment: int) -> int:
        return min(candidates)


class FarthestNextUse:
    """With a list of moments for every chunk: the one used last from now. It may be of another step; then it is a guess."""

    def __init__(self, layout: Layout, next_use: NextUse) -> None:
        self._next_use = next_use
        self._sizes = {b.index: layout.bundle_bytes(b.index) for b in layout.bundles}

    def choose(self, candidates: Sequence[int], moment: int) -> int:
        return self._next_use.farthest(candidates, moment, self._sizes)
