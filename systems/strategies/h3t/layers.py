"""H3T's layout: a layer (block) is a bundle of one segment; other modules, and sets of modules that share, have their own."""

from __future__ import annotations

from systems.planning.layout import Bundle, FlatSpace, Layout, ModelIndex, Segment, pack
from systems.planning.strategy import PlanningContext


def layer_layout(index: ModelIndex, context: PlanningContext) -> Layout:
    """Bundles in model order of their first parameter. What a layer has frozen, or in another group, is a bundle apart."""
    number = {unit.name: unit.index for unit in index.units}
    runs: dict[tuple[FlatSpace, tuple[str, ...]], list[int]] = {}
    for p in index.parameters:
        space = FlatSpace(p.group, context.ranks, p.trainable)
        runs.setdefault((space, tuple(sorted(p.users))), []).append(p.index)
    segments: list[Segment] = []
    bundles: list[Bundle] = []
    for (space, users), found in runs.items():
        parameters = [index.parameters[p] for p in found]
        segments.append(pack(parameters, index=len(segments), space=space, itemsize=context.itemsize))
        units = tuple(sorted({number[user] for user in users}))
        bundles.append(Bundle(len(bundles), (segments[-1].index,), units, segments[-1].numel, space.trainable))
    return Layout(context.itemsize, tuple(segments), tuple(bundles))


def layer_of_bundle(layout: Layout, blocks: frozenset[int]) -> dict[int, int]:
    """Bundle to the unit of its layer; other modules' bundles, and those that several use, are left out."""
    return {b.index: b.units[0] for b in layout.bundles if len(b.units) == 1 and b.units[0] in blocks}
