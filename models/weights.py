"""Initial weights: the architecture's own law, drawn from a counter-based generator keyed by (seed, parameter name).

Every system, rank and device starts from the same bits, whatever it fills first and wherever the parameter lies. An
element is 16 bits of its parameter's stream looked up in a table of normal quantiles: no transcendental function is
evaluated per element, so CPU and CUDA cannot differ. The price: 65536 distinct values, none beyond 4.33 standard
deviations.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # laws are data, and known without torch
    import torch
    from torch import nn

_QUANTILES = 1 << 16
_PER_WORD = 4
SLAB = 1 << 20  # elements drawn at once: temporaries of 11 MiB, the fastest size on a CPU (cache)


@dataclass(frozen=True)
class Normal:
    """N(0, std^2). zero_row: a row left at zero (the padding token of an embedding)."""

    std: float
    zero_row: int | None = None


@dataclass(frozen=True)
class Constant:
    value: float


@dataclass(frozen=True)
class Rule:
    """Parameters whose name matches `pattern` (re.search) start as `fill`."""

    pattern: str
    fill: Normal | Constant


Law = tuple[Rule, ...]
"""How an architecture's parameters start: the first rule that matches a name decides."""


class InitialWeights:
    """Fills a parameter by name; `Settings.initial_weights` is one of these."""

    def __init__(self, law: Law, seed: int, *, slab: int = SLAB) -> None:
        assert slab % _PER_WORD == 0
        self.law, self.seed, self._slab = law, seed, slab

    def __call__(self, name: str, tensor: torch.Tensor) -> None:
        """Fill `tensor` in place: fp32, contiguous, in the parameter's own shape, on any device.

        Raises ValueError if the law has no rule for `name`.
        """
        import torch

        assert tensor.dtype == torch.float32 and tensor.is_contiguous(), f"{name}: {tensor.dtype}, {tensor.stride()}"
        fill = self.fill_of(name)
        with torch.no_grad():
            if isinstance(fill, Constant):
                tensor.fill_(fill.value)
                return
            self._draw(name, tensor.view(-1), fill.std)
            if fill.zero_row is not None:
                tensor[fill.zero_row].zero_()

    def fill_of(self, name: str) -> Normal | Constant:
        for rule in self.law:
            if re.search(rule.pattern, name):
                return rule.fill
        raise ValueError(f"no rule says how parameter {name} starts: add one to its family's law")

    def _draw(self, name: str, flat: torch.Tensor, std: float) -> None:
        import torch

        from models.counter import random_words, stream_key

        key, table = stream_key("weights", self.seed, name), normal_quantiles(std).to(flat.device)
        for start in range(0, flat.numel(), self._slab):
            part = flat[start : start + self._slab]
            words = random_words(key, start=start // _PER_WORD, count=-(-part.numel() // _PER_WORD), device=flat.device)
            lanes = words.view(torch.int16)[: part.numel()].to(torch.int64).add_(_QUANTILES // 2)
            torch.take(table, lanes, out=part)


@lru_cache(maxsize=64)
def normal_quantiles(std: float) -> torch.Tensor:
    """fp32 (65536,), on the CPU: quantiles of N(0, std^2) at the midpoints of 65536 equal slices of probability."""
    import torch

    midpoints = (torch.arange(_QUANTILES, dtype=torch.float64, device="cpu") + 0.5) / _QUANTILES
    return (torch.special.ndtri(midpoints) * std).to(torch.float32)


def law_of(module: nn.Module, *, std: float = 0.02) -> Law:
    """A law for a module of no family here: norm weights 1, biases 0, all else N(0, std^2), padding rows 0."""
    from torch import nn

    rules = []
    for prefix, owner in module.named_modules():
        for attribute, parameter in owner.named_parameters(recurse=False):
            name = f"{prefix}.{attribute}" if prefix else attribute
            fill: Normal | Constant
            if "bias" in attribute:
                fill = Constant(0.0)
            elif parameter.dim() < 2 and "norm" in type(owner).__name__.lower():
                fill = Constant(1.0)
            else:
                fill = Normal(std, zero_row=owner.padding_idx if isinstance(owner, nn.Embedding) else None)
            rules.append(Rule(f"^{re.escape(name)}$", fill))
    return tuple(rules)
