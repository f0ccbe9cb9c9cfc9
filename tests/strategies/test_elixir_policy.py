"""Elixir's decisions: chunks, placement, plans. What the runtime makes of them is tested with the substrate."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from systems.errors import BudgetError, UnsupportedError
from systems.planning.layout import Layout, ModelIndex, round_up
from systems.planning.plan import OpKind, Plan, Tier, UpdateRule
from systems.planning.step.schedule import expand
from systems.planning.step.validator import validate
from systems.planning.strategy import PlanningContext
from systems.planning.trace import Phase, Trace
from systems.strategies.elixir import STRATEGY
from systems.strategies.elixir.chunks import ElixirChunker
from systems.strategies.elixir.options import ElixirOptions, ElixirStatistics
from systems.strategies.elixir.strategy import Elixir
from tests.planning.races import find_races
from tests.planning.reference import ReferenceRuntime
from tests.planning.synthetic import PLENTY, context, model_of, models, trace_of, transformer

TINY = transformer(6, 64)


def elixir(given: PlanningContext, **options: object) -> Elixir:
    return STRATEGY(ElixirOptions.model_validate(options), given)


def laid_out(index: ModelIndex, *, device: int = PLENTY, accumulate: int = 1, **options: object) -> Layout:
    layout: Layout = elixir(context(device=device, accumulate=accumulate), **options).layout(index)
    return layout


def plan_for(index: ModelIndex, trace: Trace, device: int, *, accumulate: int = 1, **options: object) -> Plan:
    strategy = elixir(context(device=device, accumulate=accumulate), **options)
    plan: Plan = strategy.plan(strategy.layout(index), trace)
    return plan


def resident_peak(index: ModelIndex, trace: Trace, *, accumulate: int = 1) -> int:
    peak = plan_for(index, trace, PLENTY, accumulate=accumulate).predicted_device_peak_bytes
    assert peak is not None
    return peak


# ---- chunks


@settings(max_examples=100, deadline=None)
@given(models(groups=True), st.sampled_from([1, 2]), st.sampled_from([PLENTY, 200_000]))
def test_layouts_keep_their_promises(index: ModelIndex, ranks: int, device: int) -> None:
    layout = ElixirChunker(index, ElixirOptions(), context(ranks=ranks, device=device)).layout
    placed = [p.parameter for s in layout.segments for p in s.placements]
    assert sorted(placed) == [p.index for p in index.parameters]  # each once
    units = {u.name: u.index for u in index.units}
    for segment in layout.segments:
        assert segment.numel % (128 * ranks) == 0
        end = 0
        for place in segment.placements:
            parameter = index.parameters[place.parameter]
            assert (parameter.group, parameter.trainable) == (segment.space.group, segment.space.trainable)
            assert place.offset % 128 == 0
            assert place.offset >= end
            end = place.offset + place.numel
        assert end <= segment.numel
        assert segment.numel - end < 128 * ranks  # tails are not allocated
    for number, bundle in enumerate(layout.bundles):
        assert bundle.index == number
        parameters = [index.parameters[p.parameter] for s in bundle.segments for p in layout.segments[s].placements]
        assert {p.trainable for p in parameters} == {bundle.trainable}
        assert bundle.units == tuple(sorted({units[user] for p in parameters for user in p.users}))
        assert bundle.numel == sum(layout.segments[s].numel for s in bundle.segments)
        several = {frozenset(p.users) for p in parameters if len(p.users) > 1}
        if several and bundle.movable:  # tied parameters are only with those of the same users
            assert {frozenset(p.users) for p in parameters} == several
            assert len(several) == 1


@settings(max_examples=100, deadline=None)
@given(models(groups=True), st.integers(1, 12), st.integers(0, 12), st.integers(1, 4))
def test_the_search_finds_the_least_waste_of_the_users_range(index: ModelIndex, low: int, width: int, step: int) -> None:
    unit = 128 * 2
    options = ElixirOptions(chunk_min=low * unit, chunk_max=(low + width) * unit, chunk_step=step * unit)
    chunker = ElixirChunker(index, options, context())
    tested = [(low + i * step) * 128 for i in range(width // step + 1)]
    single = [round_up(p.numel, 128) for p in index.parameters if len(p.users) == 1]
    holding = [size for size in tested if size >= max(single, default=0)] or [tested[-1]]
    assert chunker.chunk in holding
    assert chunker.waste(chunker.chunk) == min(map(chunker.waste, holding))


@settings(max_examples=60, deadline=None)
@given(models(groups=True))
def test_the_automatic_search_is_as_good_as_trying_every_size(index: ModelIndex) -> None:
    chunker = ElixirChunker(index, ElixirOptions(), context())
    sizes = chunker.candidates()
    low, high = chunker.range()
    every = range(round_up(low, 128), max(high, low) + 1, 128)
    largest = max((chunker.size(p) for p in index.parameters if len(p.users) == 1), default=0)
    every_holding = [size for size in every if size >= min(largest, sizes[0])]
    assert chunker.waste(chunker.chunk) == min(map(chunker.waste, every_holding))


def test_the_search_tries_the_size_from_which_a_group_is_fused() -> None:
    """A frozen group that takes 1664 elements is fused where a chunk holds more than that, and wastes nothing then."""
    index = model_of([(None, [385, 897]), (0, [1, 385, 1281]), (None, [1])], frozen=frozenset({0, 1, 2}))
    chunker = ElixirChunker(index, ElixirOptions(), context())
    assert 1664 + 128 in chunker.candidates() and chunker.chunk == 1664 + 128
    assert chunker.statistics["num_fused"] == 1


def test_waste_by_hand() -> None:
    index = model_of([(0, [256, 256]), (1, [256, 256]), (2, [256, 384])])
    chunker = ElixirChunker(index, ElixirOptions(chunk_min=768 * 2, chunk_max=768 * 2), context())
    # 512 + 512 + 640 elements; the second unit does not fit behind the first, nor the third behind it
    assert chunker.statistics["num_chunks"] == 3
    assert chunker.statistics["wasted_bytes"] == (3 * 768 - 1664) * 2
    assert chunker.statistics["utilization"] == 1664 / 2304
    assert chunker.layout.param_bytes == 1664 * 2


def test_blocks_do_not_share_chunks_by_default() -> None:
    layout = laid_out(TINY)
    blocks = {u.index for u in TINY.units if u.block is not None}
    for bundle in layout.bundles:
        assert len(blocks & set(bundle.units)) <= 1
    largest_block = max(sum(TINY.parameters[p].numel for p in TINY.units[u].parameters) for u in blocks)
    assert max(b.numel for b in layout.bundles if set(b.units) & blocks) <= largest_block


def test_tied_weights_have_a_bundle_of_their_own() -> None:
    layout = laid_out(TINY)
    (tied,) = [b for b in layout.bundles if len(layout.segments[b.segments[0]].placements) == 1 and 0 in b.units]
    assert tied.units == (0, len(TINY.units) - 1)
    assert tied.movable


def test_a_tiny_chunk_limit_still_lays_out_every_parameter() -> None:
    layout = laid_out(TINY, chunk_min=256, chunk_max=1024)
    assert sorted(p.parameter for s in layout.segments for p in s.placements) == list(range(len(TINY.parameters)))
    statistics = ElixirChunker(TINY, ElixirOptions(chunk_min=256, chunk_max=1024), context()).statistics
    assert statistics["num_private"] > 0
    assert statistics["chunk_size_bytes"] <= 1024


def test_small_groups_are_fused_and_never_move() -> None:
    sizes: list[tuple[int | None, list[int]]] = [(n, [2000, 2000, 10]) for n in range(3)]
    index = model_of(sizes, groups={2: "expert", 5: "expert"})
    layout = laid_out(index)
    (fused,) = [b for b in layout.bundles if not b.movable]
    assert fused.units == (0, 1)
    assert {layout.segments[s].space.group for s in fused.segments} == {"expert"}
    tight = ElixirChunker(index, ElixirOptions(), context(device=2000)).layout
    assert all(b.movable for b in tight.bundles)  # too dear for this device


# ---- budgets


def test_a_device_too_small_for_the_largest_unit_is_refused_with_both_numbers() -> None:
    strategy = elixir(context(device=50_000))
    with pytest.raises(BudgetError, match=r"at least .*KiB of device memory for unit 'unit.*is given") as raised:
        strategy.layout(TINY)
    assert (raised.value.tier, raised.value.have) == ("device", 50_000)
    need = raised.value.need
    assert need > 50_000
    elixir(context(device=need)).layout(TINY)
    with pytest.raises(BudgetError):
        elixir(context(device=need - 1)).layout(TINY)


def test_activations_that_do_not_fit_are_refused_after_the_trace() -> None:
    probe = laid_out(TINY)
    trace = trace_of(probe, activation=1 << 20)
    with pytest.raises(BudgetError, match="of activations"):
        plan_for(TINY, trace, 1 << 20)


def test_without_offload_everything_must_fit() -> None:
    trace = trace_of(laid_out(TINY), activation=1000)
    peak = resident_peak(TINY, trace)
    assert plan_for(TINY, trace, peak, offload=False).operations == ()
    with pytest.raises(BudgetError, match="offload=False") as raised:
        plan_for(TINY, trace, peak - 1, offload=False)
    assert (raised.value.need, raised.value.have) == (peak, peak - 1)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_with_enough_memory_no_byte_moves(accumulate: int) -> None:
    trace = trace_of(laid_out(TINY, accumulate=accumulate), accumulate=accumulate, activation=1000)
    peak = resident_peak(TINY, trace, accumulate=accumulate)
    plan = plan_for(TINY, trace, peak, accumulate=accumulate)
    assert plan.operations == ()
    assert set(plan.optimizer_tier) == {Tier.DEVICE}
    assert plan_for(TINY, trace, peak - 1, accumulate=accumulate).operations != ()


def test_a_cache_smaller_than_a_unit_is_refused() -> None:
    trace = trace_of(laid_out(TINY))
    with pytest.raises(BudgetError, match="cache of 1KiB is less than"):
        plan_for(TINY, trace, PLENTY, cache="1KiB")


def test_a_given_cache_bounds_all_parameters_on_the_device() -> None:
    layout = laid_out(TINY)
    trace = trace_of(layout)
    limit = layout.param_bytes // 2
    plan = plan_for(TINY, trace, PLENTY, cache=limit)
    assert plan.operations
    resident, most = set(plan.resident_at_start), 0
    operations = {m: [p.operation for p in plan.operations if p.trigger == m] for m in range(len(trace))}
    for moment in range(len(trace)):
        resident -= {b for b in trace.flushes[moment] if plan.optimizer_tier[layout.bundles[b].segments[0]] is Tier.HOST}
        for operation in operations[moment]:
            (resident.add if operation.kind is OpKind.FETCH else resident.remove)(operation.bundle)
            most = max(most, sum(layout.bundle_bytes(b) for b in resident))
    assert limit // 2 < most <= limit
    assert plan_for(TINY, trace, PLENTY, cache="inf").operations == ()


# ---- plans


@settings(max_examples=150, deadline=None)
@given(
    models(groups=True),
    st.sampled_from([1, 2]),
    st.integers(0, 3),
    st.floats(0.05, 1.1),
    st.integers(0, 4),
    st.sampled_from(["skip", "stop"]),
    st.sampled_from(["master-shard", "write-back"]),
)
def test_every_plan_is_valid_and_within_budget_or_refused(
    index: ModelIndex,
    accumulate: int,
    prefetch: int,
    share: float,
    activation: int,
    nonfinite: str,
    variant: str,
) -> None:
    options = {"prefetch": prefetch, "nonfinite": nonfinite, "variant": variant}
    plenty = context(accumulate=accumulate)
    layout = elixir(plenty).layout(index)
    trace = trace_of(layout, accumulate=accumulate, activation=activation * 700)
    everything = elixir(plenty).plan(layout, trace).predicted_device_peak_bytes or 0
    given_context = context(device=int(everything * share), accumulate=accumulate)
    refusal = None
    try:
        strategy = elixir(given_context, **options)
        layout = strategy.layout(index)  # a fused group may not be on so small a device
        trace = trace_of(layout, accumulate=accumulate, activation=activation * 700)
        plan = strategy.plan(layout, trace)
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
    if share >= 1:
        assert plan.operations == ()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_half_of_the_memory_is_enough_and_moves_bytes(accumulate: int, prefetch: int) -> None:
    trace = trace_of(laid_out(TINY, accumulate=accumulate), accumulate=accumulate, activation=2000)
    half = resident_peak(TINY, trace, accumulate=accumulate) // 2
    strategy = elixir(context(device=half, accumulate=accumulate), prefetch=prefetch)
    plan = strategy.plan(strategy.layout(TINY), trace)
    fetches = [p for p in plan.operations if p.operation.kind is OpKind.FETCH]
    assert fetches
    told = strategy.statistics()
    assert isinstance(told, ElixirStatistics) and 0 < (told.optimizer_share_on_device or 0) < 1
    if prefetch:
        late = [p for p in fetches if trace.moments[p.trigger].phase in (Phase.FORWARD_ENTER, Phase.BACKWARD_ENTER)]
        demanded = [p for p in late if p.operation.bundle in layout_bundles(trace, p.trigger)]
        assert len(demanded) < len(fetches) / 4  # most are on their way before their unit begins


def layout_bundles(trace: Trace, moment: int) -> tuple[int, ...]:
    return laid_out(TINY).bundles_of_unit[trace.moments[moment].unit]


def test_states_on_the_device_are_those_of_the_first_units() -> None:
    layout = laid_out(TINY)
    trace = trace_of(layout, activation=2000)
    plan = plan_for(TINY, trace, resident_peak(TINY, trace) // 2)
    tiers = [plan.optimizer_tier[b.segments[0]] for b in layout.bundles if len(b.units) == 1]
    changes = sum(first is not second for first, second in pairwise(tiers))
    assert tiers[0] is Tier.DEVICE
    assert tiers[-1] is Tier.HOST
    assert changes == 1


@pytest.mark.parametrize(("variant", "kind"), [("master-shard", OpKind.DROP), ("write-back", OpKind.WRITE_BACK)])
def test_evictions_write_nothing_unless_there_is_no_master_shard(variant: str, kind: OpKind) -> None:
    trace = trace_of(laid_out(TINY), activation=2000)
    plan = plan_for(TINY, trace, resident_peak(TINY, trace) // 3, variant=variant, prefetch=2)
    assert {p.operation.kind for p in plan.operations} == {OpKind.FETCH, kind}
    assert elixir(context(), variant=variant).write_back is (variant == "write-back")


def test_the_update_rule_follows_the_option() -> None:
    assert elixir(context()).update_rule is UpdateRule.AFTER_NORM
    assert elixir(context(), nonfinite="stop").update_rule is UpdateRule.WHEN_REDUCED


def test_statistics_grow_with_the_plan() -> None:
    trace = trace_of(laid_out(TINY), activation=2000)
    half = resident_peak(TINY, trace) // 2
    strategy = elixir(context(device=half))
    layout = strategy.layout(TINY)
    before = strategy.statistics()
    assert isinstance(before, ElixirStatistics)
    assert before.fetches_per_step is None
    plan = strategy.plan(layout, trace)
    after = strategy.statistics()
    assert isinstance(after, ElixirStatistics)
    assert after.fetches_per_step == sum(p.operation.kind is OpKind.FETCH for p in plan.operations)
    assert after.num_bundles == len(layout.bundles)
    assert 0 < after.utilization <= 1
    assert ElixirStatistics.model_validate(after.model_dump()) == after


def test_a_deep_model_is_planned_in_a_second() -> None:
    index = transformer(96, 256)
    trace = trace_of(laid_out(index), activation=10_000)
    budget = resident_peak(index, trace) // 3
    begin = time.perf_counter()
    plan = plan_for(index, trace, budget)
    assert time.perf_counter() - begin < 3  # under one on an idle machine
    assert len(trace) > 400
    assert len(plan.operations) > 200


# ---- eviction


def test_eviction_is_random_but_seeded_in_the_warm_up_step_and_belady_afterwards() -> None:
    layout = laid_out(TINY)
    candidates = [2, 3, 5, 7]
    first, second = (elixir(context(seed=4)).eviction(layout, None) for _ in range(2))
    picks = [first.choose(candidates, moment) for moment in range(30)]
    assert picks == [second.choose(candidates, moment) for moment in range(30)]
    assert set(picks) == set(candidates)
    trace = trace_of(layout)
    belady = elixir(context()).eviction(layout, trace)
    begin = next(i for i, m in enumerate(trace.moments) if m.phase is Phase.FORWARD_ENTER and m.unit == 4)
    earlier, later = (layout.bundles_of_unit[unit][0] for unit in (2, 5))
    assert belady.choose([earlier, later], begin) == earlier  # used again only at the end of backward


# ---- options


def test_options_read_what_a_command_line_gives() -> None:
    options = ElixirOptions.model_validate(
        {"chunk_min": "1MiB", "chunk_max": "4MiB", "cache": "1GiB", "offload": "false", "prefetch": "3"}
    )
    assert (options.chunk_min, options.chunk_max, options.cache) == (1 << 20, 4 << 20, 1 << 30)
    assert (options.offload, options.prefetch, options.nonfinite) == (False, 3, "skip")
    assert ElixirOptions.model_validate({"cache": "inf"}).cache is None
    assert ElixirOptions().cache == "auto"


@pytest.mark.parametrize(
    "given_options",
    [
        {"prefetch": "-1"},
        {"cache": "lots"},
        {"cache": "-5"},
        {"chunk_min": "2MiB", "chunk_max": "1MiB"},
        {"chunk_step": "0"},
        {"variant": "other"},
        {"nonfinite": "ignore"},
        {"chunks": "3"},
    ],
)
def test_bad_options_are_refused(given_options: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        ElixirOptions.model_validate(given_options)


@pytest.mark.parametrize("given", [{"offload": True}, {"offload": False, "cache": 1 << 20}])
def test_whole_copies_on_several_ranks_are_on_their_devices_for_good(given: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="scatter=False"):
        elixir(context(ranks=2), scatter=False, **given)
    elixir(context(ranks=2), scatter=False, offload=False)


@settings(max_examples=30, deadline=None)
@given(models(groups=True), st.floats(0.2, 0.9))
def test_two_ranks_plan_the_same(index: ModelIndex, share: float) -> None:
    """A plan is a function of its inputs, so that equal traces give every rank the same collectives."""
    strategy = elixir(context(ranks=2))
    layout = strategy.layout(index)
    trace = trace_of(layout)
    peak = strategy.plan(layout, trace).predicted_device_peak_bytes or 0
    tight = context(ranks=2, device=int(peak * share))
    try:
        plans = [elixir(tight).plan(layout, trace) for _ in range(2)]
    except BudgetError:
        assume(False)
    assert plans[0] == plans[1]
