"""The reference recipe against plain PyTorch: torch's optimizers and clip_grad_norm_ in a loop (the oracle's own oracle)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from systems.system import AdamSettings
from tests.systems import models_plain, models_small
from tests.systems.models_small import tokens
from tests.systems.running import RESIDENT, AdamState, Run, elixir, finished, one_step, settings, start

STEPS = 6
TOLERANCE = 1e-6
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class Task:
    """A model, its data, and how they are trained."""

    make_optimizer: MakeOptimizer
    model: str = "stack"
    accumulate: int = 1
    clip: float = 0.0
    schedule: Callable[[int], float] | None = None

    def build(self) -> nn.Module:
        return models_plain.build(self.model) if self.model in models_plain.CASES else models_small.build(self.model)

    @property
    def loss(self) -> Callable[..., torch.Tensor]:
        return models_plain.CASES[self.model].loss if self.model in models_plain.CASES else models_small.next_token_loss

    @property
    def ids(self) -> torch.Tensor:
        return tokens(STEPS, self.accumulate)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> LambdaLR | None:
        return None if self.schedule is None else LambdaLR(optimizer, self.schedule)


@dataclass
class Expected:
    losses: list[float]
    norms: list[float]
    parameters: dict[str, torch.Tensor]
    adam: dict[str, AdamState]


def torch_loop(task: Task) -> Expected:
    """What anybody would write."""
    model = task.build()
    optimizer = task.make_optimizer(model)
    scheduler = task.scheduler(optimizer)
    losses, norms = [], []
    for batch in task.ids:
        count, total = batch[:, :, 1:].numel(), 0.0
        for micro in batch:
            loss = task.loss(model, micro, count)
            loss.backward()
            total += loss.item()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), task.clip or torch.inf).item())
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(total)
    states = {n: optimizer.state[p] for n, p in model.named_parameters() if p in optimizer.state}
    adam = {n: AdamState(s["exp_avg"].flatten(), s["exp_avg_sq"].flatten(), int(s["step"])) for n, s in states.items()}
    return Expected(losses, norms, {n: p.detach() for n, p in model.named_parameters()}, adam)


def engine_loop(system: Any, task: Task, **given: Any) -> Run:
    model = task.build()
    optimizer = given.pop("optimizer", None) or task.make_optimizer(model)
    asked = settings(accumulate=task.accumulate, clip=task.clip, optimizer=optimizer, **given)
    engine = start(system, model, asked)
    scheduler = task.scheduler(optimizer)
    losses = []
    for batch in task.ids:
        losses.append(one_step(engine, batch, task.loss))
        if scheduler is not None:
            scheduler.step()
    return finished(engine, losses)


def assert_agrees(expected: Expected, run: Run) -> None:
    assert run.losses == pytest.approx(expected.losses, rel=TOLERANCE, abs=TOLERANCE)
    assert run.norms == pytest.approx(expected.norms, rel=TOLERANCE)
    assert run.parameters.keys() == expected.parameters.keys()
    for name, value in expected.parameters.items():
        difference = (run.parameters[name] - value).abs().max().item() if value.numel() else 0.0
        assert difference <= TOLERANCE, f"{name} is off by {difference}"
    fired = {name: state for name, state in run.adam.items() if state.steps}
    assert fired.keys() == expected.adam.keys()
    for name, (exp_avg, exp_avg_sq, steps) in expected.adam.items():
        torch.testing.assert_close(fired[name].exp_avg, exp_avg, rtol=TOLERANCE * 10, atol=TOLERANCE)
        torch.testing.assert_close(fired[name].exp_avg_sq, exp_avg_sq, rtol=TOLERANCE * 10, atol=TOLERANCE)
        assert fired[name].steps == steps


def adamw(**given: Any) -> MakeOptimizer:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, **given)


def adam(**given: Any) -> MakeOptimizer:
    return lambda model: torch.optim.Adam(model.parameters(), lr=1e-3, **given)


def groups(kind: type[torch.optim.Optimizer]) -> MakeOptimizer:
    """Biases and norms without decay, the head with its own rate and betas; in an order that is not the model's."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        head = [p for n, p in model.named_parameters() if n.startswith("head")]
        plain = [p for n, p in model.named_parameters() if p.ndim < 2 and not n.startswith("head")]
        rest = [p for n, p in model.named_parameters() if p.ndim >= 2 and not n.startswith("head")]
        found: list[dict[str, Any]] = [
            {"params": head, "lr": 5e-3, "betas": (0.8, 0.99), "eps": 1e-6},
            {"params": rest, "weight_decay": 0.1},
            {"params": plain, "weight_decay": 0.0},
        ]
        return kind(found, lr=1e-3)  # type: ignore[call-arg]

    return make


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("make", [adamw, adam], ids=["AdamW", "Adam"])
def test_resident_agrees_with_torch(
    make: Callable[..., MakeOptimizer], clip: float, accumulate: int, weight_decay: float
) -> None:
    task = Task(make(weight_decay=weight_decay), accumulate=accumulate, clip=clip)
    expected, run = torch_loop(task), engine_loop(RESIDENT, task)
    assert_agrees(expected, run)
    if clip:
        assert min(expected.norms) > clip, "void: clipping did nothing"


