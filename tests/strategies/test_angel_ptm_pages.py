"""variant=paper on one rank: the page is the unit of Algorithm 1, and a page as large as a layer gives whole layers again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from systems.planning.plan import Pages
from systems.planning.step.demand import demand_of
from systems.strategies.angel_ptm.paging import LayerPages, schedule_pages
from systems.strategies.angel_ptm.scheduling import schedule
from tests.planning.synthetic import Case, cases, uneven_room


def one_page_each(sizes: Mapping[int, int]) -> dict[int, LayerPages]:
    return {b: LayerPages((Pages(b, b + 1),), np.array([0, size])) for b, size in sizes.items()}


@settings(max_examples=300, deadline=None)
@given(cases(), st.integers(0, 12))
def test_a_page_as_large_as_a_layer_gives_whole_layers(case: Case, spare: int) -> None:
    demand = demand_of(case.layout, case.trace, case.context)
    sizes = {b.index: case.layout.bundle_bytes(b.index) for b in case.layout.bundles}
    room = uneven_room(demand, sizes, spare)
    found, whole = schedule_pages(demand, one_page_each(sizes), room, room), schedule(demand, sizes, room, as_printed=True)
    assert found == whole
