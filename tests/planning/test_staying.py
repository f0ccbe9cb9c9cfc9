"""Gradients that stay in place until the step's end, Plan.staying: memory, traffic and waits, and what a plan must not ask."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from systems.errors import BudgetError
from systems.planning.plan import OpKind, Plan, PlannedOperation, Tier, UpdateRule
from systems.planning.policy.caching import CacheRequest, plan_cache
from systems.planning.policy.division import Division
from systems.planning.step.operations import Work
from systems.planning.step.running_ahead import hindrance, last_flushes
from systems.planning.step.schedule import expand
from systems.planning.step.validator import PlanError, validate
from systems.planning.trace import Moment, Phase
from tests.planning.races import find_races
from tests.planning.reference import ReferenceRuntime
from tests.planning.synthetic import PLENTY, Case, cases, context, layout_of, trace_of

RULE = UpdateRule.AFTER_NORM
THREE = replace(layout_of([(8, [0]), (8, [1]), (8, [2])]), in_place=frozenset({0, 1, 2}))
SIZE = 8 * 128 * 2


def divided(case: Case, device: int, *, stay: bool = True) -> Division:
    layout = replace(case.layout, in_place=frozenset(b.index for b in case.layout.bundles if b.movable and b.trainable))
    asked = replace(case.context, device_budget=device)
    return Division(layout, case.trace, asked, RULE, "test", str, gradients_stay=stay)


def planned(division: Division, prefetch: int) -> Plan:
    division.least()
    residence, room = division.base, division.room(division.base)
    cache = plan_cache(CacheRequest(division.demand, division.sizes(residence), room, prefetch, OpKind.WRITE_BACK))
    return division.plan(cache.operations, residence, cache.resident)


@settings(max_examples=200, deadline=None)
@given(cases(), st.floats(1.0, 2.0), st.sampled_from([0, 1, 3]))
def test_any_plan_with_gradients_that_stay_is_valid_and_as_the_reference_runs_it(
    case: Case, share: float, prefetch: int
) -> None:
    least = divided(case, PLENTY).least().total_bytes
    division = divided(case, int(share * least) + 1)
    try:
        plan = planned(division, prefetch)
    except BudgetError:
        return
    memory = validate(division.layout, division.trace, plan, division.context)
    found = ReferenceRuntime(division.layout, division.trace, plan, division.context).run()
    schedule = expand(division.layout, division.trace, plan, division.context)
    assert found.peak == memory.pool_peak
    assert find_races(schedule.issued()) == []
    offloads = [o for o in schedule.bare if o.kind is Work.OFFLOAD]
    assert sum(o.bytes for o in offloads) == found.d2h_bytes
    last = len(division.trace) - 1
    evicted = {(p.trigger, p.operation.bundle) for p in plan.operations if p.operation.kind is OpKind.WRITE_BACK}
    assert all(o.moment == last or (o.moment, o.bundle) in evicted for o in offloads if o.bundle in plan.staying)
    assert len([o for o in offloads if o.bundle in plan.staying]) == len(plan.staying)


def test_by_hand() -> None:
    """Three units of one bundle, room for two: one gradient of the last two's leaves for the first one's parameters."""
    trace = trace_of(THREE)
    division = divided(Case(THREE, trace, context()), max(trace.non_model_bytes) + SIZE * 3)
    plan = planned(division, 0)
    assert plan.staying == {0, 1, 2}
    tight = divided(Case(THREE, trace, context()), max(trace.non_model_bytes) + SIZE * 2)
    plan = planned(tight, 0)
    schedule = expand(tight.layout, trace, plan, tight.context)
    left = [(o.moment, o.bundle) for o in schedule.bare if o.kind is Work.OFFLOAD]
    last = len(trace) - 1
    early = [(moment, bundle) for moment, bundle in left if moment != last]
    (moment, bundle) = early[0]
    assert len(early) == 1 and bundle in (1, 2) and trace.moments[moment] == Moment(Phase.BACKWARD_ENTER, 0)
    late = [bundle for moment, bundle in left if moment == last]
    assert late == sorted(late), "what the next step uses first leaves first"
    dropped = divided(Case(THREE, trace, context()), max(trace.non_model_bytes) + SIZE * 2, stay=False)
    assert planned(dropped, 0).staying == frozenset()


def fine() -> tuple[Division, Plan]:
    trace = trace_of(THREE)
    division = divided(Case(THREE, trace, context()), PLENTY)
    return division, planned(division, 0)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"in_place": frozenset({0, 1})}, "bundle 2 is to stay where its parameters were, yet it has a range"),
        ({"update_rule": UpdateRule.WHEN_REDUCED}, "bundle 0 is to stay, yet its update does not wait for the norm"),
        ({"optimizer_tier": (Tier.HOST, Tier.DEVICE, Tier.HOST)}, "bundle 1 is to stay until the host's update"),
    ],
)
def test_what_cannot_stay_is_refused(changed: dict[str, object], words: str) -> None:
    division, plan = fine()
    validate(division.layout, division.trace, plan, division.context)
    with pytest.raises(PlanError, match=words):
        validate(division.layout, division.trace, replace(plan, **changed), division.context)  # type: ignore[arg-type]


@pytest.mark.parametrize("given_context", [context(accumulate=2), context(ranks=2)])
def test_of_several_ranks_or_micro_batches_nothing_stays(given_context: object) -> None:
    division, plan = fine()
    with pytest.raises(PlanError, match="is to stay, with several ranks or micro-batches"):
        validate(division.layout, division.trace, plan, given_context)  # type: ignore[arg-type]


def test_a_gradient_that_stays_is_never_dropped() -> None:
    division, plan = fine()
    flushed = next(n for n, bundles in enumerate(division.trace.flushes) if 2 in bundles)
    for kind, words in ((OpKind.DROP, "a write-back alone sends off"), (OpKind.FETCH, "is fetched though it is on the device")):
        more = PlannedOperation(flushed, 99, replace(plan.operations[0].operation, kind=kind, bundle=2))
        with pytest.raises(PlanError, match=words):
            validate(division.layout, division.trace, replace(plan, operations=(*plan.operations, more)), division.context)


def test_no_update_of_it_runs_ahead() -> None:
    division, plan = fine()
    schedule = expand(division.layout, division.trace, plan, division.context)
    flushes = last_flushes(division.trace, 1)
    assert "stays on the device until the end" in (hindrance(0, flushes, schedule.residence, schedule.demand) or "")
    free = replace(schedule.residence, staying=frozenset())
    assert hindrance(0, flushes, free, schedule.demand) is None
    with pytest.raises(PlanError, match="its gradient stays on the device"):
        validate(division.layout, division.trace, replace(plan, ahead=frozenset({0})), division.context)
