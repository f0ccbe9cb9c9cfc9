"""The reference recipe against plain PyTorch: torch's optimizers and clip_grad_norm_ in a loop (the oracle's own oracle)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from systems.settings import AdamSettings
from systems.strategies.elixir.options import ElixirOptions
from systems.system import Engine
from tests.systems import models_plain, models_small
from tests.systems.models_small import tokens
from tests.systems.pairwise import covered
from tests.systems.running import (
    RESIDENT,
    AdamState,
    Run,
    elixir,
    finished,
    one_step,
    parameters_of,
    settings,
    start,
)

STEPS = 6
EachStep = list[dict[str, torch.Tensor]]  # parameters after each
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
    """norms: before clipping, in double precision. bounds: of parameters and moments, see Note [What rounding can do]."""

    losses: list[float]
    norms: list[float]
    parameters: list[dict[str, torch.Tensor]]
    adam: dict[str, AdamState]
    parameter_bounds: list[dict[str, torch.Tensor]]
    moment_bounds: dict[str, tuple[torch.Tensor, torch.Tensor]]


class Sizes:
    """Of a parameter: what the magnitudes of the terms of Adam's sums add up to; in double precision.

    Note [What rounding can do]
        Each step of torch's loop starts from the engine's own parameters of the step before. Both then run the same forward
        and backward on the same numbers, so losses and gradients are the same bits, and no small difference is carried
        through a model or divided by a small gradient. What remains is Adam's arithmetic, u = 2^-24 an operation, of the
        magnitude of the terms, on both sides:
        g   norm, factor and product, decay and sum, at most 6 operations: 6 u (|factor g| + decay |p|) =: 6 u a
        m   3 more a step, and older errors shrink with m: 9 T u A,  A = the mean of a that m is of g, T steps
        v   g squared twice as much, 4 more a step: 16 T u B,        B = the mean of a^2 that v is of g^2
        r   m' / (sqrt(v') + eps) with bias corrections: 9 operations and what m and v bring:
            u (9 |m'| + 9 T A' + |m'| 8 T B' / v') / (sqrt(v') + eps)
        p   three operations of p's magnitude, and the rate (1 operation) times r: 3 u |p| + rate (|r| u + the above)
    """

    UNIT = 2.0**-24

    def __init__(self, numel: int) -> None:
        self.first, self.second, self.steps = torch.zeros(numel).double(), torch.zeros(numel).double(), 0

    def add(self, group: dict[str, Any], before: torch.Tensor, gradient: torch.Tensor) -> None:
        coupled = 0.0 if group["decoupled_weight_decay"] else group["weight_decay"]
        size = gradient.double().abs() + coupled * before.double().abs()
        (beta1, beta2), self.steps = group["betas"], self.steps + 1
        self.first = beta1 * self.first + (1 - beta1) * size
        self.second = beta2 * self.second + (1 - beta2) * size.square()

    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Bounds for both sides together."""
        count = 2 * self.UNIT * self.steps
        return 9 * count * self.first, 16 * count * self.second

    def parameter(self, group: dict[str, Any], before: torch.Tensor, state: AdamState) -> torch.Tensor:
        beta1, beta2 = group["betas"]
        corrected1, corrected2 = 1 - beta1**self.steps, 1 - beta2**self.steps
        m, v = state.exp_avg.double().abs() / corrected1, state.exp_avg_sq.double() / corrected2
        below = v.sqrt() + group["eps"]
        ratio = (self.second / corrected2 / v).nan_to_num(0.0, 0.0)  # 0 of 0 where no gradient ever was
        brought = 9 * m + 9 * self.steps * self.first / corrected1 + m * 8 * self.steps * ratio
        return 2 * self.UNIT * (3 * before.double().abs() + group["lr"] * (m + brought) / below)


def torch_loop(task: Task, each_step: EachStep) -> Expected:
    """What anybody would write, but that each step starts where the engine's did. See Note [What rounding can do]."""
    model = task.build()
    optimizer = task.make_optimizer(model)
    scheduler = task.scheduler(optimizer)
    names: dict[torch.Tensor, str] = {p: name for name, p in model.named_parameters()}
    sizes = {name: Sizes(p.numel()) for p, name in names.items()}
    found = Expected([], [], [], {}, [], {})
    for step, batch in enumerate(task.ids):
        count, total = batch[:, :, 1:].numel(), 0.0
        for micro in batch:
            loss = task.loss(model, micro, count)
            loss.backward()
            total += loss.item()
        found.losses.append(total)
        fired = [p for p in model.parameters() if p.grad is not None]
        norm = torch.stack([p.grad.double().square().sum() for p in fired if p.grad is not None]).sum().sqrt()
        found.norms.append(norm.item())
        if task.clip:
            nn.utils.clip_grads_with_norm_(fired, task.clip, norm)
        before = {name: each.detach().flatten().clone() for each, name in names.items()}
        groups = {p: group for group in optimizer.param_groups for p in group["params"]}
        for p in fired:
            assert p.grad is not None
            sizes[names[p]].add(groups[p], before[names[p]], p.grad.flatten())
        optimizer.step()
        found.adam = {names[each]: adam_state(state) for each, state in optimizer.state.items()}
        found.parameters.append({name: each.detach().clone() for each, name in names.items()})
        found.parameter_bounds.append(
            {names[p]: sizes[names[p]].parameter(groups[p], before[names[p]], found.adam[names[p]]) for p in fired}
        )
        optimizer.zero_grad()
        with torch.no_grad():
            for each, name in names.items():
                each.copy_(each_step[step][name])
        if scheduler is not None:
            scheduler.step()
    found.moment_bounds = {name: sizes[name].moments() for name in found.adam}
    return found


