"""Angel-PTM's decisions: pages, the life-time schedule, the cache of optimizer states. What the runtime makes of them is tested
with the substrate."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from systems.errors import BudgetError
from systems.planning.layout import Layout, ModelIndex, round_up
from systems.planning.plan import OpKind, Plan, Tier, UpdateRule
from systems.planning.policy.caching import CacheRequest, plan_cache
from systems.planning.step.demand import demand_of
from systems.planning.step.schedule import expand
from systems.planning.step.validator import validate
from systems.planning.strategy import PlanningContext
from systems.planning.trace import Phase, Trace
from systems.sizes import parse_size
from systems.strategies.angel_ptm import STRATEGY
from systems.strategies.angel_ptm.options import AngelPTMOptions, AngelPTMStatistics
from systems.strategies.angel_ptm.pages import page_layout
from systems.strategies.angel_ptm.scheduling import schedule
from systems.strategies.angel_ptm.strategy import AngelPTM
from tests.planning.races import find_races
from tests.planning.reference import ReferenceRuntime
from tests.planning.synthetic import (
    PLENTY,
    Case,
    cases,
    check_moves,
    context,
    layout_of,
    model_of,
    models,
    trace_of,
    transformer,
    uneven_room,
)

TINY = transformer(6, 64)
PAGE = 2048


def angel(given: PlanningContext, **options: object) -> AngelPTM:
    return STRATEGY(AngelPTMOptions.model_validate({"page": PAGE} | options), given)


def laid_out(index: ModelIndex = TINY, *, device: int = PLENTY, **options: object) -> Layout:
    layout: Layout = angel(context(device=device), **options).layout(index)
    return layout


def plan_for(index: ModelIndex, trace: Trace, device: int, *, accumulate: int = 1, **options: object) -> Plan:
    strategy = angel(context(device=device, accumulate=accumulate), **options)
    plan: Plan = strategy.plan(strategy.layout(index), trace)
    return plan


def told(strategy: AngelPTM) -> AngelPTMStatistics:
    statistics = strategy.statistics()
    assert isinstance(statistics, AngelPTMStatistics)
    return statistics


# ---- pages


@settings(max_examples=100, deadline=None)
@given(models(largest=6000), st.sampled_from([1, 2]), st.integers(256, 20_000))
def test_pages_keep_their_promises(index: ModelIndex, ranks: int, page_bytes: int) -> None:
    layout, found = page_layout(index, page_bytes, context(ranks=ranks))
    page = round_up(page_bytes // 2, 128) * ranks
    assert sorted(layout.places) == [p.index for p in index.parameters]
    assert all(layout.places[p.index].numel == p.numel for p in index.parameters)  # and places refuses gaps
    assert all(place.offset % 128 == 0 for place in layout.places.values())
    for segment in layout.segments:
        tensors = [index.parameters[p.parameter] for p in segment.placements]
        assert 1 <= len(tensors) <= 2
        assert segment.used <= segment.numel <= round_up(page, 128 * ranks)
        assert segment.numel % (128 * ranks) == 0
        if len(tensors) == 2:
            assert min(t.numel for t in tensors) >= page
    for bundle in layout.bundles:  # a layer
        parameters = [index.parameters[p.parameter] for s in bundle.segments for p in layout.segments[s].placements]
        assert {p.trainable for p in parameters} == {bundle.trainable}
        assert len({frozenset(p.users) for p in parameters}) == 1
        sizes = [layout.segments[s].numel for s in bundle.segments if _in_chain(layout, s, index, page)]
        assert sizes[:-1] == [page] * (len(sizes) - 1)
    assert found.num_pages == len(layout.segments)
    assert found.num_small_pages == sum(p.numel < page for p in index.parameters)
    assert found.wasted_bytes == (len(layout.segments) * page - index.numel()) * 2 // ranks
    assert 0 < found.utilization <= 1


def _in_chain(layout: Layout, segment: int, index: ModelIndex, page: int) -> bool:
    return any(index.parameters[p.parameter].numel >= page for p in layout.segments[segment].placements)


def test_pages_by_hand() -> None:
    """Of 1,024 elements: 2,500 and 1,100 are a chain of four, which share the third; 40 and 7 are alone."""
    layout, found = page_layout(model_of([(0, [2500, 40, 1100, 7])]), PAGE, context())
    cut = [[(p.parameter, p.offset, p.numel, p.start) for p in s.placements] for s in layout.segments]
    assert cut == [
        [(0, 0, 1024, 0)],
        [(0, 0, 1024, 1024)],
        [(0, 0, 452, 2048), (2, 512, 512, 0)],
        [(2, 0, 588, 512)],
        [(1, 0, 40, 0)],
        [(3, 0, 7, 0)],
    ]
    assert [s.numel for s in layout.segments] == [1024, 1024, 1024, 640, 128, 128]
    assert (found.num_pages, found.num_shared_pages, found.num_small_pages) == (6, 1, 2)
    assert found.utilization == 3647 / 6144
    assert found.wasted_bytes == (6144 - 3647) * 2


def test_a_layer_is_a_bundle_and_tied_weights_are_one_of_their_own() -> None:
    layout = laid_out()
    assert len(layout.bundles) == 1 + 1 + 6 + 1  # tied embedding, positions, blocks, last norm
    assert [len(b.units) for b in layout.bundles].count(2) == 1


# ---- the schedule


def chain(units: int, *, size: int = 1, frozen: bool = False) -> tuple[Layout, Trace]:
    bundles = [(size, [unit]) for unit in range(units)]
    layout = layout_of(bundles, frozen=frozenset(range(units)) if frozen else frozenset())
    return layout, trace_of(layout)


def triggers(layout: Layout, trace: Trace, room: int) -> tuple[list[tuple[str, int, int]], list[int]]:
    """(kind, trigger id, layer) with trigger ids as in the paper: 0 is before the step; and layers there at its start."""
    demand = demand_of(layout, trace, context())
    moves = schedule(demand, {b.index: layout.bundle_bytes(b.index) for b in layout.bundles}, [room] * len(trace))
    found = [(p.operation.kind.value, (p.trigger + 1) % len(trace), p.operation.bundle) for p in moves.operations]
    return sorted(found, key=lambda each: each[1]), sorted(moves.resident)


def test_algorithm_1_by_hand() -> None:
    """Four layers, room for two. Moments: begin, F0 enter exit, ... F3, B3 enter exit, ... B0, end, end of step.

    0 and 1 are moved before the step. 0 is needed last, so it stays no longer than its forward, where 2 takes its place, and
    so on; 2 and 3 are there when backward begins, and each update that leaves makes room for the layer before.
    """
    layout, trace = chain(4)
    found, resident = triggers(layout, trace, 2 * 256)
    assert resident == [0, 1]
    number = {(m.phase, m.unit): i + 1 for i, m in enumerate(trace.moments)}
    forward, backward = (lambda u: number[Phase.FORWARD_ENTER, u]), (lambda u: number[Phase.BACKWARD_ENTER, u])
    assert found == [
        ("fetch", 0, 0),
        ("fetch", 0, 1),
        ("drop", forward(0) + 1, 0),
        ("fetch", forward(0) + 1, 2),
        ("drop", forward(1) + 1, 1),
        ("fetch", forward(1) + 1, 3),
        ("fetch", backward(3) + 1, 1),
        ("fetch", backward(2) + 1, 0),
    ]


def test_where_everything_fits_all_is_moved_before_the_step() -> None:
    layout, trace = chain(4)
    found, resident = triggers(layout, trace, 4 * 256)
    assert found == [("fetch", 0, layer) for layer in range(4)]
    assert resident == [0, 1, 2, 3]
    assert triggers(*chain(4, frozen=True), 4 * 256) == ([], [0, 1, 2, 3])  # nothing is made anew


@settings(max_examples=200, deadline=None)
@given(cases(), st.integers(0, 12), st.booleans())
def test_schedules_keep_to_the_room_and_repeat(case: Case, spare: int, as_printed: bool) -> None:
    layout, trace = case.layout, case.trace
    demand = demand_of(layout, trace, case.context)
    sizes = {b.index: layout.bundle_bytes(b.index) for b in layout.bundles}
    room = uneven_room(demand, sizes, spare)
    moves = schedule(demand, sizes, room, as_printed=as_printed)
    check_moves(demand, sizes, room, moves.operations, moves.resident)
    fetches = [p for p in moves.operations if p.operation.kind is OpKind.FETCH]
    assert moves.at_start + moves.later == len(fetches)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("units", [1, 3, 6])
@pytest.mark.parametrize("capacity", [1, 2, 3, 5])
def test_equal_layers_are_moved_as_often_as_belady_says(units: int, capacity: int, frozen: bool) -> None:
    layout, trace = chain(units, frozen=frozen)
    demand = demand_of(layout, trace, context())
    sizes, room = dict.fromkeys(range(units), 256), [capacity * 256] * len(trace)
    moves = schedule(demand, sizes, room)
    cached = plan_cache(CacheRequest(demand, sizes, room, 0))
    ours, theirs = (sum(p.operation.kind is OpKind.FETCH for p in each.operations) for each in (moves, cached))
    assert ours <= theirs


@settings(max_examples=100, deadline=None)
@given(cases(), st.integers(0, 8))
def test_no_move_could_be_earlier(case: Case, spare: int) -> None:
    """Phase 2: at the moment before a move there is no room for it, or the layer is in use, out of date, or let go of there."""
    layout, trace = case.layout, case.trace
    demand = demand_of(layout, trace, case.context)
    sizes = {b.index: layout.bundle_bytes(b.index) for b in layout.bundles}
    room = [max(sum(sizes[b] for b in bundles) for bundles in demand.held) + spare * 256] * len(trace)
    moves = schedule(demand, sizes, room)
    resident, last = set(moves.resident), len(trace) - 1
    there: list[set[int]] = []
    for moment in range(len(trace)):
        resident -= set(demand.stale[moment])
        for p in (p for p in moves.operations if p.trigger == moment):
            (resident.add if p.operation.kind is OpKind.FETCH else resident.remove)(p.operation.bundle)
        there.append(set(resident))
    for p in moves.operations:
        if p.operation.kind is OpKind.FETCH and p.trigger != last:
            before = (p.trigger - 1) % len(trace)
            bundle = p.operation.bundle
            gone = bundle in demand.stale[p.trigger]
            full = sum(sizes[b] for b in there[before]) + sizes[bundle] > room[before]
            assert full or gone or bundle in there[before]


# ---- plans


@settings(max_examples=100, deadline=None)
@given(
    models(largest=6000),
    st.sampled_from([1, 2]),
    st.sampled_from(["auto", "0", "20KiB"]),
    st.floats(0.05, 1.1),
    st.integers(0, 4),
    st.sampled_from(["skip", "stop"]),
)
def test_every_plan_is_valid_and_within_budget_or_refused(
    index: ModelIndex, accumulate: int, cache: str, share: float, activation: int, nonfinite: str
) -> None:
    whole = angel(context(accumulate=accumulate))
    layout = whole.layout(index)
    trace = trace_of(layout, accumulate=accumulate, activation=activation * 700)
    everything = whole.plan(layout, trace).predicted_device_peak_bytes or 0
    given_context = context(device=int(everything * share), accumulate=accumulate)
    refusal = None
    try:
        strategy = angel(given_context, cache=cache, nonfinite=nonfinite)
        plan = strategy.plan(strategy.layout(index), trace)
    except BudgetError as error:
        refusal = error
    if refusal is not None:
        assert refusal.need > refusal.have == given_context.device_budget
        return
    memory = validate(layout, trace, plan, given_context)
    assert plan.predicted_device_peak_bytes == memory.total_peak <= given_context.device_budget
    assert plan.predicted_model_peak_bytes == memory.pool_peak
    assert ReferenceRuntime(layout, trace, plan, given_context).run().peak == memory.pool_peak
    assert find_races(expand(layout, trace, plan, given_context).issued()) == []
    if share >= 1 and cache == "auto" and accumulate == 1:
        assert plan.operations == ()
    if cache != "auto":
        assert (told(strategy).cache_bytes or 0) <= parse_size(cache)


def at(share: float, **options: object) -> tuple[Layout, Trace, Plan, AngelPTM]:
    layout = laid_out()
    trace = trace_of(layout, activation=1000)
    device = int((plan_for(TINY, trace, PLENTY).predicted_device_peak_bytes or 0) * share)
    strategy = angel(context(device=device), **options)
    layout = strategy.layout(TINY)
    return layout, trace, strategy.plan(layout, trace), strategy


@pytest.mark.parametrize("accumulate", [1, 2])
def test_with_enough_memory_no_byte_moves(accumulate: int) -> None:
    trace = trace_of(laid_out(), accumulate=accumulate, activation=1000)
    plan = plan_for(TINY, trace, PLENTY, accumulate=accumulate)
    assert plan.operations == ()
    assert set(plan.optimizer_tier) == {Tier.DEVICE}


def test_the_cache_takes_what_no_parameter_needs() -> None:
    """At 60 % of the memory all parameters fit, and some states beside them, those of the first layers; at 15 % none does."""
    layout, _, plan, strategy = at(0.6)
    there = [b for b in range(len(layout.bundles)) if plan.optimizer_tier[layout.bundles[b].segments[0]] is Tier.DEVICE]
    blocks = [b for b in there if layout.bundles[b].numel == layout.bundles[3].numel]
    assert 0 < len(blocks) < 6
    assert blocks == list(range(2, 2 + len(blocks)))
    assert not [p for p in plan.operations if p.operation.kind is OpKind.DROP]
    assert 0 < (told(strategy).cache_bytes or 0) < 12 * TINY.numel() * 2
    assert set(at(0.15)[2].optimizer_tier) == {Tier.HOST}


def test_a_given_cache_goes_before_parameters() -> None:
    layout, _, plan, strategy = at(0.15, cache="300KiB")
    cached = told(strategy).cache_bytes or 0
    assert (told(at(0.15)[3]).cache_bytes or 0) < cached <= 300 << 10
    assert Tier.DEVICE in plan.optimizer_tier
    assert [p for p in plan.operations if p.operation.kind is OpKind.FETCH]
    assert set(at(1.0, cache="0")[2].optimizer_tier) == {Tier.HOST}
    assert told(at(1.0, cache="0")[3]).cache_bytes == 0
    assert len(layout.bundles) == told(strategy).num_layers


def test_statistics_grow_with_the_plan() -> None:
    strategy = angel(context())
    layout = strategy.layout(TINY)
    assert told(strategy).fetches_per_step is None
    strategy.plan(layout, trace_of(layout))
    assert (told(strategy).fetches_per_step, told(strategy).optimizer_share_on_device) == (0, 1.0)
    *_, plan, little = at(0.3)
    statistics = told(little)
    assert statistics.moved_at_start is not None
    assert statistics.moved_later is not None
    assert statistics.fetches_per_step == statistics.moved_at_start + statistics.moved_later > 0
    assert len(plan.operations) == statistics.fetches_per_step + (statistics.evictions_per_step or 0)


def test_a_device_too_small_for_the_largest_layer_is_refused_with_both_numbers() -> None:
    with pytest.raises(BudgetError, match=r"angel-ptm needs at least .* for unit 'unit.*of gradients.*is given") as raised:
        laid_out(device=50_000)
    need = raised.value.need
    laid_out(device=need)
    with pytest.raises(BudgetError):
        laid_out(device=need - 1)


# ---- eviction and options


def test_eviction_is_of_what_is_moved_last_in_the_warm_up_step_and_used_last_afterwards() -> None:
    layout = laid_out()
    first = angel(context()).eviction(layout, None)
    assert [first.choose(candidates, 7) for candidates in ([5, 2, 3], [9, 7], [4])] == [5, 9, 4]
    trace = trace_of(layout)
    belady = angel(context()).eviction(layout, trace)
    begin = next(i for i, m in enumerate(trace.moments) if m.phase is Phase.FORWARD_ENTER and m.unit == 4)
    earlier, later = layout.bundles_of_unit[2][0], layout.bundles_of_unit[6][-1]
    assert belady.choose([earlier, later], begin) == earlier


def test_options_read_what_a_command_line_gives() -> None:
    options = AngelPTMOptions.model_validate({"page": "1MiB", "cache": "2GiB"})
    assert (options.page, options.cache, options.nonfinite) == (1 << 20, 2 << 30, "skip")
    assert AngelPTMOptions().page == 4 << 20
    assert angel(context(), nonfinite="stop").update_rule is UpdateRule.WHEN_REDUCED


@pytest.mark.parametrize(
    "given_options", [{"page": "0"}, {"page": "255"}, {"cache": "-1"}, {"cache": "all"}, {"chunk_min": "1MiB"}]
)
def test_bad_options_are_refused(given_options: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        AngelPTMOptions.model_validate(given_options)


@pytest.mark.parametrize("cache", ["all", "AUTO", "", "-1", -1, None])
def test_a_bad_cache_is_told_what_is_allowed(cache: object) -> None:
    with pytest.raises(ValidationError, match=r"neither a size \(40GiB, 64MiB or plain bytes\) nor auto"):
        AngelPTMOptions.model_validate({"cache": cache})


def test_a_deep_model_is_scheduled_in_seconds() -> None:
    layout, trace = chain(300, size=4)
    demand = demand_of(layout, trace, context())
    moves = schedule(demand, dict.fromkeys(range(300), 1024), [40 * 1024] * len(trace))
    assert moves.later > 300
