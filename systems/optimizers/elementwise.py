"""An optimizer as torch operations on pieces of flat fp32 tensors: the same bits in every strategy, on every device.

Note [Bits that no cut changes]
    A strategy cuts a parameter as it likes, and an element may come to lie in the body of a vectorised loop or in its rest,
    on the host or on a GPU. An element's result is the same in all of them if each operation rounds once: mul, add, sub, div,
    sqrt, neg, abs, sign, maximum, with a tensor or a number. `add(alpha=...)`, addcmul, addcdiv, lerp and pow may or may not
    be fused, by place and by device, so a rule uses none of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from systems.adam.kernel import AdamKernel
from systems.optimizers.rule import OptimizerRule

# Elements at a time: fewer, and a step is spent calling operations; more, and temporaries grow, some four of fp32.
PIECE = {"cpu": 1 << 20, "cuda": 1 << 22}


class UpdateRange(NamedTuple):
    """Elements [offset, offset + numel) of a task's tensors, and their numbers: see ElementwiseRule.coefficients."""

    offset: int
    numel: int
    coefficients: tuple[float, ...]


class UpdateTask(NamedTuple):
    """As AdamTask, of any number of states: the master first. into: where the new ones go, None for in place."""

    states: tuple[torch.Tensor, ...]
    gradient: torch.Tensor
    out: torch.Tensor | None
    ranges: Sequence[UpdateRange]
    into: tuple[torch.Tensor, ...] | None = None


class ElementwiseRule(OptimizerRule):
    """What such a rule adds to OptimizerRule is the arithmetic, see Note [Bits that no cut changes]."""

    @abstractmethod
    def coefficients(self, hyper: Any, step: int) -> tuple[float, ...]:
        """The numbers that `update` takes, worked out in double precision; step: the update's number, from 1."""

    @abstractmethod
    def update(
        self, weight: torch.Tensor, moments: Sequence[torch.Tensor], gradient: torch.Tensor, coefficients: tuple[float, ...]
    ) -> None:
        """One update, in place. weight: fp32 master. gradient: fp32, scaled and clipped, to be overwritten at will."""

    def range(self, hyper: Any, offset: int, numel: int, step: int) -> UpdateRange:
        return UpdateRange(offset, numel, self.coefficients(hyper, step))

    def kernel(self, base: AdamKernel) -> AdamKernel:
        return ElementwiseKernel(self, base)


class ElementwiseKernel(AdamKernel):
    """A rule's updates; sums, conversions and copies are those of the kernel that Adam has there."""

    name = "torch"

    def __init__(self, rule: ElementwiseRule, base: AdamKernel) -> None:
        self._rule, self._base = rule, base

    @staticmethod
    def task(*given: Any) -> UpdateTask:
        """given: the states, then gradient, out and ranges."""
        *states, gradient, out, ranges = given
        return UpdateTask(tuple(states), gradient, out, ranges)

    def update(
        self,
        *states: torch.Tensor,
        gradient: torch.Tensor,
        out: torch.Tensor | None,
        ranges: Sequence[Any],
        factor: float,
        into: tuple[torch.Tensor, ...] | None = None,
    ) -> None:
        self.update_all([UpdateTask(states, gradient, out, ranges, into)], factor=factor)

    def update_all(self, tasks: Sequence[Any], *, factor: float) -> None:
        for task in tasks:
            assert len({each.numel() for each in (*task.states, task.gradient, *(task.into or ()))}) == 1, "they share offsets"
            piece = PIECE[task.gradient.device.type]
            for each in task.ranges:
                end = each.offset + each.numel
                for begin in range(each.offset, end, piece):
                    self._piece(task, slice(begin, min(begin + piece, end)), each.coefficients, factor)

    def _piece(self, task: UpdateTask, where: slice, coefficients: tuple[float, ...], factor: float) -> None:
        old = [state[where] for state in task.states]
        new = old if task.into is None else [to[where].copy_(state) for to, state in zip(task.into, old, strict=True)]
        weight, *moments = new
        self._rule.update(weight, moments, task.gradient[where].float() * factor, coefficients)
        if task.out is not None:  # which may be the gradient's memory
            self.cast(weight, task.out[where])

    def sum_squares_all(self, tensors: Sequence[torch.Tensor]) -> list[float] | torch.Tensor:
        return self._base.sum_squares_all(tensors)

    def accumulate(self, accumulator: torch.Tensor, gradient: torch.Tensor) -> None:
        self._base.accumulate(accumulator, gradient)

    def cast(self, master: torch.Tensor, out: torch.Tensor) -> None:
        self._base.cast(master, out)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self._base.copy(destination, source)