def adam_state(state: dict[str, Any]) -> AdamState:
    return AdamState(state["exp_avg"].flatten().clone(), state["exp_avg_sq"].flatten().clone(), int(state["step"]))


def engine_loop(system: Any, task: Task, **given: Any) -> tuple[Run, EachStep]:
    model = task.build()
    optimizer = task.make_optimizer(model)
    engine = start(system, model, settings(accumulate=task.accumulate, clip=task.clip, optimizer=optimizer, **given))
    return step_by_step(engine, task, task.scheduler(optimizer))


def step_by_step(engine: Engine, task: Task, scheduler: LambdaLR | None) -> tuple[Run, EachStep]:
    losses, each_step = [], []
    for batch in task.ids:
        losses.append(one_step(engine, batch, task.loss))
        each_step.append(parameters_of(engine))
        if scheduler is not None:
            scheduler.step()
    return finished(engine, losses), each_step


def assert_agrees(task: Task, run: Run, each_step: EachStep) -> Expected:
    expected = torch_loop(task, each_step)
    assert run.losses == expected.losses
    assert run.norms == pytest.approx(expected.norms, rel=2 * Sizes.UNIT), "summed in double precision, rounded once"
    for step, (ours, theirs) in enumerate(zip(each_step, expected.parameters, strict=True)):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            bound = expected.parameter_bounds[step].get(name, torch.zeros(value.numel()).double())
            assert_within(bound, ours[name], value, f"{name} after step {step}")
    fired = {name: state for name, state in run.adam.items() if state.steps}
    assert fired.keys() == expected.adam.keys()
    for name, (exp_avg, exp_avg_sq, steps) in expected.adam.items():
        first, second = expected.moment_bounds[name]
        assert_within(first, fired[name].exp_avg, exp_avg, f"first moment of {name}")
        assert_within(second, fired[name].exp_avg_sq, exp_avg_sq, f"second moment of {name}")
        assert fired[name].steps == steps
    return expected


def assert_within(bound: torch.Tensor, one: torch.Tensor, other: torch.Tensor, what: str) -> None:
    off = (one.double() - other.double()).abs().flatten() - bound
    assert not off.numel() or off.max() <= 0, f"{what} is off by {off.max().item()} more than rounding can bring"


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


@pytest.mark.parametrize(
    ("make", "clip", "accumulate", "weight_decay"),
    covered({"make": (adamw, adam), "clip": (0.0, 0.5), "accumulate": (1, 2), "weight_decay": (0.0, 0.1)}),
    ids=lambda value: getattr(value, "__name__", None),
)
def test_resident_agrees_with_torch(
    make: Callable[..., MakeOptimizer], clip: float, accumulate: int, weight_decay: float
) -> None:
    task = Task(make(weight_decay=weight_decay), accumulate=accumulate, clip=clip)
    expected = assert_agrees(task, *engine_loop(RESIDENT, task))
    if clip:
        assert min(expected.norms) > clip, "void: clipping did nothing"


@pytest.mark.parametrize("system", [RESIDENT, elixir()], ids=lambda s: s.name)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam], ids=lambda k: k.__name__)
def test_parameter_groups_and_a_scheduler(system: Any, kind: type[torch.optim.Optimizer]) -> None:
    task = Task(groups(kind), accumulate=2, clip=0.5, schedule=lambda step: 1.0 / (1 + step))
    assert_agrees(task, *engine_loop(system, task))


@pytest.mark.parametrize("make", [adam(weight_decay=0.1, decoupled_weight_decay=True), adamw(betas=(0.5, 0.9), eps=1e-6)])
def test_less_common_settings(make: MakeOptimizer) -> None:
    task = Task(make)
    assert_agrees(task, *engine_loop(RESIDENT, task))


@pytest.mark.parametrize("model", ["opt", "gpt2", "shared-weight", "frozen-middle", "unused-output", "root-owner"])
def test_models_with_shared_frozen_and_unused_parameters(model: str) -> None:
    task = Task(adamw(weight_decay=0.1), model=model, clip=0.5, accumulate=2)
    assert_agrees(task, *engine_loop(RESIDENT, task))


def test_settings_stand_for_an_optimizer() -> None:
    """Without an optimizer `Settings.adam` counts, and set_lr changes its rate from the next step on."""
    hyper = AdamSettings(lr=1e-3, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    task = Task(adamw(betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1), schedule=lambda step: 1.0 if step < 3 else 0.1)
    engine = start(RESIDENT, task.build(), settings(adam=hyper))
    losses, each_step = [], []
    for number, batch in enumerate(task.ids):
        engine.set_lr(1e-3 if number < 3 else 1e-4)
        losses.append(one_step(engine, batch, task.loss))
        each_step.append(parameters_of(engine))
    assert_agrees(task, finished(engine, losses), each_step)


@pytest.mark.parametrize("cut", [(1, 8), (2, 4), (8, 1)], ids=lambda c: f"{c[0]}x{c[1]}")
@pytest.mark.parametrize("system", [RESIDENT, elixir()], ids=lambda s: s.name)
def test_micro_batches_of_any_size_make_the_same_step(system: Any, cut: tuple[int, int]) -> None:
    """Field case C26. An accumulation that is off by one shows in the first two steps.

    Sums are made in another order, and Adam divides what that changes by at least eps: a large one.
    """
    accumulate, batch = cut
    whole = tokens(2, 1, batch=8)
    task = Task(adamw(weight_decay=0.1, eps=1e-3), clip=0.5)
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
        engine = start(
            elixir(), task.build(), settings(accumulate=accumulate, device_memory=1 << 19), ElixirOptions(run_ahead=False)
        )
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
