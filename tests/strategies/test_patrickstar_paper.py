"""PatrickStar's own rules, variant=paper and its ablations: laws of the plans, each of which its rule's absence breaks."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from systems.errors import BudgetError
from systems.planning.layout import Layout, ModelIndex
from systems.planning.plan import OpKind, Plan, UpdateRule
from systems.planning.policy.base import StrategyBase
from systems.planning.policy.caching import CacheRequest
from systems.planning.policy.division import Division
from systems.planning.policy.eviction import ModelOrder
from systems.planning.policy.homes import host_need, within_host
from systems.planning.step.profiles import held_profile
from systems.planning.step.schedule import expand
from systems.planning.strategy import PlanningContext
from systems.planning.trace import Moment, Phase, Trace
from systems.strategies.patrickstar import STRATEGY, placement
from systems.strategies.patrickstar import strategy as module
from systems.strategies.patrickstar.chunks import LARGEST, SMALLEST, STEP, PatrickStarChunker
from systems.strategies.patrickstar.options import PAPER, PatrickStarOptions
from systems.strategies.patrickstar.strategy import PatrickStar
from tests.planning.races import find_races
from tests.planning.synthetic import PLENTY, context, model_of, models, trace_of, transformer
from tests.strategies.patrickstar_laws import (
    Planned,
    compute_waits,
    evicted_for_want_of_room,
    farthest_is_evicted,
    fetched_when_needed,
    first_of_the_list_is_evicted,
    gradients_stay,
    margin_is_filled,
    moves,
)

TINY = transformer(6, 64)
PUBLISHED = ("paper", "spongebob", "static-partition", "osc")


def resident_peak(index: ModelIndex, activation: int) -> int:
    strategy = STRATEGY(PatrickStarOptions(), context())
    layout = strategy.layout(index)
    return strategy.plan(layout, trace_of(layout, activation=activation)).predicted_device_peak_bytes or 0


def planned(variant: str, share: float = 0.5, activation: int = 2000, index: ModelIndex = TINY, **changed: Any) -> Planned:
    """share: of what holds everything. changed: options that the variant sets otherwise."""
    asked = context(device=int(share * resident_peak(index, activation)))
    options = PatrickStarOptions.model_validate({"variant": variant}).model_copy(update=changed)
    strategy = STRATEGY(options, asked)
    layout = strategy.layout(index)
    trace = trace_of(layout, activation=activation)
    return Planned(layout, trace, strategy.plan(layout, trace), asked)


SPILLS: dict[str, Any] = {"share": 0.1, "activation": 500}  # parameters do not all fit
LAWS: dict[str, tuple[Callable[[Planned], None], str, dict[str, Any]]] = {
    "fetched when needed": (fetched_when_needed, "paper", {}),
    "compute waits": (compute_waits, "paper", {}),
    "farthest is evicted": (farthest_is_evicted, "osc", SPILLS),
    "gradients stay": (gradients_stay, "osc", SPILLS),
    "evicted for want of room": (evicted_for_want_of_room, "osc", SPILLS),
    "margin is filled": (margin_is_filled, "paper", {}),
    "first of the list is evicted": (first_of_the_list_is_evicted, "static-partition", {"share": 0.4}),
}


@pytest.mark.parametrize("name", LAWS)
def test_a_rule_of_the_paper_holds(name: str) -> None:
    law, variant, given_case = LAWS[name]
    found = planned(variant, **given_case)
    law(found)
    if "evicted" in name:
        assert any(moved.evicted for moved in moves(found)), "void: nothing is evicted"


@pytest.mark.parametrize("name", ["fetched when needed", "compute waits", "gradients stay", "margin is filled"])
def test_the_default_breaks_it_and_has_another_plan(name: str) -> None:
    law, _, given_case = LAWS[name]
    found = planned("base", **given_case)
    with pytest.raises(AssertionError):
        law(found)
    assert found.plan != planned("paper", **given_case).plan


def test_where_nothing_is_traced_belady_s_rule_is_broken_and_the_other_way_round() -> None:
    with pytest.raises(AssertionError):
        farthest_is_evicted(planned("static-partition"))
    with pytest.raises(AssertionError):
        first_of_the_list_is_evicted(planned("osc", **SPILLS))


def without(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Switches one rule off; options that the case has beside it."""
    changed: dict[str, Any] = {}
    if name == "fetched when needed":
        changed = {"prefetch": 8}
    elif name == "compute waits":
        monkeypatch.setattr(module, "demanding", lambda operations: frozenset())
    elif name == "farthest is evicted":
        monkeypatch.setattr(module, "CacheRequest", partial(_asked, ModelOrder(last=False)))
    elif name == "gradients stay":
        monkeypatch.setattr(PatrickStar, "division", StrategyBase.division)
    elif name == "evicted for want of room":
        monkeypatch.setattr(Division, "room", lambda division, residence: held_profile(division.demand, residence))
    elif name == "margin is filled":
        monkeypatch.setattr(placement, "in_the_margin", placement.beside_parameters)
    else:
        monkeypatch.setattr(module, "CacheRequest", partial(_asked, None))
    return changed


