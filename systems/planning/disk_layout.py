"""Master weights and moments on a disk: how they lie there, and the host memory through which an update takes them.

A file a part, each segment at a place of its own; places begin and end at multiples of what direct I/O wants. An update reads a
segment's parts into one of a few buffers, works there, and writes them back, so that the reads of the next segments and
the writes of the last ones go on meanwhile (Angel-PTM, section 4.3: movements and updates page by page). Each segment has its
buffer, in turn. Accumulators of several micro-batches stay on the host.
"""

from __future__ import annotations

from systems.planning.layout import Layout, Segment, round_up

BLOCK = 4096  # bytes to which direct I/O wants offsets, lengths and addresses aligned
BUFFERS = 4


def part_bytes(segment: Segment) -> int:
    """Of one part of this rank's shard, in its file and in a buffer."""
    return round_up(segment.shard_numel * 4, BLOCK)


def parts_of(layout: Layout) -> int:
    """Of a segment, fp32 each: master weight and moments."""
    return 1 + len(layout.moments)


def segments_on_disk(layout: Layout) -> list[Segment]:
    """In order of number, which is that of their places and buffers."""
    owner = layout.bundle_of_segment
    return [s for s in layout.segments if owner[s.index] in layout.on_disk]


def disk_bytes(layout: Layout) -> int:
    return parts_of(layout) * sum(map(part_bytes, segments_on_disk(layout)))


def buffer_bytes(layout: Layout) -> int:
    """Of all buffers, host memory; 0 where nothing is on the disk."""
    return BUFFERS * parts_of(layout) * max(map(part_bytes, segments_on_disk(layout)), default=0)


def buffer_of(layout: Layout) -> dict[int, int]:
    """Segment to the number of its buffer."""
    return {s.index: number % BUFFERS for number, s in enumerate(segments_on_disk(layout))}
