"""What each switch costs in the solvers' model, and what it makes of a plan: by hand, one switch at a time."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from systems.planning.layout import Layout
from systems.planning.plan import OpKind, UpdateRule
from systems.planning.trace import Moment, Phase, Trace
from systems.strategies.h3t.compiling import Compiler
from systems.strategies.h3t.costs import PAPER, PAPER_WITHOUT_LINK, SUBSTRATE, LayerCosts, ModelCosts, Rules
from systems.strategies.h3t.evaluation import Tables, memory_of, runtime_of, tables
from systems.strategies.h3t.switches import ALL_ON, COMMUNICATION, EVERY, NAMES, Switches, array_of, communication
from tests.planning.synthetic import context, layout_of, trace_of

# ---- time. Every length is a decimal digit of its own, so that a sum says what is in it.

PREFETCH, GATHER, REDUCE, OFFLOAD, HIDDEN_OUT, HIDDEN_IN = 1.0, 10.0, 100.0, 1e3, 1e4, 1e5
MOVES = LayerCosts("layer", 0.0, 0.0, PREFETCH, GATHER, REDUCE, OFFLOAD, HIDDEN_OUT, HIDDEN_IN)


def neighbour(r: int) -> Switches:
    """The three switches of communication that number r stands for."""
    on = {NAMES[column]: bool(r >> bit & 1) for bit, column in enumerate(COMMUNICATION)}
    return Switches(**on)


def middle(layer: LayerCosts, rules: Rules, choices: tuple[Switches, ...] = (ALL_ON,)) -> Tables:
    """Of the second of three such layers, over (r of the layer before, choice, r of the layer behind)."""
    return tables(ModelCosts((layer,) * 3, rules), choices)[1]


@pytest.mark.parametrize("economical", [False, True])
def test_on_one_stream_a_layer_s_two_segments_take_the_sum_of_what_its_neighbours_move(economical: bool) -> None:
    mine = replace(ALL_ON, economical_forward=economical, economical_backward=economical)
    found = middle(MOVES, PAPER_WITHOUT_LINK, (mine,)).runtime_s[:, 0]
    for before, after in product(range(8), repeat=2):
        prev, behind = neighbour(before), neighbour(after)
        forward = HIDDEN_OUT * prev.offload_hidden + PREFETCH * behind.lazy_prefetch + GATHER
        again = PREFETCH * (prev.partition and prev.lazy_prefetch) + GATHER * prev.partition
        backward = HIDDEN_IN * prev.offload_hidden + again + REDUCE + OFFLOAD
        assert found[before, after] == pytest.approx(forward + backward)


def test_the_ends_of_a_step_prepare_the_first_layer_and_bring_the_last_one_s_back() -> None:
    for s in EVERY:
        found = runtime_of(ModelCosts((MOVES,), PAPER_WITHOUT_LINK), array_of([s])[None])[0]
        copied = PREFETCH * s.lazy_prefetch * (1 + s.partition) + GATHER * (1 + s.partition)
        assert found == pytest.approx(copied + (HIDDEN_OUT + HIDDEN_IN) * s.offload_hidden + REDUCE + OFFLOAD)


def test_recomputation_takes_one_forward_more() -> None:
    layer = LayerCosts("layer", forward_s=1.0, backward_s=10.0)
    for s in EVERY:
        found = runtime_of(ModelCosts((layer,) * 2, PAPER), array_of([s, s])[None])[0]
        assert found == pytest.approx(2 * (11.0 + s.rematerialise))


def both_segments_of_the_middle(rules: Rules, mine: Switches, **lengths: Any) -> float:
    """Both neighbours have all three switches of communication on."""
    layer = LayerCosts("layer", **lengths)
    return float(middle(layer, rules, (mine,)).runtime_s[-1, 0, -1])


def test_economical_prepares_after_the_post_process_and_else_beside_it() -> None:
    lengths = {"prefetch_s": 1.0, "gather_s": 10.0, "hidden_out_s": 10.0}
    ahead, economical = replace(ALL_ON, economical_forward=False), ALL_ON
    # backward: the shard and the gather of the layer before, behind a post-process of no length
    assert both_segments_of_the_middle(PAPER, ahead, **lengths) == pytest.approx(11 + 11)  # 1 and 10, beside the 10 that leave
    assert both_segments_of_the_middle(PAPER, economical, **lengths) == pytest.approx(21 + 11)


def test_economical_gathers_after_the_post_process_on_another_stream_too() -> None:
    """With a link of its own a gather could run beside the hidden state that leaves, but then both would need memory."""
    layer = LayerCosts("layer", gather_s=10.0, hidden_out_s=5.0)
    for economical, seconds in ((False, 10.0), (True, 15.0)):
        mine = replace(ALL_ON, economical_forward=economical)
        before, behind = communication([Switches(offload_hidden=True), Switches()])
        assert middle(layer, PAPER, (mine,)).runtime_s[before, 0, behind] == pytest.approx(seconds)


def test_economical_backward_is_a_switch_of_its_own() -> None:
    lengths = {"prefetch_s": 1.0, "gather_s": 10.0, "reduce_s": 5.0, "offload_s": 10.0}
    ahead = replace(ALL_ON, economical_backward=False)
    # forward: 11. Backward: shard to 1, gather to 11, reduction to 16 on the link, offload to 26; or the other way round:
    # reduction to 5, offload to 15, shard to 16, gather to 26.
    assert both_segments_of_the_middle(PAPER, ahead, **lengths) == pytest.approx(11 + 26)
    assert both_segments_of_the_middle(PAPER, ALL_ON, **lengths) == pytest.approx(11 + 26)
    longer = lengths | {"forward_s": 0.0, "backward_s": 20.0}
    assert both_segments_of_the_middle(SUBSTRATE, ahead, **longer) == pytest.approx(11 + 26)
    assert both_segments_of_the_middle(SUBSTRATE, ALL_ON, **longer) == pytest.approx(11 + 20 + 11)  # once it is out of the way


# ---- memory

P, REST, A, H = 1_000, 100, 10_000, 1_000_000


@pytest.mark.parametrize("rules", [PAPER, PAPER_WITHOUT_LINK, SUBSTRATE])
def test_what_a_layer_keeps_from_forward_to_backward_and_for_good(rules: Rules) -> None:
    layer = LayerCosts("layer", parameter_bytes=P, resting_bytes=REST, intermediate_bytes=A, hidden_bytes=H)
    found = middle(layer, rules, EVERY)
    for number, s in enumerate(EVERY):
        gathered = P if s.lazy_prefetch else P - REST
        kept = A * (not s.rematerialise) + H * (not s.offload_hidden) + gathered * (not s.partition)
        assert (found.delta_bytes[number], found.resident_bytes[number]) == (kept, REST * (not s.lazy_prefetch))


@pytest.mark.parametrize("part", ["forward_bytes", "backward_bytes"])
def test_the_runtime_s_peak_of_a_segment_has_what_is_coming_unless_economical(part: str) -> None:
    high = 1 << 30
    layer = LayerCosts("layer", parameter_bytes=P, resting_bytes=P, intermediate_bytes=A, **{part: high})
    found = middle(layer, SUBSTRATE, EVERY)
    for (before, after), (number, s) in product(product(range(8), repeat=2), enumerate(EVERY)):
        prev, behind, mine = neighbour(before), neighbour(after), P * s.lazy_prefetch
        if part == "forward_bytes":
            coming = P * behind.lazy_prefetch * (not s.economical_forward)
            expected = high + mine + A * (not s.rematerialise) + coming
        else:
            coming = P * prev.lazy_prefetch * prev.partition * (not s.economical_backward)
            expected = high + mine + coming
        assert found.peak_bytes[before, number, after] == expected


def test_a_gap_behind_a_layer_needs_room_beside_what_the_layer_keeps() -> None:
    layer = LayerCosts("layer", intermediate_bytes=A, hidden_bytes=H, gap_bytes=1 << 30)
    found = middle(layer, SUBSTRATE, EVERY)
    for number, s in enumerate(EVERY):
        kept = A * (not s.rematerialise) + H * (not s.offload_hidden)
        assert (found.peak_bytes[:, number] == kept + (1 << 30)).all()


def test_memory_of_an_assignment_adds_up_what_the_layers_before_keep_and_what_rests_of_all() -> None:
    """Line 18: the peak of segment i, beside deltas of the layers before it, and what rests of every layer."""
    sizes = {"parameter_bytes": P, "resting_bytes": P, "intermediate_bytes": A, "hidden_bytes": H, "backward_bytes": 1 << 30}
    layer = LayerCosts("layer", **sizes)
    none = array_of([Switches()] * 3)[None]
    assert memory_of(ModelCosts((layer,) * 3, SUBSTRATE), none)[0][0] == 2 * (A + H) + (1 << 30) + 3 * P


# ---- plans

EMBEDDING, FIRST, SECOND, HEAD = range(4)
LAYOUT: Layout = layout_of([(1, [unit]) for unit in range(4)])
TRACE: Trace = trace_of(LAYOUT)
LAST = len(TRACE) - 1


def at(phase: Phase, unit: int) -> int:
    return TRACE.moments.index(Moment(phase, unit))


def moves(s: Switches, bundle: int = SECOND) -> tuple[list[tuple[int, OpKind]], bool]:
    """(triggers and kinds of what a layer's bundle does, whether it is there at the start)."""
    compiler = Compiler(LAYOUT, TRACE, context(), UpdateRule.AFTER_NORM, frozenset({FIRST, SECOND}))
    plan = compiler.plan({FIRST: Switches(), SECOND: s}, others="resident")
    found = [(p.trigger, p.operation.kind) for p in plan.operations if p.operation.bundle == bundle]
    return sorted(found, key=lambda each: each[0]), bundle in plan.resident_at_start


FORWARD, AHEAD = at(Phase.FORWARD_ENTER, SECOND), at(Phase.FORWARD_ENTER, FIRST)
BACKWARD, DONE = at(Phase.BACKWARD_ENTER, SECOND), at(Phase.FORWARD_EXIT, SECOND)


@pytest.mark.parametrize("partition", [False, True])
@pytest.mark.parametrize("economical", [False, True])
def test_lazy_prefetching_fetches_for_forward_and_else_once_the_update_is_over(economical: bool, partition: bool) -> None:
    """Economical: when the layer before is out of the way; else when it begins. The other mode is backward's."""
    s = Switches(partition=partition, economical_forward=economical, economical_backward=not economical)
    found, resident = moves(s)
    assert resident and (LAST, OpKind.FETCH) in found
    assert not [kind for trigger, kind in found if trigger <= FORWARD]
    found, resident = moves(replace(s, lazy_prefetch=True))
    assert not resident and (LAST, OpKind.FETCH) not in found
    assert [trigger for trigger, _ in found if trigger <= FORWARD] == [FORWARD if economical else AHEAD]


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("economical", [False, True])
def test_partition_drops_after_forward_and_fetches_again_for_backward(economical: bool, lazy: bool) -> None:
    s = Switches(lazy_prefetch=lazy, economical_backward=economical, economical_forward=not economical)
    between = [each for each in moves(s)[0] if DONE <= each[0] <= BACKWARD]
    assert between == []
    between = [each for each in moves(replace(s, partition=True))[0] if DONE <= each[0] <= BACKWARD]
    begins = BACKWARD if economical else at(Phase.BACKWARD_ENTER, HEAD)
    assert between == [(DONE, OpKind.DROP), (begins, OpKind.FETCH)]


def test_a_layer_prepared_ahead_in_backward_comes_when_the_layer_behind_it_begins() -> None:
    compiler = Compiler(LAYOUT, TRACE, context(), UpdateRule.AFTER_NORM, frozenset({FIRST, SECOND}))
    plan = compiler.plan({FIRST: Switches(partition=True), SECOND: Switches()}, others="resident")
    fetched = [p.trigger for p in plan.operations if p.operation.bundle == FIRST and p.operation.kind is OpKind.FETCH]
    assert sorted(fetched) == [BACKWARD, LAST]


def test_activation_switches_become_the_plan_s() -> None:
    compiler = Compiler(LAYOUT, TRACE, context(), UpdateRule.AFTER_NORM, frozenset({FIRST, SECOND}))
    hidden, both = Switches(offload_hidden=True), Switches(rematerialise=True, offload_hidden=True)
    plan = compiler.plan({FIRST: hidden, SECOND: both}, others="resident")
    assert (plan.rematerialise, plan.offload_inputs) == (frozenset({SECOND}),) * 2  # H_i leaves only where A_i goes too
    plan = compiler.plan({FIRST: Switches(rematerialise=True), SECOND: both}, others="resident")
    assert (plan.rematerialise, plan.offload_inputs) == (frozenset({FIRST, SECOND}), frozenset({SECOND}))


def test_numbers_of_communication_are_those_of_the_tables() -> None:
    """r of a neighbour counts its switches from the lowest bit on, as `communication` does."""
    assert communication([neighbour(r) for r in range(8)]).tolist() == list(range(8))
