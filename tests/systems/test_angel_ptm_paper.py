"""Angel-PTM by its paper's rules: the bits of plain training in half of its memory, and updates of what has come home."""

from __future__ import annotations

from typing import Any

import pytest

from systems.planning.plan import UpdateRule
from tests.planning.races import find_races
from tests.systems.running import Run, angel_ptm, managed
from tests.systems.test_ordering import as_issued
from tests.systems.test_ranks import assert_is_one_rank, on_one_rank, on_ranks
from tests.systems.test_ranks_matrix import PAGE, assert_as_it_should_be
from tests.systems.test_shards import Last, assert_as_planned, assert_bytes_as_planned, plan_of

PAPER = {"variant": "paper", "page": PAGE}
MODELS = ("opt-tiny", "gpt-tiny", "bert-tiny", "t5-tiny")


def half(model: str) -> int:
    """Of what resident takes."""
    return (on_one_rank(model, 1, 0.0, "fp32").memory.device_peak_bytes or 0) // 2


def assert_as_alone(run: Run, last: Last) -> None:
    log = managed(run.engine).log
    assert not find_races(as_issued(log.operations))
    assert_as_planned(run, last.counters[0], [o.what for o in log.operations[last.issued[0] :]])
    assert_bytes_as_planned(plan_of(run), log.bytes[last.bytes[0] - 1 :])


def trained(model: str, size: int, options: dict[str, Any], last: Last) -> list[Run]:
    return on_ranks(angel_ptm(), model, size, 1, options, before=last.note, device_memory=half(model), log_events=True)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.one_in(4)
def test_half_of_resident_s_memory_holds_the_bits(model: str, size: int) -> None:
    last = Last()
    found = trained(model, size, PAPER, last)
    assert_is_one_rank(on_one_rank(model, size, 0.0, "fp32"), found)
    if size > 1:
        assert_as_it_should_be(found, last)
    else:
        assert_as_alone(found[0], last)
    for run in found:
        plan = plan_of(run)
        assert run.counters["fallbacks"] == run.counters["departures"] == 0 and plan.operations
        assert plan.update_rule is UpdateRule.WHEN_REDUCED and not plan.ahead
        assert (run.memory.device_peak_bytes or 0) <= (plan.predicted_device_peak_bytes or 0) <= half(model)


def updates(options: dict[str, Any]) -> list[tuple[str, int]]:
    """(what, number of the bundle) of a steady step, in order of issue: offload, update of what the host updates, and exit."""
    last = Last()
    (run,) = trained("opt-tiny", 1, options, last)
    engine = managed(run.engine)
    assert not find_races(as_issued(engine.log.operations))  # an update waits for the offload of what it reads
    found = (o.label.split(" ") for o in engine.log.operations[last.issued[0] :])
    return [
        (words[0], int(words[-1].rstrip(")") if words[0] == "release" else words[2])) for words in found if words[:2] in WORDS
    ]


WORDS = (["offload", "bundle"], ["update", "bundle"], ["release", "by"])


def test_updates_begin_as_soon_as_gradients_are_home_and_not_before() -> None:
    """Each right behind its own offload, while backward goes on; by default they wait for the step's norm."""
    paper, default = updates(PAPER), updates({"page": PAGE, "run_ahead": False})
    for found, at_once in ((paper, True), (default, False)):
        updated = [number for number, (what, _) in enumerate(found) if what == "update"]
        assert updated
        for number in updated:
            home = ("offload", found[number][1])
            assert home in found[:number]
            assert (found[number - 1] == home) is at_once
    assert paper[-1][0] == "release" and default[-1][0] == "update"
