"""Strategies over pages: their layouts with every bundle cut into segments of one size, wherever that cuts its parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from systems.planning.layout import Layout, ModelIndex, Placement, Segment, align_elements
from systems.substrate.system import ManagedSystem


def cut(layout: Layout, page: int) -> Layout:
    """Segments of `page` aligned lines of elements; the last of a bundle may be shorter."""
    numel = page * align_elements(layout.itemsize)
    segments: list[Segment] = []
    bundles = []
    for bundle in layout.bundles:
        space = layout.segments[bundle.segments[0]].space
        places = sorted((place.offset, p, place.numel) for p, place in layout.places.items() if place.bundle == bundle.index)
        mine = []
        for begin in range(0, bundle.numel, numel):
            end = min(begin + numel, bundle.numel)
            pieces = [
                Placement(p, max(offset, begin) - begin, min(offset + size, end) - max(offset, begin), max(begin - offset, 0))
                for offset, p, size in places
                if offset < end and offset + size > begin
            ]
            mine.append(len(segments))
            segments.append(Segment(len(segments), space, end - begin, tuple(pieces)))
        bundles.append(replace(bundle, segments=tuple(mine)))
    return replace(layout, segments=tuple(segments), bundles=tuple(bundles))


def paged(system: ManagedSystem, page: int) -> ManagedSystem:
    strategy: Any = system.strategy

    class Paged(strategy):
        def layout(self, index: ModelIndex) -> Layout:
            return cut(super().layout(index), page)

    return ManagedSystem(Paged)
