"""SGD as torch.optim.SGD: momentum, Nesterov's, dampening, and decay that is added to the gradient.

4 bytes a parameter beside the master weight with momentum, none without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from systems.optimizers.elementwise import ElementwiseRule
from systems.settings import Hyperparameters


@dataclass(frozen=True)
class SgdSettings(Hyperparameters):
    """As torch.optim names them."""

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        if self.nesterov and (self.momentum <= 0 or self.dampening):
            raise ValueError("nesterov needs momentum above 0 and no dampening")


class Sgd(ElementwiseRule):
    """g += decay w; b = momentum b + (1 - dampening) g, at the first update b = g; w -= lr b, with nesterov w -= lr (g +
    momentum b), without momentum w -= lr g.
    """

    name = "sgd"
    hyperparameters = SgdSettings
    taken = (torch.optim.SGD,)

    def moments(self, hyper: SgdSettings) -> tuple[str, ...]:
        return ("momentum_buffer",) if hyper.momentum else ()

    def read(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> SgdSettings:
        lr, momentum, dampening, decay = (float(group[name]) for name in ("lr", "momentum", "dampening", "weight_decay"))
        return SgdSettings(lr, momentum, dampening, decay, bool(group["nesterov"]))

    def coefficients(self, hyper: SgdSettings, step: int) -> tuple[float, ...]:
        share = 1.0 if step == 1 else 1.0 - hyper.dampening
        return hyper.weight_decay, hyper.momentum, share, hyper.momentum if hyper.nesterov else 0.0, hyper.lr

    def update(
        self, weight: torch.Tensor, moments: Sequence[torch.Tensor], gradient: torch.Tensor, coefficients: tuple[float, ...]
    ) -> None:
        decay, momentum, share, ahead, lr = coefficients
        if decay:
            gradient.add_(weight * decay)
        direction = gradient
        for buffer in moments:
            buffer.mul_(momentum).add_(gradient * share)
            direction = gradient.add_(buffer * ahead) if ahead else buffer
        weight.sub_(direction * lr)


RULE = Sgd()
