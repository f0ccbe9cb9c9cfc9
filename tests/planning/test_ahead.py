"""Which updates run ahead of the norm: never more than the host has room for, and no more than help."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from systems import registry
from systems.planning import hardware
from systems.planning.layout import Layout
from systems.planning.plan import Plan, UpdateRule
from systems.planning.policy.ahead import NEAR, AheadChoice, slowed
from systems.planning.policy.homes import host_need
from systems.planning.step.residence import second_version_bytes
from systems.planning.step.validator import validate
from systems.planning.strategy import UNLIMITED, PlanningContext
from systems.planning.trace import Trace
from systems.prediction.policies import policy_of
from tests.planning.machines import machine, simulate
from tests.planning.reference import can_run_ahead
from tests.planning.synthetic import Case, cases, context, layout_of, trace_of, transformer
from tests.planning.test_timeline import planned, plans
from tests.systems import every

PAGE = 4096
EIGHT = layout_of([(1000, [unit]) for unit in range(8)])
SLOW_ADAM = machine(cpu_adam_bytes_per_s=8 * 1000 * 128 * 28 / 20e-3, d2h_bytes_per_s=8 * 1000 * 128 * 2 / 4e-3)


def with_spare(layout: Layout, given: PlanningContext, spare: int, **more: Any) -> PlanningContext:
    """A host with so many bytes more than it needs."""
    return replace(given, host_budget=host_need(layout, given) + spare, **more)


def choice_of(case: Case, spare: int, plan: Plan | None = None, **more: Any) -> AheadChoice:
    made = planned(case) if plan is None else plan
    return AheadChoice(
        replace(made, ahead=frozenset()), case.layout, case.trace, with_spare(case.layout, case.context, spare, **more)
    )


def eight(seconds: float = 1e-3, accumulate: int = 1) -> Case:
    return Case(EIGHT, trace_of(EIGHT, seconds=seconds, accumulate=accumulate), context(accumulate=accumulate))


def last_flush(trace: Trace, bundle: int) -> int:
    return max(moment for moment, bundles in enumerate(trace.flushes) if bundle in bundles)


@settings(max_examples=150, deadline=None)
@given(
    cases(ranks=True), plans, st.integers(-3, 40), st.integers(0, 4095), st.one_of(st.none(), st.frozensets(st.integers(0, 9)))
)
def test_no_more_runs_ahead_than_the_host_has_room_for(
    case: Case, choices: dict[str, object], pages: int, more: int, allowed: frozenset[int] | None
) -> None:
    """Without a profile all that fit, in the order of their flushes: what was passed over does not fit beside those before."""
    plan, spare = replace(planned(case, **choices), ahead=frozenset()), pages * PAGE + more  # type: ignore[arg-type]
    given_all = replace(choice_of(case, spare, plan), allowed=allowed)
    made, layout = given_all.made(), case.layout
    assert replace(made, ahead=frozenset()) == plan
    assert given_all.spare_bytes == spare
    if made.ahead:
        need = max(validate(layout, case.trace, made, given_all.context).host_bytes)
        assert need <= given_all.context.host_budget
        assert second_version_bytes(layout, case.context, made.ahead) <= spare
    good = can_run_ahead(layout, case.trace, plan, case.context)
    good = good if allowed is None else good & allowed
    assert made.ahead <= good
    for bundle in good - made.ahead:
        before = {b for b in made.ahead if last_flush(case.trace, b) <= last_flush(case.trace, bundle)}
        assert second_version_bytes(layout, case.context, before | {bundle}) > spare


def test_second_versions_by_hand() -> None:
    """Bundles of 128,000 elements: master and moments of 512,000 bytes are exactly 125 pages, slots of 256,000 are 62.5."""
    assert second_version_bytes(EIGHT, context(), ()) == 0
    assert second_version_bytes(EIGHT, context(), {3}) == 3 * 125 * PAGE + 63 * PAGE
    assert second_version_bytes(EIGHT, context(), {3, 4}) == 3 * 250 * PAGE + 125 * PAGE
    assert second_version_bytes(EIGHT, context(accumulate=2), {3}) == 3 * 125 * PAGE


def test_what_flushes_first_runs_ahead_first_and_what_no_longer_fits_is_passed_over() -> None:
    layout = layout_of([(10, [0]), (1000, [1]), (1000, [2]), (1000, [3])])
    case = Case(layout, trace_of(layout), context())
    of = {count: second_version_bytes(layout, context(), range(4 - count, 4)) for count in (1, 2, 3)}
    assert choice_of(case, of[2]).eligible == (3, 2, 1, 0)
    assert choice_of(case, of[2]).made().ahead == {3, 2}
    assert choice_of(case, of[2] - 1).made().ahead == {3, 0}
    assert choice_of(case, of[3] - 1).made().ahead == {3, 2, 0}
    assert not choice_of(case, -1).made().ahead and not choice_of(case, 0).made().ahead


def mean_step_s(case: Any, choice: AheadChoice, ahead: Iterable[int]) -> float:
    """Over the machine and one whose host is slower."""
    plan = replace(choice.plan, ahead=frozenset(ahead))
    machines = SLOW_ADAM, slowed(SLOW_ADAM)
    return sum(simulate(case.layout, case.trace, plan, case.context, each).step_time_s for each in machines) / 2


def test_with_a_profile_the_fewest_that_are_as_good_as_what_fits() -> None:
    """Adam takes 20 ms of a step, compute 7: the norm holds all of it back. Where all fit it is all."""
    case = eight(seconds=2e-4)
    everything = choice_of(case, UNLIMITED >> 1, hardware=SLOW_ADAM)
    assert everything.made().ahead == set(range(8))
    choice = choice_of(case, second_version_bytes(EIGHT, context(), range(7)), hardware=SLOW_ADAM)
    mean_s = partial(mean_step_s, case, choice)
    assert mean_s(()) > 1.1 * mean_s(range(1, 8)), "void: nothing to gain"
    made = choice.made().ahead
    assert 0 < len(made) < 8
    enough = NEAR * min(mean_s(each) for each in (range(1, 8), range(7)))
    assert mean_s(made) <= enough
    late = [b for b in reversed(range(8)) if b in made]
    assert late != list(reversed(range(8 - len(made), 8))) or mean_s(late[:-1]) > enough, "one of them was needless"


@pytest.mark.parametrize("seconds", [4e-4, 8e-4, 1.2e-3])
def test_where_memory_is_short_it_goes_to_those_that_gain_most(seconds: float) -> None:
    """Whether those flushed first, those used first or those between do depends on what takes longer, Adam or compute."""
    case = eight(seconds=seconds)
    choice = choice_of(case, second_version_bytes(EIGHT, context(), range(3)), hardware=SLOW_ADAM)
    mean_s = partial(mean_step_s, case, choice)
    ways = [mean_s(each) for each in ((5, 6, 7), (0, 1, 2), (3, 4, 5))]
    assert mean_s(choice.made().ahead) <= NEAR * min(ways) < mean_s(())


def test_nothing_runs_ahead_where_the_norm_holds_nothing_back() -> None:
    assert not choice_of(eight(seconds=1.0), UNLIMITED >> 1, hardware=SLOW_ADAM).made().ahead
    assert choice_of(eight(seconds=1.0), UNLIMITED >> 1).made().ahead == set(range(8))


@settings(max_examples=40, deadline=None)
@given(cases(), plans, st.sampled_from(["h100-80g-x1", "hai-pcie-a100-40g-x8"]), st.floats(-6, -3), st.integers(0, 60))
def test_what_is_chosen_is_never_slower_than_waiting(
    case: Case, choices: dict[str, object], name: str, seconds: float, pages: int
) -> None:
    trace = replace(case.trace, compute_time_s=(10**seconds,) * len(case.trace))
    plan = planned(case, **choices)  # type: ignore[arg-type]
    choice = choice_of(replace(case, trace=trace), pages * PAGE, plan, hardware=hardware.load(name))
    made = choice.made()
    if made.ahead:
        assert choice.nbytes(made.ahead) <= pages * PAGE
        assert choice.step_time_s(made.ahead) < choice.step_time_s(frozenset())


def test_the_machine_is_known_by_its_device() -> None:
    """At run time there is no profile but that of a shipped machine with such a device."""
    name = hardware.load("h100-80g-x1").device_name
    assert choice_of(eight(), PAGE, device_name=name).profile == hardware.load("h100-80g-x1")
    assert choice_of(eight(), PAGE, device_name="TOY-1").profile is None
    assert choice_of(eight(), PAGE, device_name=name, hardware=SLOW_ADAM).profile is SLOW_ADAM


def test_where_nothing_may_run_ahead() -> None:
    case, plenty = eight(), UNLIMITED >> 1
    assert choice_of(case, plenty).made().ahead == set(range(8))
    for plan in (planned(case, rule=UpdateRule.WHEN_REDUCED), replace(planned(case), provisional=True)):
        choice = choice_of(case, plenty, plan)
        assert choice.made() is choice.plan
    assert not choice_of(case, plenty, any_plan=True).made().ahead
    disk = replace(case, layout=replace(EIGHT, on_disk=frozenset({2})))
    assert not choice_of(disk, plenty).made().ahead


def test_inputs_that_wait_on_the_host_leave_less_to_spare() -> None:
    """By whichever of plan, strategy and traced step they do; each has whole pages, and what is no input's has none."""
    case = eight()
    seen = replace(case.trace, input_bytes=((0, 5000), (1, 100), (2, 4096), (3, 9000)), offloaded=frozenset({2}))
    choice = choice_of(replace(case, trace=seen), 100 * PAGE)
    assert choice.spare_bytes == 99 * PAGE
    assert replace(choice, offloaded=frozenset({0, 2, 7})).spare_bytes == 97 * PAGE
    assert replace(choice, plan=replace(choice.plan, offload_inputs=frozenset({1}))).spare_bytes == 98 * PAGE


