"""Belady's rule against brute force and LRU (invariant 8)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from systems.planning.step.belady import NEVER, NextUse
from tests.planning.belady_replay import belady

references = st.lists(st.integers(0, 5), max_size=14)


def lru_misses(blocks: Sequence[int], capacity: int) -> int:
    cache: OrderedDict[int, None] = OrderedDict()
    misses = 0
    for block in blocks:
        if block in cache:
            cache.move_to_end(block)
            continue
        misses += 1
        if len(cache) == capacity:
            cache.popitem(last=False)
        cache[block] = None
    return misses


def fewest_misses(blocks: Sequence[int], capacity: int) -> int:
    """Every eviction tried: the cheapest way to each content of the cache, reference by reference."""
    ways: dict[frozenset[int], int] = {frozenset(): 0}
    for block in blocks:
        following: dict[frozenset[int], int] = {}
        for cache, misses in ways.items():
            if block in cache:
                after, cost = [cache], misses
            elif len(cache) < capacity:
                after, cost = [cache | {block}], misses + 1
            else:
                after, cost = [cache - {victim} | {block} for victim in cache], misses + 1
            for content in after:
                following[content] = min(cost, following.get(content, cost))
        ways = following
    return min(ways.values())


@settings(deadline=None)
@given(references, st.integers(1, 4))
def test_misses_equal_brute_force_and_never_exceed_lru(blocks: list[int], capacity: int) -> None:
    misses = len(belady(blocks, capacity=capacity).misses)
    assert misses == fewest_misses(blocks, capacity)
    assert misses <= lru_misses(blocks, capacity)


@settings(deadline=None)
@given(references, st.lists(st.integers(1, 5), min_size=6, max_size=6), st.integers(5, 12))
def test_with_sizes_the_cache_never_overflows(blocks: list[int], sizes: list[int], capacity: int) -> None:
    replay = belady(blocks, capacity=capacity, sizes=dict(enumerate(sizes)))
    cached: set[int] = set()
    evictions = list(replay.evictions)
    for position, block in enumerate(blocks):
        if position in replay.misses:
            while evictions and evictions[0][0] == position:
                cached.remove(evictions.pop(0)[1])
            assert block not in cached
            cached.add(block)
        assert block in cached
        assert sum(sizes[b] for b in cached) <= capacity
    assert cached == replay.resident


@settings(deadline=None)
@given(references, st.integers(1, 4))
def test_a_repeating_step_settles_and_misses_no_more_than_its_first_round(blocks: list[int], capacity: int) -> None:
    first = belady(blocks, capacity=capacity, cyclic=True)
    second = belady(blocks, capacity=capacity, cyclic=True, resident=first.resident)
    assert len(second.misses) <= len(first.misses)


def test_a_block_larger_than_the_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="block 3 of 9 bytes is larger than the cache of 8"):
        belady([3], capacity=8, sizes={3: 9})


def test_next_use_wraps_around() -> None:
    next_use = NextUse({1: [2, 7], 2: [4]}, 10)
    assert [next_use.after(1, position) for position in (-1, 2, 7, 9)] == [2, 7, 12, 12]
    assert next_use.after(3, 0) == NEVER
    assert NextUse({1: [2]}, 10, cyclic=False).after(1, 2) == NEVER
    assert next_use.farthest([1, 2], 2) == 1
    assert next_use.farthest([1, 2], 4) == 2