def _asked(order: ModelOrder | None, *given_request: Any) -> CacheRequest:
    return replace(CacheRequest(*given_request), order=order)


@pytest.mark.parametrize("name", LAWS)
def test_without_the_rule_its_law_is_broken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    law, variant, given_case = LAWS[name]
    changed = without(name, monkeypatch)
    with pytest.raises(AssertionError):
        law(planned(variant, **given_case, **changed))


@settings(max_examples=60, deadline=None)
@given(models(), st.floats(0.2, 1.1), st.integers(0, 4), st.sampled_from(PUBLISHED))
def test_the_rules_hold_for_any_model(index: ModelIndex, share: float, activation: int, variant: str) -> None:
    try:
        found = planned(variant, share, activation * 700, index)
    except BudgetError:
        return
    fetched_when_needed(found)
    gradients_stay(found)
    evicted_for_want_of_room(found, 0.2 if variant == "static-partition" else 1)
    (first_of_the_list_is_evicted if variant == "static-partition" else farthest_is_evicted)(found)
    assert find_races(expand(found.layout, found.trace, found.plan, found.context).issued()) == []
    assert found.plan.staying == found.plan.in_place - found.whole


# ---- options


@pytest.mark.parametrize("variant", PUBLISHED)
def test_the_paper_s_variants_set_what_they_rest_on(variant: str) -> None:
    options = PatrickStarOptions.model_validate({"variant": variant})
    assert {name: getattr(options, name) for name in PAPER} == PAPER
    assert STRATEGY(options, context()).update_rule is UpdateRule.AFTER_NORM
    for name, value in (("prefetch", 8), ("run_ahead", True), ("nonfinite", "stop")):
        with pytest.raises(ValidationError, match=f"variant={variant} has {name}=.*leave {name} out"):
            PatrickStarOptions.model_validate({"variant": variant, name: value})
    assert PatrickStarOptions.model_validate({"variant": variant, "prefetch": "off"}) == options


def test_the_default_is_none_of_them() -> None:
    options = PatrickStarOptions()
    assert (options.variant, options.prefetch, options.run_ahead, options.as_published) == ("base", 8, True, False)
    assert planned("base").plan.staying == frozenset()


