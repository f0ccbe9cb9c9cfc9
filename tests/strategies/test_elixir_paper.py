"""Elixir's variant paper as plans: laws that they keep, that the default's plans break, and that break without their rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from systems.errors import BudgetError
from systems.planning.layout import Layout, ModelIndex
from systems.planning.plan import LaneKind, OpKind, Plan, Tier
from systems.planning.policy.division import Division
from systems.planning.policy.eviction import ModelOrder
from systems.planning.policy.homes import host_need, within_host
from systems.planning.step.operations import ScheduledOperation, Work, grad_shard, shard
from systems.planning.step.residence import Residence
from systems.planning.step.schedule import Schedule, expand
from systems.planning.step.validator import validate
from systems.planning.strategy import PlanningContext
from systems.planning.trace import ENTER, Phase, Trace
from systems.strategies.elixir import strategy as elixir
from systems.strategies.elixir.chunks import ElixirChunker
from systems.strategies.elixir.options import PAPER_CACHE, ElixirOptions, ElixirStatistics
from systems.strategies.elixir.placement import ElixirDivision, Placer
from systems.strategies.elixir.strategy import Elixir, Sparing
from tests.planning.machines import computes_beside_fetches
from tests.planning.races import find_races
from tests.planning.reference import ReferenceRuntime
from tests.planning.synthetic import PLENTY, context, model_of, models, trace_of, transformer

TINY = transformer(6, 64)
GATHERED = (Work.FETCH, Work.GATHER, Work.DROP, Work.ALLOCATE, Work.FREE)  # by which chunks and ranges come and go
ACTIVATION = 2000


@dataclass(frozen=True)
class Planned:
    strategy: Elixir
    layout: Layout
    trace: Trace
    plan: Plan
    context: PlanningContext

    @cached_property
    def schedule(self) -> Schedule:
        return expand(self.layout, self.trace, self.plan, self.context)

    @property
    def fetches(self) -> list[ScheduledOperation]:
        return [o for o in self.schedule.bare if o.kind is Work.FETCH or (o.kind is Work.GATHER and o.device_delta)]

    @property
    def updates(self) -> list[ScheduledOperation]:
        return [o for o in self.schedule.bare if o.kind in (Work.UPDATE, Work.UPDATE_AHEAD)]

    def gathered(self) -> int:
        """The most bytes of chunks that come and go, and of their gradients, after any operation; shards at rest apart."""
        apart = self.strategy._staying | {b.index for b in self.layout.bundles if not b.movable}
        now = most = sum(map(self.layout.bundle_bytes, self.plan.resident_at_start - apart))
        for o in self.schedule.bare:
            shards = o.reads in ((grad_shard(o.bundle),), (shard(o.bundle),)) and not o.device_delta > 0
            if o.kind in GATHERED and o.bundle not in apart and not shards:
                now += o.device_delta
                most = max(most, now)
        return most


def planned(index: ModelIndex, given: PlanningContext, *, activation: int = ACTIVATION, **options: object) -> Planned:
    strategy = Elixir(ElixirOptions.model_validate(options), given)
    layout = strategy.layout(index)
    trace = trace_of(layout, accumulate=given.accumulate, activation=activation)
    return Planned(strategy, layout, trace, strategy.plan(layout, trace), given)


def refusal_of(index: ModelIndex, given: PlanningContext, **options: Any) -> BudgetError | None:
    try:
        planned(index, given, **options)
    except BudgetError as error:
        return error
    return None


def fetch_waits(found: Planned, cache: int) -> bool:
    """No bundle comes before the ENTER of a unit that reads it."""
    moments, units = found.trace.moments, found.layout.bundles_of_unit
    return all(moments[o.moment].phase in ENTER and o.bundle in units[moments[o.moment].unit] for o in found.fetches)


def update_waits(found: Planned, cache: int) -> bool:
    """No update before the last backward has ended."""
    end = max(number for number, moment in enumerate(found.trace.moments) if moment.phase is Phase.BACKWARD_END)
    return bool(found.updates) and all(o.moment > end for o in found.updates)


def cache_is_enough(found: Planned, cache: int) -> bool:
    return found.gathered() <= cache


def host_updates(found: Planned, cache: int) -> bool:
    return all(o.lane is LaneKind.CPU for o in found.updates) and Tier.DEVICE not in trained_tiers(found)


def gradients_take_place(found: Planned, cache: int) -> bool:
    """Of chunks that one unit alone reads, with one micro-batch."""
    if found.context.accumulate > 1:
        return True
    single = {b.index for b in found.layout.bundles if b.trainable and b.movable and len(b.units) == 1}
    return not [o for o in found.schedule.bare if o.kind is Work.ALLOCATE and o.bundle in single]


def compute_waits(found: Planned, cache: int) -> bool:
    return bool(found.fetches) and not computes_beside_fetches(found.layout, found.trace, found.plan, found.context)


Law = Callable[[Planned, int], bool]
EVERY = (fetch_waits, compute_waits, update_waits, cache_is_enough, host_updates, gradients_take_place)
LAWS: Mapping[str, Law] = MappingProxyType({law.__name__: law for law in EVERY})


def broken(found: Planned, cache: int) -> set[str]:
    return {name for name, law in LAWS.items() if not law(found, cache)}


def trained_tiers(found: Planned) -> set[Tier]:
    return {found.plan.optimizer_tier[s.index] for s in found.layout.segments if s.space.trainable}


def half_of(accumulate: int = 1) -> int:
    everything = planned(TINY, context(accumulate=accumulate)).plan.predicted_device_peak_bytes
    assert everything is not None
    return everything // 2


def cache_of(accumulate: int) -> int:
    """About a third of the parameters; with several micro-batches each gradient has a range beside its parameters."""
    parameters = planned(TINY, context()).layout.param_bytes
    return parameters // 3 if accumulate == 1 else parameters * 2 // 3


# ---- laws


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("times", [1, 4, PLENTY], ids=["half", "twice", "plenty"])
def test_the_laws_hold_whatever_room_there_is(times: int, accumulate: int, ranks: int) -> None:
    device, cache = min(times * half_of(accumulate), PLENTY), cache_of(accumulate)
    found = planned(TINY, context(device=device, accumulate=accumulate, ranks=ranks), variant="paper", cache=cache)
    assert broken(found, cache) == set()
    assert found.gathered() > cache // 2, "void: the cache is not used"
    memory = validate(found.layout, found.trace, found.plan, found.context)
    assert found.plan.predicted_device_peak_bytes == memory.total_peak <= device
    assert find_races(found.schedule.issued()) == []
    told = found.strategy.statistics()
    assert isinstance(told, ElixirStatistics)
    assert (told.cache_bytes, told.optimizer_share_on_device) == (cache, 0)


ALL_BUT_TIME = {"fetch_waits", "compute_waits", "cache_is_enough", "gradients_take_place"}


@pytest.mark.parametrize(
    ("options", "laws"),
    [
        ({}, {*ALL_BUT_TIME, "host_updates"}),
        ({"nonfinite": "stop"}, {"update_waits"}),
        ({"cache": 0}, ALL_BUT_TIME),  # the same as in the paper's plan
    ],
    ids=lambda given: str(sorted(given)) if isinstance(given, set) else str(given),
)
def test_the_default_breaks_each(options: dict[str, Any], laws: set[str]) -> None:
    cache = cache_of(1)
    found = planned(TINY, context(device=half_of()), **{name: value or cache for name, value in options.items()})
    assert broken(found, cache) >= laws


def test_with_room_for_everything_the_default_moves_nothing_and_updates_all_of_it_there() -> None:
    default = planned(TINY, context())
    assert default.plan.operations == () and broken(default, 1 << 40) == {"host_updates", "compute_waits"}
    assert planned(TINY, context(), variant="paper", cache=cache_of(1)).plan.operations


def test_the_plans_differ_where_a_rule_binds() -> None:
    paper = planned(TINY, context(device=half_of()), variant="paper", cache=cache_of(1))
    for options in ({}, {"cache": cache_of(1)}):
        default = planned(TINY, context(device=half_of()), **options)
        assert paper.plan.operations != default.plan.operations
        assert paper.plan.in_place and not default.plan.in_place
    assert trained_tiers(paper) == {Tier.HOST} != trained_tiers(planned(TINY, context(device=half_of())))
    kinds = {p.operation.kind for p in paper.plan.operations}
    assert kinds == {OpKind.FETCH, OpKind.DROP} and not paper.strategy.write_back  # master shards on the host


def without(option: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    rules = dict(ElixirOptions.rules["paper"]) | {option: value}
    return lambda patch: patch.setattr(ElixirOptions, "rules", {"paper": rules})


def nothing_waits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("systems.strategies.elixir.strategy.demanding", lambda operations: frozenset())


def placed_as_by_default(patch: pytest.MonkeyPatch) -> None:
    own = Placer.place

    def place(self: Placer) -> ElixirDivision:
        return own(Placer(self.division, ElixirOptions()))

    patch.setattr(Placer, "place", place)


def nothing_beside_parameters(patch: pytest.MonkeyPatch) -> None:
    def none(self: Placer, residence: Residence) -> list[int]:
        return [0] * len(self.division.demand)

    patch.setattr(Placer, "_ranges", none)


def no_limit(patch: pytest.MonkeyPatch) -> None:
    def constant(self: Placer, residence: Residence) -> ElixirDivision:
        room = self.division.room(residence)
        return ElixirDivision(residence, tuple(room), max(room))

    patch.setattr(Placer, "_constant", constant)


def all_that_fits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Placer, "_keeps_all", lambda self: True)


def ranges(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Division, "reusable", frozenset())


@pytest.mark.parametrize(
    ("mutate", "law", "device", "accumulate"),
    [
        (without("prefetch", 8), "fetch_waits", "half", 1),
        (nothing_waits, "compute_waits", "half", 1),
        (without("nonfinite", "stop"), "update_waits", "half", 1),
        (placed_as_by_default, "host_updates", "half", 1),
        (all_that_fits, "host_updates", "plenty", 1),
        (no_limit, "cache_is_enough", "half", 1),
        (nothing_beside_parameters, "cache_is_enough", "half", 2),
        (ranges, "gradients_take_place", "half", 1),
    ],
)
def test_without_its_rule_a_law_breaks(
    mutate: Callable[[pytest.MonkeyPatch], None],
    law: str,
    device: str,
    accumulate: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = {"half": half_of(accumulate), "plenty": PLENTY}[device]
    mutate(monkeypatch)
    cache = cache_of(2)
    found = planned(TINY, context(device=room, accumulate=accumulate), variant="paper", cache=cache)
    assert law in broken(found, cache)


@settings(max_examples=100, deadline=None)
@given(models(groups=True), st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.floats(0.05, 1.1), st.floats(0.1, 1.2))
def test_every_plan_keeps_the_laws_or_is_refused(
    index: ModelIndex, accumulate: int, ranks: int, share: float, part: float
) -> None:
    plenty = planned(index, context(accumulate=accumulate, ranks=ranks), activation=700)
    cache = int(plenty.layout.param_bytes * part)
    given_context = replace(plenty.context, device_budget=int((plenty.plan.predicted_device_peak_bytes or 0) * share))
    refusal = refusal_of(index, given_context, activation=700, variant="paper", cache=cache)
    if refusal is not None:
        assert refusal.need > refusal.have
        return
    found = planned(index, given_context, activation=700, variant="paper", cache=cache)
    assert broken(found, cache) <= (set() if any(b.trainable for b in found.layout.bundles) else {"update_waits"})
    memory = validate(found.layout, found.trace, found.plan, given_context)
    assert memory.total_peak <= given_context.device_budget
    assert find_races(found.schedule.issued()) == []
    if ranks == 1:
        runtime = ReferenceRuntime(found.layout, found.trace, found.plan, given_context)
        assert runtime.run().peak == memory.pool_peak == found.plan.predicted_model_peak_bytes


# ---- the fused chunk


def with_experts(size: int, **more: Any) -> ModelIndex:
    """Blocks of 4010 elements, and two parameters in a data-parallel group of their own."""
    sizes: list[tuple[int | None, list[int]]] = [(n, [2000, 2000, size]) for n in range(4)]
    return model_of(sizes, groups={2: "expert", 8: "expert"}, **more)


def fused(index: ModelIndex, device: int = PLENTY, **options: Any) -> tuple[Planned, int]:
    found = planned(index, context(device=device), variant="paper", **options)
    (bundle,) = [b.index for b in found.layout.bundles if 2 in {p.parameter for s in b.segments for p in parts(found, s)}]
    return found, bundle


def parts(found: Planned, segment: int) -> Any:
    return found.layout.segments[segment].placements


def test_the_fused_chunk_is_there_from_its_first_use_to_its_gradient_and_the_host_updates_it() -> None:
    cache = 4 * 4096 * 2
    found, bundle = fused(with_experts(10), cache=cache)
    assert broken(found, cache) == set()
    mine = [p for p in found.plan.operations if p.operation.bundle == bundle]
    assert [p.operation.kind for p in mine] == [OpKind.FETCH]
    first = next(n for n, m in enumerate(found.trace.moments) if m.unit in found.layout.bundles[bundle].units)
    assert mine[0].trigger == first and bundle not in found.plan.resident_at_start
    assert trained_tiers(found) == {Tier.HOST}
    assert len({(p.trigger, p.priority) for p in found.plan.operations}) == len(found.plan.operations)
    default = planned(with_experts(10), context(device=1 << 22), cache=cache)
    assert Tier.DEVICE in trained_tiers(default), "the default updates it where it is"


def test_it_stays_though_the_cache_has_no_room_for_it() -> None:
    """C is what the largest block takes: the fused chunk is beside it."""
    least = planned(with_experts(10), context(), variant="paper", cache="inf").layout
    cache = max(sum(map(least.bundle_bytes, (b for b in bundles if b != 1))) for bundles in least.bundles_of_unit.values())
    found, bundle = fused(with_experts(10), cache=cache)
    assert bundle == 1 and broken(found, cache) == set()
    assert not [p for p in found.plan.operations if p.operation.bundle == bundle and p.operation.kind is not OpKind.FETCH]


def test_it_is_updated_on_the_device_if_it_may_not_move_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    build = ElixirChunker._build

    def fixed(self: ElixirChunker, index: ModelIndex) -> tuple[Layout, frozenset[int], Mapping[str, Any]]:
        layout, staying, told = build(self, index)
        there = tuple(replace(b, movable=b.movable and b.index not in staying) for b in layout.bundles)
        return replace(layout, bundles=there), frozenset(), told

    monkeypatch.setattr(ElixirChunker, "_build", fixed)
    found, _ = fused(with_experts(10), cache=4 * 4096 * 2)
    assert broken(found, 4 * 4096 * 2) == {"host_updates"}


def test_what_is_too_small_for_a_chunk_is_fused_on_the_smallest_device_or_refused() -> None:
    """The default cuts it into chunks where it takes more than a sixteenth."""
    index, cache = with_experts(1200), 1 << 16
    found, bundle = fused(index, cache=cache)
    least = found.plan.predicted_device_peak_bytes or 0
    tight, _ = fused(index, least, cache=cache)
    assert bundle in tight.strategy._staying
    assert not planned(index, context(device=least)).strategy._staying
    devices = range(least, 0, -256)
    refusals = (refusal_of(index, context(device=device), variant="paper", cache=cache) for device in devices)
    first = next(refusal for refusal in refusals if refusal is not None)
    assert "of a fused chunk, which stays" in str(first) and first.need > first.have


def test_a_frozen_one_never_moves() -> None:
    found, bundle = fused(with_experts(10, frozen=frozenset({2, 8})), cache=4 * 4096 * 2)
    assert not found.layout.bundles[bundle].movable
    assert bundle in found.plan.resident_at_start
    assert bundle not in {p.operation.bundle for p in found.plan.operations}


def test_eviction_without_a_plan_spares_it() -> None:
    found, bundle = fused(with_experts(10), cache=1 << 15)
    warm_up = found.strategy.eviction(found.layout, None)
    assert {warm_up.choose([0, bundle, 3], moment) for moment in range(40)} == {0, 3}  # random still
    assert found.strategy.eviction(found.layout, found.trace).choose([bundle], 0) == bundle
    assert Sparing(ModelOrder(last=True), frozenset({7})).choose([2, 7], 0) == 2


# ---- [S, O, C]


def test_zero_2_gathers_each_chunk_once_in_forward_and_zero_3_more_often() -> None:
    once, again = (
        planned(TINY, context(ranks=2), variant="paper", offload=False, cache=cache) for cache in ("inf", cache_of(1))
    )
    assert broken(once, 1 << 40) | broken(again, cache_of(1)) == {"host_updates"}
    for found in (once, again):
        assert found.plan.sharded == {b.index for b in found.layout.bundles}
        assert {o.lane for o in found.schedule.bare if o.bytes} == {LaneKind.GATHER, LaneKind.REDUCE}
    phases = {once.trace.moments[o.moment].phase for o in once.fetches}
    assert phases == {Phase.FORWARD_ENTER}
    assert sum(o.bytes for o in once.fetches) == once.layout.param_bytes < sum(o.bytes for o in again.fetches)


def test_ddp_moves_nothing() -> None:
    found = planned(TINY, context(ranks=2), variant="paper", scatter=False, offload=False)
    assert found.plan.operations == () and not any(b.movable for b in found.layout.bundles)


# ---- what is refused


def test_a_cache_that_does_not_hold_a_unit_is_refused_before_the_first_step() -> None:
    strategy = Elixir(ElixirOptions(variant="paper", cache=1 << 10), context())
    with pytest.raises(BudgetError, match=r"cache of 1KiB is less than the .* of parameters and gradients that one unit") as no:
        strategy.layout(TINY)
    assert no.value.final and "auto" not in str(no.value)
    Elixir(ElixirOptions(variant="paper", cache=no.value.need), context()).layout(TINY)
    with pytest.raises(BudgetError):
        Elixir(ElixirOptions(variant="paper", cache=no.value.need - 1), context()).layout(TINY)


@pytest.mark.parametrize("disk", [0, PLENTY])
def test_what_the_host_lacks_is_refused_and_not_kept_on_the_device(disk: int) -> None:
    need = host_need(planned(TINY, context()).layout, context())
    tight = replace(context(), host_budget=need * 3 // 4, disk_budget=disk)
    default = Elixir(ElixirOptions(), tight)
    kept = within_host(default.layout(TINY), tight, default.update_rule)
    assert disk or any(not b.movable for b in kept.bundles), "the default has it on the device"
    paper = Elixir(ElixirOptions(variant="paper", cache=cache_of(1)), tight)
    if disk:  # which is the user's own wish
        assert within_host(paper.layout(TINY), tight, paper.update_rule).on_disk
        return
    with pytest.raises(BudgetError, match="of host memory .* keeps nothing of it on the device") as refused:
        paper.layout(TINY)
    assert (refused.value.tier, refused.value.need, refused.value.have) == ("host", need, tight.host_budget)


def test_the_device_would_take_it_without_that_check(monkeypatch: pytest.MonkeyPatch) -> None:
    tight = replace(context(), host_budget=host_need(planned(TINY, context()).layout, context()) * 3 // 4)
    monkeypatch.setattr(elixir, "check_host", lambda *given: None)
    paper = Elixir(ElixirOptions(variant="paper", cache=cache_of(1)), tight)
    assert any(not b.movable for b in within_host(paper.layout(TINY), tight, paper.update_rule).bundles)


# ---- options


def test_the_variant_has_its_own_values() -> None:
    paper = ElixirOptions(variant="paper")
    assert (paper.cache, paper.prefetch, paper.run_ahead, paper.nonfinite) == (PAPER_CACHE, 0, False, "skip")
    assert ElixirOptions(variant="paper", cache="1GiB").cache == 1 << 30
    for off in (False, 0, "false", "F", "n", "off"):
        assert ElixirOptions.model_validate({"variant": "paper", "scatter": off, "offload": off}).cache is None
    with pytest.raises(ValidationError, match="offload\n.*valid boolean"):
        ElixirOptions.model_validate({"variant": "paper", "scatter": "n", "offload": "nay"})
    assert ElixirOptions.model_validate({"variant": "paper", "offload": "false"}).cache == PAPER_CACHE
    assert ElixirOptions.model_validate(paper.model_dump()) == paper


@pytest.mark.parametrize(
    "wrong", [{"cache": "auto"}, {"prefetch": 8}, {"run_ahead": True}, {"nonfinite": "stop"}, {"activations": "host"}], ids=str
)
def test_what_the_variant_sets_cannot_be_given_otherwise(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ValidationError, match=rf"variant=paper has .*{name}.*{value} is given: "):
        ElixirOptions.model_validate({"variant": "paper", **wrong})


def test_a_step_without_a_plan_has_no_more_than_the_cache() -> None:
    cache, device = cache_of(1), 1 << 30
    found = planned(TINY, context(device=device), variant="paper", cache=cache)
    pool = found.context.allowance.warm_up_pool(0, found.layout.movable_bytes, device, found.strategy.warm_up_share)
    assert cache - 1 <= pool <= cache
    assert planned(TINY, context(device=device)).strategy.warm_up_share is None
