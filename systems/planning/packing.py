"""Which chunk sizes are worth testing when parameters are packed one behind the other.

Packing changes only where a chunk is just full, so that the best of all possible sizes is the smallest allowed one or a sum
of neighbouring parameters.
"""

from __future__ import annotations

from collections.abc import Sequence


def sums_of_neighbours(sizes: Sequence[int], low: int, high: int) -> set[int]:
    """Sums of neighbouring sizes between low and high. Equal neighbourhoods (blocks) are walked once."""
    found: set[int] = set()
    seen: set[tuple[int, ...]] = set()
    for start in range(len(sizes)):
        total, end = 0, start
        while end < len(sizes) and total + sizes[end] <= high:
            total += sizes[end]
            end += 1
        neighbours = tuple(sizes[start:end])
        if neighbours in seen:
            continue
        seen.add(neighbours)
        total = 0
        for size in neighbours:
            total += size
            if total >= low:
                found.add(total)
    return found
