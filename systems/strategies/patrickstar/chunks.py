"""Cuts a model into chunks of a searched size (section 6.1.1, "Chunk Size Searching", table 3).

A chunk list is a model's parameters in the order of initialization. The lists of param fp32, momentum and variance are mapped
in the same way, which here is one layout: a segment's offsets hold for all four. Frozen parameters and those of another
data-parallel group have lists of their own. All sizes in elements unless they say bytes.

Note [Chunks of several ranks]
    A communication group of R ranks has R chunks (section 6.2), and comes and goes as one. So that what a unit holds does not
    grow with the ranks, the sizes that are tested by default are those of one rank over R, but none in which the largest
    parameter of a block has no place, as long as groups of such chunks are no longer than two blocks. Beyond that parameters
    that are larger than a chunk lie out of chunks, evenly over all ranks. So do the chunks at a list's end that are too few for
    a group, unless their parameters fill one to nine tenths (the paper's fragments are below one). What is wasted is counted in
    whole groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from systems.planning.layout import FlatSpace, Layout, ModelIndex, pack
from systems.planning.policy.chunks import ChunkCutter, ChunkGroup, Chunks, Run
from systems.planning.policy.packing import ChunkRange, candidate_sizes, group_parameters
from systems.planning.strategy import PlanningContext
from systems.strategies.patrickstar.groups import communication_group, groups_of
from systems.strategies.patrickstar.options import PatrickStarOptions

LISTS = ("param 16-bit", "param fp32", "momentum", "variance")
SMALLEST, LARGEST, STEP = 128 << 20, 512 << 20, 32 << 20  # elements: the range of section 8.1, "Chunk Size Searching"


class PatrickStarChunker(ChunkCutter):
    """layout: the result. chunk: elements of a chunk. statistics: fields of PatrickStarStatistics, what the search found."""

    def __init__(
        self, index: ModelIndex, options: PatrickStarOptions, context: PlanningContext, chunk: int | None = None
    ) -> None:
        found = group_parameters(index, context)
        lists = [ChunkGroup(each.space, tuple((p,) for p in each.single), each.shared) for each in found]
        blocks = [[index.parameters[p] for p in u.parameters] for u in index.units if u.block is not None]
        owned = [tuple(p for p in block if len(p.users) <= 1) for block in blocks]
        main = [block for block in owned if block] or [each.single for each in found if each.single]
        super().__init__(index, lists, main, options, context)
        if options.as_published and self._is_large(options):
            bounds = (elements * context.itemsize for elements in (SMALLEST, LARGEST, STEP))
            self._given = ChunkRange(**dict(zip(("chunk_min", "chunk_max", "chunk_step"), bounds, strict=True)))
        tensors = options.variant == "spongebob"
        self.chunk = 0 if tensors else self.best() if chunk is None else chunk
        self.layout, self.statistics = self._build(index)

    def _is_large(self, options: PatrickStarOptions) -> bool:
        """No range is given, and a block is as large as the paper's smallest chunk."""
        given = (options.chunk_min, options.chunk_max, options.chunk_step)
        block = max((sum(map(self.size, run)) for run in self._whole), default=0)
        return all(each is None for each in given) and block >= SMALLEST

    def chunks(self, chunk: int) -> Chunks:
        """In whole groups; what makes none is outside."""
        found = super().chunks(chunk)
        if self.context.ranks == 1:
            return found
        groups = list(groups_of(found.inside))
        whole = [len(runs) == space.ranks or self._is_full(space, runs) for space, runs in groups]
        inside = [(space, run) for (space, runs), fits in zip(groups, whole, strict=True) for run in runs if fits]
        beside = [(space, run) for (space, runs), fits in zip(groups, whole, strict=True) for run in runs if not fits]
        places = sum(space.ranks for (space, _), fits in zip(groups, whole, strict=True) if fits)
        nominal, held = chunk * places, sum(p.numel for _, run in inside for p in run)
        return Chunks(tuple(inside), (*found.outside, *beside), held / nominal if nominal else 1.0, nominal - held)

    def _is_full(self, space: FlatSpace, runs: Sequence[Run]) -> bool:
        group = communication_group(runs, space=space, itemsize=self.context.itemsize)
        return group.used >= 0.9 * group.numel

    def candidates(self) -> list[int]:
        """See Note [Chunks of several ranks]: of those in which there is a place for each parameter that has one in any."""
        if self.context.ranks == 1:
            return super().candidates()
        low, high = self.range()
        runs = (chain.from_iterable(group.runs) for group in self.groups)
        inside = [[self.size(p) for p in mine if self.size(p) <= high] for mine in runs]
        return candidate_sizes(inside, low, high, self._given, self.context)

    def range(self) -> tuple[int, int]:
        """Smallest and largest size to test."""
        ranks = self.context.ranks
        if ranks == 1:
            return super().range()
        block = max((sum(map(self.size, run)) for run in self._whole), default=self.align)
        largest = max((self.size(p) for run in self._whole for p in run), default=self.align)
        if ranks * largest > 2 * block:
            largest = 0
        low, high = max(-(-self.least(block) // ranks), largest), max(block // ranks, largest * 3 // 2)
        return self._given.within(low, high, self.context.itemsize)

    def _build(self, index: ModelIndex) -> tuple[Layout, Mapping[str, Any]]:
        """Bundles in model order of their first parameter."""
        found, itemsize = self.chunks(self.chunk), self.context.itemsize
        pieces = [(space, tuple(chain(*runs)), runs) for space, runs in groups_of(found.inside)]
        num_groups, num_chunks = len(pieces), sum(space.ranks for space, _, _ in pieces)
        pieces += [(space, run, ()) for space, run in found.outside]
        pieces.sort(key=lambda piece: piece[1][0].index)
        segments = [
            communication_group(runs, space=space, itemsize=itemsize)
            if runs and self.context.ranks > 1
            else pack(mine, space=space, itemsize=itemsize)
            for space, mine, runs in pieces
        ]
        single = (n for n, (space, mine, _) in enumerate(pieces) if space.trainable and all(len(p.users) == 1 for p in mine))
        layout = Layout.of(index, itemsize, ([segment] for segment in segments), in_place=frozenset(single))
        trained = sum(s.shard_numel for s in layout.segments if s.space.trainable) * 4
        parameters = sum(s.shard_numel for s in layout.segments) * itemsize
        return layout, dict(
            chunk_lists={LISTS[0]: parameters, **dict.fromkeys(LISTS[1:], trained)},
            num_chunks=num_chunks,
            num_groups=num_groups,
            chunk_size_elements=self.chunk,
            chunk_size_bytes=self.chunk * itemsize,
            utilization=found.utilization,
            fragmentation=1 - found.utilization,
            num_out_of_chunks=len(found.outside),
        )
