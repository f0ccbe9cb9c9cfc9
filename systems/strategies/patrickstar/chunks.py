"""Cuts a model into chunks of a searched size (section 6.1.1, "Chunk Size Searching", table 3).

A chunk list is a model's parameters in the order of initialization. The lists of param fp32, momentum and variance are mapped
in the same way, which here is one layout: a segment's offsets hold for all four. Frozen parameters and those of another
data-parallel group have lists of their own. All sizes in elements unless they say bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from systems.planning.layout import Layout, ModelIndex, pack
from systems.planning.policy.chunks import ChunkCutter, ChunkGroup
from systems.planning.policy.packing import group_parameters
from systems.planning.strategy import PlanningContext
from systems.strategies.patrickstar.options import PatrickStarOptions

LISTS = ("param 16-bit", "param fp32", "momentum", "variance")


class PatrickStarChunker(ChunkCutter):
    """layout: the result. chunk: elements of a chunk. statistics: fields of PatrickStarStatistics, what the search found."""

    def __init__(self, index: ModelIndex, options: PatrickStarOptions, context: PlanningContext) -> None:
        found = group_parameters(index, context.ranks)
        lists = [ChunkGroup(each.space, tuple((p,) for p in each.single), each.shared) for each in found]
        blocks = [[index.parameters[p] for p in u.parameters] for u in index.units if u.block is not None]
        owned = [tuple(p for p in block if len(p.users) <= 1) for block in blocks]
        main = [block for block in owned if block] or [each.single for each in found if each.single]
        super().__init__(index, lists, main, options, context)
        tensors = options.variant == "spongebob"
        self.chunk = 0 if tensors else self.best()
        self.layout, self.statistics = self._build(index)

    def _build(self, index: ModelIndex) -> tuple[Layout, Mapping[str, Any]]:
        """Bundles in model order of their first parameter."""
        found, itemsize = self.chunks(self.chunk), self.context.itemsize
        pieces = sorted((*found.inside, *found.outside), key=lambda piece: piece[1][0].index)
        packed = ([pack(chunk, space=space, itemsize=itemsize)] for space, chunk in pieces)
        single = (n for n, (space, chunk) in enumerate(pieces) if space.trainable and all(len(p.users) == 1 for p in chunk))
        layout = Layout.of(index, itemsize, packed, in_place=frozenset(single))
        trained = sum(s.shard_numel for s in layout.segments if s.space.trainable) * 4
        return layout, dict(
            chunk_lists={LISTS[0]: layout.param_bytes // self.context.ranks, **dict.fromkeys(LISTS[1:], trained)},
            num_chunks=len(found.inside),
            chunk_size_elements=self.chunk,
            chunk_size_bytes=self.chunk * itemsize,
            utilization=found.utilization,
            fragmentation=1 - found.utilization,
            num_out_of_chunks=len(found.outside),
        )
