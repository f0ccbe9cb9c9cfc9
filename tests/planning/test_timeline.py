"""Schedule and timeline against a second, plainer runtime; what the bounds promise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from systems.planning.layout import Layout
from systems.planning.plan import LaneKind, OpKind, Plan, PlannedOperation, Tier, UpdateRule
from systems.planning.policy.caching import CacheRequest, plan_cache
from systems.planning.policy.nominal import nominal_trace
from systems.planning.step.demand import demand_of, reusable
from systems.planning.step.operations import Work, state
from systems.planning.step.profiles import minimum_need
from systems.planning.step.residence import Residence
from systems.planning.step.schedule import expand
from systems.planning.step.timeline import MemTimeline, fitted, timeline, timeline_of
from systems.planning.step.validator import circular_wait, validate
from systems.planning.strategy import PlanningContext
from systems.planning.trace import Moment, Phase, Trace
from tests.planning.races import find_races
from tests.planning.reference import PoolAccount, ReferenceRuntime, can_run_ahead
from tests.planning.shard_moves import in_two
from tests.planning.synthetic import PLENTY, Case, cases, context, layout_of, trace_of

ALL = frozenset(range(100))
HOST_UPDATES = (Work.UPDATE, Work.UPDATE_AHEAD, Work.CLEAR)


def planned(
    case: Case,
    *,
    on_device: frozenset[int] = frozenset(),
    prefetch: int = 2,
    spare: int = 0,
    rule: UpdateRule = UpdateRule.AFTER_NORM,
    evict: OpKind = OpKind.DROP,
    in_place: bool = False,
    ahead: frozenset[int] = frozenset(),
    sharded: bool = False,
    moves: bool | None = None,
    first: bool = False,
    one_copy_queue: bool = False,
) -> Plan:
    """A cache of what is held at most plus `spare` bytes for every bundle that is not on the device for good. ahead: where they
    can be. sharded: of several ranks, bundles updated on the device that can rest there as shards do. moves: of what comes from
    the host the shard stays where it is used again, and, if true, all of it comes in two. first: what can be fetched before
    gradients leave is.
    """
    trace = case.trace
    layout = replace(case.layout, in_place=frozenset(b.index for b in case.layout.bundles if b.trainable and in_place))
    on_device = frozenset(b.index for b in layout.bundles if b.index in on_device or not b.movable)
    shards = frozenset(b for b in on_device if layout.bundles[b].movable and sharded and case.context.ranks > 1)
    written = reusable(layout, trace, case.context) - (on_device - shards)
    demand = demand_of(layout, trace, case.context, written)
    sizes = {b.index: layout.bundle_bytes(b.index) for b in layout.bundles if b.index not in on_device - shards}
    capacity = max(sum(sizes.get(b, 0) for b in held) for held in demand.held) + spare
    cache = plan_cache(CacheRequest(demand, sizes, (capacity,) * len(trace), prefetch, evict, shards))
    owner = layout.bundle_of_segment
    tiers = tuple(Tier.DEVICE if owner[s.index] in on_device else Tier.HOST for s in layout.segments)
    resident = (on_device - shards) | cache.resident
    plan = Plan(trace.signature, cache.operations, tiers, resident, rule, in_place=written, sharded=shards)
    if moves is not None:
        plan = in_two(plan, demand, ranks=case.context.ranks, move=moves)
    if first:
        plan = replace(plan, operations=tuple(_first(p, plan, trace) for p in plan.operations))
    plan = replace(plan, one_copy_queue=one_copy_queue)
    return replace(plan, ahead=ahead & can_run_ahead(layout, trace, plan, case.context))


def _first(p: PlannedOperation, plan: Plan, trace: Trace) -> PlannedOperation:
    """Not at the step's end, which updates it, nor where it leaves or something else is done with it."""
    bundle, here = p.operation.bundle, [o for o in plan.operations if o.trigger == p.trigger]
    alone = sum(o.operation.bundle == bundle for o in here) == 1 and bundle not in trace.flushes[p.trigger]
    return replace(p, first=p.operation.kind is OpKind.FETCH and alone and p.trigger < len(trace) - 1)


