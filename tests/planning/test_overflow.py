"""What the host cannot hold is kept on the device, the least that will do, first units first."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from systems.errors import BudgetError
from systems.planning.disk_layout import disk_bytes
from systems.planning.layout import Layout
from systems.planning.plan import UpdateRule
from systems.planning.policy.homes import host_need, within_host
from systems.planning.strategy import PlanningContext
from tests.planning.synthetic import PLENTY, context, layout_of

RULE = UpdateRule.AFTER_NORM
FOUR = layout_of([(32, [0]), (16, [1]), (64, [2]), (16, [3])], frozen=frozenset({3}))


def kept(layout: Layout) -> list[int]:
    return [b.index for b in layout.bundles if not b.movable]


def test_what_fits_is_left_as_it_is() -> None:
    need = host_need(FOUR, context())
    assert need == 128 * 128 * 2 + 112 * 128 * 12
    assert within_host(FOUR, replace(context(), host_budget=need), RULE) is FOUR


ALL_TRAINED = 112 * 128 * 14


@pytest.mark.parametrize(
    ("missing", "bundles"),
    [
        (1, [0]),
        (32 * 128 * 14, [0]),
        (32 * 128 * 14 + 1, [0, 1]),
        (ALL_TRAINED, [0, 1, 2]),
        (ALL_TRAINED + 1, [0, 1, 2, 3]),  # the frozen one, which has 2 bytes a parameter, at last
        (ALL_TRAINED + 16 * 128 * 2, [0, 1, 2, 3]),
    ],
)
def test_first_units_stay_on_the_device(missing: int, bundles: list[int]) -> None:
    small = replace(context(), host_budget=host_need(FOUR, context()) - missing)
    found = within_host(FOUR, small, RULE)
    assert kept(found) == bundles
    assert host_need(found, small) <= small.host_budget


def outcome(layout: Layout, asked: PlanningContext) -> tuple[BudgetError | None, Layout | None]:
    try:
        return None, within_host(layout, asked, RULE)
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
        assert device < PLENTY and "the device has no room for the difference" in str(error)
        return
    assert host_need(found, asked) <= host
    on_device = kept(found)
    assert on_device == list(range(len(on_device)))
    state = 12 + asked.accumulator_itemsize
    assert sum(sizes[b] * 128 * (2 + state) for b in on_device) <= device
    if on_device:
        fewer = [replace(b, movable=b.index >= on_device[-1]) for b in layout.bundles]
        assert host_need(replace(layout, bundles=tuple(fewer)), asked) > host


def test_states_of_the_last_units_go_to_the_disk_first() -> None:
    """Segments of 16 and of 64 lines of 128 elements: buffers are of the largest that goes, so the small ones go first."""
    layout = layout_of([(16, [unit]) for unit in range(12)] + [(64, [12])])
    asked = replace(context(), disk_budget=PLENTY)
    each, buffers = 16 * 128 * 12, 4 * 16 * 128 * 12
    need = host_need(layout, asked)
    for saved, chosen in ((1, [7, 8, 9, 10, 11]), (each, [7, 8, 9, 10, 11]), (each + 1, [6, 7, 8, 9, 10, 11])):
        found = within_host(layout, replace(asked, host_budget=need - saved), RULE)
        assert sorted(found.on_disk) == chosen
        assert host_need(found, asked) == need - len(chosen) * each + buffers <= need - saved
        assert not kept(found)


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    host=st.integers(0, 600_000),
    disk=st.integers(0, 900_000),
    accumulate=st.sampled_from([1, 2]),
)
def test_disk_and_device_together_hold_what_the_host_cannot(sizes: list[int], host: int, disk: int, accumulate: int) -> None:
    layout = layout_of([(size, [unit]) for unit, size in enumerate(sizes)])
    asked = replace(context(accumulate=accumulate), host_budget=host, disk_budget=disk)
    error, found = outcome(layout, asked)
    assert error is None and found is not None, "the device has plenty"
    assert host_need(found, asked) <= host
    assert disk_bytes(found) <= disk
    assert not found.on_disk.intersection(kept(found))
    if host_need(layout, asked) <= host:
        assert found is layout


def test_of_states_on_the_disk_the_device_takes_those_of_the_first_units() -> None:
    """Where the host cannot even hold all slots: whose bundle is on the device needs neither the slot nor the disk."""
    layout = layout_of([(16, [unit]) for unit in range(12)])
    slots, buffers = 12 * 16 * 128 * 2, 4 * 16 * 128 * 12
    asked = replace(context(), disk_budget=PLENTY, host_budget=slots + buffers)
    assert within_host(layout, asked, RULE) == replace(layout, on_disk=frozenset(range(12)))
    found = within_host(layout, replace(asked, host_budget=slots + buffers - 16 * 128 * 2 - 1), RULE)
    assert kept(found) == [0, 1] and found.on_disk == frozenset(range(2, 12))
    assert host_need(found, asked) == slots - 2 * 16 * 128 * 2 + buffers


def test_a_layout_that_is_all_on_the_device_needs_no_host() -> None:
    asked = replace(context(), host_budget=0)
    found = within_host(FOUR, asked, RULE)
    assert kept(found) == [0, 1, 2, 3] and host_need(found, asked) == 0
