"""The scripted system does what its script says: the harness's tests stand on it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from models.loss import count_labels, token_loss
from systems.baselines.dummy import COUNTERS, SYSTEM, DummyEngine, DummyOptions
from systems.errors import BudgetError, DivergedError, OutOfMemoryError, UnavailableError, UnsupportedError
from systems.settings import Settings
from systems.system import Engine

IDS = torch.arange(32).reshape(2, 16) % 8


def step(engine: Engine) -> float:
    batch = {"input_ids": IDS, "labels": IDS.clone()}
    loss = token_loss(engine, batch, count_labels(batch))
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def make(sleeps: list[float], **options: Any) -> DummyEngine:
    return DummyEngine(DummyOptions(**options), Settings(clip=1.0), sleep=sleeps.append)


def test_times_are_slept_as_told() -> None:
    sleeps: list[float] = []
    with make(sleeps, step_time_s=2.0, micro_step_time_s=1.0, slow_steps=1, slow_factor=3.0) as engine:
        step(engine)
        step(engine)
    assert sleeps == [3.0, 6.0, 1.0, 2.0]


def test_queued_work_is_waited_for_by_drain_only() -> None:
    sleeps: list[float] = []
    with make(sleeps, drain_time_s=5.0) as engine:
        step(engine)
        engine.drain()
        assert sorted(sleeps) == [0.0, 0.0, 5.0]


def test_the_loss_is_known_and_has_a_gradient() -> None:
    with make([]) as engine:
        assert step(engine) == pytest.approx(math.log(8))
        assert engine.outcomes[0].norm == 2.0
        assert engine.outcomes[0].clip_factor == 0.5


def test_skips_and_traffic_are_counted() -> None:
    with make([], skip_at=2, bytes_per_step=7) as engine:
        for _ in range(3):
            step(engine)
        assert [outcome.skipped for outcome in engine.outcomes] == [False, True, False]
        assert set(engine.counters()) == set(COUNTERS)
        assert (engine.counters()["skipped_steps"], engine.counters()["h2d_bytes"]) == (1, 21)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"oom_at": 2}, OutOfMemoryError),
        ({"diverge_at": 2}, DivergedError),
        ({"crash_at": 2}, RuntimeError),
        ({"disk_full_at": 2}, OSError),
    ],
)
def test_failures_come_at_their_step(options: dict[str, int], error: type[Exception]) -> None:
    with make([], **options) as engine:
        step(engine)
        with pytest.raises(error):
            step(engine)


def test_step_0_is_initialize() -> None:
    with pytest.raises(RuntimeError, match="step 0"):
        make([], crash_at=0)


def test_a_nan_comes_at_its_step() -> None:
    with make([], nan_at=2) as engine:
        assert [math.isnan(step(engine)) for _ in range(3)] == [False, True, False]


def test_requests_are_refused() -> None:
    module = torch.nn.Module()
    with pytest.raises(BudgetError, match="2GiB of host memory, the budget is 1GiB") as caught:
        SYSTEM.initialize(module, Settings(host_memory=1 << 30), DummyOptions(host_need=2 << 30))
    assert (caught.value.tier, caught.value.need, caught.value.have) == ("host", 2 << 30, 1 << 30)
    with pytest.raises(UnsupportedError):
        SYSTEM.initialize(module, Settings(), DummyOptions(refuse="unsupported"))
    with pytest.raises(UnavailableError, match="pip install offload-parts"):
        SYSTEM.initialize(module, Settings(), DummyOptions(refuse="unavailable"))
    with pytest.raises(ModuleNotFoundError):
        SYSTEM.initialize(module, Settings(), DummyOptions(refuse="missing-package"))
    engine = SYSTEM.initialize(module, Settings(host_memory=2 << 30), DummyOptions(host_need=2 << 30))
    engine.close()
    engine.close()
