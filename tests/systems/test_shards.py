"""Shards at rest on the device, on several ranks as threads: bits of the reference, and runs as their plans say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest

from systems.device.watch.events import LoggedBytes
from systems.planning.layout import space_of
from systems.planning.plan import LaneKind, OpKind, Plan, Tier
from systems.planning.policy.base import moved
from systems.planning.policy.division import Division
from systems.planning.step.operations import LaneOperation, ScheduledOperation, Work
from systems.planning.step.schedule import Schedule, expand
from systems.strategies.elixir.strategy import Elixir
from systems.substrate.system import ManagedSystem
from tests.planning.races import find_races
from tests.planning.shard_moves import in_two
from tests.systems.every import STRATEGIES
from tests.systems.running import Run, assert_equal, elixir, managed
from tests.systems.test_ordering import as_issued
from tests.systems.test_ranks import EXACT, STEPS, Asked, on_ranks, resident

LANES = {
    LaneKind.H2D: "h2d_bytes",
    LaneKind.D2H: "d2h_bytes",
    LaneKind.GATHER: "gather_bytes",
    LaneKind.REDUCE: "reduce_bytes",
}
COLLECTIVE = (LaneKind.GATHER, LaneKind.REDUCE)


@dataclass
class Last:
    """What each rank had counted and issued before the last step, which is a steady one."""

    counters: dict[int, dict[str, int]] = field(default_factory=dict)
    issued: dict[int, int] = field(default_factory=dict)
    bytes: dict[int, int] = field(default_factory=dict)

    def note(self, engine: Any, rank: int, step: int) -> None:
        if step == STEPS - 1:
            engine.drain()
            self.counters[rank] = dict(engine.counters())
            self.issued[rank], self.bytes[rank] = len(engine.log.operations), len(engine.log.bytes)


@cache
def reference(asked: Asked) -> list[Run]:
    return resident(asked.model, asked.size, asked.accumulate, asked.dtype, asked.clip, asked.recompute)


def trained(system: ManagedSystem, asked: Asked, options: Mapping[str, Any], device_memory: int | None = None) -> list[Run]:
    """With the bits of the reference, no races, and a last step that is its plan's to the byte and to the operation."""
    last, given = Last(), asked._asdict()
    del given["model"], given["size"], given["share"], given["accumulate"]
    found = on_ranks(
        system,
        asked.model,
        asked.size,
        asked.accumulate,
        dict(options),
        jitter=True,
        before=last.note,
        device_memory=device_memory,
        log_events=True,
        **given,
    )
    for rank, (one, other) in enumerate(zip(reference(asked), found, strict=True)):
        assert_equal(one, other)
        log = managed(other.engine).log
        assert not find_races(as_issued(log.operations))
        assert_as_planned(other, last.counters[rank], [o.what for o in log.operations[last.issued[rank] :]])
        assert_bytes_as_planned(plan_of(other), log.bytes[last.bytes[rank] - 1 :])
    return found


def plan_of(run: Run) -> Plan:
    plan = managed(run.engine).cursor.plan
    assert plan is not None
    return plan


def schedule_of(run: Run) -> Schedule:
    engine, plan = managed(run.engine), plan_of(run)
    (trace,) = (trace for trace, known in engine.planner.plans.values() if known is plan)
    return expand(engine.layout, trace, plan, engine.strategy._context)


