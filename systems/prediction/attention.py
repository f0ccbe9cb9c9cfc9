"""Fused attention taken as one operation, before it falls apart into products that no longer say what they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class Attend(Protocol):
    """query, key, value: (..., heads, rows, width). mask: added to the scores, or None. Returns the attended values."""

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, *, causal: bool
    ) -> torch.Tensor: ...


class FusedAttention(TorchFunctionMode):
    """Within, `attend` stands for `scaled_dot_product_attention`."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self._attend = attend

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            return self._call(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _call(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **_: Any,
    ) -> torch.Tensor:
        return self._attend(query, key, value, attn_mask, causal=is_causal)
