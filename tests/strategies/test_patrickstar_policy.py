"""PatrickStar's decisions: chunks, states, margin, plans. What training makes of them is in test_patrickstar_training."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from systems.errors import BudgetError
from systems.planning.layout import Layout, ModelIndex, round_up
from systems.planning.plan import OpKind, Plan, Tier, UpdateRule
from systems.planning.step.demand import demand_of, reusable
from systems.planning.step.operations import Work
from systems.planning.step.schedule import expand
from systems.planning.step.timeline import timeline
from systems.planning.step.validator import validate
from systems.planning.strategy import PlanningContext
from systems.planning.trace import ENTER, Moment, Phase, Trace
from systems.strategies.patrickstar import STRATEGY
from systems.strategies.patrickstar.chunks import LISTS, PatrickStarChunker
from systems.strategies.patrickstar.options import PatrickStarOptions, PatrickStarStatistics
from systems.strategies.patrickstar.strategy import PatrickStar
from systems.strategies.patrickstar.tracer import margin
from tests.planning.races import find_races
from tests.planning.reference import ReferenceRuntime
from tests.planning.synthetic import PLENTY, context, model_of, models, trace_of, transformer
from tests.strategies.patrickstar_states import TRANSITIONS, Event, TensorState, TensorStates, may_move

TINY = transformer(6, 64)
VARIANTS = ("base", "paper", "spongebob", "static-partition", "osc")


def patrickstar(given: PlanningContext, **options: object) -> PatrickStar:
    return STRATEGY(PatrickStarOptions.model_validate(options), given)


def laid_out(index: ModelIndex = TINY, *, device: int = PLENTY, **options: object) -> Layout:
    return patrickstar(context(device=device), **options).layout(index)


def plan_for(index: ModelIndex, trace: Trace, device: int, *, accumulate: int = 1, **options: object) -> Plan:
    strategy = patrickstar(context(device=device, accumulate=accumulate), **options)
    return strategy.plan(strategy.layout(index), trace)


def told(strategy: PatrickStar) -> PatrickStarStatistics:
    statistics = strategy.statistics()
    assert isinstance(statistics, PatrickStarStatistics)
    return statistics


def resident_peak(index: ModelIndex, trace: Trace, **options: object) -> int:
    peak = plan_for(index, trace, PLENTY, **options).predicted_device_peak_bytes  # type: ignore[arg-type]
    assert peak is not None
    return peak


# ---- chunks


@settings(max_examples=100, deadline=None)
@given(models(), st.sampled_from([1, 2]), st.sampled_from(["base", "spongebob"]))
def test_chunk_lists_keep_their_promises(index: ModelIndex, ranks: int, variant: str) -> None:
    chunker = PatrickStarChunker(index, PatrickStarOptions.model_validate({"variant": variant}), context(ranks=ranks))
    layout = chunker.layout
    placed = [p.parameter for s in layout.segments for p in s.placements]
    assert sorted(placed) == [p.index for p in index.parameters]  # each once, in one chunk only
    assert all(segment.numel % (128 * ranks) == 0 for segment in layout.segments)
    for frozen in (False, True):  # of each list: model order
        found = [index.parameters[p] for p in placed if index.parameters[p].trainable is not frozen]
        mine = [p.index for p in found if len(p.users) == 1 and chunker.size(p) <= chunker.chunk]
        assert mine == sorted(mine)
    for bundle in layout.bundles:
        parameters = [index.parameters[p.parameter] for s in bundle.segments for p in layout.segments[s].placements]
        assert {p.trainable for p in parameters} == {bundle.trainable}
        shared = any(len(p.users) > 1 for p in parameters)
        assert not shared or len({frozenset(p.users) for p in parameters}) == 1  # out of chunks
        assert (bundle.index in layout.in_place) == (bundle.trainable and not shared)
        assert variant == "base" or shared or len(parameters) == 1
    lists = chunker.statistics["chunk_lists"]
    assert tuple(lists) == LISTS
    trained = sum(s.numel for s in layout.segments if s.space.trainable) // ranks
    assert [lists[name] for name in LISTS[1:]] == [4 * trained] * 3


@settings(max_examples=100, deadline=None)
@given(models(), st.integers(1, 12), st.integers(0, 12), st.integers(1, 4))
def test_the_search_finds_the_least_waste_of_the_users_range(index: ModelIndex, low: int, width: int, step: int) -> None:
    unit = 128 * 2
    options = PatrickStarOptions(chunk_min=low * unit, chunk_max=(low + width) * unit, chunk_step=step * unit)
    chunker = PatrickStarChunker(index, options, context())
    tested = [(low + i * step) * 128 for i in range(width // step + 1)]
    single = [round_up(p.numel, 128) for p in index.parameters if len(p.users) == 1]
    holding = [size for size in tested if size >= max(single, default=0)] or [tested[-1]]
    assert chunker.chunk in holding
    least = min(map(chunker.waste, holding))
    assert chunker.chunk == max(size for size in holding if chunker.waste(size) == least)  # fewer copies for the same waste


def test_utilization_by_hand() -> None:
    """As in table 3: elements of parameters over elements of chunks."""
    index = model_of([(0, [256, 256]), (1, [256, 256]), (2, [256, 384])])
    chunker = PatrickStarChunker(index, PatrickStarOptions(chunk_min=768 * 2, chunk_max=768 * 2), context())
    # 256 256 256 | 256 256, and 384 does not fit behind them
    assert chunker.statistics["num_chunks"] == 3
    assert chunker.statistics["utilization"] == 1664 / (3 * 768)
    assert [len(s.placements) for s in chunker.layout.segments] == [3, 2, 1]


def test_what_no_chunk_holds_is_labelled_out_of_chunks() -> None:
    statistics = PatrickStarChunker(TINY, PatrickStarOptions(chunk_min=256, chunk_max=1024), context()).statistics
    assert statistics["num_out_of_chunks"] > 1
    layout = laid_out()
    (tied,) = [b for b in layout.bundles if b.units == (0, len(TINY.units) - 1)]
    assert tied.index not in layout.in_place


# ---- states


def test_the_transitions_are_those_of_figure_6() -> None:
    free, compute, hold = TensorState.FREE, TensorState.COMPUTE, TensorState.HOLD
    forward, backward = TensorState.HOLD_AFTER_FWD, TensorState.HOLD_AFTER_BWD
    arrows = {(before, after) for (before, _), after in TRANSITIONS.items() if before is not after}
    assert arrows == {
        (free, hold),  # initialized
        (free, compute),  # a remote chunk was fetched
        (hold, compute),
        (compute, forward),
        (forward, compute),  # another operator
        (forward, hold),  # all FWD is done
        (compute, hold),  # BWD of a shared one that is used again
        (compute, backward),
        (backward, hold),  # ADAM is done
        (forward, free),  # remote
        (backward, free),
    }


@pytest.mark.parametrize("accumulate", [1, 2])
@settings(max_examples=50, deadline=None)
@given(index=models())
def test_a_chunk_may_move_exactly_when_nothing_holds_it(index: ModelIndex, accumulate: int) -> None:
    layout = laid_out(index)
    trace = trace_of(layout, accumulate=accumulate)
    demand = demand_of(layout, trace, context(accumulate=accumulate))
    for states, held in zip(TensorStates(index, trace).steps(), demand.held, strict=True):
        for bundle in layout.bundles:
            mine = [states[p.parameter] for s in bundle.segments for p in layout.segments[s].placements]
            assert may_move(mine) == (bundle.index not in held)


def test_the_states_of_a_step() -> None:
    index = model_of([(0, [128]), (1, [128])], tied=[(128, [0, 1])])
    trace = trace_of(laid_out(index))
    steps = TensorStates(index, trace).steps()
    order = [[next(s for i, s in enumerate(now) if i == p) for now in steps] for p in range(3)]
    shared, first, _ = ([s for i, s in enumerate(line) if not i or line[i - 1] is not s] for line in order)
    hold, compute = TensorState.HOLD, TensorState.COMPUTE
    forward, backward = TensorState.HOLD_AFTER_FWD, TensorState.HOLD_AFTER_BWD
    assert first == [hold, compute, forward, hold, compute, backward, hold]
    # the reference counter: after the first of its two uses in BWD the shared one is not done
    assert shared == [hold, compute, forward, compute, forward, compute, hold, compute, backward, hold]


@pytest.mark.parametrize("nested", [True, False])
def test_the_forward_of_a_recomputation_ends_no_access_of_backward(nested: bool) -> None:
    """Non-reentrant checkpoints run it inside the block's backward, where Algorithm 2 waits for the outer release."""
    index = model_of([(0, [128]), (1, [128])])
    trace = trace_of(laid_out(index))
    at = next(i for i, m in enumerate(trace.moments) if m.phase is Phase.BACKWARD_ENTER and m.unit == 1)
    again = [Moment(Phase.FORWARD_ENTER, 1), Moment(Phase.FORWARD_EXIT, 1)]
    enter, rest = [trace.moments[at]], trace.moments[at + 1 :]
    moments = [*trace.moments[:at], *((*enter, *again) if nested else (*again, *enter)), *rest]
    steps = TensorStates(index, replace(trace, moments=tuple(moments))).steps()
    hold, compute = TensorState.HOLD, TensorState.COMPUTE
    forward, backward = TensorState.HOLD_AFTER_FWD, TensorState.HOLD_AFTER_BWD
    inside = [now[1] for now in steps[at : at + 4]]
    assert inside == ([compute] * 3 + [backward] if nested else [compute, forward, compute, backward])
    assert steps[-1] == (hold, hold)


