"""Trains a model a few steps under a system and keeps everything a test may compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel
from torch import nn

from systems.baselines.resident import SYSTEM as RESIDENT
from systems.managed import ManagedSystem
from systems.substrate.device import EmulatedDevice
from systems.substrate.engine import ManagedEngine
from systems.system import Engine, MemoryReport, Settings
from tests.random_eviction import RandomEviction, RandomOptions
from tests.systems.models_small import next_token_loss

RANDOM = ManagedSystem(RandomEviction)
HOST = 8 << 30
AMPLE = 1 << 30


@dataclass
class Run:
    losses: list[float]
    norms: list[float | None]
    skipped: list[bool]
    parameters: dict[str, torch.Tensor]
    counters: dict[str, int]
    per_step: list[dict[str, int]]  # counters' growth over each step
    memory: MemoryReport
    engine: Engine  # closed


def settings(**given: Any) -> Settings:
    defaults: dict[str, Any] = {"device": "cpu", "dtype": "fp32", "device_memory": AMPLE, "host_memory": HOST}
    return Settings(**(defaults | given))


def elixir() -> ManagedSystem:
    from systems.strategies.elixir import STRATEGY

    return ManagedSystem(STRATEGY)


def start(
    system: Any, model: nn.Module, asked: Settings, options: BaseModel | None = None, jitter: Callable[[], None] | None = None
) -> Engine:
    chosen = system.Options() if options is None else options
    if jitter is None:
        return system.initialize(model, asked, chosen)
    budget = asked.device_memory or AMPLE
    return system.initialize(model, asked, chosen, device=lambda log: EmulatedDevice(budget, log, jitter=jitter))


def train(
    engine: Engine,
    ids: torch.Tensor,
    loss: Callable[..., torch.Tensor] = next_token_loss,
    each_step: Callable[[int, Engine], None] | None = None,
) -> Run:
    """ids: [steps, accumulate, batch, length]. Closes the engine."""
    losses, per_step = [], []
    before = engine.counters()
    for step in range(ids.shape[0]):
        if each_step is not None:
            each_step(step, engine)
        count = ids[step, :, :, 1:].numel()
        total = 0.0
        for micro in ids[step]:
            value = loss(engine, micro, count)
            engine.backward(value)
            total += value.item()
        engine.step()
        losses.append(total)
        after = engine.counters()
        per_step.append({k: after.get(k, 0) - before.get(k, 0) for k in after})
        before = after
    engine.drain()
    with engine.summon() as values:
        parameters = {name: value.clone() for name, value in values.items()}
    run = Run(
        losses,
        [o.norm for o in engine.outcomes],
        [o.skipped for o in engine.outcomes],
        parameters,
        engine.counters(),
        per_step,
        engine.memory(),
        engine,
    )
    engine.close()
    return run


def train_as(
    system: Any,
    model: nn.Module,
    ids: torch.Tensor,
    options: BaseModel | None = None,
    jitter: Callable[[], None] | None = None,
    **given: Any,
) -> Run:
    return train(start(system, model, settings(accumulate=ids.shape[1], **given), options, jitter), ids)


def assert_equal(one: Run, other: Run) -> None:
    """Bit for bit: losses, norms, skips and parameters."""
    assert one.losses == other.losses
    assert [repr(n) for n in one.norms] == [repr(n) for n in other.norms]
    assert one.skipped == other.skipped
    assert one.parameters.keys() == other.parameters.keys()
    different = [n for n in one.parameters if not torch.equal(one.parameters[n], other.parameters[n])]
    assert not different, f"parameters differ: {different}"


def parts_of(engine: Engine) -> Any:
    assert isinstance(engine, ManagedEngine)
    return engine.parts


def replace(asked: Settings, **changes: Any) -> Settings:
    return dataclasses.replace(asked, **changes)


__all__ = ["AMPLE", "HOST", "RANDOM", "RESIDENT", "RandomOptions", "Run", "assert_equal", "elixir", "train", "train_as"]
