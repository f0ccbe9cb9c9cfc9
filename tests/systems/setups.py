"""What is trained in the equality tests, as data: model, sharing, recomputation, micro-batches, dtype, clipping.

The reference of each setup is run once and kept. Budgets are shares of that reference's peak.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from torch import nn

from tests.systems.every import WAYS
from tests.systems.models_small import build, tokens
from tests.systems.running import RESIDENT, Run, train_as

Recompute = Literal["none", "full", "reentrant", "non-reentrant"]  # full: the engine's own; the last two: transformers'
Sharing = Literal["tied", "untied", "half-frozen"]
SHARE: Mapping[str, float] = MappingProxyType({"above": 1.0, "half": 0.55, "tight": 0.4})  # of resident's peak
STEPS = 3


@dataclass(frozen=True)
class Setup:
    model: Literal["opt", "gpt2"] = "opt"
    recompute: Recompute = "none"
    accumulate: int = 1
    sharing: Sharing = "tied"
    dtype: Literal["fp32", "bf16"] = "fp32"
    clip: float = 0.0

    def build(self) -> nn.Module:
        model = build(self.model, tied=self.sharing != "untied")
        if self.sharing == "half-frozen":
            for number, block in enumerate(blocks_of(model)):
                block.requires_grad_(number % 2 == 0)
        if self.recompute in ("reentrant", "non-reentrant"):
            checkpoint_blocks(model, reentrant=self.recompute == "reentrant")
        return model

    def run(self, system: Any, budget: int | None = None, options: BaseModel | None = None, **more: Any) -> Run:
        given: dict[str, Any] = {"dtype": self.dtype, "clip": self.clip} | more
        if self.recompute in ("none", "full"):
            given["recompute"] = self.recompute
        if budget is not None:
            given["device_memory"] = budget
        return train_as(system, self.build(), tokens(STEPS, self.accumulate), options, **given)


def checkpoint_blocks(model: Any, *, reentrant: bool) -> None:
    """transformers' own way; its name is being changed, which it warns of."""
    with warnings.catch_warnings(action="ignore"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})


def blocks_of(model: nn.Module) -> nn.ModuleList:
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList))


@cache
def reference(setup: Setup) -> Run:
    """`resident`, with all the memory it wants."""
    return setup.run(RESIDENT)


def budget_of(setup: Setup, level: str) -> int:
    peak = reference(setup).memory.device_peak_bytes
    assert peak is not None
    return int(peak * SHARE[level]) + 1


SYSTEMS = WAYS


def in_turn(names: Iterable[Any], rows: Sequence[tuple[Any, ...]], *, each: int = 1) -> list[Any]:
    """Each name, or tuple of values, with so many of the rows, those after the ones of the name before.

    With the others in the long tests. Where more than two things vary: tests.systems.pairwise.covered.
    """
    found = []
    for place, name in enumerate(names):
        for number, row in enumerate(rows):
            often = (number - place * each) % len(rows) < each
            values = (*name, *row) if isinstance(name, tuple) else (name, *row)
            found.append(pytest.param(*values, marks=() if often else pytest.mark.slow))
    return found
