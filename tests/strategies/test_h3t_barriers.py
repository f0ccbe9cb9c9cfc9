"""H3T's seventh switch: which segments end in a barrier, and that plans keep or leave them as their solver says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from systems.planning.trace import EXIT, Moment, Phase
from systems.strategies.h3t.barriers import barriers
from systems.strategies.h3t.candidates import LIKE
from systems.strategies.h3t.options import H3TOptions, H3TStatistics, Solver
from systems.strategies.h3t.switches import Switches
from systems.substrate.engine import ManagedEngine
from tests.planning.synthetic import layout_of, trace_of
from tests.systems.running import Run, assert_equal, h3t
from tests.systems.setups import Setup, budget_of, reference

EMBEDDING, FIRST, SECOND, HEAD = range(4)
TRACE = trace_of(layout_of([(1, [unit]) for unit in range(4)]))
ON, OFF = Switches(synchronise=True), Switches()


def ends(switches: dict[int, Switches]) -> list[Moment]:
    return [TRACE.moments[m] for m in sorted(barriers(TRACE, switches))]


def test_a_layer_s_two_segments_end_with_its_computation() -> None:
    forward, backward = Moment(Phase.FORWARD_EXIT, SECOND), Moment(Phase.BACKWARD_EXIT, SECOND)
    assert ends({FIRST: OFF, SECOND: ON}) == [forward, Moment(Phase.BACKWARD_ENTER, SECOND), backward]


def test_the_short_segments_go_by_the_first_and_the_last_layer() -> None:
    """As in the cost model: before the first layer and behind the last backward by the first, at the turn by the last."""
    assert ends({FIRST: ON, SECOND: OFF}) == [
        Moment(Phase.FORWARD_ENTER, FIRST),
        Moment(Phase.FORWARD_EXIT, FIRST),
        Moment(Phase.BACKWARD_EXIT, FIRST),
        Moment(Phase.BACKWARD_END),
    ]
    assert ends({FIRST: OFF, SECOND: OFF}) == []


@settings(max_examples=50, deadline=None)
@given(
    order=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    layers=st.dictionaries(st.integers(0, 5), st.booleans()),
    accumulate=st.sampled_from([1, 2]),
)
def test_every_end_of_a_layer_s_pass_is_one_and_none_lies_between_neighbours(
    order: list[int], layers: dict[int, bool], accumulate: int
) -> None:
    trace = trace_of(layout_of([(1, [unit]) for unit in range(6)]), order=order, accumulate=accumulate)
    switches = {unit: Switches(synchronise=on) for unit, on in layers.items()}
    found = barriers(trace, switches)
    for number, moment in enumerate(trace.moments):
        if moment.phase in EXIT and moment.unit in layers:
            assert (number in found) == layers[moment.unit]
    for number in found:
        before, here = trace.moments[number - 1], trace.moments[number]
        assert here.phase is not Phase.STEP_BEGIN and here.phase is not Phase.STEP_END
        if here.phase in (Phase.FORWARD_ENTER, Phase.BACKWARD_ENTER):
            assert layers[here.unit] and before.unit not in layers, "a neighbour's post-process is still to be issued"


def trained(solver: Solver) -> tuple[Run, H3TStatistics, int]:
    setup = Setup("opt", clip=0.5)
    run = setup.run(h3t(), budget_of(setup, "half"), H3TOptions(profile_steps=1, solver=solver, samples=50), seed=1)
    assert_equal(reference(setup), run)
    assert isinstance(run.engine, ManagedEngine)
    told, plan = run.engine.statistics(), run.engine.cursor.plan
    assert isinstance(told, H3TStatistics) and plan is not None
    return run, told, len(plan.barriers)


@pytest.mark.parametrize("solver", ["on", "dp", "drawn"])
def test_a_solver_asked_for_by_name_keeps_its_barriers(solver: Solver) -> None:
    _, told, barriers = trained(solver)
    share = (told.switch_on_ratios or {})["synchronise"]
    assert told.barriers_per_step == barriers > 0 and share > 0
    assert solver == "drawn" or (share == 1.0 and barriers == 4 + 4 + 3)


@pytest.mark.parametrize("solver", ["best", "off"])
def test_the_best_plan_waits_for_nothing_it_need_not(solver: Solver) -> None:
    """What it costs is never less than nothing, and memory is the same."""
    _, told, barriers = trained(solver)
    assert told.barriers_per_step == barriers == 0
    assert (told.switch_on_ratios or {})["synchronise"] == 0.0
    fastest_s = min(told.candidates_s.values())  # of those as fast, the one that moves the fewest bytes is taken
    assert (told.simulated_step_time_s or 0.0) <= fastest_s * (1 + LIKE) or solver == "off"
