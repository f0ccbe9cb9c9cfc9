"""torch's own optimizer for the baselines that are torch's, with and without masters, and their arguments' check."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from systems.baselines.external.engine import LateNumber, Update
from systems.baselines.external.package import Config
from systems.errors import UnsupportedError
from systems.messages import unknown_name
from systems.recipe.step.loss_scale import FP16_FIRST_SCALE, FP16_GROWTH_STEPS
from systems.settings import AdamSettings, Settings

BUCKET = 1 << 28  # elements whose fp32 gradients exist at once: 1 GiB
_DECIDED = frozenset(
    {"lr", "betas", "eps", "weight_decay", "params", "module", "mesh", "mp_policy", "offload_policy", "param_dtype"}
)


def adam(parameters: Iterable[nn.Parameter], settings: AdamSettings, arguments: Mapping[str, Any]) -> torch.optim.Optimizer:
    """AdamW or Adam over the trainable ones."""
    kind = torch.optim.AdamW if settings.decoupled else torch.optim.Adam
    return kind(
        [p for p in parameters if p.requires_grad],
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        **arguments,
    )


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


class UpdateChoice(ABC):
    """How parameters on the device are updated. values: what counts as the master, parameter by parameter."""

    values: Sequence[torch.Tensor]

    @abstractmethod
    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss that backward starts from."""

    @abstractmethod
    def take(self) -> None:
        """A micro-batch's gradients are there."""

    @abstractmethod
    def step(self) -> Update: ...

    @abstractmethod
    def set_lr(self, lr: float) -> None: ...

    @abstractmethod
    def written(self) -> None:
        """`values` were changed from outside."""


class OnParameters(UpdateChoice):
    """The optimizer works on the parameters themselves, with torch's loss scale where the compute dtype is fp16."""

    def __init__(self, parameters: Sequence[nn.Parameter], settings: Settings, arguments: Mapping[str, Any]) -> None:
        self.values = [p.data for p in parameters]
        self._parameters, self._clip = parameters, settings.clip
        self._optimizer = adam(parameters, settings.adam, arguments)
        self._scaler = torch.amp.GradScaler(
            settings.device,
            init_scale=FP16_FIRST_SCALE,
            growth_interval=FP16_GROWTH_STEPS,
            enabled=settings.dtype == "fp16",
        )

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return self._scaler.scale(loss)

    def take(self) -> None:
        return

    def step(self) -> Update:
        norm = None
        if self._clip > 0:
            self._scaler.unscale_(self._optimizer)
            norm = LateNumber(torch.nn.utils.clip_grad_norm_(self._parameters, self._clip))
        scale = float(self._scaler.get_scale())
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        return Update(norm, scale, skipped=float(self._scaler.get_scale()) < scale)

    def set_lr(self, lr: float) -> None:
        set_rate(self._optimizer, lr)

    def written(self) -> None:
        return


class WithMasters(UpdateChoice):
    """fp32 masters beside 16-bit parameters: gradients are raised to fp32 a bucket at a time, masters lowered after.

    Gradients of several micro-batches add up in fp32, 4 more bytes a parameter, as in the reference recipe.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], settings: Settings, arguments: Mapping[str, Any]) -> None:
        self._settings, self._arguments = settings, arguments
        self._parameters = parameters
        self.values: list[torch.Tensor] = []
        self._buckets: list[list[tuple[nn.Parameter, nn.Parameter]]] = []
        self._optimizers: list[torch.optim.Optimizer] = []

    def start_from(self, number: int, value: torch.Tensor) -> None:
        """Give the parameters' masters in order. value: fp32, on the device."""
        assert number == len(self.values)
        self.values.append(value)
        if number + 1 < len(self._parameters):
            return
        room = 0
        for parameter, master in zip(self._parameters, self.values, strict=True):
            if not parameter.requires_grad:
                continue
            if room < parameter.numel():
                self._buckets.append([])
                room = BUCKET
            room -= parameter.numel()
            self._buckets[-1].append((parameter, nn.Parameter(master)))
        for bucket in self._buckets:
            self._optimizers.append(adam([master for _, master in bucket], self._settings.adam, self._arguments))

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss

    def take(self) -> None:
        if self._settings.accumulate > 1:
            for bucket in self._buckets:
                _raise(bucket)

    def step(self) -> Update:
        factor, norm = None, None
        if self._settings.clip > 0:
            total = self._norm()
            factor = torch.clamp(self._settings.clip / (total + 1e-6), max=1.0)
            norm = LateNumber(total)
        for bucket, optimizer in zip(self._buckets, self._optimizers, strict=True):
            _raise(bucket)
            masters = [master for _, master in bucket]
            gradients = [master.grad for master in masters if master.grad is not None]
            if factor is not None and gradients:
                torch._foreach_mul_(gradients, factor)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            torch._foreach_copy_([p.data for p, _ in bucket], [master.data for master in masters])
        return Update(norm)

    def _norm(self) -> torch.Tensor:
        """Over all gradients, raised already or not, in fp32."""
        pairs = [pair for bucket in self._buckets for pair in bucket]
        gradients = [p.grad if master.grad is None else master.grad for p, master in pairs]
        norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients if g is not None]
        return torch.linalg.vector_norm(torch.stack(norms))

    def set_lr(self, lr: float) -> None:
        for optimizer in self._optimizers:
            set_rate(optimizer, lr)

    def written(self) -> None:
        for parameter, value in zip(self._parameters, self.values, strict=True):
            parameter.data.copy_(value)


def _raise(bucket: Iterable[tuple[nn.Parameter, nn.Parameter]]) -> None:
    """Move gradients from the parameters to their masters, in fp32."""
    for parameter, master in bucket:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            continue
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad.add_(gradient)


def arguments_of(function: Callable[..., Any]) -> set[str]:
    """What a user's file may give it: all but what the run decides."""
    return set(inspect.signature(function).parameters) - _DECIDED - {"self"}


def check_arguments(config: Config, allowed: Mapping[str, Collection[str]], path: str | None) -> None:
    """UnsupportedError for a section or an argument that nothing takes, or that is not a file's to give."""
    for section, arguments in config.items():
        if section not in allowed:
            raise UnsupportedError(f"{path}: {unknown_name('section', section, allowed)}")
        if not isinstance(arguments, Mapping):
            raise UnsupportedError(f"{path}: {section} is {arguments!r}, an object is needed")
        for name in arguments:
            if name not in allowed[section]:
                raise UnsupportedError(f"{path}: {unknown_name(f'argument of {section}', name, allowed[section])}")