def test_a_transition_that_the_figure_lacks_is_an_error() -> None:
    with pytest.raises(KeyError):
        TRANSITIONS[TensorState.HOLD_AFTER_BWD, Event.RELEASE_FWD]


# ---- tracer, margin, room


def test_the_margin_counts_in_chunks() -> None:
    layout = laid_out(model_of([(n, [1024]) for n in range(8)]), chunk_min=2048, chunk_max=2048)
    assert len(layout.bundles) == 8
    curve = [0, 5000, 100]
    parameters, chunk = 8 * 1024 * 2, 1024
    above = margin(layout, 5000 + parameters + 2 * chunk * 12 + 7, curve, chunk=chunk, optimizer_itemsize=12)
    assert (above.size_bytes, above.chunks) == (2 * chunk * 12 + 7, 2)
    below = margin(layout, 5000 + parameters - chunk * 2 - 1, curve, chunk=chunk, optimizer_itemsize=12)
    assert (below.size_bytes, below.chunks) == (-chunk * 2 - 1, -2)


@settings(max_examples=100, deadline=None)
@given(
    models(),
    st.sampled_from([1, 2]),
    st.sampled_from(["off", "1", "3"]),
    st.floats(0.05, 1.1),
    st.integers(0, 4),
    st.sampled_from(["skip", "stop"]),
    st.sampled_from(VARIANTS),
)
def test_every_plan_is_valid_and_within_the_traced_room_or_refused(
    index: ModelIndex, accumulate: int, prefetch: str, share: float, activation: int, nonfinite: str, variant: str
) -> None:
    options = {"variant": variant} | ({"prefetch": prefetch, "nonfinite": nonfinite} if variant == "base" else {})
    whole = patrickstar(context(accumulate=accumulate), variant="spongebob" if variant == "spongebob" else "base")
    layout = whole.layout(index)
    trace = trace_of(layout, accumulate=accumulate, activation=activation * 700)
    everything = whole.plan(layout, trace).predicted_device_peak_bytes or 0
    given_context = context(device=int(everything * share), accumulate=accumulate)
    refusal = None
    try:
        strategy = patrickstar(given_context, **options)
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
    for moment, pool in enumerate(memory.device_pool_bytes):  # A = L - N, and N covers this moment and the next
        assert pool <= given_context.device_budget - trace.non_model_bytes[moment]
    if share >= 1 and variant == "base" and accumulate == 1:
        assert plan.operations == ()
    if variant == "osc":
        assert set(plan.optimizer_tier) == {Tier.HOST}


