"""What breaks off where pages move by themselves. With `paper` alone they do, which neither clips nor skips; here they do by
Angel-PTM's default, so that what is asked of whole layers is asked of pages.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from systems.planning.plan import LaneKind
from systems.strategies.angel_ptm.options import AngelPTMOptions
from systems.strategies.angel_ptm.paging import LayerPages, schedule_pages
from systems.strategies.angel_ptm.placement import AngelPtmDivision
from systems.strategies.angel_ptm.scheduling import Moves
from systems.strategies.angel_ptm.strategy import AngelPTM
from systems.substrate.moves.pages import PageMoves
from tests.systems import test_faults, test_interrupts

ASKED: dict[str, Callable[[], None]] = {
    "an allocation fails once": partial(test_faults.test_an_allocation_that_fails_once_is_made_again, "angel-ptm", 1, 5),
    "allocations keep failing": partial(
        test_faults.test_an_allocation_that_keeps_failing_is_said_and_forgotten, "angel-ptm", 9
    ),
    "a copy fails": partial(
        test_faults.test_a_failed_copy_or_update_is_raised_and_close_is_clean, "angel-ptm", 1, LaneKind.H2D
    ),
    "an interrupt in a fetch": partial(test_faults.test_an_interrupt_in_an_operation, "angel-ptm", "fetch bundle", False),
    "an interrupt behind a fetch": partial(test_faults.test_an_interrupt_in_an_operation, "angel-ptm", "fetch bundle", True),
    "an update fails": partial(
        test_faults.test_a_failed_copy_or_update_is_raised_and_close_is_clean, "angel-ptm", 1, LaneKind.CPU
    ),
    "an interrupt anywhere": partial(test_interrupts.test_ctrl_c_anywhere_in_a_step, 1, "angel-ptm"),
    "an evaluation fails": partial(test_faults.test_an_exception_in_evaluation_costs_nothing, "angel-ptm"),
}


def noted(done: Callable[..., None], found: list[Any]) -> Callable[..., None]:
    def called(*given: Any) -> None:
        found.append(given)
        done(*given)

    return called


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Pages that moved or were left, by the schedule of `paper`, whatever the options."""
    found: list[Any] = []

    def by_pages(self: AngelPTM, division: Any, placement: AngelPtmDivision) -> Moves:
        sizes, options = division.sizes(placement.residence), self._options
        assert isinstance(options, AngelPTMOptions)
        layers = {bundle: LayerPages.of(division.layout, bundle, options.page) for bundle in sizes}
        return schedule_pages(division.demand, layers, placement.room, division.room_for_merging(placement.residence))

    monkeypatch.setattr(AngelPTM, "_schedule", by_pages)
    for name in ("move", "leave"):
        monkeypatch.setattr(PageMoves, name, noted(getattr(PageMoves, name), found))
    return found


@pytest.mark.filterwarnings("ignore:module forward hook with ``always_call=True`` raised")
@pytest.mark.parametrize("what", ASKED)
def test_what_breaks_off_among_pages(what: str, moved: list[Any]) -> None:
    ASKED[what]()
    assert moved, "void: whole layers moved"