plans: st.SearchStrategy[dict[str, object]] = st.builds(
    dict,
    prefetch=st.integers(0, 3),
    spare=st.integers(0, 20).map(lambda n: n * 256),
    rule=st.sampled_from(UpdateRule),
    evict=st.sampled_from([OpKind.DROP, OpKind.WRITE_BACK]),
    on_device=st.frozensets(st.integers(0, 3), max_size=2),
    in_place=st.booleans(),
    ahead=st.one_of(st.just(ALL), st.frozensets(st.integers(0, 9))),
    sharded=st.booleans(),
    moves=st.sampled_from([None, False, True]),
    first=st.booleans(),
    one_copy_queue=st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(cases(ranks=True), plans)
def test_pool_bytes_equal_the_reference_runtime_at_every_moment(case: Case, choices: dict[str, object]) -> None:
    plan = planned(case, **choices)  # type: ignore[arg-type]
    memory = validate(case.layout, case.trace, plan, case.context)
    account = ReferenceRuntime(case.layout, case.trace, plan, case.context).run()
    assert list(memory.device_pool_bytes) == account.after
    assert memory.pool_peak == account.peak
    assert set(memory.host_bytes) == {account.host_bytes}
    for moment, value in account.log:
        assert value <= memory.device_pool_peak_bytes[moment]
    for moment, real in enumerate(real_non_model(case, account, plan.in_place if case.context.ranks == 1 else frozenset())):
        assert memory.device_non_model_bytes[moment] >= real
        assert memory.device_total_bytes[moment] >= account.after[moment] + real


def real_non_model(case: Case, account: PoolAccount, in_place: frozenset[int]) -> list[int]:
    """What the interval behind each moment really takes: gradients come one by one, and only adopted ones stay.

    Those that will be written in place stay until the interval ends.
    """
    layout, real = case.layout, []
    for moment, entering in enumerate(case.trace.moments):
        live, kept = case.trace.non_model_bytes[moment], account.adopted[moment]
        if entering.phase is not Phase.BACKWARD_ENTER:
            real.append(live + kept)
            continue
        sizes = {b: layout.bundle_bytes(b) for b in layout.bundles_of_unit[entering.unit] if layout.bundles[b].trainable}
        live -= max(sizes.values(), default=0)
        kept -= sum(sizes[b] for b in account.newly_adopted[moment])
        peak = kept
        for bundle, size in sizes.items():
            peak = max(peak, kept + size)
            if bundle in account.newly_adopted[moment] or (bundle in in_place and len(layout.bundles[bundle].units) == 1):
                kept += size
        real.append(live + peak)
    return real


@settings(max_examples=100, deadline=None)
@given(cases(ranks=True), plans)
def test_schedules_have_no_race_and_no_cycle_and_move_the_planned_bytes(case: Case, choices: dict[str, object]) -> None:
    plan = planned(case, **choices)  # type: ignore[arg-type]
    schedule = expand(case.layout, case.trace, plan, case.context)
    assert not schedule.flaws
    assert find_races(schedule.issued(steps=3)) == []
    assert circular_wait(schedule.operations, one_copy_queue=schedule.one_copy_queue) == []
    account = ReferenceRuntime(case.layout, case.trace, plan, case.context).run()
    assert sum(o.bytes for o in schedule.operations if o.kind in (Work.FETCH, Work.MOVE)) == account.h2d_bytes
    assert sum(o.bytes for o in schedule.operations if o.kind is Work.OFFLOAD) == account.d2h_bytes
    updates = [o for o in schedule.operations if o.lane is LaneKind.CPU and o.kind in HOST_UPDATES]
    assert [(o.moment, o.kind.value, o.bundle) for o in updates] == account.updates


@settings(max_examples=60, deadline=None)
@given(cases())
def test_every_flushed_bundle_is_updated_once(case: Case) -> None:
    schedule = expand(case.layout, case.trace, planned(case, ahead=ALL), case.context)
    updated = [o.bundle for o in schedule.operations if o.kind in (Work.UPDATE, Work.UPDATE_AHEAD)]
    flushed = {b for bundles in case.trace.flushes for b in bundles}
    assert sorted(updated) == sorted(flushed)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_removing_a_wait_of_a_schedule_shows_as_a_race(case: Case) -> None:
    issued = expand(case.layout, case.trace, planned(case), case.context).issued(steps=1)
    copies = {o.ticket for o in issued if o.lane == "h2d"}
    first = next((i for i, o in enumerate(issued) if o.lane == "compute" and copies.intersection(o.waits)), None)
    assume(first is not None)
    assert first is not None
    issued[first] = replace(issued[first], waits=())
    assert find_races(issued)


@settings(max_examples=60, deadline=None)
@given(cases(ranks=True), plans)
def test_updates_that_run_ahead_change_the_hosts_part_of_a_step_alone(case: Case, choices: dict[str, object]) -> None:
    """Nothing on any other lane, nor what the norm reads; and every update waits for the norm but those."""
    plan = planned(case, **choices)  # type: ignore[arg-type]
    with_some, without = (expand(case.layout, case.trace, p, case.context) for p in (plan, replace(plan, ahead=frozenset())))
    told = [[(o.moment, o.label, o.lane, o.reads, o.writes, o.bytes) for o in s.bare] for s in (with_some, without)]
    alike = [[one for one in each if not one[1].startswith(("update", "clear"))] for each in told]
    assert alike[0] == alike[1]
    for o in with_some.bare:
        if o.kind is Work.UPDATE_AHEAD:
            assert o.bundle in plan.ahead and o.reads == () and o.moment < len(case.trace) - 1
            assert {state(s) for s in case.layout.bundles[o.bundle].segments} <= set(o.writes)
        elif o.kind is Work.UPDATE and o.lane is LaneKind.CPU:
            assert o.bundle not in plan.ahead and (plan.update_rule is UpdateRule.WHEN_REDUCED or o.reads == ("norm",))
    cleared = [o.bundle for o in with_some.bare if o.kind is Work.CLEAR]
    assert sorted(cleared) == (sorted(plan.ahead) if case.context.accumulate > 1 else [])


def test_a_fetch_waits_for_the_update_that_ran_ahead_and_not_for_the_norm() -> None:
    layout = layout_of([(2, [0]), (3, [1])])
    trace = trace_of(layout)
    case = Case(layout, trace, context())
    schedule = expand(layout, trace, planned(case, prefetch=1, ahead=frozenset({0})), case.context)
    update = {o.bundle: o for o in schedule.operations if o.kind in (Work.UPDATE, Work.UPDATE_AHEAD)}
    norm = next(o for o in schedule.operations if o.kind is Work.NORM)
    assert update[0].ticket < norm.ticket < update[1].ticket
    (early,) = [o for o in schedule.operations if o.kind is Work.FETCH and o.moment == len(trace) - 1]
    assert early.bundle == 0 and update[0].ticket in early.waits and norm.ticket not in early.waits


def everything_resident(layout: Layout, trace: Trace) -> Plan:
    everything = frozenset(b.index for b in layout.bundles)
    return Plan(trace.signature, (), (Tier.DEVICE,) * len(layout.segments), everything)


def test_all_on_the_device_is_predicted_exactly() -> None:
    layout = layout_of([(2, [0]), (3, [1]), (4, [2])])
    trace = trace_of(layout, activation=1000)
    memory = timeline(layout, trace, everything_resident(layout, trace), context())
    elements = 9 * 128
    assert set(memory.device_pool_bytes) == {elements * (2 + 12)}
    # the last backward still has one unit's activation, and all gradients are there
    expected = []
    gradients = 0
    for moment, entry in enumerate(trace.moments):
        if entry.phase is Phase.BACKWARD_ENTER:
            gradients += (entry.unit + 2) * 128 * 2
        live = trace.non_model_bytes[moment] - ((entry.unit + 2) * 256 if entry.phase is Phase.BACKWARD_ENTER else 0)
        expected.append(elements * 14 + live + gradients)
    assert memory.total_peak == max(expected)


def test_a_plan_that_passes_its_pool_budget_too_gets_ever_less() -> None:
    layout = layout_of([(2, [0]), (3, [1])])
    trace = trace_of(layout, activation=1000)
    plan = everything_resident(layout, trace)
    memory = timeline(layout, trace, plan, context())
    asked: list[int] = []

    def make(within: PlanningContext) -> tuple[Plan, MemTimeline]:
        asked.append(within.pool_budget)
        return plan, memory

    fitted(make, layout, context(device=memory.total_peak - 100))
    assert asked[1:] == [memory.pool_peak - 100, memory.pool_peak - 200]


def test_an_unmeasured_trace_is_bounded_instead() -> None:
    layout = layout_of([(2, [0]), (3, [1])])
    trace = trace_of(layout, activation=1000)
    plan = everything_resident(layout, trace)
    bare = replace(trace, adopted_peak_bytes=(), gradient_bytes=())
    assert timeline(layout, bare, plan, context()).total_peak >= timeline(layout, trace, plan, context()).total_peak


def test_fetches_wait_for_the_update_of_the_step_before() -> None:
    layout = layout_of([(2, [0]), (3, [1])])
    trace = trace_of(layout)
    case = Case(layout, trace, context())
    schedule = expand(layout, trace, planned(case, prefetch=1), case.context)
    update = {o.bundle: o.ticket for o in schedule.operations if o.kind is Work.UPDATE}
    fetches = [o for o in schedule.operations if o.kind is Work.FETCH]
    ahead = [o for o in fetches if o.moment == len(trace) - 1]
    assert [o.bundle for o in ahead] == [0]
    assert update[0] in ahead[0].waits
    first = next(o for o in fetches if o.bundle == 1)
    assert update[1] in first.previous_waits


def test_a_gradient_range_waits_for_the_memory_it_takes_over() -> None:
    layout = layout_of([(4, [0]), (4, [1]), (4, [2])])
    trace = trace_of(layout)
    size = layout.bundle_bytes(0)
    case = Case(layout, trace, context(device=2 * size))
    plan = planned(case, prefetch=0)
    assert timeline_of(expand(layout, trace, plan, case.context), trace).pool_peak == 2 * size
    waits = [o.room_waits for o in expand(layout, trace, plan, case.context).operations if o.kind is Work.FETCH]
    assert any(waits)


def test_several_ranks_gather_after_fetches_and_reduce_before_offloads() -> None:
    layout = layout_of([(2, [0]), (2, [1])], ranks=2)
    trace = trace_of(layout)
    case = Case(layout, trace, context(ranks=2))
    operations = [o for o in expand(layout, trace, planned(case), case.context).operations if o.lane is not None]
    for kind, follows in ((Work.FETCH, Work.GATHER), (Work.REDUCE, Work.SQUARES)):
        places = [i for i, o in enumerate(operations) if o.kind is kind]
        assert places
        assert all(operations[i + 1].kind is follows and operations[i + 1].bundle == operations[i].bundle for i in places)
    fetch = next(o for o in operations if o.kind is Work.FETCH)
    assert fetch.bytes == layout.bundle_bytes(fetch.bundle) // 2


@settings(max_examples=60, deadline=None)
@given(cases())
def test_minimum_need_is_what_demand_paging_takes(case: Case) -> None:
    unmovable = frozenset(b.index for b in case.layout.bundles if not b.movable)
    residence = Residence(case.layout, case.context, unmovable, UpdateRule.AFTER_NORM)
    need = minimum_need(case.trace, demand_of(case.layout, case.trace, case.context), residence)
    plan = planned(case, prefetch=0)
    assert need.total_bytes <= timeline(case.layout, case.trace, plan, case.context).total_peak
    parts = (need.static_bytes, need.parameter_bytes, need.gradient_bytes, need.non_model_bytes)
    assert need.total_bytes == sum(parts)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_the_nominal_trace_flushes_every_trainable_bundle_once_a_micro_step(case: Case) -> None:
    trace = nominal_trace(case.layout, accumulate=case.context.accumulate)
    flushed = sorted(b for bundles in trace.flushes for b in bundles)
    expected = [b.index for b in case.layout.bundles if b.trainable and b.units]
    assert flushed == sorted(expected * case.context.accumulate)
    assert (trace.moments[0].phase, trace.moments[-1].phase) == (Phase.STEP_BEGIN, Phase.STEP_END)
    validate(case.layout, trace, planned(Case(case.layout, trace, case.context)), replace(case.context, device_budget=PLENTY))


def test_a_unit_that_enters_again_after_its_flush_is_planned_from_the_master() -> None:
    """Hooks may see a unit's backward twice; the second time its host slot holds the gradient already."""
    layout = layout_of([(2, [0]), (3, [1]), (4, [2])])
    trace = trace_of(layout)
    again = next(i for i, m in enumerate(trace.moments) if m.phase is Phase.BACKWARD_EXIT and m.unit == 1) + 1

    def with_entry(values: tuple[Any, ...], *new: object) -> tuple[Any, ...]:
        return (*values[:again], *new, *values[again:])

    odd = Trace(
        with_entry(trace.moments, Moment(Phase.BACKWARD_ENTER, 2), Moment(Phase.BACKWARD_EXIT, 2)),
        with_entry(trace.non_model_bytes, 0, 0),
        with_entry(trace.compute_time_s, 0.0, 0.0),
        with_entry(trace.flushes, (), ()),
    )
    case = Case(layout, odd, context())
    demand = demand_of(layout, odd, case.context)
    assert demand.stale[again - 3] == (2,)
    assert demand.stale[-1] == (2,)
    assert len(demand.gradient_spans[2]) == 1  # nothing is flushed again, so no range is opened again
    plan = planned(case, prefetch=1)
    validate(layout, odd, plan, case.context)
    schedule = expand(layout, odd, plan, case.context)
    (fetch,) = [o for o in schedule.operations if o.kind is Work.FETCH and o.bundle == 2 and "state:2" in o.reads]
    assert fetch.moment <= again
    assert find_races(schedule.issued()) == []
    assert len([o for o in schedule.operations if o.kind is Work.UPDATE]) == 3
