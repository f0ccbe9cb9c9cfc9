"""Cuts parameters into chunks of one size, and searches the size that wastes least. What lies together is the strategy's.

No parameter crosses a chunk, and a run of parameters that does not fit into what is left of one begins the next. All sizes in
elements unless they say bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from systems.planning.layout import FlatSpace, Layout, ModelIndex, Parameter, align_elements, round_up
from systems.planning.plan import UpdateRule
from systems.planning.policy.homes import host_need, left_unused
from systems.planning.policy.packing import ChunkRange, candidate_sizes
from systems.planning.strategy import PlanningContext

GATHERED_BYTES = 128 << 20  # about what GPUs of one host move while a gather and a reduction keep the host, 0.2 and 1 ms
GATHERED_SHARE = 64  # of the device's budget at most
UNUSED_SHARE = 16  # of the device's budget: so much of the host's may be left unused before another size is looked for

Run = tuple[Parameter, ...]
Piece = tuple[FlatSpace, Run]  # what a segment holds


@dataclass(frozen=True)
class ChunkGroup:
    """A FlatSpace's parameters. runs: those of one unit at most; shared: one run per set of several users."""

    space: FlatSpace
    runs: tuple[Run, ...]
    shared: tuple[Run, ...]

    def parameters(self) -> list[Parameter]:
        return sorted((p for run in (*self.runs, *self.shared) for p in run), key=lambda p: p.index)


@dataclass(frozen=True)
class Cut:
    """What packing at one chunk size gives. alone: parameters larger than a chunk."""

    chunks: tuple[Run, ...]
    alone: tuple[Parameter, ...]


@dataclass(frozen=True)
class Chunks:
    """Pieces of all groups at one chunk size. outside: tied parameters, and those larger than a chunk. utilization,
    wasted: of the chunks at their nominal size.
    """

    inside: tuple[Piece, ...]
    outside: tuple[Piece, ...]
    utilization: float
    wasted: int


class ChunkCutter:
    """groups: what is cut. whole: the runs that set the range of sizes where the user says nothing: from a part of the largest
    (`least`) to all of it. A subclass may leave groups out of the chunks (`cuts`) and have more sizes tested (`more_sizes`).
    """

    def __init__(
        self, index: ModelIndex, groups: Sequence[ChunkGroup], whole: Sequence[Run], given: ChunkRange, context: PlanningContext
    ) -> None:
        self.groups, self.context, self._given = groups, context, given
        self.align = align_elements(context.itemsize)
        self._sizes = [round_up(p.numel, self.align) for p in index.parameters]
        self._whole = whole

    def size(self, parameter: Parameter) -> int:
        """With the padding that lets the next parameter start aligned."""
        return self._sizes[parameter.index]

    def cuts(self, group: ChunkGroup, chunk: int) -> bool:
        """True if the group is in chunks, where they have this size."""
        return True

    def more_sizes(self) -> Iterable[int]:
        """To test beside those at which the packing changes."""
        return ()

    def cut(self, runs: Iterable[Run], chunk: int) -> Cut:
        """Pack runs into chunks of the given size; 0 puts each parameter on its own."""
        chunks: list[list[Parameter]] = []
        alone, left = [], 0
        for run in runs:
            fitting = [p for p in run if chunk and self.size(p) <= chunk]
            alone += [p for p in run if not chunk or self.size(p) > chunk]
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
        return self.chunks(chunk).wasted

    def chunks(self, chunk: int) -> Chunks:
        groups = [g for g in self.groups if self.cuts(g, chunk)]
        cuts = [(g.space, self.cut(g.runs, chunk)) for g in groups]
        inside = [(space, run) for space, cut in cuts for run in cut.chunks]
        outside = [(g.space, run) for g in groups for run in g.shared]
        outside += [(space, (p,)) for space, cut in cuts for p in cut.alone]
        held, nominal = sum(p.numel for _, run in inside for p in run), len(inside) * chunk
        return Chunks(tuple(inside), tuple(outside), held / nominal if nominal else 1.0, nominal - held)

    def best(self) -> int:
        """The size that wastes least, the largest of equals."""
        return min(self.candidates(), key=lambda chunk: (self.waste(chunk), -chunk))

    def candidates(self) -> list[int]:
        """Chunk sizes to test, ascending. No allowed size may hold a parameter; that one is on its own."""
        single = [[self.size(p) for run in group.runs for p in run] for group in self.groups]
        low, high = self.range()
        sizes = candidate_sizes(single, low, high, self._given, self.context)
        if self._given.chunk_step is not None:
            return sizes
        return sorted({*sizes, *(size for size in self.more_sizes() if sizes[0] <= size <= high)})

    def range(self) -> tuple[int, int]:
        """Smallest and largest size to test."""
        largest = max((sum(map(self.size, run)) for run in self._whole), default=self.align)
        low = max([self.least(largest), *(self.size(p) for run in self._whole for p in run)])
        return self._given.within(low, largest, self.context.itemsize)

    def least(self, whole: int) -> int:
        """What is gathered at once, unless the user says so: a quarter of a block of this size. Several ranks gather as much
        of it as a collective is worth, where the device has room for many of them.
        """
        quarter, context = -(-whole // 4), self.context
        if context.ranks == 1:
            return quarter
        worth = min(GATHERED_BYTES, context.device_budget // GATHERED_SHARE) // context.itemsize
        return max(quarter, min(whole, worth))


class LaidOut(Protocol):
    """A ChunkCutter that has cut."""

    layout: Layout

    def candidates(self) -> list[int]: ...


Cutter = TypeVar("Cutter", bound=LaidOut)


def for_short_host(make: Callable[[int | None], Cutter], context: PlanningContext, rule: UpdateRule) -> Cutter:
    """What cuts a model into chunks of the size that wastes least. What the host lacks room for lives on the device by whole
    chunks with their states, be it a small part of one: where that leaves much of the host's memory unused, or does not fit,
    into chunks of the size that leaves least, the largest of equals.

    make: with a size, or with None for the one that wastes least.
    """
    first = make(None)
    lacks = host_need(replace(first.layout, moments=context.moments), context) - context.host_budget
    if not 0 < lacks <= context.device_budget:
        return first
    left = left_unused(first.layout, context, rule)
    if left is not None and left * UNUSED_SHARE <= context.device_budget:
        return first
    best, least = first, context.host_budget + 1 if left is None else left
    for chunk in reversed(first.candidates()):
        found = make(chunk)
        left = left_unused(found.layout, context, rule)
        if left is not None and left < least:
            best, least = found, left
    return best
