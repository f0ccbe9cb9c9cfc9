"""What the host cannot hold is kept on the device, the least that will do, first units first."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from systems.errors import BudgetError
from systems.planning.layout import Layout
from systems.planning.overflow import host_need, keep_on_device, slot_bytes
from systems.planning.plan import UpdateRule
from systems.planning.strategy import PlanningContext
from tests.planning.synthetic import PLENTY, context, layout_of

RULE = UpdateRule.AFTER_NORM
FOUR = layout_of([(4, [0]), (2, [1]), (8, [2]), (2, [3])], frozen=frozenset({3}))


def kept(layout: Layout) -> list[int]:
    return [b.index for b in layout.bundles if not b.movable]


def test_what_fits_is_left_as_it_is() -> None:
    need = host_need(FOUR, context())
    assert need == 16 * 128 * 2 + 14 * 128 * 12
    assert keep_on_device(FOUR, replace(context(), host_budget=need), RULE) is FOUR


@pytest.mark.parametrize(("missing", "bundles"), [(1, [0]), (4 * 128 * 12, [0]), (4 * 128 * 12 + 1, [0, 1])])
def test_first_units_stay_on_the_device(missing: int, bundles: list[int]) -> None:
    small = replace(context(), host_budget=host_need(FOUR, context()) - missing)
    found = keep_on_device(FOUR, small, RULE)
    assert kept(found) == bundles
    assert host_need(found, small) <= small.host_budget


def outcome(layout: Layout, asked: PlanningContext) -> tuple[BudgetError | None, Layout | None]:
    try:
        return None, keep_on_device(layout, asked, RULE)
    except BudgetError as error:
        return error, None


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    host=st.integers(0, 90_000),
    device=st.sampled_from([30_000, 90_000, PLENTY]),
    accumulate=st.sampled_from([1, 2]),
)
def test_it_fits_both_memories_or_says_what_is_missing(sizes: list[int], host: int, device: int, accumulate: int) -> None:
    layout = layout_of([(size, [unit]) for unit, size in enumerate(sizes)])
    asked = replace(context(device=device, accumulate=accumulate), host_budget=host)
    error, found = outcome(layout, asked)
    if found is None:
        assert error is not None and error.tier == "host" and error.need > error.have == host
        assert slot_bytes(layout) > host or device < PLENTY
        assert ("parameters have a place there" in str(error)) == (slot_bytes(layout) > host)
        return
    assert host_need(found, asked) <= host
    on_device = kept(found)
    assert on_device == list(range(len(on_device)))
    state = 12 + asked.accumulator_itemsize
    assert sum(sizes[b] * 128 * (2 + state) for b in on_device) <= device
    if on_device:
        fewer = [replace(b, movable=b.index >= on_device[-1]) for b in layout.bundles]
        assert host_need(replace(layout, bundles=tuple(fewer)), asked) > host
