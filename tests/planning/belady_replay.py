"""A cache under Belady's rule, reference by reference: what `systems.planning.policy.caching` is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from systems.planning.step.belady import NextUse


@dataclass(frozen=True)
class Replay:
    """misses: positions whose block was fetched. evictions: (position, block). resident: blocks left at the end."""

    misses: tuple[int, ...]
    evictions: tuple[tuple[int, int], ...]
    resident: frozenset[int]


def belady(
    references: Sequence[int],
    *,
    capacity: int,
    sizes: Mapping[int, int] | None = None,
    cyclic: bool = False,
    resident: frozenset[int] = frozenset(),
) -> Replay:
    """Replay `references` through a cache of `capacity` bytes (blocks, where sizes is None) that starts with
    `resident`.

    ValueError if one block alone is larger than the cache.
    """
    blocks = set(references) | resident
    size = {block: 1 if sizes is None else sizes[block] for block in blocks}
    uses: dict[int, list[int]] = {}
    for position, block in enumerate(references):
        uses.setdefault(block, []).append(position)
    next_use = NextUse(uses, len(references), cyclic=cyclic)
    cached, used = set(resident), sum(size[block] for block in resident)
    misses, evictions = [], []
    for position, block in enumerate(references):
        if block in cached:
            continue
        if size[block] > capacity:
            raise ValueError(f"block {block} of {size[block]} bytes is larger than the cache of {capacity}")
        misses.append(position)
        while used + size[block] > capacity:
            victim = next_use.farthest(cached, position, size)
            cached.remove(victim)
            used -= size[victim]
            evictions.append((position, victim))
        cached.add(block)
        used += size[block]
    return Replay(tuple(misses), tuple(evictions), frozenset(cached))
