"""Belady with prefetching over a repeating step."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from systems.planning.layout import Layout
from systems.planning.plan import OpKind
from systems.planning.policy.caching import CachePlan, CacheRequest, plan_cache
from systems.planning.step.demand import demand_of
from systems.planning.trace import Phase, Trace
from tests.planning.belady_replay import belady
from tests.planning.synthetic import Case, cases, check_moves, context, layout_of, trace_of, uneven_room


def cached(layout: Layout, trace: Trace, capacity: int, prefetch: int) -> CachePlan:
    demand = demand_of(layout, trace, context())
    sizes = {b.index: layout.bundle_bytes(b.index) for b in layout.bundles}
    return plan_cache(CacheRequest(demand, sizes, (capacity,) * len(trace), prefetch))


def fetches(plan: CachePlan) -> int:
    return sum(p.operation.kind is OpKind.FETCH for p in plan.operations)


def chain(units: int, *, frozen: bool = False) -> tuple[Layout, Trace]:
    layout = layout_of([(1, [u]) for u in range(units)], frozen=frozenset(range(units)) if frozen else frozenset())
    return layout, trace_of(layout)


def test_without_prefetching_every_fetch_is_at_its_use() -> None:
    layout, trace = chain(5)
    plan = cached(layout, trace, 2 * 256, 0)
    for p in plan.operations:
        if p.operation.kind is OpKind.FETCH:
            assert p.operation.bundle == trace.moments[p.trigger].unit
            assert trace.moments[p.trigger].phase in (Phase.FORWARD_ENTER, Phase.BACKWARD_ENTER)
    # forward misses all five; of backward the last two used are still there
    assert fetches(plan) == 5 + 3


@settings(deadline=None)
@given(st.integers(1, 7), st.integers(1, 7))
def test_frozen_bundles_miss_as_often_as_belady_says(units: int, capacity: int) -> None:
    layout, trace = chain(units, frozen=True)
    uses = [m.unit for m in trace.moments if m.phase in (Phase.FORWARD_ENTER, Phase.BACKWARD_ENTER)]
    plan = cached(layout, trace, capacity * 256, 0)
    resident: frozenset[int] = frozenset()
    for _ in range(3):
        replay = belady(uses, capacity=capacity, cyclic=True, resident=resident)
        resident = replay.resident
    assert fetches(plan) == len(replay.misses)
    assert plan.resident == resident


def test_prefetching_brings_the_next_bundles_while_one_computes() -> None:
    layout, trace = chain(5)
    plan = cached(layout, trace, 3 * 256, 1)
    fetched_at: dict[int, int] = {}
    for p in plan.operations:
        if p.operation.kind is OpKind.FETCH:
            fetched_at.setdefault(p.operation.bundle, p.trigger)
    enter = {m.unit: i for i, m in enumerate(trace.moments) if m.phase is Phase.FORWARD_ENTER}
    assert plan.resident == {0}  # fetched at the end of the step for the next
    for unit in range(2, 5):
        assert fetched_at[unit] < enter[unit]


def test_a_fetch_ahead_does_no_harm() -> None:
    """With room for one bundle there is nothing to fetch ahead into, and so no more traffic than without."""
    layout, trace = chain(4)
    for prefetch in (0, 1, 3):
        assert fetches(cached(layout, trace, 256, prefetch)) == 7
        assert fetches(cached(layout, trace, 256 * 4, prefetch)) == 4


@settings(deadline=None)
@given(cases(), st.integers(0, 12), st.integers(0, 4))
def test_plans_keep_to_the_room_and_repeat(case: Case, spare: int, prefetch: int) -> None:
    layout, trace = case.layout, case.trace
    demand = demand_of(layout, trace, case.context)
    sizes = {b.index: layout.bundle_bytes(b.index) for b in layout.bundles}
    room = uneven_room(demand, sizes, spare)
    plan = plan_cache(CacheRequest(demand, sizes, room, prefetch))
    check_moves(demand, sizes, room, plan.operations, plan.resident)


@settings(deadline=None)
@given(cases(), st.integers(0, 12))
def test_prefetching_costs_few_more_fetches(case: Case, spare: int) -> None:
    """Fetching ahead may let go of something a little early; it never doubles the traffic of a step."""
    demand = demand_of(case.layout, case.trace, case.context)
    sizes = {b.index: case.layout.bundle_bytes(b.index) for b in case.layout.bundles}
    room = (max(sum(sizes[b] for b in bundles) for bundles in demand.held) + spare * 256,) * len(case.trace)
    lazy, eager = (plan_cache(CacheRequest(demand, sizes, room, prefetch)) for prefetch in (0, 2))
    assert fetches(eager) <= 2 * fetches(lazy) + 2


@settings(deadline=None)
@given(cases(), st.integers(0, 12), st.integers(0, 4))
def test_whatever_goes_is_what_is_used_farthest_in_the_future(case: Case, spare: int, prefetch: int) -> None:
    """For a fetch on demand as for one ahead: nobody that could have gone instead is used later.

    A step that does not settle is emptied at its end, in any order.
    """
    demand = demand_of(case.layout, case.trace, case.context)
    sizes = {b.index: case.layout.bundle_bytes(b.index) for b in case.layout.bundles}
    room = (max(sum(sizes[b] for b in bundles) for bundles in demand.held) + spare * 256,) * len(case.trace)
    plan = plan_cache(CacheRequest(demand, sizes, room, prefetch))
    resident, waiting = set(plan.resident), sorted(plan.operations, key=lambda p: (p.trigger, p.priority))
    for moment, stale in enumerate(demand.stale):
        resident -= set(stale)
        while waiting and waiting[0].trigger == moment:
            operation = waiting.pop(0).operation
            if operation.kind is OpKind.FETCH:
                resident.add(operation.bundle)
                continue
            after = {b: demand.next_use.after(b, moment) for b in resident - set(demand.held[moment])}
            emptied = not plan.resident and moment == len(demand) - 1
            assert emptied or after[operation.bundle] == max(after.values())
            resident.remove(operation.bundle)
