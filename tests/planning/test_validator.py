"""Every fault that a plan can have is found, and named."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from systems.planning.layout import Layout
from systems.planning.plan import LaneKind, Operation, OpKind, Plan, PlannedOperation, Tier, UpdateRule
from systems.planning.step.operations import ScheduledOperation, Work
from systems.planning.step.schedule import expand
from systems.planning.step.validator import PlanError, check_waits, circular_wait, validate
from systems.planning.trace import Moment, Phase, Trace
from tests.planning.reference import can_run_ahead
from tests.planning.synthetic import Case, cases, context, layout_of, trace_of
from tests.planning.test_timeline import planned

LAYOUT = layout_of([(2, [0]), (3, [1]), (4, [2])])
TRACE = trace_of(LAYOUT, activation=100)
CASE = Case(LAYOUT, TRACE, context())
GOOD = planned(CASE, prefetch=1)


def moment(phase: Phase, unit: int) -> int:
    return next(i for i, m in enumerate(TRACE.moments) if m.phase is phase and m.unit == unit)


def refused(plan: Plan, *, device: int | None = None, host: int | None = None) -> str:
    budgets = context() if device is None else context(device=device)
    if host is not None:
        budgets = replace(budgets, host_budget=host)
    with pytest.raises(PlanError) as raised:
        validate(LAYOUT, TRACE, plan, budgets)
    return str(raised.value)


def with_operation(trigger: int, kind: OpKind, bundle: int, *, priority: int = -1, plan: Plan = GOOD) -> Plan:
    return replace(plan, operations=(*plan.operations, PlannedOperation(trigger, priority, Operation(kind, bundle))))


def without(kind: OpKind, bundle: int, trigger: int | None = None) -> Plan:
    kept = tuple(
        p
        for p in GOOD.operations
        if (p.operation.kind, p.operation.bundle) != (kind, bundle) or (trigger is not None and p.trigger != trigger)
    )
    return replace(GOOD, operations=kept)


def test_a_good_plan_passes() -> None:
    memory = validate(LAYOUT, TRACE, GOOD, context())
    assert memory.total_peak > memory.pool_peak > 0


def test_budget() -> None:
    peak = validate(LAYOUT, TRACE, GOOD, context()).total_peak
    validate(LAYOUT, TRACE, GOOD, context(device=peak))
    message = refused(GOOD, device=peak - 1)
    assert f"{peak} bytes on the device" in message
    assert f"budget {peak - 1}" in message
    assert "of unit" in message
    assert "bytes on the host" in refused(GOOD, host=100)


def test_use_before_fetch() -> None:
    message = refused(without(OpKind.FETCH, 1))
    assert "bundle 1 is used before it is fetched" in message
    assert "of unit 1" in message


def test_fetched_too_late() -> None:
    late = with_operation(moment(Phase.FORWARD_EXIT, 1), OpKind.FETCH, 1, plan=without(OpKind.FETCH, 1))
    assert "bundle 1 is used before it is fetched" in refused(late)


@pytest.mark.parametrize("kind", [OpKind.DROP, OpKind.WRITE_BACK])
def test_released_while_held(kind: OpKind) -> None:
    layout = layout_of([(2, [0]), (3, [1]), (2, [0, 1])])
    trace = trace_of(layout)
    inner = list(trace.moments)
    # unit 0 wraps unit 1: 0 enters, 1 enters and exits, 0 exits
    inner[2], inner[3], inner[4] = inner[3], inner[4], inner[2]
    nested = replace(trace, moments=tuple(inner))
    case = Case(layout, nested, context())
    plan = planned(case, spare=10_000)
    validate(layout, nested, plan, case.context)
    bad = replace(plan, operations=(*plan.operations, PlannedOperation(3, 99, Operation(kind, 0))))
    with pytest.raises(PlanError, match=f"moment 3 .*bundle 0 has a {kind.value} while a unit holds it"):
        validate(layout, nested, bad, case.context)


def test_redundant_operations() -> None:
    trigger = moment(Phase.FORWARD_EXIT, 0)
    assert "bundle 0 is fetched though it is on the device" in refused(with_operation(trigger, OpKind.FETCH, 0))
    assert "bundle 2 has a drop though it is not on the device" in refused(with_operation(0, OpKind.DROP, 2))


def test_fetch_of_an_outdated_bundle_closes_a_circle() -> None:
    """Bundle 2's update waits for the norm, the norm for bundle 0's gradient, that for bundle 0's fetch behind it."""
    trigger = moment(Phase.BACKWARD_EXIT, 2)
    plan = replace(planned(CASE, prefetch=0))
    bad = with_operation(trigger, OpKind.FETCH, 2, plan=plan)
    assert "circular wait over bundle" in refused(bad)
    schedule = expand(LAYOUT, TRACE, bad, context())
    cycle = circular_wait(schedule.operations)
    assert {o.bundle for o in cycle} >= {2}
    assert circular_wait(expand(LAYOUT, TRACE, plan, context()).operations) == []


