"""Forecasts of what is no strategy of ours: bytes and memory by hand, steps that end before the next begins."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from models import registry as models_registry
from models.loss import token_loss
from systems import registry
from systems.errors import UnsupportedError
from systems.planning.plan import COLLECTIVE, LaneKind
from systems.planning.step.operations import Work
from systems.planning.step.schedule import Schedule
from systems.planning.step.validator import circular_wait
from systems.prediction import forecast as forecasts
from systems.prediction import zero_policy
from systems.prediction.forecast import Forecast, Question, fits
from systems.prediction.policies import BASELINES, RESIDENT
from systems.ranks.loopback import as_threads
from systems.ranks.ranks import Ranks
from tests.prediction.test_forecast import MIB, asked, observations, question
from tests.systems.running import settings
from tests.systems.setups import in_turn

ZERO = tuple(name for name in BASELINES if "zero" in name)
ON_DEVICE = tuple(name for name in BASELINES if "offload" not in name)
MODEL = "opt-tiny"


def about(ranks: int, **given: Any) -> Question:
    return question("h100-80g-x4", ranks=ranks, device_memory=1 << 32, **given)


def planned(system: str, asked_about: Question) -> forecasts._Planned:
    chosen = registry.get(system)
    plans = forecasts._PlansByBudget(chosen, chosen.Options(), asked_about, observations(MODEL))
    found = plans.at(asked_about.device_memory)
    assert isinstance(found, forecasts._Planned)
    return found


def schedule_of(system: str, asked_about: Question) -> Schedule:
    return planned(system, asked_about).schedule()


def param_bytes(asked_about: Question) -> int:
    """As computed with, padding included."""
    return planned("deepspeed-zero2", asked_about).layout.param_bytes


@pytest.mark.parametrize(
    ("system", "ranks", "accumulate", "recompute"),
    in_turn(list(BASELINES), [(1, 1, "none"), (2, 1, "full"), (3, 2, "none"), (4, 1, "none"), (2, 2, "full")]),
)
def test_a_schedule_holds_together(system: str, ranks: int, accumulate: int, recompute: Any) -> None:
    """Nothing waits for itself, and what a step takes of the device it gives back; all ranks' gradients are summed."""
    asked_about = about(ranks, accumulate=accumulate, recompute=recompute)
    schedule = schedule_of(system, asked_about)
    assert not schedule.flaws and not circular_wait(schedule.operations)
    assert [o.ticket for o in schedule.operations] == list(range(len(schedule.operations)))
    assert [o.moment for o in schedule.bare] == sorted(o.moment for o in schedule.bare)
    live = [schedule.initial_device_bytes]
    for operation in schedule.bare:
        live.append(live[-1] + operation.device_delta)
    assert live[-1] == live[0] and min(live) >= 0
    moved = [o for o in schedule.bare if o.lane in COLLECTIVE]
    assert bool(moved) == (ranks > 1)
    reduced = sum(o.bytes for o in moved if o.kind is Work.REDUCE)
    trained = param_bytes(replace(asked_about, ranks=1)) * (2 if accumulate > 1 else 1)  # in fp32 once, or in bf16 twice
    assert not reduced or reduced == pytest.approx(trained, rel=0.02)


@pytest.mark.parametrize("system", BASELINES)
def test_a_step_begins_when_the_last_one_is_done(system: str) -> None:
    """Its first computation waits for every update of the last step, and for what was brought together behind it."""
    operations = schedule_of(system, about(2)).operations
    first = next(o for o in operations if o.lane is LaneKind.COMPUTE)
    before: set[int] = set(first.previous_waits)
    for operation in reversed(operations):  # of the step before, with what those wait for, and what is ahead in their queues
        if operation.ticket in before:
            before |= {*operation.waits, *operation.room_waits}
            before |= {o.ticket for o in operations if o.lane is operation.lane and o.ticket < operation.ticket}
    last = operations[-1].moment
    ending = [o for o in operations if o.moment == last and o.lane is not None and o.kind is not Work.NORM]
    assert any(o.kind is Work.UPDATE for o in ending)
    left = {o.label for o in ending if o.lane is not LaneKind.COMPUTE and o.ticket not in before}
    assert not left


def moved(system: str, ranks: int, **given: Any) -> dict[str, int]:
    found: Forecast = asked(system, MODEL, about(ranks, **given))
    return dict(found.simulation.bytes)


