"""Cuts a model into pages (section 4.1, figures 3 and 4): a layer's tensors over pages of one size, at most two a page.

Tensors of a page or more lie one behind the other, so that only a page in which one ends and the next begins has two; a
smaller tensor has a page of its own. The last page of a chain, and that of a small tensor, is no longer than what is in it.
All sizes in elements unless they say bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from systems.planning.layout import (
    FlatSpace,
    Layout,
    ModelIndex,
    Parameter,
    Placement,
    Segment,
    align_elements,
    pack,
    round_up,
)
from systems.planning.policy.packing import by_users
from systems.planning.strategy import PlanningContext


@dataclass(frozen=True)
class PageStatistics:
    """See AngelPTMStatistics."""

    page_bytes: int
    num_pages: int
    num_shared_pages: int
    num_small_pages: int
    utilization: float
    wasted_bytes: int


def page_layout(index: ModelIndex, page_bytes: int, context: PlanningContext) -> tuple[Layout, PageStatistics]:
    """A bundle a layer, in model order of its first parameter; what a layer has frozen, or shares, is a bundle apart."""
    page = round_up(page_bytes // context.itemsize, align_elements(context.itemsize))
    layers = by_users(index, context)
    pages = (_pages(tensors, page * space.ranks, space, context.itemsize) for space, tensors in layers)
    layout = Layout.of(index, context.itemsize, pages)
    return layout, _statistics(layout.segments, page, context.itemsize)


def _pages(tensors: Sequence[Parameter], page: int, space: FlatSpace, itemsize: int) -> list[Segment]:
    """page: elements of all ranks' parts."""
    large = [p for p in tensors if p.numel >= page]
    small = [p for p in tensors if p.numel < page]
    align = align_elements(itemsize)
    offsets, end = [], 0
    for tensor in large:
        offsets.append(end)
        end = round_up(end + tensor.numel, align)
    segments: list[Segment] = []
    for begin in range(0, end, page):
        stop = min(begin + page, end)
        pieces = [
            Placement(p.index, max(at, begin) - begin, min(at + p.numel, stop) - max(at, begin), max(begin - at, 0))
            for at, p in zip(offsets, large, strict=True)
            if at < stop and at + p.numel > begin
        ]
        numel = round_up(stop - begin, align * space.ranks)
        segments.append(Segment(0, space, numel, tuple(pieces)))
    return segments + [pack((tensor,), space=space, itemsize=itemsize) for tensor in small]


def _statistics(segments: Sequence[Segment], page: int, itemsize: int) -> PageStatistics:
    used, nominal = sum(s.used for s in segments), sum(page * s.space.ranks for s in segments)
    ranks = segments[0].space.ranks if segments else 1
    return PageStatistics(
        page_bytes=page * itemsize,
        num_pages=len(segments),
        num_shared_pages=sum(len(s.placements) > 1 for s in segments),
        num_small_pages=sum(_is_small(s, page) for s in segments),
        utilization=used / nominal if nominal else 1.0,
        wasted_bytes=(nominal - used) * itemsize // ranks,
    )


def _is_small(segment: Segment, page: int) -> bool:
    """One whole tensor that does not fill it; the end of a large one begins later in it."""
    only = segment.placements[0]
    return len(segment.placements) == 1 and only.start == 0 and only.numel < page * segment.space.ranks
