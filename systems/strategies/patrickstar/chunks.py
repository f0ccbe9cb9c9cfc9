"""Cuts a model into chunks and searches their size (section 6.1.1, "Chunk Size Searching", table 3).

A chunk list is a model's parameters in the order of initialization; no parameter crosses a chunk. The lists of param fp32,
momentum and variance are mapped in the same way, which here is one layout: a segment's offsets hold for all four. Frozen
parameters and those of another data-parallel group have lists of their own. All sizes in elements unless they say bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from systems.planning.layout import (
    Layout,
    ModelIndex,
    Parameter,
    align_elements,
    pack,
    round_up,
)
from systems.planning.packing import candidate_sizes, group_parameters
from systems.planning.strategy import PlanningContext
from systems.strategies.patrickstar.options import PatrickStarOptions

LISTS = ("param 16-bit", "param fp32", "momentum", "variance")
Chunk = tuple[Parameter, ...]


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
        self._lists = group_parameters(index, context.ranks)
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
        filled = [c for each in self._lists for c in self.cut(each.single, chunk).chunks]
        return len(filled) * chunk - sum(p.numel for c in filled for p in c)

    def candidates(self) -> list[int]:
        """Chunk sizes to test, ascending. A parameter that no allowed size holds is labelled out of chunks."""
        single = [[self.size(p) for p in each.single] for each in self._lists]
        return candidate_sizes(single, *self._range(), self._options, self._context)

    def _range(self) -> tuple[int, int]:
        """Smallest and largest size to test: the user's, or from a quarter of the largest block to all of it."""
        blocks = [[self._index.parameters[p] for p in u.parameters] for u in self._index.units if u.block is not None]
        owned = [[p for p in block if len(p.users) <= 1] for block in blocks]
        main = [block for block in owned if block] or [list(each.single) for each in self._lists if each.single]
        whole = max((sum(map(self.size, block)) for block in main), default=self._align)
        low = max([-(-whole // 4), *(self.size(p) for block in main for p in block)])
        return self._options.within(low, whole, self._context.itemsize)

    def _build(self) -> tuple[Layout, ChunkStatistics]:
        """Bundles in model order of their first parameter."""
        cuts = [(each.space, self.cut(each.single, self.chunk)) for each in self._lists]
        chunks = [(space, chunk) for space, cut in cuts for chunk in cut.chunks]
        outside = [(each.space, shared) for each in self._lists for shared in each.shared]
        outside += [(space, (p,)) for space, cut in cuts for p in cut.alone]
        pieces = sorted((*chunks, *outside), key=lambda piece: piece[1][0].index)
        packed = ([pack(chunk, space=space, itemsize=self._context.itemsize)] for space, chunk in pieces)
        single = (n for n, (space, chunk) in enumerate(pieces) if space.trainable and all(len(p.users) == 1 for p in chunk))
        layout = Layout.of(self._index, self._context.itemsize, packed, in_place=frozenset(single))
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
