"""Shards at rest on the device, on several ranks as threads: bits of the reference, and runs as their plans say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

from systems.planning.plan import LaneKind, Plan
from systems.planning.step.operations import LaneOperation, ScheduledOperation, Work
from systems.planning.step.schedule import Schedule, expand
from tests.planning.races import find_races
from tests.systems.every import STRATEGIES
from tests.systems.running import Run, assert_equal, managed
from tests.systems.test_ordering import as_issued
from tests.systems.test_ranks import STEPS, Asked, on_ranks, resident

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

    def note(self, engine: Any, rank: int, step: int) -> None:
        if step == STEPS - 1:
            engine.drain()
            self.counters[rank] = dict(engine.counters())
            self.issued[rank] = len(engine.log.operations)


@cache
def reference(asked: Asked) -> list[Run]:
    return resident(asked.model, asked.size, asked.accumulate, asked.dtype, asked.clip, asked.recompute)


def trained(strategy: str, asked: Asked, options: Mapping[str, Any], device_memory: int | None = None) -> list[Run]:
    """With the bits of the reference, no races, and a last step that is its plan's to the byte and to the operation."""
    last, given = Last(), asked._asdict()
    del given["model"], given["size"], given["share"], given["accumulate"]
    found = on_ranks(
        STRATEGIES[strategy],
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
        operations = managed(other.engine).log.operations
        assert not find_races(as_issued(operations))
        assert_as_planned(other, last.counters[rank], [o.what for o in operations[last.issued[rank] :]])
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
    size = managed(run.engine).strategy._context.ranks
    on_lanes = [o for o in schedule.bare if o.lane in LANES and o.kind is not Work.SQUARES]
    for lane, counter in LANES.items():
        share = (size - 1, size) if lane in COLLECTIVE else (1, 1)
        planned = sum(o.bytes * share[0] // share[1] for o in on_lanes if o.lane is lane)
        assert run.counters.get(counter, 0) - before.get(counter, 0) == planned, lane
    ran = [each for each in issued if isinstance(each, LaneOperation) and each.lane in LANES]
    for lane in LANES:
        assert told(ran, lane) == told(on_lanes, lane)


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
def test_shards_have_the_reference_s_bits_and_do_as_planned(case: str, nonfinite: str) -> None:
    asked = CASES[case]._replace(clip=0.0) if nonfinite == "stop" else CASES[case]
    for run in trained("elixir", asked, zero_3(asked, nonfinite=nonfinite)):
        plan, layout = plan_of(run), managed(run.engine).layout
        assert plan.sharded == {b.index for b in layout.bundles if b.movable}
        assert not any(o.lane in (LaneKind.H2D, LaneKind.D2H) for o in schedule_of(run).bare)
        assert plan.predicted_device_peak_bytes == run.memory.device_peak_bytes
