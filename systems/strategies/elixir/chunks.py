"""Cuts a model into chunks and searches their size (paper, "Initialization Algorithm").

A run is the parameters that one unit alone uses, in model order. Runs are packed one behind the other; no parameter
crosses a chunk, and a run that does not fit into what is left of one begins the next. All sizes in elements unless
they say bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from systems.planning.layout import (
    FlatSpace,
    Layout,
    ModelIndex,
    Parameter,
    align_elements,
    pack,
    round_up,
)
from systems.planning.packing import candidate_sizes, group_parameters
from systems.planning.strategy import PlanningContext
from systems.strategies.elixir.options import ElixirOptions

FUSED_SHARE = 16  # a fused group may take this part of the device budget for good
Run = tuple[Parameter, ...]


@dataclass(frozen=True)
class ChunkStatistics:
    """See ElixirStatistics."""

    num_chunks: int
    chunk_size_bytes: int
    utilization: float
    wasted_bytes: int
    num_private: int
    num_fused: int


@dataclass(frozen=True)
class Cut:
    """What packing at one chunk size gives. alone: parameters larger than a chunk."""

    chunks: tuple[Run, ...]
    alone: tuple[Parameter, ...]


@dataclass(frozen=True)
class Group:
    """A chunk group. runs: single-use parameters; shared: one run per set of several users."""

    space: FlatSpace
    runs: tuple[Run, ...]
    shared: tuple[Run, ...]

    def parameters(self) -> list[Parameter]:
        return sorted((p for run in (*self.runs, *self.shared) for p in run), key=lambda p: p.index)


class Chunker:
    """layout: the result. statistics: what the search found."""

    def __init__(self, index: ModelIndex, options: ElixirOptions, context: PlanningContext) -> None:
        self._index, self._options, self._context = index, options, context
        self._align = align_elements(context.itemsize)
        self._sizes = [round_up(p.numel, self._align) for p in index.parameters]
        self._groups = chunk_groups(index, context.ranks)
        self._totals = {group.space: sum(map(self.size, group.parameters())) for group in self._groups}
        self.chunk = self._search()
        self.layout, self.statistics = self._build()

    def size(self, parameter: Parameter) -> int:
        """With the padding that lets the next parameter start aligned."""
        return self._sizes[parameter.index]

    def cut(self, runs: Iterable[Run], chunk: int) -> Cut:
        """Pack runs into chunks of the given size."""
        chunks: list[list[Parameter]] = []
        alone, left = [], 0
        for run in runs:
            fitting = [p for p in run if self.size(p) <= chunk]
            alone += [p for p in run if self.size(p) > chunk]
            if fitting and (not chunks or sum(map(self.size, fitting)) > left):
                chunks.append([])
                left = chunk
            for parameter in fitting:
                size = self.size(parameter)
                if size > left:
                    chunks.append([])
                    left = chunk
                chunks[-1].append(parameter)
                left -= size
        return Cut(tuple(tuple(c) for c in chunks), tuple(alone))

    def waste(self, chunk: int) -> int:
        """Elements of all chunks of this size that hold no parameter."""
        wasted = 0
        for group in self._groups:
            if not self._fused(group, chunk):
                for filled in self.cut(group.runs, chunk).chunks:
                    wasted += chunk - sum(p.numel for p in filled)
        return wasted

    def candidates(self) -> list[int]:
        """Chunk sizes to test, ascending: those at which the packing changes, and those from which a group is fused."""
        single = [[self.size(p) for run in group.runs for p in run] for group in self._groups]
        low, high = self._range()
        sizes = candidate_sizes(single, low, high, self._options, self._context)
        if self._options.chunk_step is not None:
            return sizes
        unit = self._align * self._context.ranks
        fusing = {round_up(total + 1, unit) for total in self._totals.values()}
        return sorted({*sizes, *(size for size in fusing if sizes[0] <= size <= high)})

    def _search(self) -> int:
        return min(self.candidates(), key=lambda chunk: (self.waste(chunk), -chunk))

    def _range(self) -> tuple[int, int]:
        """Smallest and largest size to test: the user's, or a quarter of the largest block to all of it."""
        blocks = {u.name for u in self._index.units if u.block is not None}
        runs = [run for group in self._groups for run in group.runs]
        main = [run for run in runs if run[0].users[0] in blocks] or runs
        whole = max((sum(map(self.size, run)) for run in main), default=self._align)
        low = max([-(-whole // 4), *(self.size(p) for run in main for p in run)])
        return self._options.within(low, whole, self._context.itemsize)

    def _fused(self, group: Group, chunk: int) -> bool:
        total = self._totals[group.space]
        per_element = self._context.itemsize
        if group.space.trainable:
            per_element += self._context.itemsize + self._context.optimizer_itemsize
        return total < chunk and total * per_element * FUSED_SHARE <= self._context.device_budget

    def _build(self) -> tuple[Layout, ChunkStatistics]:
        """Bundles in model order of their first parameter."""
        fused = [g for g in self._groups if self._fused(g, self.chunk)]
        plain = [g for g in self._groups if g not in fused]
        cuts = [(g.space, self.cut(g.runs, self.chunk)) for g in plain]
        private = [(g.space, run) for g in plain for run in g.shared]
        private += [(space, (p,)) for space, cut in cuts for p in cut.alone]
        chunks = [(space, run) for space, cut in cuts for run in cut.chunks]
        pieces: list[tuple[bool, list[tuple[FlatSpace, Run]]]] = [(True, [piece]) for piece in (*chunks, *private)]
        for trainable in (True, False):  # one bundle each, so that a bundle is trained or not
            small = [(g.space, tuple(g.parameters())) for g in fused if g.space.trainable is trainable]
            if small:
                pieces.append((False, small))
        pieces.sort(key=lambda piece: piece[1][0][1][0].index)
        itemsize = self._context.itemsize
        packed = ([pack(run, space=space, itemsize=itemsize) for space, run in parts] for _, parts in pieces)
        unmovable = {number for number, (movable, _) in enumerate(pieces) if not movable}
        layout = Layout.of(self._index, itemsize, packed, unmovable=unmovable)
        held = sum(p.numel for _, run in chunks for p in run)
        nominal = len(chunks) * self.chunk
        return layout, ChunkStatistics(
            num_chunks=len(chunks),
            chunk_size_bytes=self.chunk * itemsize,
            utilization=held / nominal if nominal else 1.0,
            wasted_bytes=(nominal - held) * itemsize,
            num_private=len(private),
            num_fused=len(unmovable),
        )


def chunk_groups(index: ModelIndex, ranks: int) -> list[Group]:
    """In model order of their first parameter."""
    found = []
    for group in group_parameters(index, ranks):
        runs = tuple(tuple(run) for _, run in groupby(group.single, key=lambda p: p.users))
        found.append(Group(group.space, runs, group.shared))
    return found
