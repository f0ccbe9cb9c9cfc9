"""Trains a model a few steps under a system and keeps everything a test may compare."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel
from torch import nn

from systems.baselines.resident import ResidentEngine
from systems.device.emulated import EmulatedDevice
from systems.reports import MemoryReport
from systems.settings import Settings
from systems.substrate.engine import ManagedEngine
from systems.substrate.system import ManagedSystem
from systems.system import Engine
from tests.random_eviction import RandomOptions
from tests.systems.every import RANDOM, RESIDENT, STRATEGIES
from tests.systems.models_small import next_token_loss

HOST = 8 << 30
AMPLE = 1 << 30


class AdamState(NamedTuple):
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    steps: int


@dataclass
class Run:
    losses: list[float]
    norms: list[float | None]
    skipped: list[bool]
    parameters: dict[str, torch.Tensor]
    adam: dict[str, AdamState]
    counters: dict[str, int]
    per_step: list[dict[str, int]]  # counters' growth over each step
    memory: MemoryReport
    engine: Engine  # closed


def settings(**given: Any) -> Settings:
    defaults: dict[str, Any] = {"device": "cpu", "dtype": "fp32", "device_memory": AMPLE, "host_memory": HOST}
    return Settings(**(defaults | given))


def elixir() -> ManagedSystem:
    """For tests of what only Elixir has; others run over tests.systems.every."""
    return STRATEGIES["elixir"]


def angel_ptm() -> ManagedSystem:
    return STRATEGIES["angel-ptm"]


def patrickstar() -> ManagedSystem:
    return STRATEGIES["patrickstar"]


def h3t() -> ManagedSystem:
    return STRATEGIES["h3t"]


def start(
    system: Any, model: nn.Module, asked: Settings, options: BaseModel | None = None, jitter: Callable[[], None] | None = None
) -> Engine:
    chosen = system.Options() if options is None else options
    if jitter is None:
        return system.initialize(model, asked, chosen)
    budget = asked.device_memory or AMPLE
    return system.initialize(model, asked, chosen, device=lambda log: EmulatedDevice(budget, log, jitter=jitter))


def host_need(system: Any, model: nn.Module, options: BaseModel | None = None, **given: Any) -> int:
    """Bytes of the host that an engine takes at first where it may take all it wants; inputs that wait there come on top."""
    with start(system, model, settings(**given), options) as engine:
        return managed(engine).store.host.live


def one_step(
    engine: Engine,
    micro_batches: torch.Tensor | Sequence[torch.Tensor],
    loss: Callable[..., torch.Tensor] = next_token_loss,
) -> float:
    """micro_batches: [accumulate, batch, length], or a [batch, length] for each. The step's loss."""
    count, total = sum(micro[:, 1:].numel() for micro in micro_batches), 0.0
    for micro in micro_batches:
        value = loss(engine, micro, count)
        engine.backward(value)
        total += value.item()
    engine.step()
    return total


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
        losses.append(one_step(engine, ids[step], loss))
        after = engine.counters()
        per_step.append({k: after.get(k, 0) - before.get(k, 0) for k in after})
        before = after
    return finished(engine, losses, per_step)


def finished(engine: Engine, losses: list[float], per_step: list[dict[str, int]] | None = None) -> Run:
    """Closes the engine."""
    engine.drain()
    run = Run(
        losses,
        [o.norm for o in engine.outcomes],
        [o.skipped for o in engine.outcomes],
        parameters_of(engine),
        adam_states(engine),
        engine.counters(),
        per_step or [],
        engine.memory(),
        engine,
    )
    engine.close()
    return run


def waiting(options: Any) -> Any:
    """The same, and no update runs ahead of the norm: so the host holds no second versions."""
    return options.model_copy(update={"run_ahead": False})


def parameters_of(engine: Engine) -> dict[str, torch.Tensor]:
    """Masters, each once; what summon adds to them: tests/systems/test_export.py."""
    with engine.masters() as values:
        return {name: value.clone() for name, value in values.items()}


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
    """Bit for bit: losses, norms, skips, parameters, moments and Adam's step counts."""
    assert one.losses == other.losses
    assert [repr(n) for n in one.norms] == [repr(n) for n in other.norms]
    assert one.skipped == other.skipped
    assert one.parameters.keys() == other.parameters.keys()
    different = [n for n in one.parameters if not torch.equal(one.parameters[n], other.parameters[n])]
    assert not different, f"parameters differ: {different}"
    assert one.adam.keys() == other.adam.keys()
    for name, (exp_avg, exp_avg_sq, steps) in one.adam.items():
        theirs = other.adam[name]
        assert torch.equal(exp_avg, theirs.exp_avg), f"first moment of {name} differs"
        assert torch.equal(exp_avg_sq, theirs.exp_avg_sq), f"second moment of {name} differs"
        assert steps == theirs.steps, f"{name} had {steps} and {theirs.steps} updates"


def adam_states(engine: Engine) -> dict[str, AdamState]:
    """Moments and step counts of every trainable parameter by name, flat, as copies. Call only when drained.

    Of an optimizer that keeps fewer than Adam, those that it has not are of no elements.
    """

    def made(moments: Sequence[torch.Tensor], steps: int) -> AdamState:
        first, second = [*moments, torch.empty(0), torch.empty(0)][:2]
        return AdamState(first, second, steps)

    found = {}
    if isinstance(engine, ResidentEngine):
        for number, (name, moments) in enumerate(zip(engine._names, engine._moments, strict=True)):
            if moments is not None:
                found[name] = made([each.clone() for each in moments], engine.control.updates[number])
        return found
    assert isinstance(engine, ManagedEngine)
    values = engine.values
    for described in engine.index.parameters:
        if described.trainable:
            mine = [values.moment(described.index, part) for part in values.moments]
            found[described.name] = made(mine, engine.control.updates[described.index])
    return found


def evict_at_once(engine: Engine, *, seed: int = 0) -> None:
    """From now on whatever is released leaves the device at once, and now and then an unfinished gradient does too.

    What a use after release would read is thus never there by luck.
    """
    residency, luck = managed(engine).residency, random.Random(seed)
    release = residency.release

    def release_and_evict(indices: Sequence[int], key: object) -> None:
        release(indices, key)
        for index in residency.room.evictable():
            residency.evict(index)
        if luck.random() < 0.5:
            residency.room._relieve()

    residency.release = release_and_evict


def managed(engine: Engine) -> Any:
    """The engine as the one that it is, whose mechanism a test may look at and change."""
    assert isinstance(engine, ManagedEngine)
    return engine


def replace(asked: Settings, **changes: Any) -> Settings:
    return dataclasses.replace(asked, **changes)


__all__ = [
    "AMPLE",
    "HOST",
    "RANDOM",
    "RESIDENT",
    "RandomOptions",
    "Run",
    "angel_ptm",
    "assert_equal",
    "elixir",
    "h3t",
    "host_need",
    "patrickstar",
    "train",
    "train_as",
]
