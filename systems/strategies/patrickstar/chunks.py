"""Cuts a model into chunks and searches their size (section 6.1.1, "Chunk Size Searching", table 3).

A chunk list is a model's parameters in the order of initialization; no parameter crosses a chunk. The lists of param fp32,
momentum and variance are mapped in the same way, which here is one layout: a segment's offsets hold for all four. Frozen
parameters and those of another data-parallel group have lists of their own. All sizes in elements unless they say bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from systems.planning.layout import (
    Bundle,
    FlatSpace,
    Layout,
    ModelIndex,
    Parameter,
    Segment,
    align_elements,
    pack,
    round_up,
)
from systems.planning.packing import sums_of_neighbours
from systems.planning.strategy import PlanningContext
from systems.strategies.patrickstar.options import PatrickStarOptions

MAX_CANDIDATES = 256
LISTS = ("param 16-bit", "param fp32", "momentum", "variance")
Chunk = tuple[Parameter, ...]


@dataclass(frozen=True)
class ChunkList:
    """irregular: parameters read by several units, in sets of the same users; they are not managed in chunks."""

    space: FlatSpace
    parameters: tuple[Parameter, ...]
    irregular: tuple[Chunk, ...]


@dataclass(frozen=True)
class Cut:
    """What packing at one chunk size gives. alone: parameters larger than a chunk."""

    chunks: tuple[Chunk, ...]
    alone: tuple[Parameter, ...]


@dataclass(frozen=True)
class ChunkStatistics:
    """See PatrickStarStatistics."""

    chunk_lists: dict[str, int]
    num_chunks: int
    chunk_size_elements: int
    utilization: float
    num_out_of_chunks: int


class Chunker:
    """layout: the result. chunk: elements of a chunk. statistics: what the search found."""

    def __init__(self, index: ModelIndex, options: PatrickStarOptions, context: PlanningContext) -> None:
        self._index, self._options, self._context = index, options, context
        self._align = align_elements(context.itemsize)
        self._sizes = [round_up(p.numel, self._align) for p in index.parameters]
        self._lists = chunk_lists(index, context.ranks)
        tensors = options.variant == "spongebob"
        self.chunk = 0 if tensors else min(self.candidates(), key=lambda chunk: (self.waste(chunk), -chunk))
        self.layout, self.statistics = self._build()

    def size(self, parameter: Parameter) -> int:
        """With the padding that lets the next parameter start aligned."""
        return self._sizes[parameter.index]

    def cut(self, parameters: Iterable[Parameter], chunk: int) -> Cut:
        """One behind the other; what does not fit into the rest of a chunk begins the next. chunk 0: each on its own."""
        chunks: list[list[Parameter]] = []
        alone, left = [], 0
        for parameter in parameters:
            size = self.size(parameter)
            if size > chunk or not chunk:
                alone.append(parameter)
                continue
            if size > left or not chunks:
                chunks.append([])
                left = chunk
            chunks[-1].append(parameter)
            left -= size
        return Cut(tuple(tuple(c) for c in chunks), tuple(alone))

    def waste(self, chunk: int) -> int:
        """Elements of all chunks of this size that hold no parameter."""
        filled = [c for each in self._lists for c in self.cut(each.parameters, chunk).chunks]
        return len(filled) * chunk - sum(p.numel for c in filled for p in c)

    def candidates(self) -> list[int]:
        """Chunk sizes to test, ascending: the user's range by step, else every size that matters in the range.

        None that is too small for a parameter, unless all are: then that parameter is labelled out of chunks.
        """
        low, high = self._range()
        unit = self._align * self._context.ranks
        step = self._options.chunk_step
        if step is not None:
            width = max(unit, round_up(step // self._context.itemsize, unit))
            found = {round_up(low + i * width, unit) for i in range((high - low) // width + 1)}
        else:
            sums = (sums_of_neighbours([self.size(p) for p in each.parameters], low, high) for each in self._lists)
            found = {round_up(size, unit) for sizes in sums for size in sizes} | {round_up(low, unit)}
        largest = max((self.size(p) for each in self._lists for p in each.parameters), default=unit)
        sizes = sorted(found)
        sizes = [s for s in sizes if s >= min(largest, sizes[-1])]
        if step is None and len(sizes) > MAX_CANDIDATES:
            sizes = [sizes[i * (len(sizes) - 1) // (MAX_CANDIDATES - 1)] for i in range(MAX_CANDIDATES)]
        return sizes

    def _range(self) -> tuple[int, int]:
        """Smallest and largest size to test: the user's, or from a quarter of the largest block to all of it."""
        blocks = [[self._index.parameters[p] for p in u.parameters] for u in self._index.units if u.block is not None]
        owned = [[p for p in block if len(p.users) <= 1] for block in blocks]
        main = [block for block in owned if block] or [list(each.parameters) for each in self._lists if each.parameters]
        whole = max((sum(map(self.size, block)) for block in main), default=self._align)
        low = max([-(-whole // 4), *(self.size(p) for block in main for p in block)])
        given_low, given_high = (
            None if given is None else max(self._align, given // self._context.itemsize)
            for given in (self._options.chunk_min, self._options.chunk_max)
        )
        if given_high is not None:
            return (min(low, given_high) if given_low is None else given_low), given_high
        return (low, max(low, whole)) if given_low is None else (given_low, max(given_low, whole))

    def _build(self) -> tuple[Layout, ChunkStatistics]:
        """Bundles in model order of their first parameter."""
        cuts = [(each.space, self.cut(each.parameters, self.chunk)) for each in self._lists]
        chunks = [(space, chunk) for space, cut in cuts for chunk in cut.chunks]
        outside = [(each.space, shared) for each in self._lists for shared in each.irregular]
        outside += [(space, (p,)) for space, cut in cuts for p in cut.alone]
        layout = self._layout(sorted((*chunks, *outside), key=lambda piece: piece[1][0].index))
        held = sum(p.numel for _, chunk in chunks for p in chunk)
        nominal = len(chunks) * self.chunk
        trained = sum(s.shard_numel for s in layout.segments if s.space.trainable) * 4
        lists = dict.fromkeys(LISTS[1:], trained)
        return layout, ChunkStatistics(
            chunk_lists={LISTS[0]: layout.param_bytes // self._context.ranks, **lists},
            num_chunks=len(chunks),
            chunk_size_elements=self.chunk,
            utilization=held / nominal if nominal else 1.0,
            num_out_of_chunks=len(outside),
        )

    def _layout(self, pieces: Sequence[tuple[FlatSpace, Chunk]]) -> Layout:
        unit_of = {unit.name: unit.index for unit in self._index.units}
        segments: list[Segment] = []
        bundles: list[Bundle] = []
        in_place = set()
        for number, (space, chunk) in enumerate(pieces):
            segments.append(pack(chunk, index=number, space=space, itemsize=self._context.itemsize))
            units = tuple(sorted({unit_of[user] for p in chunk for user in p.users}))
            bundles.append(Bundle(number, (number,), units, segments[-1].numel, space.trainable))
            if space.trainable and all(len(p.users) == 1 for p in chunk):
                in_place.add(number)
        return Layout(self._context.itemsize, tuple(segments), tuple(bundles), frozenset(in_place))


def chunk_lists(index: ModelIndex, ranks: int) -> list[ChunkList]:
    """In model order of their first parameter."""
    spaces: dict[FlatSpace, list[Parameter]] = {}
    for parameter in index.parameters:
        spaces.setdefault(FlatSpace(parameter.group, ranks, parameter.trainable), []).append(parameter)
    found = []
    for space, parameters in spaces.items():
        shared: dict[frozenset[str], list[Parameter]] = {}
        for parameter in parameters:
            if len(parameter.users) > 1:
                shared.setdefault(frozenset(parameter.users), []).append(parameter)
        single = tuple(p for p in parameters if len(p.users) <= 1)
        found.append(ChunkList(space, single, tuple(tuple(each) for each in shared.values())))
    return found