def test_gathers_and_reductions_wait_in_one_queue() -> None:
    """A gather cannot wait for a reduction behind it; one that reads what another queue makes can."""
    gather = ScheduledOperation(0, 0, Work.GATHER, LaneKind.GATHER, waits=(1,))
    behind = ScheduledOperation(1, 0, Work.REDUCE, LaneKind.REDUCE)
    assert {o.ticket for o in circular_wait([gather, behind])} == {0, 1}
    assert circular_wait([gather, behind._replace(kind=Work.OFFLOAD, lane=LaneKind.D2H)]) == []


def test_nothing_waits_for_an_update_ahead_of_the_last_fetch() -> None:
    plan = planned(CASE, prefetch=0, rule=UpdateRule.WHEN_REDUCED)
    bad = with_operation(moment(Phase.BACKWARD_EXIT, 2), OpKind.FETCH, 2, plan=plan)
    assert "waits for an update of this step ahead of the fetch of bundle" in refused(bad)


def test_fetch_of_an_outdated_bundle_after_the_last_fetch() -> None:
    trigger = moment(Phase.BACKWARD_EXIT, 0)
    assert "circular wait over bundle 2" in refused(with_operation(trigger, OpKind.FETCH, 2))
    plan = planned(CASE, prefetch=0, rule=UpdateRule.WHEN_REDUCED)
    bad = with_operation(trigger, OpKind.FETCH, 2, plan=plan)
    assert "bundle 2 is fetched between its flush and STEP_END" in refused(bad)


def test_the_step_must_repeat() -> None:
    assert "bundle 0 is on the device at the end of the step but not at its start" in refused(
        replace(
            with_operation(0, OpKind.FETCH, 0),
            resident_at_start=GOOD.resident_at_start - {0},
        )
    )
    assert "bundle 0 is not at the end of the step but at its start" in refused(without(OpKind.FETCH, 0, len(TRACE) - 1))


def test_what_stays_on_the_device() -> None:
    tiers = (Tier.DEVICE, Tier.HOST, Tier.HOST)
    plan = planned(CASE, on_device=frozenset({0}))
    assert plan.optimizer_tier == tiers
    validate(LAYOUT, TRACE, plan, context())
    assert "bundle 0 stays on the device, yet the plan does not have it resident" in refused(
        replace(plan, resident_at_start=plan.resident_at_start - {0})
    )
    trigger = moment(Phase.FORWARD_EXIT, 0)
    assert "bundle 0 stays on the device, yet the plan has a drop" in refused(
        with_operation(trigger, OpKind.DROP, 0, plan=plan)
    )


def test_order_of_collectives_must_follow_from_the_plan() -> None:
    first = GOOD.operations[0]
    assert "two operations have priority" in refused(with_operation(first.trigger, OpKind.DROP, 1, priority=first.priority))


def test_what_cannot_run_ahead_of_the_norm() -> None:
    validate(LAYOUT, TRACE, replace(GOOD, ahead=frozenset({0, 1, 2})), context())
    assert "bundle 7 is to run ahead of the norm, and there is no such bundle" in refused(replace(GOOD, ahead=frozenset({7})))
    early = planned(CASE, rule=UpdateRule.WHEN_REDUCED)
    assert "bundle 1 is to run ahead of a norm for which no update waits" in refused(replace(early, ahead=frozenset({1, 2})))
    kept = planned(CASE, on_device=frozenset({1}))
    assert "bundle 1 is to run ahead of the norm, yet it is updated on the device" in refused(
        replace(kept, ahead=frozenset({0, 1}))
    )


def refused_ahead(layout: Layout, trace: Trace, accumulate: int = 1) -> str:
    """Of bundle 1."""
    case = Case(layout, trace, context(accumulate=accumulate))
    plan = planned(case, prefetch=1)
    validate(layout, trace, plan, case.context)
    validate(layout, trace, replace(plan, ahead=frozenset({0, 2})), case.context)
    with pytest.raises(PlanError, match="the update of bundle 1 is to run ahead of the norm, yet") as raised:
        validate(layout, trace, replace(plan, ahead=frozenset({0, 1, 2})), case.context)
    return str(raised.value)


def test_a_frozen_bundle_cannot_run_ahead() -> None:
    layout = layout_of([(2, [0]), (3, [1]), (4, [2])], frozen=frozenset({1}))
    assert "it is not trained" in refused_ahead(layout, trace_of(layout))


