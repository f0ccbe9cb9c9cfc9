"""PatrickStar on several ranks, as threads: chunks are shards, and gradients lie over the copies of those that rest as such."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from systems.planning.plan import UpdateRule
from systems.planning.step.operations import Work
from tests.planning.races import find_races
from tests.systems.every import STRATEGIES
from tests.systems.running import RESIDENT, Run, assert_equal, managed
from tests.systems.test_ordering import as_issued
from tests.systems.test_ranks import (
    STEPS,
    Asked,
    assert_is_one_rank,
    idle_in_part,
    on_one_rank,
    on_ranks,
    resident,
    tight,
)
from tests.systems.test_shards import plan_of, schedule_of, trained

PATRICKSTAR = STRATEGIES["patrickstar"]
SOME = 0.5  # of the reference's peak: a device on which some bundles rest as shards, and others are updated on the host


def assert_chunks_are_shards(run: Run) -> int:
    """No parameter of a communication group crosses a chunk's end; how many groups there are."""
    told: Any = managed(run.engine).strategy.statistics()
    whole = 0
    for segment in managed(run.engine).layout.segments:
        length = segment.shard_numel
        whole += all(p.offset // length == (p.offset + max(p.numel, 1) - 1) // length for p in segment.placements)
    assert told.num_groups <= whole <= told.num_groups + told.num_out_of_chunks
    return int(told.num_groups)


CASES = [
    ("stack", 2, 0.45),
    ("stack", 2, 0.7),
    ("stack", 4, SOME),
    ("gpt2", 2, SOME),  # tied
    ("gpt2", 3, 0.45),
    ("opt", 4, SOME),
    ("frozen-middle", 3, 0.7),
    ("adapters", 4, 0.7),
    ("never-called", 2, SOME),  # parameters without a gradient
    ("called-twice", 3, 0.45),
]


@pytest.mark.parametrize(("model", "size", "share"), CASES)
@pytest.mark.one_in(7)
def test_the_bits_of_one_rank_the_predicted_peak_and_the_layout_s_bytes(model: str, size: int, share: float) -> None:
    """Where all states are on the device, and where a unit's gradients come twice, the peak is a bound, as on one rank."""
    found = on_ranks(PATRICKSTAR, model, size, clip=0.5, device_memory=tight(model, size, share), log_events=True)
    assert_is_one_rank(on_one_rank(model, size, 0.5, "fp32"), found)
    for mine in found:
        engine, schedule, plan = managed(mine.engine), schedule_of(mine), plan_of(mine)
        layout, operations = engine.layout, engine.log.operations
        assert assert_chunks_are_shards(mine) > 0, "void: no group"
        assert not find_races(as_issued(operations))
        predicted, measured = plan.predicted_device_peak_bytes, mine.memory.device_peak_bytes
        assert predicted is not None and measured is not None
        bound = model == "called-twice" or len(plan.resident_at_start) == len(layout.bundles)
        assert measured <= predicted if bound else measured == predicted
        gathered = [int(o.label.split()[2]) for o in operations if o.label.startswith("gather bundle")]
        reduced = [int(o.label.split()[2]) for o in operations if o.label.startswith("reduce bundle")]
        for counter, bundles in (("gather_bytes", gathered), ("reduce_bytes", reduced)):
            assert bundles
            assert mine.counters[counter] == sum(map(layout.bundle_bytes, bundles)) * (size - 1) // size
        flushed = sorted(o.bundle for o in schedule.bare if o.kind is Work.REDUCE)
        assert sorted(reduced) == sorted(flushed * STEPS)


def some_rest_as_shards(found: list[Run]) -> None:
    for mine in found:
        plan, schedule = plan_of(mine), schedule_of(mine)
        written = plan.in_place & plan.sharded
        assert written, "void: nothing is written over what rests as a shard"
        kinds = {o.kind for o in schedule.bare if o.bundle in written}
        assert Work.ALLOCATE not in kinds and Work.REDUCE in kinds
        ranges = {f"gradient of bundle {b} begins" for b in written}
        steady = [o.what for o in managed(mine.engine).log.operations][-len(schedule.bare) :]
        assert not ranges.intersection(map(str, steady))
        assert mine.counters.get("gradient_detours", 0) == 0


@pytest.mark.parametrize("nonfinite", ["skip", "stop"])
@pytest.mark.parametrize(
    "asked",
    [
        Asked("stack", 2, share=SOME),
        Asked("stack", 4, dtype="bf16", share=0.4),
        Asked("gpt2", 3, dtype="bf16", recompute="full", share=SOME),
        Asked("opt", 2, dtype="bf16", share=SOME),
        Asked("frozen-middle", 2, share=0.66),
        Asked("never-called", 2, share=SOME),
    ],
)
@pytest.mark.one_in(9)
def test_gradients_take_the_place_of_what_rests_as_a_shard(asked: Asked, nonfinite: str) -> None:
    """With resident's bits on the same ranks, no range, the predicted peak, and a last step that is its plan's to the byte."""
    whole = resident(asked.model, asked.size, asked.accumulate, asked.dtype, asked.clip, asked.recompute)
    budget = int(asked.share * (whole[0].memory.device_peak_bytes or 0))
    found = trained(PATRICKSTAR, asked, {"nonfinite": nonfinite}, budget)
    some_rest_as_shards(found)
    for mine in found:
        plan = plan_of(mine)
        assert plan.update_rule is (UpdateRule.AFTER_NORM if nonfinite == "skip" else UpdateRule.WHEN_REDUCED)
        assert plan.predicted_device_peak_bytes == mine.memory.device_peak_bytes


@pytest.mark.parametrize("nonfinite", ["skip", "stop"])
def test_groups_of_several_units_have_the_gradients_of_one_beside_them(nonfinite: str) -> None:
    """Not of all that read a group: the others' are in their place by then, or to come."""
    asked, whole = Asked("stack", 2, share=0.35), resident("stack", 2, 1, "fp32", 0.0, "none")
    budget = int(asked.share * (whole[0].memory.device_peak_bytes or 0))
    large = {"chunk_min": 64 << 10, "chunk_max": 1 << 20, "chunk_step": 64 << 10, "nonfinite": nonfinite, "prefetch": 0}
    for mine in trained(PATRICKSTAR, asked, large, budget):
        layout = managed(mine.engine).layout
        held = max(sum(map(layout.bundle_bytes, bundles)) for bundles in layout.bundles_of_unit.values())
        assert plan_of(mine).in_place == {b.index for b in layout.bundles}
        assert 2 * held > budget, "void: there is room for all gradients of what is held"


@pytest.mark.parametrize("asked", [Asked("stack", 3, 2, clip=0.5), Asked("gpt2", 2, 2, "bf16"), Asked("never-called", 4, 2)])
@pytest.mark.one_in(3)
def test_micro_batches_are_added_up_chunk_by_chunk(asked: Asked) -> None:
    whole = resident(asked.model, asked.size, asked.accumulate, asked.dtype, asked.clip, asked.recompute)
    for mine in trained(PATRICKSTAR, asked, {}, int(0.6 * (whole[0].memory.device_peak_bytes or 0))):
        assert assert_chunks_are_shards(mine) > 0
        assert not plan_of(mine).in_place
        assert plan_of(mine).predicted_device_peak_bytes == mine.memory.device_peak_bytes


@pytest.mark.parametrize(("nonfinite", "at"), [("skip", 0), ("skip", 1), ("stop", 2)])
@pytest.mark.parametrize("block", [0, 1, 3])
@pytest.mark.one_in(4)
def test_what_is_idle_on_one_rank_is_zero_over_its_parameters(block: int, nonfinite: str, at: int) -> None:
    """In the copy of what rests as a shard."""

    def differ(engine: Any, rank: int, step: int) -> None:
        if (rank, step) == (1, at):
            idle_in_part(engine.module, block)

    expected = on_ranks(RESIDENT, "stack", 2, before=differ)
    given: dict[str, Any] = {"before": differ, "device_memory": tight("stack", 2, SOME), "log_events": True}
    found = on_ranks(PATRICKSTAR, "stack", 2, 1, {"nonfinite": nonfinite}, **given)
    some_rest_as_shards(found)
    for one, other in zip(expected, found, strict=True):
        assert_equal(one, other)
        assert not find_races(as_issued(managed(other.engine).log.operations))


def test_a_step_that_is_skipped_leaves_shards_as_they_were() -> None:
    """Of their copies nothing is left."""

    def overflow(engine: Any, rank: int, step: int) -> None:
        def infinite(gradient: torch.Tensor) -> torch.Tensor:
            hook.remove()
            return torch.full_like(gradient, torch.inf)

        if (rank, step) == (1, 2):
            hook = engine.module.head.weight.register_hook(infinite)

    expected = on_ranks(RESIDENT, "stack", 3, clip=0.5, before=overflow)
    budget = tight("stack", 3, SOME)
    found = on_ranks(PATRICKSTAR, "stack", 3, clip=0.5, before=overflow, device_memory=budget, log_events=True)
    some_rest_as_shards(found)
    for one, other in zip(expected, found, strict=True):
        assert other.skipped == [False, False, True]
        assert_equal(one, other)


@pytest.mark.parametrize("nonfinite", ["skip", "stop"])
def test_a_unit_that_enters_again_gets_its_parameters_back_from_the_shards(nonfinite: str) -> None:
    """As hooks do for outputs whose gradients come late; here the runtime is told so by hand. The gradient in the copy moves to
    a range, and the copy is gathered anew.
    """

    def come_again(engine: Any, rank: int, step: int) -> None:
        if step < STEPS - 1:
            return
        plan, runtime, layout = engine.cursor.plan, engine.runtime, engine.layout
        written = (b for b in layout.bundles if b.index in plan.in_place & plan.sharded and len(b.units) > 1)
        mine = engine.residency.bundles[next(written).index]
        again, leave = layout.bundles[mine.index].units[-1], runtime.backward_exit
        places = [place for place in layout.places.values() if place.bundle == mine.index]

        def values() -> list[list[float]]:
            engine.device.drain()
            return [mine.block.view(torch.float32, place.offset, place.numel).tolist() for place in places]

        def leave_and_return(unit: int) -> None:
            if unit != again or not runtime.holds_backward(unit):
                leave(unit)
                return
            before = values()
            leave(unit)
            there = values()
            runtime.backward_enter(unit)
            same = [before == found for found in (there, values())]
            seen.append(same)
            leave(unit)

        runtime.backward_exit = leave_and_return

    seen: list[list[bool]] = []
    budget = tight("stack", 2, 0.6 if nonfinite == "skip" else SOME)
    given: dict[str, Any] = {"before": come_again, "device_memory": budget, "log_events": True}
    found = on_ranks(PATRICKSTAR, "stack", 2, 1, {"nonfinite": nonfinite}, **given)
    for one, other in zip(on_ranks(RESIDENT, "stack", 2), found, strict=True):
        assert_equal(one, other)
        assert other.counters["gradient_detours"] == 1
        assert not find_races(as_issued(managed(other.engine).log.operations))
    assert seen == [[False, True]] * 2, "gradients lay there, and then parameters again"
