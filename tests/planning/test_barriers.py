"""A plan's barriers: what the device's lanes wait for, in a schedule and on the simulator's clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from systems.planning.clock.rates import Costs, Rates, default_queues
from systems.planning.clock.simulator import clocked
from systems.planning.plan import DEVICE_LANES, LaneKind, Plan, UpdateRule
from systems.planning.step.operations import Work
from systems.planning.step.schedule import Schedule, expand
from systems.planning.step.validator import PlanError, circular_wait, validate
from systems.planning.step.waits import Barriers
from tests.planning.machines import machine, simulate
from tests.planning.races import find_races
from tests.planning.synthetic import Case, cases, context, layout_of, trace_of
from tests.planning.test_timeline import planned, plans


def with_barriers(plan: Plan, moments: frozenset[int]) -> Plan:
    return replace(plan, barriers=frozenset(m for m in moments if m < len(plan.signature)))


@settings(max_examples=80, deadline=None)
@given(cases(ranks=True), plans, st.frozensets(st.integers(0, 40), max_size=12))
def test_a_barrier_changes_waits_and_nothing_else(case: Case, choices: dict[str, Any], moments: frozenset[int]) -> None:
    free = planned(case, **choices)
    joined = with_barriers(free, moments)
    memory = validate(case.layout, case.trace, joined, case.context)
    assert memory == validate(case.layout, case.trace, free, case.context)
    schedule, without = (expand(case.layout, case.trace, plan, case.context) for plan in (joined, free))
    assert find_races(schedule.issued(steps=3)) == []
    assert circular_wait(schedule.operations) == []
    mine = [o for o in schedule.operations if o.kind is not Work.BARRIER]
    assert [(o.kind, o.lane, o.bundle, o.moment) for o in mine] == [
        (o.kind, o.lane, o.bundle, o.moment) for o in without.operations
    ]
    assert sum(o.kind is Work.BARRIER for o in schedule.operations) == len(joined.barriers)


def spans_by_side(schedule: Schedule, case: Case, barrier: int, speeds: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Ends of what the device's lanes were given before the barrier, and starts of what they are given after."""
    profile = machine(devices=case.context.ranks, **speeds)
    costs = Costs(case.layout, case.context, Rates(profile, case.context.ranks), default_queues())
    timed = clocked(schedule.operations, len(case.trace), costs)
    mine = [(o.ticket, span) for o, span in timed.operations if o.lane in DEVICE_LANES and o.kind is not Work.NORM]
    ends = [span.end_s for ticket, span in mine if ticket < barrier]
    return ends, [span.start_s for ticket, span in mine if ticket > barrier]


@settings(max_examples=60, deadline=None)
@given(cases(ranks=True), plans, st.integers(0, 40), st.integers(1, 20), st.integers(1, 20))
def test_what_comes_after_a_barrier_starts_when_all_before_it_is_done(
    case: Case, choices: dict[str, Any], moment: int, up: int, down: int
) -> None:
    plan = with_barriers(planned(case, **choices), frozenset({moment % len(case.trace)}))
    schedule = expand(case.layout, case.trace, plan, case.context)
    (barrier,) = [o.ticket for o in schedule.operations if o.kind is Work.BARRIER]
    speeds = {"h2d_bytes_per_s": up * 1e5, "d2h_bytes_per_s": down * 1e5, "device_link_bytes_per_s": 1e6}
    ends, starts = spans_by_side(schedule, case, barrier, speeds)
    assert not ends or not starts or max(ends) <= min(starts) + 1e-9


def test_a_barrier_costs_what_a_copy_could_have_run_on() -> None:
    """Two units of 1 s a pass; the first gradient takes 2 s to leave. With a barrier the unit below waits for it to be gone."""
    layout = layout_of([(1000, [0]), (1000, [1])])
    trace = trace_of(layout, seconds=1.0)
    free = planned(Case(layout, trace, context()), spare=10**9, rule=UpdateRule.WHEN_REDUCED)
    joined = replace(free, barriers=frozenset({7}))  # the first unit's BACKWARD_ENTER, behind the other's gradient
    profile = machine(d2h_bytes_per_s=1000 * 128 * 2 / 2.0)
    times = [simulate(layout, trace, plan, context(), profile).step_time_s for plan in (free, joined)]
    assert times[1] == pytest.approx(times[0] + 1.0, rel=1e-6), "a second of it hides behind what runs until there"


def test_the_hosts_updates_go_on() -> None:
    barriers = Barriers(lane.value for lane in DEVICE_LANES)
    barriers.record(1, LaneKind.H2D.value)
    barriers.record(2, LaneKind.CPU.value)
    barriers.record(3, LaneKind.COMPUTE.value)
    barriers.join()
    barriers.record(4, LaneKind.H2D.value)
    barriers.join()
    assert barriers.record(5, LaneKind.CPU.value) == {}
    assert barriers.record(6, LaneKind.D2H.value) == {"h2d": 4, "compute": 3}
    assert barriers.record(7, LaneKind.H2D.value) == {"compute": 3}
    assert barriers.record(8, LaneKind.H2D.value) == {}


@pytest.mark.parametrize("moment", [-1, 99])
def test_a_barrier_outside_the_step_is_refused(moment: int) -> None:
    layout = layout_of([(1, [0])])
    trace = trace_of(layout)
    case = Case(layout, trace, context())
    with pytest.raises(PlanError, match=f"a barrier is at moment {moment} of {len(trace)} moments"):
        validate(layout, trace, replace(planned(case), barriers=frozenset({moment})), context())
