"""What a token uses of a model with experts: parameters, and which of transformers' mixtures are here known by what they hold.

This project's are `moe.Mixture`. transformers' have a number of experts, `num_experts`, and either one tensor for all of them,
an expert after the other, or a module an expert; how many a token goes to is in the model's config.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from models.moe import Mixture

CHOICES = {"switch_transformers": 1}  # of types whose configs do not say: what their papers do


@dataclass(frozen=True)
class ParameterCount:
    """A tied parameter counted once, experts of other ranks included.

    activated: those that a token passes, if it is sent to as many experts as there are for one; None: the model has none.
    """

    total: int
    activated: int | None = None


def count_parameters(model: nn.Module) -> ParameterCount:
    total = sum(parameter.numel() for parameter in model.parameters())
    idle, found = 0, False
    for mixture, choices, experts, held in _mixtures(model):
        found = True
        if isinstance(mixture, Mixture):
            elsewhere = held // len(mixture.experts) * (experts - len(mixture.experts))
            total, held = total + elsewhere, held + elsewhere
        idle += held // experts * (experts - min(choices, experts))
    return ParameterCount(total, total - idle if found else None)


def stand_for_experts(model: nn.Module) -> None:
    """Where a module an expert runs on the tokens that chose it, which nobody knows on the meta device: one runs on all.

    So work is counted as it is, if each token has a place with one expert. For who only counts.
    """
    for mixture, choices, _, _ in _mixtures(model):
        if isinstance(mixture, nn.ModuleDict):
            experts = list(mixture.values())[:choices]
            mixture.forward = _on_all(experts)


def _on_all(experts: list[nn.Module]) -> Any:
    def forward(hidden: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.stack([expert(hidden) for expert in experts]).sum(0)

    return forward


def _mixtures(model: nn.Module) -> Iterator[tuple[nn.Module, int, int, int]]:
    """Each with the experts of a token, those of the mixture, and the parameters here of all of them."""
    config = getattr(model, "config", None)
    choices = getattr(config, "num_experts_per_tok", None) or CHOICES.get(getattr(config, "model_type", ""), 0)
    for module in model.modules():
        experts = getattr(module, "num_experts", None)
        if isinstance(module, Mixture):
            yield module, module.choices, module.expert_count, _size(module.experts)
        elif not choices:
            continue
        elif type(experts) is int and isinstance(module, nn.ModuleDict) and len(module) == experts:
            yield module, choices, experts, _size(module)
        elif type(experts) is int and any(p.dim() == 3 and len(p) == experts for p in module.parameters(recurse=False)):
            mine = [p for p in module.parameters(recurse=False) if len(p) == experts]
            yield module, choices, experts, sum(p.numel() for p in mine)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
