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


PRODUCTS: Mapping[Any, Callable[..., int]] = {
    _aten.mm.default: _mm,
    _aten.bmm.default: _mm,
    _aten.addmm.default: _addmm,
    _aten.baddbmm.default: _addmm,
    _aten.mv.default: lambda a, b: 2 * math.prod(a.shape),
    _aten.dot.default: lambda a, b: 2 * math.prod(a.shape),
}
BATCHED = frozenset({_aten.bmm.default, _aten.baddbmm.default})
