"""Hyperparameters of each parameter: the settings' own, or those of a torch optimizer's groups as they are now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from systems.errors import UnsupportedError
from systems.planning.layout import ModelIndex
from systems.settings import AdamSettings, Settings

FLAGS = ("amsgrad", "maximize", "differentiable")


class _Inside(NamedTuple):
    """What was read of the groups. placed: parameters by id; group_of: by number, the group; adam: of each group."""

    placed: list[list[int]]
    group_of: list[int]
    adam: list[AdamSettings]


class ParameterGroups:
    """parameters: the model's, in index order, as the optimizer knows them. What was read last is in force until `refresh`.

    Raises UnsupportedError for an optimizer, or groups of one, that the engine cannot follow; groups may change at any time.
    """

    def __init__(self, settings: Settings, index: ModelIndex, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._optimizer, self._index = settings.optimizer, index
        self._parameters = list(parameters)
        self._number = {id(p): i for i, p in enumerate(parameters)}
        self._own = settings.adam
        if self._optimizer is not None:
            if type(self._optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
                kind = type(self._optimizer).__name__
                raise UnsupportedError(f"optimizer {kind} is not supported: pass torch.optim.AdamW or Adam")
            # Schedulers warn unless optimizer.step ran before them; here engine.step is that step.
            self._optimizer._opt_called = True  # type: ignore[attr-defined]
        self._inside = _Inside([], [0] * len(parameters), [])
        self.refresh()

    def refresh(self) -> None:
        self._inside = self._read()

    def of(self, parameter: int) -> AdamSettings:
        return self._inside.adam[self._inside.group_of[parameter]]

    def changed(self) -> str | None:
        """What is no longer as it was read, for a message; None if nothing is."""
        before, now = self._inside, self._read()
        if before.placed != now.placed:
            return "the parameters of the optimizer's groups"
        for number, (old, new) in enumerate(zip(before.adam, now.adam, strict=True)):
            for name in vars(old):
                if getattr(old, name) != getattr(new, name):
                    where = "" if self._optimizer is None else f" of parameter group {number}"
                    return f"{name}{where} ({getattr(old, name)!r} to {getattr(new, name)!r})"
        return None

    def described(self) -> list[dict[str, Any]]:
        """Of each group as it is now: its hyperparameters, and the numbers of its parameters. To be compared over ranks."""
        inside = self._read()
        numbers: list[list[int]] = [[] for _ in inside.adam]
        for parameter, group in enumerate(inside.group_of):
            numbers[group].append(parameter)
        return [vars(adam) | {"parameters": mine} for adam, mine in zip(inside.adam, numbers, strict=True)]

    def set_lr(self, lr: float) -> None:
        if self._optimizer is None:
            self._own = replace(self._own, lr=lr)
            return
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    def _read(self) -> _Inside:
        if self._optimizer is None:
            return _Inside([], self._inside.group_of, [self._own])
        groups = self._optimizer.param_groups
        check_flags(type(self._optimizer).__name__, groups)
        placed = [[id(p) for p in group["params"]] for group in groups]
        group_of = self._inside.group_of if placed == self._inside.placed else self._locate(groups)
        return _Inside(placed, group_of, [_hyper(self._optimizer, group) for group in groups])

    def _locate(self, groups: Sequence[Mapping[str, Any]]) -> list[int]:
        """The group of each parameter."""
        place: dict[int, int] = {}
        for number, group in enumerate(groups):
            for parameter in group["params"]:
                found = self._number.get(id(parameter))
                if found is None:
                    raise UnsupportedError(
                        f"parameter group {number} of the optimizer has a parameter of shape {tuple(parameter.shape)} that is "
                        "not the model's and would never be updated: give it an optimizer of its own"
                    )
                place[found] = number
        for described in self._index.parameters:
            if described.trainable and described.index not in place:
                raise UnsupportedError(
                    f"parameter {described.name} is trainable but in no group of the optimizer: add or freeze it"
                )
        return [place.get(number, 0) for number in range(len(self._parameters))]


def check_flags(kind: str, groups: Iterable[Mapping[str, Any]]) -> None:
    """UnsupportedError for variants of Adam that there are no kernels of."""
    for group in groups:
        for flag in FLAGS:
            if group.get(flag):
                raise UnsupportedError(f"{kind}({flag}=True) is not supported: leave it off")


def _hyper(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> AdamSettings:
    decoupled = isinstance(optimizer, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay"))
    beta1, beta2 = (float(b) for b in group["betas"])
    return AdamSettings(float(group["lr"]), (beta1, beta2), float(group["eps"]), float(group["weight_decay"]), decoupled)
