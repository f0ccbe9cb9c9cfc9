"""torch's own optimizer for the baselines that are torch's, and the check of the arguments a user's file gives them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from systems.baselines.external.package import Config
from systems.errors import UnsupportedError
from systems.messages import unknown_name
from systems.system import AdamSettings

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


def check_arguments(config: Config, takes: Mapping[str, Callable[..., Any]], path: str | None) -> None:
    """UnsupportedError for a section or an argument that nothing takes, or that is not a file's to give."""
    for section, arguments in config.items():
        if section not in takes:
            raise UnsupportedError(f"{path}: {unknown_name('section', section, takes)}")
        if not isinstance(arguments, Mapping):
            raise UnsupportedError(f"{path}: {section} is {arguments!r}, an object is needed")
        allowed = set(inspect.signature(takes[section]).parameters) - _DECIDED - {"self"}
        for name in arguments:
            if name not in allowed:
                raise UnsupportedError(f"{path}: {unknown_name(f'argument of {section}', name, allowed)}")
