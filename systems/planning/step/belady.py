"""Belady's rule: when room is needed, let go of what is used farthest in the future.

Optimal for blocks of one size; with several sizes the same rule frees farthest first until there is room. A training
step repeats, so the future is known and wraps around: after the last use of a step comes its first use in the next.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

NEVER = 1 << 60


class NextUse:
    """When each block is used next, over a reference string of `length` positions.

    cyclic: the string repeats, so that a position past the end means the next round; else there is nothing after it.
    """

    def __init__(self, uses: Mapping[int, Sequence[int]], length: int, *, cyclic: bool = True) -> None:
        self._uses = {block: tuple(sorted(positions)) for block, positions in uses.items() if positions}
        self._length, self._cyclic = length, cyclic

    def after(self, block: int, position: int) -> int:
        """First position later than `position` (plus `length` if it is in the next round); NEVER without one."""
        positions = self._uses.get(block)
        if positions is None:
            return NEVER
        index = bisect_right(positions, position)
        if index < len(positions):
            return positions[index]
        return positions[0] + self._length if self._cyclic else NEVER

    def also_at(self, blocks: Iterable[int], position: int) -> NextUse:
        """With a use of each of these there too."""
        more = {block: (*self._uses.get(block, ()), position) for block in blocks}
        return NextUse({**self._uses, **more}, self._length, cyclic=self._cyclic)

    def farthest(self, candidates: Iterable[int], position: int, sizes: Mapping[int, int] | None = None) -> int:
        """The candidate used last from now; of equals the largest, then the lowest number."""
        return max(candidates, key=lambda b: (self.after(b, position), sizes[b] if sizes else 0, -b))