def assert_as_planned(run: Run, before: Mapping[str, int], issued: list[Any]) -> None:
    """The measured device peak is the predicted one too, where nothing had the device's room before there was a plan."""
    schedule = schedule_of(run)
    layout = managed(run.engine).layout
    on_lanes = [o for o in schedule.bare if o.lane in LANES and o.kind is not Work.SQUARES]
    for lane, counter in LANES.items():
        mine = [o for o in on_lanes if o.lane is lane]
        kept = sum(o.bytes // space_of(layout, o.bundle).ranks for o in mine) if lane in COLLECTIVE else 0
        planned = sum(o.bytes for o in mine) - kept
        assert run.counters.get(counter, 0) - before.get(counter, 0) == planned, lane
    ran = [each for each in issued if isinstance(each, LaneOperation) and each.lane in LANES]
    for lane in LANES:
        assert told(ran, lane) == told(on_lanes, lane)


def assert_bytes_as_planned(plan: Plan, logged: list[LoggedBytes]) -> None:
    device = [each for each in logged if each.tier == "device"]
    assert max(each.pool for each in device) == plan.predicted_model_peak_bytes
    assert plan.predicted_device_peak_bytes is not None
    if plan.rematerialise is None:  # else activations are those of other switches than were measured
        assert max(each.live for each in device) <= plan.predicted_device_peak_bytes


def told(operations: list[Any] | list[ScheduledOperation], lane: LaneKind) -> list[str]:
    return [o.label for o in operations if o.lane is lane]


def zero_3(asked: Asked, **more: Any) -> dict[str, Any]:
    """Everything on the devices, in a cache that takes what one unit holds, and less than all."""
    whole = {"gpt2": 220 << 10}.get(asked.model, 120 << 10)
    return {"offload": False, "cache": whole if asked.dtype == "fp32" else whole // 2, **more}


CASES = {
    "two ranks": Asked("stack", 2, clip=0.5),
    "three ranks": Asked("stack", 3),
    "two micro-batches": Asked("stack", 2, 2, clip=0.5),
    "bf16, recomputed": Asked("gpt2", 2, 1, "bf16", recompute="full"),
    "half frozen": Asked("frozen-middle", 2, dtype="bf16"),
    "half frozen, two micro-batches": Asked("frozen-middle", 3, 2, "bf16"),
    "called twice": Asked("called-twice", 3, clip=0.5),
    "tied": Asked("gpt2", 3),
}


@pytest.mark.parametrize("nonfinite", ["skip", "stop"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.one_in(10)
def test_shards_have_the_reference_s_bits_and_do_as_planned(case: str, nonfinite: str) -> None:
    asked = CASES[case]._replace(clip=0.0) if nonfinite == "stop" else CASES[case]
    for run in trained(elixir(), asked, zero_3(asked, nonfinite=nonfinite)):
        plan, layout = plan_of(run), managed(run.engine).layout
        assert plan.sharded == {b.index for b in layout.bundles if b.movable}
        assert not any(o.lane in (LaneKind.H2D, LaneKind.D2H) for o in schedule_of(run).bare)
        assert plan.predicted_device_peak_bytes == run.memory.device_peak_bytes


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "h3t"])
@pytest.mark.parametrize(
    "asked", [Asked("stack", 3, clip=0.5, share=0.42), Asked("gpt2", 2, 2, "bf16"), Asked("frozen-middle", 2, share=0.66)]
)
@pytest.mark.one_in(8)
def test_states_that_the_device_has_room_for_rest_there_as_shards(strategy: str, asked: Asked) -> None:
    """Whatever else comes and goes beside them. share: of the reference's peak, for some states but not all."""
    budget = int(asked.share * (reference(asked)[0].memory.device_peak_bytes or 0))
    for run in trained(STRATEGIES[strategy], asked, {}, budget):
        plan, schedule = plan_of(run), schedule_of(run)
        assert plan.sharded and any(o.lane is LaneKind.D2H for o in schedule.bare), "some there, others on the host"
        if strategy in EXACT:
            assert plan.predicted_device_peak_bytes == run.memory.device_peak_bytes


@pytest.mark.parametrize("asked", [Asked("stack", 2), Asked("gpt2", 3, 2, "bf16")])
def test_with_room_for_all_of_it_every_bundle_stays_whole(asked: Asked) -> None:
    """[S, O, C] = [T, F, inf], ZeRO-2: a reduction and a gather of all parameters a step, times the part of the other ranks."""
    for run in trained(elixir(), asked, {"offload": False, "cache": "inf"}):
        plan, layout, schedule = plan_of(run), managed(run.engine).layout, schedule_of(run)
        assert not plan.sharded and len(plan.resident_at_start) == len(layout.bundles)
        for lane, times in ((LaneKind.GATHER, 1), (LaneKind.REDUCE, asked.accumulate)):
            assert sum(o.bytes for o in schedule.bare if o.lane is lane) == times * layout.param_bytes
        assert plan.predicted_device_peak_bytes == run.memory.device_peak_bytes


@pytest.mark.parametrize("nonfinite", ["skip", "stop"])
@pytest.mark.parametrize(
    "asked", [Asked("stack", 2), Asked("gpt2", 3, 2, "bf16"), Asked("frozen-middle", 3), Asked("called-twice", 2, 2)]
)
@pytest.mark.one_in(7)
def test_without_scatter_every_rank_has_all_and_makes_the_same_updates(asked: Asked, nonfinite: str) -> None:
    """[F, F, inf], DDP: each gradient is reduced and gathered, and 12 bytes a parameter of states are on every device."""
    options = {"offload": False, "scatter": False, "nonfinite": nonfinite}
    for run in trained(elixir(), asked, options):
        plan, layout, schedule = plan_of(run), managed(run.engine).layout, schedule_of(run)
        trained_bytes = sum(layout.bundle_bytes(b.index) for b in layout.bundles if b.trainable)
        for lane in COLLECTIVE:
            assert sum(o.bytes for o in schedule.bare if o.lane is lane) == asked.accumulate * trained_bytes
        each = schedule.residence.context.optimizer_itemsize
        assert schedule.residence.static_bytes == layout.param_bytes + trained_bytes // layout.itemsize * each
        assert plan.predicted_device_peak_bytes == run.memory.device_peak_bytes


@pytest.mark.parametrize("clip", [0.5, 1e-3])
def test_norms_count_every_element_once_though_every_rank_has_it(clip: float) -> None:
    trained(elixir(), Asked("stack", 3, clip=clip), {"offload": False, "scatter": False})


def test_a_cache_that_takes_no_more_than_a_unit_gathers_twice_and_reduces_once() -> None:
    """[T, F, C], ZeRO-3: 3 M a step, less what stays over the turn and from one step to the next, which is planned."""
    asked = Asked("stack", 2)
    for run in trained(elixir(), asked, zero_3(asked, prefetch=0)):
        plan, layout, schedule = plan_of(run), managed(run.engine).layout, schedule_of(run)
        uses = {b: len(spans) for b, spans in schedule.demand.hold_spans.items()}
        gathered = [p.operation.bundle for p in plan.operations if p.operation.kind is OpKind.FETCH]
        kept = sum(layout.bundle_bytes(b) * (uses[b] - gathered.count(b)) for b in uses)
        sums = {lane: sum(o.bytes for o in schedule.bare if o.lane is lane) for lane in COLLECTIVE}
        assert sums[LaneKind.REDUCE] == layout.param_bytes
        assert sums[LaneKind.GATHER] == 2 * layout.param_bytes - kept and 0 < kept < layout.param_bytes


class InTwo(Elixir):
    """What Elixir fetches moves first and is gathered when it is used; its shard stays where it is used again. A part of the
    device is left for the shards.
    """

    moves = True

    def decide(self, division: Division) -> Plan:
        less = replace(division.context, device_budget=int(0.62 * division.context.device_budget))
        plan = super().decide(replace(division, context=less))
        return in_two(plan, division.demand, ranks=self._context.ranks, move=self.moves)


class Left(InTwo):
    """What Elixir fetches comes whole, and leaves its shard."""

    moves = False


@pytest.mark.parametrize(
    ("strategy", "variant"), [(InTwo, "master-shard"), (InTwo, "write-back"), (Left, "master-shard")], ids=str
)
@pytest.mark.parametrize(
    "asked",
    [
        Asked("stack", 2, clip=0.5, share=0.65),
        Asked("gpt2", 3, 2, "bf16", share=0.65),
        Asked("frozen-middle", 2, share=0.5),
        Asked("called-twice", 3, share=0.65),
    ],
)
@pytest.mark.one_in(12)
def test_a_shard_comes_and_goes_apart_from_the_rest(asked: Asked, strategy: type[InTwo], variant: str) -> None:
    budget = int(asked.share * (reference(asked)[0].memory.device_peak_bytes or 0))
    cache = (
        "70KiB" if asked.model in ("stack", "called-twice") and not strategy.moves else "auto"
    )  # so that something has to go
    for run in trained(ManagedSystem(strategy), asked, {"variant": variant, "cache": cache}, budget):
        kinds = {o.kind for o in schedule_of(run).bare}
        assert strategy.moves or Work.SHRINK in kinds, "nothing was let go of"
        assert (Work.MOVE in kinds) == strategy.moves and (Work.FETCH in kinds) != strategy.moves


def test_one_rank_has_no_part_of_a_bundle_to_move_or_to_leave() -> None:
    """Its fetches are as if they had been made in one, and nothing goes as its shard stays."""
    asked = Asked("stack", 1, clip=0.5, share=0.65)
    budget = int(asked.share * (reference(asked)[0].memory.device_peak_bytes or 0))
    (run,) = trained(ManagedSystem(InTwo), asked, {"run_ahead": False}, budget)
    kinds = [p.operation.kind for p in plan_of(run).operations]
    assert OpKind.MOVE in kinds
    assert not {Work.MOVE, Work.SHRINK}.intersection(o.kind for o in schedule_of(run).bare)


@pytest.mark.parametrize("asked", [Asked("stack", 2, clip=0.5), Asked("gpt2", 3, 2, "bf16"), Asked("frozen-middle", 2)])
@pytest.mark.parametrize("solver", ["off", "drawn"])
@pytest.mark.one_in(6)
def test_h3t_rests_as_shards_where_it_does_not_prefetch_lazily(asked: Asked, solver: str) -> None:
    """Moved at a step's end, gathered for forward, and, partitioned, shrunk in between and gathered once more."""
    for run in trained(STRATEGIES["h3t"], asked, {"solver": solver, "variant": "global-offload"}):
        plan, layout = plan_of(run), managed(run.engine).layout
        kinds = {kind: set(moved(plan, kind)) for kind in OpKind}
        assert plan.shards_at_start == kinds[OpKind.MOVE] and not kinds[OpKind.MOVE] & plan.resident_at_start
        assert kinds[OpKind.SHRINK] <= kinds[OpKind.MOVE] <= kinds[OpKind.FETCH]
        if solver == "off":
            layers = managed(run.engine).strategy.offloaded_inputs  # what becomes of other modules depends on measured times
            mine = {b.index for b in layout.bundles if b.trainable and layers.issuperset(b.units)}
            assert mine and mine <= kinds[OpKind.MOVE] and not kinds[OpKind.SHRINK]


@pytest.mark.parametrize("asked", [Asked("stack", 2, clip=0.5), Asked("gpt2", 3, 2, "bf16"), Asked("frozen-middle", 2)])
@pytest.mark.one_in(3)
def test_h3t_s_states_are_on_the_devices_of_several_ranks(asked: Asked) -> None:
    for run in trained(STRATEGIES["h3t"], asked, {"solver": "off"}):
        plan, layout = plan_of(run), managed(run.engine).layout
        here = {b.index for b in layout.bundles if b.trainable and plan.optimizer_tier[b.segments[0]] is Tier.DEVICE}
        assert here, "void: all of them are on the hosts"
        assert here <= plan.resident_at_start and not here & {b for kind in OpKind for b in moved(plan, kind)}
