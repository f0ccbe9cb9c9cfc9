"""The reference recipe's decisions: gradient norm, clipping factor, loss scale, what is skipped, whose turn which step is.

Both the resident baseline and the managed engine use this, so that equality between them can be exact.

Note [The recipe]
    loss = sum over label tokens / global label count. Weights and gradients in the compute dtype, master weights and moments
    in fp32. norm = square root of the sum, in parameter order, of one fp64 sum of squares a parameter, rounded once to fp32.
    Gradients are multiplied by min(1, clip / (norm + 1e-6)), in fp32. A step whose norm is not finite changes nothing. A
    parameter without a gradient is skipped: no decay, no moments, no step count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from systems.checkpoint import LoopState
from systems.errors import DivergedError, UnsupportedError
from systems.planning.layout import ModelIndex
from systems.substrate.adam import AdamRange
from systems.system import AdamSettings, Settings, StepOutcome

MAX_SKIPS_IN_A_ROW = 20
FP16_FIRST_SCALE = 2.0**16
FP16_GROWTH_STEPS = 2000


class LossScaler:
    """Dynamic loss scale: halved by a skipped step, doubled after FP16_GROWTH_STEPS good ones; constant 1 unless fp16."""

    def __init__(self, dtype: str) -> None:
        self.dynamic = dtype == "fp16"
        self.scale = FP16_FIRST_SCALE if self.dynamic else 1.0
        self.good_steps = 0

    def after_step(self, *, skipped: bool) -> None:
        if not self.dynamic:
            return
        if skipped:
            self.scale, self.good_steps = max(self.scale / 2, 1.0), 0
            return
        self.good_steps += 1
        if self.good_steps == FP16_GROWTH_STEPS:
            self.scale, self.good_steps = self.scale * 2, 0


class StepControl:
    """Turns a step's partial sums into a decision and keeps what outlives a step: step counts, scale, skips in a row."""

    def __init__(self, settings: Settings, index: ModelIndex, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.clip = settings.clip
        self.scaler = LossScaler(settings.dtype)
        self.updates = [0] * len(index.parameters)  # optimizer steps taken, per parameter
        self.outcomes: list[StepOutcome] = []
        self._skips_in_a_row = 0
        self._steps_before = self._skipped_before = 0  # in the run whose checkpoint was restored
        self._groups = _Groups(settings, index, parameters)

    def decide(self, partials: Mapping[int, float]) -> StepOutcome:
        """partials: parameter index to fp64 sum of squares of its (scaled) gradient, for parameters that have one."""
        total = 0.0
        for parameter in sorted(partials):
            total += partials[parameter]
        scale = self.scaler.scale
        norm = float(np.float32(math.sqrt(total) / scale)) if math.isfinite(total) else math.nan
        skipped = not math.isfinite(norm)
        factor = 1.0
        if self.clip > 0 and not skipped:
            factor = min(1.0, float(np.float32(self.clip) / (np.float32(norm) + np.float32(1e-6))))
        return StepOutcome(self._steps_before + len(self.outcomes) + 1, norm, factor, scale, skipped)

    @property
    def loop(self) -> LoopState:
        """For a checkpoint."""
        steps, skipped = len(self.outcomes), sum(outcome.skipped for outcome in self.outcomes)
        return LoopState(
            steps=self._steps_before + steps,
            skipped_steps=self._skipped_before + skipped,
            loss_scale=self.scaler.scale,
            good_steps=self.scaler.good_steps,
            skips_in_a_row=self._skips_in_a_row,
        )

    @loop.setter
    def loop(self, state: LoopState) -> None:
        self._steps_before = state.steps - len(self.outcomes)
        self._skipped_before = state.skipped_steps - sum(outcome.skipped for outcome in self.outcomes)
        self._skips_in_a_row = state.skips_in_a_row
        if self.scaler.dynamic:
            self.scaler.scale, self.scaler.good_steps = state.loss_scale, state.good_steps

    def record(self, outcome: StepOutcome) -> None:
        """The step's decision was carried out."""
        self.outcomes.append(outcome)
        self.scaler.after_step(skipped=outcome.skipped)
        if not outcome.skipped:
            self._skips_in_a_row = 0
            return
        self._skips_in_a_row += 1
        if self._skips_in_a_row >= MAX_SKIPS_IN_A_ROW:
            raise DivergedError(
                f"{self._skips_in_a_row} steps in a row were skipped for a non-finite gradient, the last at step "
                f"{outcome.step}: lower the learning rate, set `clip`, or check the data"
            )

    def begin_updates(self, fired: Sequence[int]) -> None:
        """Advance the step count of every parameter about to be updated, and read the groups' hyperparameters anew."""
        for parameter in fired:
            self.updates[parameter] += 1
        self._groups.refresh()

    def take_back(self, fired: Sequence[int]) -> None:
        """The updates that `begin_updates` was told of will not be."""
        for parameter in fired:
            self.updates[parameter] -= 1

    def multiplier(self, outcome: StepOutcome) -> float:
        """What a scaled gradient is multiplied by: loss scale and clipping in one."""
        return float(np.float32(outcome.clip_factor / outcome.loss_scale))

    def adam_range(self, parameter: int, offset: int, numel: int) -> AdamRange:
        hyper = self._groups.of(parameter)
        return AdamRange(
            offset=offset,
            numel=numel,
            lr=hyper.lr,
            beta1=hyper.betas[0],
            beta2=hyper.betas[1],
            eps=hyper.eps,
            weight_decay=hyper.weight_decay,
            decoupled=hyper.decoupled,
            step=self.updates[parameter],
        )

    def set_lr(self, lr: float) -> None:
        """For runs without a torch optimizer: the learning rate from the next step on."""
        self._groups.set_lr(lr)


class _Groups:
    """Hyperparameters per parameter, from settings.adam or live from a torch optimizer's parameter groups."""

    def __init__(self, settings: Settings, index: ModelIndex, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._optimizer = settings.optimizer
        self._adam = [settings.adam]
        self._group_of = [0] * len(parameters)
        if self._optimizer is None:
            return
        _check_optimizer(self._optimizer)
        # Schedulers warn unless optimizer.step ran before them; here engine.step is that step.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        place = {id(p): g for g, group in enumerate(self._optimizer.param_groups) for p in group["params"]}
        for i, parameter in enumerate(parameters):
            if id(parameter) in place:
                self._group_of[i] = place[id(parameter)]
            elif parameter.requires_grad:
                name = index.parameters[i].name
                raise UnsupportedError(f"parameter {name} is trainable but in no group of the optimizer: add or freeze it")
        self.refresh()

    def refresh(self) -> None:
        if self._optimizer is not None:
            self._adam = [_hyper(self._optimizer, group) for group in self._optimizer.param_groups]

    def of(self, parameter: int) -> AdamSettings:
        return self._adam[self._group_of[parameter]]

    def set_lr(self, lr: float) -> None:
        if self._optimizer is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            return
        old = self._adam[0]
        self._adam = [AdamSettings(lr, old.betas, old.eps, old.weight_decay, old.decoupled)]


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise UnsupportedError(f"optimizer {type(optimizer).__name__} is not supported: pass torch.optim.AdamW or Adam")
    for group in optimizer.param_groups:
        for flag in ("amsgrad", "maximize", "differentiable"):
            if group.get(flag):
                raise UnsupportedError(f"{type(optimizer).__name__}({flag}=True) is not supported: leave it off")
    if optimizer.state:
        raise UnsupportedError("the optimizer has taken steps already: pass a fresh one")


def _hyper(optimizer: torch.optim.Optimizer, group: dict) -> AdamSettings:
    decoupled = isinstance(optimizer, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay"))
    beta1, beta2 = (float(b) for b in group["betas"])
    return AdamSettings(float(group["lr"]), (beta1, beta2), float(group["eps"]), float(group["weight_decay"]), decoupled)