def test_a_bundle_on_the_disk_cannot_run_ahead() -> None:
    plan = replace(GOOD, ahead=frozenset({1}))
    with pytest.raises(PlanError, match="bundle 1 .* its states have their home on the disk"):
        validate(replace(LAYOUT, on_disk=frozenset({1})), TRACE, plan, replace(context(), disk_budget=1 << 40))


def test_a_bundle_without_a_gradient_in_the_last_micro_step_cannot_run_ahead() -> None:
    assert "is not flushed in the last micro-step" in refused_ahead(LAYOUT, trace_of(LAYOUT, unused=frozenset({1})))
    trace = trace_of(LAYOUT, accumulate=2)
    late = [m for m, bundles in enumerate(trace.flushes) if 1 in bundles][-1]
    only_first = replace(trace, flushes=tuple(() if m == late else bundles for m, bundles in enumerate(trace.flushes)))
    assert "is not flushed in the last micro-step" in refused_ahead(LAYOUT, only_first, accumulate=2)


def entered_again(*flushes: tuple[int, ...]) -> Trace:
    """The backward of unit 1 is seen a second time, behind the flush of its bundle."""
    again = moment(Phase.BACKWARD_EXIT, 1) + 1
    added = (Moment(Phase.BACKWARD_ENTER, 1), Moment(Phase.BACKWARD_EXIT, 1))
    return Trace(
        (*TRACE.moments[:again], *added, *TRACE.moments[again:]),
        (*TRACE.non_model_bytes[:again], 0, 0, *TRACE.non_model_bytes[again:]),
        (*TRACE.compute_time_s[:again], 0.0, 0.0, *TRACE.compute_time_s[again:]),
        (*TRACE.flushes[:again], *flushes, *TRACE.flushes[again:]),
    )


def test_a_bundle_that_is_used_or_flushed_again_cannot_run_ahead() -> None:
    assert "it is used again after its last flush" in refused_ahead(LAYOUT, entered_again((), ()))
    assert "its gradient is flushed 2 times in the last micro-step" in refused_ahead(LAYOUT, entered_again((), (1,)))


def test_nothing_waits_for_an_update_that_ran_ahead_ahead_of_the_last_fetch() -> None:
    trace = entered_again((), ())
    plan = planned(Case(LAYOUT, trace, context()), prefetch=0)
    check_waits(trace, expand(LAYOUT, trace, plan, context()))
    ahead = expand(LAYOUT, trace, replace(plan, ahead=frozenset({1})), context())
    with pytest.raises(PlanError, match="fetch of bundle 1 waits for an update of this step ahead of the fetch of bundle 0"):
        check_waits(trace, ahead)


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from(UpdateRule), st.frozensets(st.integers(0, 3), max_size=2))
def test_what_can_run_ahead_is_what_a_plainer_rule_says(case: Case, rule: UpdateRule, on_device: frozenset[int]) -> None:
    plan, good = planned(case, rule=rule, on_device=on_device), set()
    for bundle in range(len(case.layout.bundles)):
        with suppress(PlanError):
            validate(case.layout, case.trace, replace(plan, ahead=frozenset({bundle})), case.context)
            good.add(bundle)
    assert good == can_run_ahead(case.layout, case.trace, plan, case.context)


def test_second_versions_are_the_hosts() -> None:
    need = validate(LAYOUT, TRACE, GOOD, context()).host_bytes[0]
    with_one = replace(GOOD, ahead=frozenset({1}))
    pages = 3 * 4096 + 4096  # 3 * 128 elements
    validate(LAYOUT, TRACE, with_one, replace(context(), host_budget=need + pages))
    assert f"{need + pages} bytes on the host" in refused(with_one, host=need + pages - 1)


def test_shape() -> None:
    assert "signature" in refused(replace(GOOD, signature=GOOD.signature[:-1]))
    assert "optimizer tiers for 3 segments" in refused(replace(GOOD, optimizer_tier=(Tier.HOST,)))
    assert "updated on disk" in refused(replace(GOOD, optimizer_tier=(Tier.DISK, Tier.HOST, Tier.HOST)))
    assert "has trigger 99" in refused(with_operation(99, OpKind.DROP, 0))
    assert "there is no bundle 7" in refused(with_operation(0, OpKind.DROP, 7))
    fixed = layout_of([(2, [0])], unmovable=frozenset({0}))
    trace = trace_of(fixed)
    plan = Plan(trace.signature, (), (Tier.HOST,), frozenset({0}))
    with pytest.raises(PlanError, match="bundle 0 never moves, yet its update is on the host"):
        validate(fixed, trace, plan, context())
