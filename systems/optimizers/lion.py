"""Lion (Chen et al., Symbolic Discovery of Optimization Algorithms, 2023, algorithm 2): 4 bytes a parameter beside the master.

torch has none, so `Lion` is here: it holds parameter groups for an engine, and steps by itself where there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from systems.optimizers.elementwise import ElementwiseRule
from systems.settings import Hyperparameters


@dataclass(frozen=True)
class LionSettings(Hyperparameters):
    """As in the paper: lr (eta), betas, weight_decay (lambda)."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are {self.betas}: give two of at least 0 and below 1")


class Lion(torch.optim.Optimizer):
    """params: parameters or groups of them. Its state of a parameter: exp_avg, the paper's m."""

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        LionSettings(lr, betas, weight_decay)
        if not (lr >= 0 and weight_decay >= 0):
            raise ValueError(f"lr is {lr}, weight_decay {weight_decay}: give none below 0")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient. Returns what `closure` does, which is called first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            coefficients = RULE.coefficients(RULE.read(self, group), 1)
            for p in (p for p in group["params"] if p.grad is not None):
                moment = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                RULE.update(p, [moment], p.grad.clone(), coefficients)
        return loss


class LionRule(ElementwiseRule):
    """w -= lr (sign(beta1 m + (1 - beta1) g) + decay w); m = beta2 m + (1 - beta2) g."""

    name = "lion"
    hyperparameters = LionSettings
    taken = (Lion,)

    def moments(self, hyper: LionSettings) -> tuple[str, ...]:
        return ("exp_avg",)

    def read(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> LionSettings:
        beta1, beta2 = (float(b) for b in group["betas"])
        return LionSettings(float(group["lr"]), (beta1, beta2), float(group["weight_decay"]))

    def coefficients(self, hyper: LionSettings, step: int) -> tuple[float, ...]:
        beta1, beta2 = hyper.betas
        return hyper.lr, beta1, 1.0 - beta1, beta2, 1.0 - beta2, 1.0 - hyper.lr * hyper.weight_decay

    def update(
        self, weight: torch.Tensor, moments: Sequence[torch.Tensor], gradient: torch.Tensor, coefficients: tuple[float, ...]
    ) -> None:
        lr, b1, w1, b2, w2, kept = coefficients
        (moment,) = moments
        direction = (moment * b1).add_(gradient * w1).sign_()
        weight.mul_(kept).sub_(direction.mul_(lr))
        moment.mul_(b2).add_(gradient.mul_(w2))


RULE = LionRule()
