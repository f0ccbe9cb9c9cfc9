"""The sizes worth testing, and the groups they are tested for: against brute force and by what they promise."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from systems.planning.layout import ModelIndex, Parameter
from systems.planning.policy.packing import MAX_CANDIDATES, ChunkRange, candidate_sizes, group_parameters, sums_of_neighbours
from tests.planning.synthetic import context

UNIT = 128  # elements of 2 bytes that 256-byte alignment rounds to


@st.composite
def indices(draw: st.DrawFn) -> ModelIndex:
    users = st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True)
    drawn = draw(st.lists(st.tuples(users, st.booleans(), st.sampled_from(("world", "expert"))), max_size=12))
    return ModelIndex(
        tuple(
            Parameter(i, f"p{i}", (8,), 8, trainable, tuple(names), group) for i, (names, trainable, group) in enumerate(drawn)
        ),
        (),
    )


@given(indices(), st.integers(1, 3))
def test_every_parameter_is_in_one_group(index: ModelIndex, ranks: int) -> None:
    groups = group_parameters(index, context(ranks=ranks))
    held = [p for g in groups for p in (*g.single, *(p for each in g.shared for p in each))]
    assert sorted(p.index for p in held) == list(range(len(index.parameters)))
    assert len({g.space for g in groups}) == len(groups)
    for group in groups:
        assert group.space.ranks == ranks
        assert all((p.group, p.trainable) == (group.space.group, group.space.trainable) for p in held if p in group.single)
        assert [p.index for p in group.single] == sorted(p.index for p in group.single)
        assert all(len(p.users) == 1 for p in group.single)
        assert all(len({frozenset(p.users) for p in each}) == 1 and len(each[0].users) > 1 for each in group.shared)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 9), max_size=10), st.integers(0, 20), st.integers(0, 30))
def test_sums_are_those_of_all_neighbourhoods(sizes: list[int], low: int, width: int) -> None:
    every = {sum(sizes[i:j]) for i in range(len(sizes)) for j in range(i + 1, len(sizes) + 1)}
    assert sums_of_neighbours(sizes, low, low + width) == {s for s in every if low <= s <= low + width}


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(1, 40).map(lambda n: n * UNIT), max_size=30), max_size=3),
    st.integers(1, 60),
    st.integers(0, 400),
    st.one_of(st.none(), st.integers(1, 50)),
)
def test_candidates_lie_in_the_range_and_hold_every_parameter_that_one_can(
    groups: list[list[int]], low: int, width: int, step: int | None
) -> None:
    asked = ChunkRange(chunk_step=None if step is None else step * UNIT * 2)
    sizes = candidate_sizes(groups, low * UNIT, (low + width) * UNIT, asked, context())
    assert sizes == sorted(set(sizes)) and sizes
    assert all(low * UNIT <= size <= (low + width) * UNIT and size % UNIT == 0 for size in sizes)
    largest = max((size for each in groups for size in each), default=0)
    assert len(sizes) == 1 or sizes[0] >= largest
    assert step is not None or len(sizes) <= MAX_CANDIDATES
    if step is not None:
        assert all((size - low * UNIT) % (step * UNIT) == 0 for size in sizes)


def test_what_the_user_says_of_the_range_is_kept() -> None:
    for given_sizes, expected in (
        ({}, (1000, 4000)),
        ({"chunk_max": 1000}, (500, 500)),
        ({"chunk_max": 4096}, (1000, 2048)),
        ({"chunk_min": 4096}, (2048, 4000)),
        ({"chunk_min": 16384}, (8192, 8192)),
        ({"chunk_min": 1, "chunk_max": 4096}, (UNIT, 2048)),
    ):
        assert ChunkRange.model_validate(given_sizes).within(1000, 4000, itemsize=2) == expected


@pytest.mark.parametrize(
    ("given_sizes", "told"),
    [
        ({"chunk_min": 2, "chunk_max": 1}, "chunk_min 2 is above chunk_max 1"),
        ({"chunk_max": 0}, "chunk_max is 0"),
        ({"chunk_step": 0}, "chunk_step is 0"),
    ],
)
def test_an_impossible_range_is_refused(given_sizes: dict[str, int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ChunkRange.model_validate(given_sizes)
