"""Operations that multiply matrices, and the floating-point operations that each does: 2 m n k."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

_aten = torch.ops.aten


def _mm(a: torch.Tensor, b: torch.Tensor, *_: Any) -> int:
    return 2 * math.prod(a.shape) * b.shape[-1]


def _addmm(_: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *__: Any) -> int:
    return _mm(a, b)


def _grouped(a: torch.Tensor, b: torch.Tensor, *_: Any) -> int:
    """Rows that lie group by group with a matrix for each (forward), or with rows that do too (a weight's gradient)."""
    rows = math.prod(a.shape[1:]) if a.dim() > b.dim() else math.prod(a.shape)
    return 2 * rows * b.shape[-1]


def _grouped_empty(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    rows = [a.shape[-2], b.shape[-1]]
    groups = [len(offs)] if a.dim() == b.dim() == 2 and offs is not None else []
    both = [a.shape[0]] if a.dim() == b.dim() == 3 else []
    return a.new_empty([*groups, *both, *rows], dtype=out_dtype or a.dtype)


PRODUCTS: Mapping[Any, Callable[..., int]] = {
    _aten.mm.default: _mm,
    _aten.bmm.default: _mm,
    _aten.addmm.default: _addmm,
    _aten.baddbmm.default: _addmm,
    _aten.mv.default: lambda a, b: 2 * math.prod(a.shape),
    _aten.dot.default: lambda a, b: 2 * math.prod(a.shape),
    _aten._grouped_mm.default: _grouped,
}
STAND_INS: Mapping[Any, Callable[..., torch.Tensor]] = {_aten._grouped_mm.default: _grouped_empty}
"""On the meta device, where torch has the operation for one dtype alone."""
BATCHED = frozenset({_aten.bmm.default, _aten.baddbmm.default})
