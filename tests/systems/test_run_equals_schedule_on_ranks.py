"""On several ranks too the lanes are given what the schedule says, and a forecast's schedule is that of the run.

As in test_run_equals_schedule.py; the ranks are threads. Gathers and reductions come in one order on all of them. A run takes a
reduction's sums of squares within the reduction's own job, which a schedule has as two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from models import registry as models_registry
from models.loss import token_loss
from models.shape import ModelShape
from systems.planning import hardware
from systems.planning.clock.simulator import simulation_of
from systems.planning.plan import COLLECTIVE, LaneKind
from systems.planning.step.operations import LaneOperation, Work
from systems.planning.step.schedule import Schedule, expand
from systems.planning.strategy import PlanningContext
from systems.planning.trace import Trace
from systems.prediction.forecast import Observations, Question, _Planned, _PlansByBudget
from systems.ranks.loopback import as_threads
from systems.ranks.ranks import Ranks
from systems.settings import TORCH_DTYPE
from tests.systems.every import STRATEGIES
from tests.systems.pairwise import pairwise
from tests.systems.running import HOST, managed, settings
from tests.systems.test_run_equals_schedule import STEPS, name_of, planned

SEQUENCE, BATCH = 16, 2
MIB = 1 << 20
MOVED = ("h2d", "d2h", "gather", "reduce")
PROFILE = "h100-80g-x4"


class Steady(NamedTuple):
    """Of one rank: what its lanes were given in the last step, the bytes that it moved, what its plan's schedule says of that,
    the schedule, and the trace that it was made for.
    """

    ran: tuple[LaneOperation, ...]
    moved: dict[str, int]
    planned: dict[str, int]
    schedule: Schedule
    trace: Trace


def expected(schedule: Schedule) -> list[LaneOperation]:
    return [o for o in planned(schedule) if not (o.kind is Work.SQUARES and o.lane is LaneKind.REDUCE)]


def shape_of(model: str) -> ModelShape:
    return models_registry.resolve(model)


def steady(system: Any, model: str, size: int, budget: int, options: Any, **given: Any) -> list[Steady]:
    shape, accumulate, dtype = shape_of(model), given.get("accumulate", 1), given.get("dtype", "bf16")
    asked = settings(
        ranks=size,
        device_memory=budget,
        log_events=True,
        initial_weights=models_registry.initial_weights(shape, 0),
        **given,
    )
    models = [models_registry.build(shape) for _ in range(size)]  # threads share torch's generator
    ids = torch.randint(0, shape.vocab_size, (size, accumulate, BATCH, SEQUENCE))

    def work(ranks: Ranks) -> Steady:
        engine = managed(system.initialize(models[ranks.rank], asked, options, ranks=ranks))
        with engine:
            begin, before = 0, engine.counters()
            for _ in range(STEPS):
                engine.drain()
                begin, before = len(engine.log.operations), engine.counters()
                for batch in ids[ranks.rank]:
                    engine.backward(token_loss(engine, {"input_ids": batch, "labels": batch.clone()}, ids.numel()))
                engine.step()
            engine.drain()
            plan = engine.cursor.plan
            assert plan is not None and engine.cursor.following and not plan.provisional, "void: no plan"
            ran = tuple(op.what for op in engine.log.operations[begin:] if isinstance(op.what, LaneOperation))
            trace, _ = engine.planner.plans[plan.signature]
            context = PlanningContext(
                device_budget=engine.device.plannable_bytes,
                host_budget=HOST // size,
                itemsize=TORCH_DTYPE[dtype].itemsize,
                ranks=size,
                accumulate=accumulate,
                seed=0,
                allowance=engine.device.allowance,
            )
            schedule, after = expand(engine.layout, trace, plan, context), engine.counters()
            found = simulation_of(schedule, trace, plan, hardware.load(PROFILE)).bytes
            moved = {lane: after[f"{lane}_bytes"] - before[f"{lane}_bytes"] for lane in MOVED}
            return Steady(ran, moved, {lane: found.get(lane, 0) for lane in MOVED}, schedule, trace)

    return as_threads(size, work)


FACTORS: Mapping[str, Any] = {
    "system": tuple(STRATEGIES),
    "model": ("opt-tiny", "gpt-tiny"),
    "size": (2, 3),
    "budget": (6, 24),
    "recompute": ("none", "full"),
    "accumulate": (1, 2),
    "nonfinite": ("skip", "stop"),
}


@pytest.mark.parametrize("row", pairwise(FACTORS), ids=name_of)
@pytest.mark.one_in(8)
def test_the_run_is_what_the_schedule_and_the_forecast_say(row: Mapping[str, Any]) -> None:
    system, size, budget = STRATEGIES[row["system"]], row["size"], row["budget"] * MIB
    options = system.Options(nonfinite=row["nonfinite"], run_ahead=False)
    work = {"recompute": row["recompute"], "accumulate": row["accumulate"]}
    found = steady(system, row["model"], size, budget, options, dtype="bf16", **work)
    for one in found:
        assert one.schedule.flaws == ()
        assert "\n".join(o.label for o in one.ran) == "\n".join(o.label for o in expected(one.schedule))
        assert one.moved == one.planned and one.moved["reduce"]
    collectives = [[o.label for o in one.ran if o.lane in COLLECTIVE] for one in found]
    assert collectives[0] and all(theirs == collectives[0] for theirs in collectives)
    forecast = _forecast(system, options, row["model"], budget, ranks=size, **work)
    assert forecast.trace.moments == found[0].trace.moments
    assert forecast.trace.flushes == found[0].trace.flushes


def _forecast(system: Any, options: Any, model: str, budget: int, **asked: Any) -> _Planned:
    shape = shape_of(model)
    about = Question(
        profile=hardware.load(PROFILE),
        device_memory=budget,
        host_memory=HOST,
        batch_size=BATCH,
        seq_len=SEQUENCE,
        **asked,
    )
    seen = Observations(models_registry.build(shape), partial(token_loss, objective=shape.objective))
    planned = _PlansByBudget(system, options, replace(about), seen).at(budget)
    assert isinstance(planned, _Planned)
    return planned
