"""AdamW and Adam, by kernels of their own: systems/adam."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from systems.adam.kernel import AdamKernel, AdamRange
from systems.optimizers.rule import OptimizerRule
from systems.settings import AdamSettings


class AdamW(OptimizerRule):
    """Decoupled decay, or Adam's, which is added to the gradient: AdamSettings.decoupled."""

    name = "adamw"
    hyperparameters = AdamSettings
    taken = (torch.optim.AdamW, torch.optim.Adam)
    counted = True

    def moments(self, hyper: AdamSettings) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def read(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> AdamSettings:
        decoupled = isinstance(optimizer, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay"))
        beta1, beta2 = (float(b) for b in group["betas"])
        return AdamSettings(float(group["lr"]), (beta1, beta2), float(group["eps"]), float(group["weight_decay"]), decoupled)

    def range(self, hyper: AdamSettings, offset: int, numel: int, step: int) -> AdamRange:
        return AdamRange(
            offset=offset,
            numel=numel,
            lr=hyper.lr,
            beta1=hyper.betas[0],
            beta2=hyper.betas[1],
            eps=hyper.eps,
            weight_decay=hyper.weight_decay,
            decoupled=hyper.decoupled,
            step=step,
        )

    def kernel(self, base: AdamKernel) -> AdamKernel:
        return base


RULE = AdamW()
