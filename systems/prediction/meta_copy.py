"""A model without its weights: what an observer runs, which needs shapes and no values."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


def on_meta(module: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers are meta tensors, shared where the original's are; no weight is copied."""
    memo: dict[int, Any] = {}
    for p in module.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    for b in module.buffers():
        memo[id(b)] = torch.empty_like(b, device="meta")
    return copy.deepcopy(module, memo)
