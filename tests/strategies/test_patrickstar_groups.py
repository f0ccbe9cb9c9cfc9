"""PatrickStar's communication groups: on several ranks a bundle is a chunk for each of them, and a chunk is a shard."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from systems.planning.layout import FlatSpace, Layout, ModelIndex, Parameter, Segment, round_up
from systems.strategies.patrickstar.chunks import PatrickStarChunker
from systems.strategies.patrickstar.groups import communication_group, groups_of
from systems.strategies.patrickstar.options import PatrickStarOptions
from tests.planning.synthetic import context, model_of, transformer

ALIGN = 128  # elements of 2 bytes in 256


@st.composite
def indices(draw: st.DrawFn) -> ModelIndex:
    """Any sizes, some of no elements; tied and frozen ones, and lists of another data-parallel group."""
    sizes = st.lists(st.integers(0, 1500), min_size=1, max_size=7)
    owned = [(unit, draw(sizes)) for unit in range(draw(st.integers(1, 6)))]
    tied = [(draw(st.integers(1, 900)), [0, len(owned) - 1])] if len(owned) > 1 and draw(st.booleans()) else []
    index = model_of(owned, tied=tied)
    frozen = draw(st.frozensets(st.integers(0, len(index.parameters) - 1), max_size=4))
    aside = draw(st.frozensets(st.integers(0, len(index.parameters) - 1), max_size=3))
    parameters = tuple(
        Parameter(p.index, p.name, p.shape, p.numel, p.index not in frozen, p.users, "expert" if p.index in aside else p.group)
        for p in index.parameters
    )
    return ModelIndex(parameters, index.units)


def segments_of(chunker: PatrickStarChunker) -> tuple[list[Segment], list[Segment]]:
    """Those that are groups of chunks, and the others."""
    found = groups_of(chunker.chunks(chunker.chunk).inside)
    firsts = {runs[0][0].index for _, runs in found}
    owner = {segment.placements[0].parameter: segment for segment in chunker.layout.segments}
    return [owner[p] for p in firsts], [segment for p, segment in owner.items() if p not in firsts]


@settings(max_examples=300, deadline=None)
@given(
    indices(),
    st.integers(1, 4),
    st.sampled_from(["base", "base", "spongebob"]),
    st.one_of(st.none(), st.integers(1, 14).map(lambda n: n * 256)),
)
def test_chunks_of_all_ranks_keep_their_promises(index: ModelIndex, ranks: int, variant: str, most: int | None) -> None:
    chunker = PatrickStarChunker(index, PatrickStarOptions(variant=variant, chunk_max=most), context(ranks=ranks))
    layout, (groups, others) = chunker.layout, segments_of(chunker)
    assert len(groups) == chunker.statistics["num_groups"] and len(others) == chunker.statistics["num_out_of_chunks"]
    assert chunker.statistics["num_chunks"] == ranks * len(groups)
    for group in groups:
        length = group.numel // ranks
        assert length * ranks == group.numel and length % ALIGN == 0
        assert length <= max(chunker.chunk, ALIGN)
        for p in group.placements:  # none crosses the end of a chunk
            assert not p.numel or p.offset // length == (p.offset + p.numel - 1) // length
            assert p.offset % ALIGN == 0
        order = [p.parameter for p in group.placements]
        assert order == sorted(order)
    assert_owned_once(index, layout, ranks)
    held = sum(index.parameters[p.parameter].numel for group in groups for p in group.placements)
    assert chunker.statistics["utilization"] == (
        held / (len(groups) * ranks * chunker.chunk) if groups and chunker.chunk else 1.0
    )
    single = [s for s in others if all(len(index.parameters[p.parameter].users) <= 1 for p in s.placements)]
    for segment in single:  # larger than a chunk, or fewer chunks than ranks, at a list's end
        larger = [p for p in segment.placements if round_up(p.numel, ALIGN) > chunker.chunk]
        last = max((p.parameter for g in groups if g.space == segment.space for p in g.placements), default=-1)
        assert len(larger) == len(segment.placements) == 1 or (not larger and segment.placements[0].parameter > last)
    assert sum(len(s.placements) > 1 for s in single) < ranks * len({s.space for s in single} | {None})


def assert_owned_once(index: ModelIndex, layout: Layout, ranks: int) -> None:
    """Every element by one rank, within its shard."""
    owners = {p.index: [0] * p.numel for p in index.parameters}
    listed = dict.fromkeys(owners, 0)
    for segment in layout.segments:
        assert segment.shard_numel * layout.itemsize % 256 == 0
        for rank in range(ranks):
            for p in segment.shard(rank):
                assert p.offset >= 0 and p.offset + p.numel <= segment.shard_numel and p.numel >= 0
                listed[p.parameter] += 1
                for element in range(p.start, p.start + p.numel):
                    owners[p.parameter][element] += 1
    assert all(set(each) <= {1} for each in owners.values())
    assert all(listed[p.index] == 1 for p in index.parameters if not p.numel), "one without elements is in one shard"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2000), min_size=1, max_size=12), st.integers(1, 4), st.integers(2000, 4000))
def test_no_shorter_chunks_hold_a_group(sizes: list[int], ranks: int, chunk: int) -> None:
    """By trying all lengths."""
    chunk = round_up(chunk, ALIGN)
    parameters = [Parameter(i, f"p{i}", (size,), size, True, ("0",)) for i, size in enumerate(sizes)]
    runs: list[list[Parameter]] = []
    for p in parameters:
        if not runs or sum(round_up(q.numel, ALIGN) for q in (*runs[-1], p)) > chunk:
            runs.append([])
        runs[-1].append(p)
    mine = [tuple(run) for run in runs[:ranks]]
    group = communication_group(mine, space=FlatSpace("world", ranks, True), itemsize=2)
    padded = [round_up(p.numel, ALIGN) for p in chain(*mine)]
    shortest = next(length for length in range(ALIGN, chunk + 1, ALIGN) if chunks_needed(padded, length) <= ranks)
    assert group.numel == ranks * shortest
    assert [p.parameter for p in group.placements] == [p.index for p in chain(*mine)]


def chunks_needed(sizes: list[int], length: int) -> int:
    if max(sizes) > length:
        return 1 << 30
    needed, left = 1, length
    for size in sizes:
        if size > left:
            needed, left = needed + 1, length
        left -= size
    return needed


@pytest.mark.parametrize("variant", ["base", "spongebob"])
def test_one_rank_has_the_layout_of_single_chunks(variant: str) -> None:
    """Each chunk is a bundle, as long as what is in it."""
    index = transformer(6, 64)
    chunker = PatrickStarChunker(index, PatrickStarOptions.model_validate({"variant": variant}), context())
    sizes = [sum(round_up(p.numel, ALIGN) for p in run) for _, run in chunker.chunks(chunker.chunk).inside]
    assert sorted(s.numel for s in segments_of(chunker)[0]) == sorted(sizes)
    assert chunker.statistics["num_groups"] == chunker.statistics["num_chunks"] == len(sizes)


def test_a_group_by_hand() -> None:
    """Chunks of 768: 256 256 256 | 512 128, and on two ranks a group of them, in which none is longer than what is in it."""
    index = model_of([(0, [256, 256, 256]), (1, [512, 128]), (2, [256, 256]), (3, [384, 384])])
    options = PatrickStarOptions(chunk_min=768 * 2, chunk_max=768 * 2)
    chunker = PatrickStarChunker(index, options, context(ranks=2))
    first, second = chunker.layout.segments
    assert [p.offset for p in first.placements] == [0, 256, 512, 768, 1280] and first.numel == 2 * 768
    assert [p.offset for p in second.placements] == [0, 256, 768, 1152] and second.numel == 2 * 768
    assert chunker.statistics["utilization"] == (768 + 640 + 512 + 768) / (4 * 768)
    assert [[p.parameter for p in first.shard(rank)] for rank in (0, 1)] == [[0, 1, 2], [3, 4]]


def test_chunks_that_make_no_group_lie_evenly() -> None:
    """A third chunk on two ranks would be alone in a group, which a half of is a hole."""
    index = model_of([(0, [256, 256, 256]), (1, [512, 128]), (2, [768])])
    chunker = PatrickStarChunker(index, PatrickStarOptions(chunk_min=768 * 2, chunk_max=768 * 2), context(ranks=2))
    assert chunker.statistics["num_groups"] == 1 and chunker.statistics["num_out_of_chunks"] == 1
    assert [s.numel for s in chunker.layout.segments] == [2 * 768, 768]
    assert [[p.numel for p in chunker.layout.segments[1].shard(rank)] for rank in (0, 1)] == [[384], [384]]


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_a_chunk_has_room_for_a_block_s_largest_parameter_as_long_as_a_group_is_two_blocks(ranks: int) -> None:
    index = transformer(12, 64)
    largest = max(p.numel for p in index.parameters if len(p.users) == 1)
    block = max(sum(index.parameters[p].numel for p in unit.parameters) for unit in index.units if unit.block is not None)
    chunker = PatrickStarChunker(index, PatrickStarOptions(), context(ranks=ranks))
    assert (chunker.chunk >= largest) == (ranks * largest <= 2 * block)
    assert chunker.statistics["utilization"] > 0.8, "void: the search may waste as it likes"
    assert max(s.numel for s in segments_of(chunker)[0]) <= 3 * block