@pytest.mark.parametrize("system", [RESIDENT, elixir()], ids=lambda s: s.name)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam], ids=lambda k: k.__name__)
def test_parameter_groups_and_a_scheduler(system: Any, kind: type[torch.optim.Optimizer]) -> None:
    task = Task(groups(kind), accumulate=2, clip=0.5, schedule=lambda step: 1.0 / (1 + step))
    assert_agrees(torch_loop(task), engine_loop(system, task))


@pytest.mark.parametrize("make", [adam(weight_decay=0.1, decoupled_weight_decay=True), adamw(betas=(0.5, 0.9), eps=1e-6)])
def test_less_common_settings(make: MakeOptimizer) -> None:
    task = Task(make)
    assert_agrees(torch_loop(task), engine_loop(RESIDENT, task))


@pytest.mark.parametrize("model", ["opt", "gpt2", "shared-weight", "frozen-middle", "unused-output", "root-owner"])
def test_models_with_shared_frozen_and_unused_parameters(model: str) -> None:
    # eps well above the rounding noise that is the gradient of a key's bias, which Adam would blow up to a full step
    task = Task(adamw(weight_decay=0.1, eps=1e-4), model=model, clip=0.5, accumulate=2)
    assert_agrees(torch_loop(task), engine_loop(RESIDENT, task))


def test_settings_stand_for_an_optimizer() -> None:
    """Without an optimizer `Settings.adam` counts, and set_lr changes its rate from the next step on."""
    hyper = AdamSettings(lr=1e-3, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    task = Task(adamw(betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1), schedule=lambda step: 1.0 if step < 3 else 0.1)
    engine = start(RESIDENT, task.build(), settings(adam=hyper))
    losses = []
    for number, batch in enumerate(task.ids):
        engine.set_lr(1e-3 if number < 3 else 1e-4)
        losses.append(one_step(engine, batch, task.loss))
    assert_agrees(torch_loop(task), finished(engine, losses))


@pytest.mark.parametrize("cut", [(1, 8), (2, 4), (8, 1)], ids=lambda c: f"{c[0]}x{c[1]}")
@pytest.mark.parametrize("system", [RESIDENT, elixir()], ids=lambda s: s.name)
def test_micro_batches_of_any_size_make_the_same_step(system: Any, cut: tuple[int, int]) -> None:
    """Field case C26. An accumulation that is off by one shows in the first two steps."""
    accumulate, batch = cut
    whole = tokens(2, 1, batch=8)
    task = Task(adamw(weight_decay=0.1), clip=0.5)
    model = task.build()
    asked = settings(accumulate=accumulate, clip=0.5, optimizer=task.make_optimizer(model))
    engine = start(system, model, asked)
    losses = [one_step(engine, step.reshape(accumulate, batch, -1), task.loss) for step in whole]
    run = finished(engine, losses)
    expected = engine_of_one(whole, task)
    assert run.losses == pytest.approx(expected.losses, rel=1e-5)
    assert run.norms == pytest.approx(expected.norms, rel=1e-5)
    for name, value in expected.parameters.items():
        torch.testing.assert_close(run.parameters[name], value, rtol=1e-5, atol=1e-6)


def test_accumulation_takes_one_fp32_accumulator_whatever_the_number_of_micro_batches() -> None:
    task = Task(adamw())
    peaks: dict[int, int] = {}
    for accumulate in (1, 2, 8):
        engine = start(elixir(), task.build(), settings(accumulate=accumulate, device_memory=1 << 19))
        batch = tokens(3, accumulate, batch=1)
        run = finished(engine, [one_step(engine, step, task.loss) for step in batch])
        peaks[accumulate] = run.memory.host_peak_bytes or 0
    numel = sum(p.numel() for p in task.build().parameters())
    assert peaks[2] == peaks[8]
    assert 0 <= peaks[2] - peaks[1] - 4 * numel < 0.1 * 4 * numel  # padding


def engine_of_one(whole: torch.Tensor, task: Task) -> Run:
    model = task.build()
    engine = start(RESIDENT, model, settings(clip=task.clip, optimizer=task.make_optimizer(model)))
    return finished(engine, [one_step(engine, step, task.loss) for step in whole])