def test_bytes_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of M bytes of parameters over 4 ranks 3/4 pass a port: DDP 2 M, stage 2 2 M, stage 3 a gather more less what the turn
    keeps, which with all of a small model gathered ahead is all."""
    size = param_bytes(about(4))
    part, shard = size * 3 // 4, size // 4
    for system in ("torch-ddp", RESIDENT, "deepspeed-zero2"):
        assert moved(system, 4) == {"reduce": pytest.approx(part, rel=0.02), "gather": pytest.approx(part, rel=0.02)}
    assert moved("deepspeed-zero3", 4) == {"reduce": part, "gather": part}
    monkeypatch.setattr(zero_policy, "PREFETCH", 0)
    stage_3, schedule = moved("deepspeed-zero3", 4), schedule_of("deepspeed-zero3", about(4))
    layout, times = schedule.residence.layout, Counter(o.bundle for o in schedule.bare if o.kind is Work.GATHER)
    assert stage_3["gather"] == sum(n * layout.bundle_bytes(b) for b, n in times.items()) * 3 // 4
    tied = next(bundle.index for bundle in layout.bundles if len(bundle.units) > 1)  # embedding, head at the turn, embedding
    kept = [b for b in times if times[b] == 1]
    assert times[tied] == 3 and len(kept) <= 2 and all(times[b] == 2 for b in times if b not in (tied, *kept))
    offloads = moved("deepspeed-zero2-offload", 4)
    assert offloads == {"h2d": shard, "gather": part, "reduce": part, "d2h": shard}
    all_of_it = moved("deepspeed-zero3-offload", 4)
    assert all_of_it["gather"] == stage_3["gather"] and all_of_it["h2d"] == pytest.approx(stage_3["gather"] / 3, rel=0.02)
    assert all_of_it["d2h"] == shard
    twice, once = (moved(RESIDENT, 2, accumulate=a)["reduce"] for a in (2, 1))
    assert twice == 2 * once  # every micro-step's


def test_memory_by_hand() -> None:
    """16 bytes a parameter where each rank has all, shared by the ranks where ZeRO shares them; on a node the host has all."""
    size, ranks = param_bytes(about(4)), 4
    states = {name: asked(name, MODEL, about(ranks, recompute="full")).tiers["device"].parts for name in ON_DEVICE}
    for name in ("torch-ddp", RESIDENT):
        assert states[name]["master"] == pytest.approx(2 * size, rel=0.02)
    for name in ("deepspeed-zero2", "deepspeed-zero3"):
        assert states[name]["master"] * ranks == 2 * size and states[name]["moments"] * ranks == 4 * size
    assert states["deepspeed-zero2"]["weights"] == size
    assert states["deepspeed-zero3"]["gradients"] >= size // ranks
    for name in ("deepspeed-zero2-offload", "deepspeed-zero3-offload"):
        host = asked(name, MODEL, about(ranks)).tiers["host"]
        assert host.parts == {"weights": size, "master": 2 * size, "moments": 4 * size}
    for name in ON_DEVICE:
        assert asked(name, MODEL, about(ranks)).tiers["host"].need_bytes == 0


@pytest.mark.parametrize(("system", "ranks"), in_turn(list(BASELINES), [(1,), (2,), (4,)]))
def test_the_least_device_is_the_least_and_its_parts_add_up(system: str, ranks: int) -> None:
    chosen, seen = registry.get(system), observations(MODEL)
    found = asked(system, MODEL, about(ranks))
    least = found.least_device_bytes
    for need in found.tiers.values():
        assert sum(need.parts.values()) == need.need_bytes and min(need.parts.values(), default=0) >= 0
    assert fits(chosen, chosen.Options(), replace(found.question, device_memory=least), seen)
    assert not fits(chosen, chosen.Options(), replace(found.question, device_memory=least - 1), seen)


def test_more_ranks_of_zero_need_less_of_each_device_and_more_of_resident_do_not() -> None:
    need = {(name, n): asked(name, MODEL, about(n)).least_device_bytes for name in ON_DEVICE for n in (2, 4)}
    assert need["deepspeed-zero3", 4] < 0.7 * need["deepspeed-zero3", 2]
    assert need["deepspeed-zero2", 4] < need["deepspeed-zero2", 2]
    assert need["torch-ddp", 4] == need["torch-ddp", 2]


def test_what_resident_waits_for_ddp_hides() -> None:
    """Its sums come when backward is over."""
    slow = question("hai-pcie-a100-40g-x8", ranks=8, batch_size=64, seq_len=128)
    resident, ddp = (asked(name, MODEL, slow) for name in (RESIDENT, "torch-ddp"))
    assert resident.simulation.bytes == pytest.approx(ddp.simulation.bytes, rel=0.02)
    compute, link = (resident.simulation.busy_s[lane] for lane in ("compute", "reduce"))
    assert resident.simulation.step_time_s >= compute + link
    assert ddp.simulation.step_time_s < resident.simulation.step_time_s


@pytest.mark.parametrize("accumulate", [1, 2])
def test_resident_on_ranks_takes_no_more_than_its_forecast(accumulate: int) -> None:
    size, shape, budget = 2, models_registry.resolve(MODEL), 64 * MIB
    chosen = registry.get(RESIDENT)
    initial = models_registry.initial_weights(shape, 0)
    asked_for = settings(ranks=size, accumulate=accumulate, dtype="bf16", device_memory=budget, initial_weights=initial)
    models = [models_registry.build(shape) for _ in range(size)]
    ids = torch.randint(0, shape.vocab_size, (size, accumulate, 4, 32))

    def work(ranks: Ranks) -> int:
        engine: Any = chosen.initialize(models[ranks.rank], asked_for, chosen.Options(), ranks=ranks)  # type: ignore[call-arg]
        with engine:
            for _ in range(2):
                for batch in ids[ranks.rank]:
                    engine.backward(token_loss(engine, {"input_ids": batch, "labels": batch.clone()}, ids.numel()))
                engine.step()
            return engine.memory().device_peak_bytes or 0

    forecast = asked(RESIDENT, MODEL, about(size, accumulate=accumulate))
    for peak in as_threads(size, work):
        assert 0.6 * forecast.device_peak_bytes < peak <= forecast.device_peak_bytes


def test_other_weights_of_ddp_have_no_forecast() -> None:
    with pytest.raises(UnsupportedError, match="weights='compute'.* has no forecast: use .*weights='masters'"):
        asked("torch-ddp", MODEL, about(2), weights="compute")