# ---- plans


def at_half(**options: object) -> tuple[Layout, Trace, Plan, PatrickStar]:
    trace = trace_of(laid_out(), activation=2000)
    strategy = patrickstar(context(device=resident_peak(TINY, trace) // 2), **options)
    layout = strategy.layout(TINY)
    return layout, trace, strategy.plan(layout, trace), strategy


def test_optimizer_chunks_in_the_margin_evict_nothing() -> None:
    layout, _, plan, strategy = at_half()
    share = told(strategy).optimizer_share_on_device
    assert share is not None
    assert 0 < share < 1
    assert (told(strategy).margin_chunks or 0) > 0
    assert {p.operation.kind for p in plan.operations} == {OpKind.FETCH}  # each after its update, none evicted
    tiers = [plan.optimizer_tier[b.segments[0]] for b in layout.bundles if b.index in layout.in_place]
    assert tiers[0] is Tier.DEVICE
    assert tiers[-1] is Tier.HOST
    without = at_half(variant="osc")[2]
    assert {p.operation.kind for p in without.operations} == {OpKind.FETCH}
    assert len(without.operations) > len(plan.operations)


@pytest.mark.parametrize("share", [0.5, 0.6, 0.75, 0.9])
@pytest.mark.parametrize("nonfinite", ["skip", "stop"])
def test_the_margin_is_filled_with_as_many_optimizer_chunks_as_fit(share: float, nonfinite: str) -> None:
    """What is left beside all parameters would not do for another chunk's three lists, its parameters and its gradient."""
    trace = trace_of(laid_out(), activation=2000)
    strategy = patrickstar(context(device=int(share * resident_peak(TINY, trace))), nonfinite=nonfinite)
    layout = strategy.layout(TINY)
    plan = strategy.plan(layout, trace)
    on_host = [b for b in layout.bundles if plan.optimizer_tier[b.segments[0]] is Tier.HOST]
    assert 0 < len(on_host) < len(layout.bundles), "void"
    least = min(b.numel for b in on_host) * (12 + 2 + 2)
    assert (plan.predicted_device_peak_bytes or 0) + least > strategy._context.device_budget


def test_where_parameters_spill_they_are_written_back_and_no_optimizer_is_on_the_device() -> None:
    trace = trace_of(laid_out(), activation=2000)
    strategy = patrickstar(context(device=max(trace.non_model_bytes) + laid_out().param_bytes * 2 // 3))
    plan = strategy.plan(strategy.layout(TINY), trace)
    assert {p.operation.kind for p in plan.operations} == {OpKind.FETCH, OpKind.WRITE_BACK}
    assert set(plan.optimizer_tier) == {Tier.HOST}
    statistics = told(strategy)
    assert statistics.margin_chunks is not None
    assert statistics.margin_chunks < 0
    assert statistics.margin_bytes == max(trace.non_model_bytes) * -1 + strategy._context.device_budget - laid_out().param_bytes
    assert statistics.written_back_bytes_per_step


def test_gradients_take_no_memory_of_their_own() -> None:
    layout, trace, plan, strategy = at_half(variant="osc")
    schedule = expand(layout, trace, plan, strategy._context)
    ranged = {o.bundle for o in schedule.operations if o.kind is Work.ALLOCATE}
    assert ranged == {b.index for b in layout.bundles} - layout.in_place  # the tied one
    padding = layout.param_bytes / layout.itemsize / TINY.numel()
    assert (told(strategy).model_bytes_per_parameter or 0) <= 14 * padding + layout.bundle_bytes(min(ranged)) / TINY.numel()
    several = patrickstar(context(accumulate=2))
    assert "2 micro-batches" in told_after_layout(several).gradients
    assert several.plan(several.layout(TINY), trace_of(layout, accumulate=2)).in_place == frozenset()


def told_after_layout(strategy: PatrickStar) -> PatrickStarStatistics:
    strategy.layout(TINY)
    return told(strategy)


def test_a_unit_that_is_used_twice_has_a_range() -> None:
    layout = laid_out(model_of([(0, [512]), (1, [512]), (2, [512])]), chunk_min=1024, chunk_max=1024)
    once = trace_of(layout)
    assert reusable(layout, once, context()) == {0, 1, 2}
    twice = trace_of(layout, order=[0, 1, 2, 1])
    assert reusable(layout, twice, context()) == {0, 2}
    assert reusable(layout, once, context(accumulate=2)) == frozenset()
    assert reusable(replace(layout, in_place=frozenset({2})), once, context()) == {2}


def test_without_prefetching_a_chunk_is_fetched_when_it_is_needed() -> None:
    layout, trace, plan, _ = at_half(prefetch="off")
    fetches = [p for p in plan.operations if p.operation.kind is OpKind.FETCH]
    assert fetches
    for planned in fetches:
        entering = trace.moments[planned.trigger]
        assert entering.phase in ENTER
        assert planned.operation.bundle in layout.bundles_of_unit[entering.unit]
    ahead = at_half()[2]
    late = [p for p in ahead.operations if trace.moments[p.trigger].phase in (Phase.FORWARD_ENTER, Phase.BACKWARD_ENTER)]
    assert len(late) < len(fetches)


@pytest.mark.parametrize("share", [0.1, 0.2])
def test_a_static_partition_never_exceeds_its_share(share: float) -> None:
    layout, trace, plan, strategy = at_half(variant="static-partition", warmup_share=share)
    memory = timeline(layout, trace, plan, strategy._context)
    demand = demand_of(layout, trace, strategy._context, plan.in_place)
    held = max(sum(map(layout.bundle_bytes, bundles)) for bundles in demand.held)
    tied = max(layout.bundle_bytes(b.index) for b in layout.bundles if b.index not in layout.in_place)
    limit = max(int(share * strategy._context.device_budget), held)
    assert limit + tied < layout.param_bytes, "void: all chunks fit"
    assert memory.pool_peak <= limit + tied  # its gradient's range is not a chunk
    assert plan.operations


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("variant", ["base", "spongebob"])
def test_with_enough_memory_no_byte_moves(accumulate: int, variant: str) -> None:
    layout = laid_out(variant=variant)
    trace = trace_of(layout, accumulate=accumulate, activation=1000)
    plan = plan_for(TINY, trace, PLENTY, accumulate=accumulate, variant=variant)
    assert plan.operations == ()
    assert set(plan.optimizer_tier) == {Tier.DEVICE}
    least = plan.predicted_device_peak_bytes or 0
    if variant != "base":  # the margin is beside the highest non-model memory and knows nothing of gradients
        states = sum(s.numel for s in layout.segments) * context(accumulate=accumulate).optimizer_itemsize
        least = max(trace.non_model_bytes) + layout.param_bytes * 2 + states
    assert plan_for(TINY, trace, least, accumulate=accumulate, variant=variant).operations == ()


def test_a_device_too_small_for_the_largest_unit_is_refused_with_both_numbers() -> None:
    with pytest.raises(BudgetError, match=r"patrickstar needs at least .* for unit 'unit.*of gradients.*is given") as raised:
        laid_out(device=50_000)
    need = raised.value.need
    laid_out(device=need)
    with pytest.raises(BudgetError):
        laid_out(device=need - 1)


# ---- eviction and options


def test_eviction_is_in_chunk_list_order_in_the_warm_up_step_and_farthest_next_use_afterwards() -> None:
    layout = laid_out()
    first = patrickstar(context()).eviction(layout, None)
    assert [first.choose(candidates, 7) for candidates in ([5, 2, 3], [9, 7], [4])] == [2, 7, 4]
    trace = trace_of(layout)
    belady = patrickstar(context()).eviction(layout, trace)
    begin = next(i for i, m in enumerate(trace.moments) if m.phase is Phase.FORWARD_ENTER and m.unit == 4)
    earlier, later = layout.bundles_of_unit[2][1], layout.bundles_of_unit[6][-1]
    assert belady.choose([earlier, later], begin) == earlier  # used again only at the end of backward


def test_options_read_what_a_command_line_gives() -> None:
    options = PatrickStarOptions.model_validate({"chunk_min": "1MiB", "warmup_share": "0.3", "prefetch": "off"})
    assert (options.chunk_min, options.warmup_share, options.prefetch, options.variant) == (1 << 20, 0.3, 0, "base")
    assert PatrickStarOptions.model_validate({"prefetch": "4"}).prefetch == 4
    assert patrickstar(context(), warmup_share=0.4).warm_up_share == 0.4
    assert patrickstar(context(), nonfinite="stop").update_rule is UpdateRule.WHEN_REDUCED


@pytest.mark.parametrize(
    "given_options",
    [
        {"prefetch": "-1"},
        {"prefetch": "on"},
        {"warmup_share": "0"},
        {"warmup_share": "1.5"},
        {"chunk_min": "2MiB", "chunk_max": "1MiB"},
        {"chunk_step": "0"},
        {"variant": "other"},
        {"cache": "1GiB"},
    ],
)
def test_bad_options_are_refused(given_options: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        PatrickStarOptions.model_validate(given_options)