def test_times_are_those_of_the_plans_own_switches() -> None:
    """A trace of a step in which all was recomputed, and a plan in which nothing is: less compute, so Adam shows more."""
    case = eight(seconds=2.5e-3)
    seen = replace(case.trace, recomputed=frozenset(range(8)))
    stays, leaves = (
        choice_of(replace(case, trace=seen), UNLIMITED >> 1, replace(planned(case), rematerialise=units), hardware=SLOW_ADAM)
        for units in (frozenset(range(8)), frozenset[int]())
    )
    assert leaves.step_time_s(frozenset()) < stays.step_time_s(frozenset())


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("system", list(every.STRATEGIES))
def test_every_strategys_plan_gets_it_in_the_same_way(system: str, accumulate: int) -> None:
    """Its own plan, and nothing else of it changed."""
    index, chosen, options = transformer(2, 32), policy_of(registry.get(system)), registry.get(system).Options()
    sizes = [p.numel * 2 for p in index.parameters]
    asked = context(device=int(1.5 * sum(sizes)) + 6 * 2**16, accumulate=accumulate)
    layout = chosen(options, asked).layout(index).named(index)
    trace, alone, within = (
        trace_of(layout, accumulate=accumulate, activation=2**16),
        *(chosen(options, asked) for _ in range(2)),
    )
    for strategy in (alone, within):
        strategy.layout(index)
    plan = alone.plan(layout, trace)
    found = AheadChoice(within.plan(layout, trace), layout, trace, asked, within.offloaded_inputs).made()
    assert replace(found, ahead=frozenset()) == replace(plan, predicted_step_time_s=found.predicted_step_time_s)
    good = can_run_ahead(layout, trace, plan, asked)
    assert found.ahead == (frozenset() if plan.provisional else good) and not plan.ahead
    if found.ahead:
        few = frozenset(sorted(good)[:1])
        for allowed in (few, frozenset[int]()):
            again = AheadChoice(plan, layout, trace, asked, within.offloaded_inputs, allowed)
            assert again.made().ahead == allowed
