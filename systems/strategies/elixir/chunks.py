"""Cuts a model into chunks of a searched size (paper, "Initialization Algorithm"). All sizes in elements unless they say bytes.

A run is the parameters that one unit alone uses, in model order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from systems.planning.layout import FlatSpace, Layout, ModelIndex, pack, round_up
from systems.planning.policy.chunks import ChunkCutter, ChunkGroup, Piece
from systems.planning.policy.packing import group_parameters
from systems.planning.strategy import PlanningContext
from systems.strategies.elixir.options import ElixirOptions

FUSED_SHARE = 16  # a fused group may take this part of the device budget for good


class ElixirChunker(ChunkCutter):
    """layout: the result, in chunks of `chunk` elements, by default of the size that wastes least. statistics: fields of
    ElixirStatistics, what the search found.

    staying: fused bundles that stay on the device in a step though the host updates them, so that they may move for that.
    """

    def __init__(self, index: ModelIndex, options: ElixirOptions, context: PlanningContext, chunk: int | None = None) -> None:
        self._options = options
        self._scattered = options.scatter or context.ranks == 1
        groups = chunk_groups(index, context, scattered=self._scattered)
        blocks = {u.name for u in index.units if u.block is not None}
        runs = [run for group in groups for run in group.runs]
        super().__init__(index, groups, [run for run in runs if blocks.intersection(run[0].users)] or runs, options, context)
        self._totals = {group.space: sum(map(self.size, group.parameters())) for group in groups}
        self.chunk = self.best() if chunk is None else chunk
        self.layout, self.staying, self.statistics = self._build(index)

    def cuts(self, group: ChunkGroup, chunk: int) -> bool:
        """A group is fused, and never moves, if it is smaller than a chunk and not too dear for the device; in the paper if it
        is smaller.
        """
        total, per_element = self._totals[group.space], self.context.itemsize
        if self._options.keeps_to_paper:
            return total >= chunk
        if group.space.trainable:
            per_element += self.context.itemsize + self.context.optimizer_itemsize
        return total >= chunk or total * per_element * FUSED_SHARE > self.context.device_budget

    def more_sizes(self) -> Iterable[int]:
        """Those from which a group is fused."""
        unit = self.align * self.context.ranks
        return {round_up(total + 1, unit) for total in self._totals.values()}

    def _build(self, index: ModelIndex) -> tuple[Layout, frozenset[int], Mapping[str, Any]]:
        """Bundles in model order of their first parameter; which of them are `staying`; statistics."""
        found, itemsize = self.chunks(self.chunk), self.context.itemsize
        pieces: list[tuple[bool, list[Piece]]] = [(True, [piece]) for piece in (*found.inside, *found.outside)]
        fused = [group for group in self.groups if not self.cuts(group, self.chunk)]
        together: dict[FlatSpace, list[Piece]] = {}  # one bundle each, so that a bundle is trained or not, and of one group
        for group in fused:
            together.setdefault(group.space, []).append((group.space, tuple(group.parameters())))
        pieces += [(False, small) for small in together.values()]
        pieces.sort(key=lambda piece: piece[1][0][1][0].index)
        packed = ([pack(run, space=space, itemsize=itemsize) for space, run in parts] for _, parts in pieces)
        fixed = {number for number, (movable, _) in enumerate(pieces) if not movable}
        staying, in_place = frozenset[int](), set[int]()
        if self._options.keeps_to_paper:
            trained = {number for number, (_, parts) in enumerate(pieces) if parts[0][0].trainable}
            in_place = {n for n in trained if all(len(p.users) == 1 for _, run in pieces[n][1] for p in run)}
            if self._options.offload:
                staying = frozenset(fixed & trained)
        unmovable = fixed - staying if self._scattered else range(len(pieces))
        layout = Layout.of(index, itemsize, packed, unmovable=unmovable, in_place=in_place)
        statistics = dict(
            num_chunks=len(found.inside),
            chunk_size_bytes=self.chunk * itemsize,
            utilization=found.utilization,
            wasted_bytes=found.wasted * itemsize,
            num_private=len(found.outside),
            num_fused=len(fixed),
        )
        return layout, staying, statistics


def chunk_groups(index: ModelIndex, context: PlanningContext, *, scattered: bool = True) -> list[ChunkGroup]:
    """In model order of their first parameter."""
    found = []
    for group in group_parameters(index, context, scattered=scattered):
        runs = tuple(tuple(run) for _, run in groupby(group.single, key=lambda p: p.users))
        found.append(ChunkGroup(group.space, runs, group.shared))
    return found
