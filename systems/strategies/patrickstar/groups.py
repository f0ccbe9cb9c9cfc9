"""Communication groups (section 6.2): as many continuous chunks of a list as there are ranks, each of them another rank's.

A group is one segment, so that a chunk is a shard: what a rank keeps, updates and sends. All sizes in elements.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from systems.planning.layout import FlatSpace, Placement, Segment, align_elements, round_up
from systems.planning.policy.chunks import Piece, Run

Group = tuple[FlatSpace, tuple[Run, ...]]


def groups_of(pieces: Iterable[Piece]) -> Iterator[Group]:
    """Chunks of each list, those of one list behind each other, by as many as it has ranks; of the last group some may lack."""
    for space, mine in groupby(pieces, key=lambda piece: piece[0]):
        chunks = [run for _, run in mine]
        for first in range(0, len(chunks), space.ranks):
            yield space, tuple(chunks[first : first + space.ranks])


def communication_group(chunks: Sequence[Run], *, space: FlatSpace, itemsize: int) -> Segment:
    """The parameters of these chunks, at most one for each rank, in chunks of one length, the shortest in which they fit in
    order: no parameter crosses the end of one, and what is left of each there is a hole.

    The paper's chunks all have the nominal length. These are no longer, and are as even as can be, the last group's too.
    """
    align = align_elements(itemsize)
    parameters = [p for run in chunks for p in run]
    sizes = [round_up(p.numel, align) for p in parameters]
    lengths = range(max(align, *sizes), max(align, sum(sizes)) + 1, align)
    length = lengths[bisect_left(lengths, True, key=lambda length: len(_filled(sizes, length)) <= space.ranks)]
    placements, remaining = list[Placement](), iter(zip(parameters, sizes, strict=True))
    for number, count in enumerate(_filled(sizes, length)):
        offset = number * length
        for parameter, size in (next(remaining) for _ in range(count)):
            placements.append(Placement(parameter.index, offset, parameter.numel))
            offset += size
    return Segment(0, space, length * space.ranks, tuple(placements))


def _filled(sizes: Sequence[int], length: int) -> list[int]:
    """How many follow each other in each chunk of that length, which none exceeds."""
    counts, left = list[int](), 0
    for size in sizes:
        if size > left or not counts:
            counts.append(0)
            left = length
        counts[-1] += 1
        left -= size
    return counts
