"""Who goes when room is needed and no plan says so: the bundle used last, or, before any trace, the last in model order."""

from __future__ import annotations

from collections.abc import Sequence

from systems.planning.belady import NextUse
from systems.planning.layout import Layout


class FarthestNextUse:
    """next_use: of a traced step, None before one."""

    def __init__(self, layout: Layout, next_use: NextUse | None) -> None:
        self._next_use = next_use
        self._sizes = {b.index: layout.bundle_bytes(b.index) for b in layout.bundles}

    def choose(self, candidates: Sequence[int], moment: int) -> int:
        return candidates[-1] if self._next_use is None else self._next_use.farthest(candidates, moment, self._sizes)
