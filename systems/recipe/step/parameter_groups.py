"""Hyperparameters of each parameter: the settings' own, or those of a torch optimizer's groups as they are now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from systems.errors import UnsupportedError
from systems.optimizers.choice import chosen
from systems.planning.layout import ModelIndex
from systems.settings import Hyperparameters, Settings

FLAGS = ("amsgrad", "maximize", "differentiable")


class Inside(NamedTuple):
    """What was read of the groups. placed: parameters by id; group_of: by number, the group; hyper: of each group."""

    placed: list[list[int]]
    group_of: list[int]
    hyper: list[Hyperparameters]


class ParameterGroups:
    """parameters: the model's, in index order, as the optimizer knows them. What was read last is in force until `refresh`.

    inside: that. Raises UnsupportedError for an optimizer, or groups of one, that the engine cannot follow; groups may change
    at any time.
    """

    def __init__(self, settings: Settings, index: ModelIndex, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.chosen = chosen(settings)
        self._own, self._index = self.chosen.own, index
        self._optimizer = settings.optimizer if isinstance(settings.optimizer, torch.optim.Optimizer) else None
        self._parameters = list(parameters)
        self._number = {id(p): i for i, p in enumerate(parameters)}
        if self._optimizer is not None:
            # Schedulers warn unless optimizer.step ran before them; here engine.step is that step.
            self._optimizer._opt_called = True  # type: ignore[attr-defined]
        self.inside = Inside([], [0] * len(parameters), [])
        self.refresh()

    def refresh(self) -> None:
        self.inside = self._read()

    def changed(self) -> str | None:
        """What is no longer as it was read, for a message; None if nothing is."""
        before, now = self.inside, self._read()
        if before.placed != now.placed:
            return "the parameters of the optimizer's groups"
        for number, (old, new) in enumerate(zip(before.hyper, now.hyper, strict=True)):
            for name in vars(old):
                if getattr(old, name) != getattr(new, name):
                    where = "" if self._optimizer is None else f" of parameter group {number}"
                    return f"{name}{where} ({getattr(old, name)!r} to {getattr(new, name)!r})"
        return None

    def described(self) -> list[dict[str, Any]]:
        """Of each group as it is now: its hyperparameters, and the numbers of its parameters. To be compared over ranks."""
        inside = self._read()
        numbers: list[list[int]] = [[] for _ in inside.hyper]
        for parameter, group in enumerate(inside.group_of):
            numbers[group].append(parameter)
        return [vars(hyper) | {"parameters": mine} for hyper, mine in zip(inside.hyper, numbers, strict=True)]

    def set_lr(self, lr: float) -> None:
        if self._optimizer is None:
            assert self._own is not None
            self._own = replace(self._own, lr=lr)
            return
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    def _read(self) -> Inside:
        if self._optimizer is None:
            assert self._own is not None
            return Inside([], self.inside.group_of, [self._own])
        groups = self._optimizer.param_groups
        check_flags(type(self._optimizer).__name__, groups)
        placed = [[id(p) for p in group["params"]] for group in groups]
        group_of = self.inside.group_of if placed == self.inside.placed else self._locate(groups)
        hyper = [self.chosen.rule.read(self._optimizer, group) for group in groups]
        for each in hyper:
            self.chosen.check(each)
        return Inside(placed, group_of, hyper)

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
    """UnsupportedError for variants of an optimizer that no rule has."""
    for group in groups:
        for flag in FLAGS:
            if group.get(flag):
                raise UnsupportedError(f"{kind}({flag}=True) is not supported: leave it off")