def test_large_blocks_have_the_paper_s_range_of_chunks() -> None:
    block = model_of([(n, [SMALLEST // 4] * 4) for n in range(3)])
    large = PatrickStarChunker(block, PatrickStarOptions(variant="paper"), context())
    assert large.range() == (SMALLEST, LARGEST)
    assert large.candidates() == list(range(SMALLEST, LARGEST + 1, STEP))
    assert PatrickStarChunker(block, PatrickStarOptions(), context()).range() == (SMALLEST // 4, SMALLEST)
    smaller = model_of([(n, [SMALLEST // 4] * 3) for n in range(3)])
    ranges = [PatrickStarChunker(smaller, PatrickStarOptions(variant=v), context()).range() for v in ("paper", "base")]
    assert ranges[0] == ranges[1]
    given_range = PatrickStarOptions(variant="paper", chunk_max=2 * SMALLEST)
    assert PatrickStarChunker(block, given_range, context()).range()[1] == SMALLEST


# ---- a static partition


def shuffled(trace: Trace, seed: int) -> Trace:
    """Of the same moments, with other bytes and times: at most half as many."""
    luck = random.Random(seed)
    order = luck.sample(range(len(trace)), len(trace))
    peaks = tuple(trace.non_model_bytes[at] // luck.randint(2, 4) for at in order)
    return replace(trace, non_model_bytes=peaks, compute_time_s=tuple(luck.random() for _ in order), adopted_peak_bytes=())


def moves_alike(variant: str, seed: int) -> bool:
    """For a shuffled trace of the same moments."""
    asked = context(device=int(0.5 * resident_peak(TINY, 200_000)))
    strategy = STRATEGY(PatrickStarOptions.model_validate({"variant": variant}), asked)
    layout = strategy.layout(TINY)
    trace = trace_of(layout, activation=200_000)
    found, other = (strategy.plan(layout, each).operations for each in (trace, shuffled(trace, seed)))
    assert found, "void: nothing moves"
    return found == other


@pytest.mark.parametrize("seed", range(4))
def test_a_static_partition_looks_at_no_measured_byte(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has a tracer does, and so would a share of what the trace leaves."""
    assert moves_alike("static-partition", seed)
    assert not moves_alike("paper", seed)
    monkeypatch.setattr(placement, "static_room", lambda division, residence, share: _part_of(division.room(residence)))
    assert not moves_alike("static-partition", seed)


def _part_of(room: list[int]) -> list[int]:
    return [each // 5 for each in room]


@pytest.mark.parametrize(("variant", "alike"), [("static-partition", True), ("osc", False)])
def test_a_static_partition_looks_at_no_future_use(variant: str, alike: bool) -> None:
    """Two steps that are alike up to the end of forward, and then take their units in another order, move alike until then."""
    strategy = STRATEGY(PatrickStarOptions.model_validate({"variant": variant, "warmup_share": 0.3}), context(device=400_000))
    layout = strategy.layout(TINY)
    usual = trace_of(layout)
    turn = next(n for n, m in enumerate(usual.moments) if m.phase is Phase.BACKWARD_ENTER)
    heads = []
    for order in (1, -1):
        units = [m.unit for m in usual.moments[turn:] if m.phase is Phase.BACKWARD_ENTER][::order]
        trace = in_order(usual, layout, turn, units)
        operations = strategy.plan(layout, trace).operations
        heads.append([(p.trigger, p.operation) for p in operations if p.trigger < turn])
    assert heads[0], "void: nothing moves in forward"
    assert (heads[0] == heads[1]) == alike


def in_order(trace: Trace, layout: Layout, turn: int, units: list[int]) -> Trace:
    """The same step, whose backward takes its units in this order."""
    moments: list[Moment] = list(trace.moments[:turn])
    flushes: list[tuple[int, ...]] = [()] * turn
    for number, unit in enumerate(units):
        later = set(units[number + 1 :])
        moments += [replace(m, unit=unit) for m in trace.moments[turn : turn + 2]]
        flushes += [(), tuple(b for b in layout.bundles_of_unit[unit] if not later.intersection(layout.bundles[b].units))]
    end = trace.moments[len(moments) :]
    return Trace((*moments, *end), (0,) * len(trace), trace.compute_time_s, (*flushes, *((),) * len(end)))


@pytest.mark.parametrize("share", [0.8, 0.9, 1.0])
def test_a_static_partition_that_activations_do_not_fit_beside_is_refused(share: float) -> None:
    def plan(device: int, part: float = share) -> Plan:
        strategy = STRATEGY(PatrickStarOptions(variant="static-partition", warmup_share=part), context(device=device))
        layout = strategy.layout(TINY)
        return strategy.plan(layout, trace_of(layout, activation=5_000))

    with pytest.raises(
        BudgetError, match=r"where \d+% of it is for chunks whatever.*lower warmup_share, as `options="
    ) as raised:
        plan(400_000)
    told = re.search(r"`options=dict\(warmup_share=(.*?)\)`", str(raised.value))
    assert told is not None and plan(400_000, float(told[1])).operations
    need = raised.value.need
    assert need > raised.value.have == 400_000
    assert plan(need).operations or share == 1
    with pytest.raises(BudgetError):
        plan(need - 2)


# ---- the largest model


DEVICE, HOST, WIDTH = 8_000_000, 4_000_000, 64


def holds(
    blocks: int, variant: str, device: int = DEVICE, host: int = HOST, share: float = 0.2
) -> PlanningContext | BudgetError:
    """Whether layout and plan take a model of so many blocks."""
    asked = replace(context(device=device), host_budget=host)
    strategy = STRATEGY(PatrickStarOptions.model_validate({"variant": variant, "warmup_share": share}), asked)
    try:
        layout = within_host(strategy.layout(transformer(blocks, WIDTH)), asked, strategy.update_rule)
    except BudgetError as error:
        return error
    strategy.plan(layout, trace_of(layout))
    assert host_need(layout, asked) <= host
    return asked


def formula(device: float, host: int) -> float:
    """Blocks of (device + host) x utilization / 14 parameters, where the tails of chunks are not allocated."""
    one, two = transformer(1, WIDTH), transformer(2, WIDTH)
    layout = STRATEGY(PatrickStarOptions(variant="paper"), context()).layout(two)
    utilization = two.numel() * 2 / layout.param_bytes
    each = two.numel() - one.numel()
    return ((device + host) * utilization / 14 - (one.numel() - each)) / each


@pytest.mark.parametrize(("device", "host"), [(DEVICE, HOST), (4_000_000, 6_000_000), (16_000_000, 2_500_000)])
@pytest.mark.parametrize("variant", PUBLISHED)
def test_the_largest_model_is_bounded_by_the_warm_up(variant: str, device: int, host: int) -> None:
    """Section 8.2.1: (0.2 L + host) x utilization / 14, within a layer; and neither the host alone nor all of the device."""
    bound = formula(0.2 * device, host)
    assert formula(0, host) < bound - 1 < formula(device, host) - 2, "void: the share does not matter"
    most = next(n for n in range(1, 100) if isinstance(holds(n + 1, variant, device, host), BudgetError))
    assert int(bound) - 1 <= most <= bound
    refusal = holds(most + 1, variant, device, host)
    assert isinstance(refusal, BudgetError)
    assert "chunks may take 20% (" in str(refusal)
    told = re.search(r"`options=dict\(warmup_share=(.*?)\)`", str(refusal))
    assert told is not None and not isinstance(holds(most + 1, variant, device, host, float(told[1])), BudgetError)
    assert refusal.need > refusal.have == host
    assert not isinstance(holds(int(bound) + 1, "base", device, host), BudgetError), "the default takes more"


def test_without_the_rule_a_model_is_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "warm_up_share", lambda layout, context, rule, share: share)
    assert not isinstance(holds(int(formula(0.2 * DEVICE, HOST)) + 1, "paper"), BudgetError)


def test_all_of_the_warm_up_s_model_data_is_within_the_share() -> None:
    """Of what is left beside that which never moves, the strategy's share is so much that both together are its 20 %."""
    asked = replace(context(device=DEVICE), host_budget=HOST)
    strategy = STRATEGY(PatrickStarOptions(variant="paper"), asked)
    layout = within_host(strategy.layout(transformer(int(formula(0.2 * DEVICE, HOST)), WIDTH)), asked, strategy.update_rule)
    settled = Division(layout, trace_of(layout), asked, strategy.update_rule, "patrickstar", str).base.static_bytes
    share = strategy.warm_up_share
    assert share is not None and settled > 0 and share < 0.2
    assert settled + share * (DEVICE - settled) == pytest.approx(0.2 * DEVICE)
    ample = STRATEGY(PatrickStarOptions(variant="paper", warmup_share=0.3), context(device=PLENTY))
    ample.layout(TINY)
    assert ample.warm_up_share == 0.3


def test_gradients_that_are_evicted_are_no_parameters_written_back() -> None:
    asked = context(device=int(0.1 * resident_peak(TINY, 500)))
    strategy = STRATEGY(PatrickStarOptions(variant="osc"), asked)
    layout = strategy.layout(TINY)
    trace = trace_of(layout, activation=500)
    plan = strategy.plan(layout, trace)
    flushed = {b: n for n, bundles in enumerate(trace.flushes) for b in bundles}
    written = [p for p in plan.operations if p.operation.kind is OpKind.WRITE_BACK]
    gradients = [p for p in written if p.operation.bundle in plan.staying and p.trigger >= flushed[p.operation.bundle]]
    assert gradients and len(gradients) < len(written), "void: both are evicted"
    told: Any = strategy.statistics()
    assert told.kept_gradients == len(plan.staying)
    others = [p.operation.bundle for p in written if p not in gradients]
    assert told.written_back_bytes_per_step == sum(map(layout.bundle_bytes, others))
