"""Which bundles are H3T's layers (`policy.packing.bundle_a_unit`); other modules, and sets that share, have their own."""

from __future__ import annotations

from systems.planning.layout import Layout


def layer_of_bundle(layout: Layout, blocks: frozenset[int]) -> dict[int, int]:
    """Bundle to the unit of its layer; other modules' bundles, and those that several use, are left out."""
    return {b.index: b.units[0] for b in layout.bundles if len(b.units) == 1 and b.units[0] in blocks}
