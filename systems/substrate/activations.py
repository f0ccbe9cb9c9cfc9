"""Recomputation: which blocks throw their activations away in forward and run again in backward.

By torch.utils.checkpoint, non-reentrant, around a block's `forward`, so that the unit's hooks stay outside of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

from torch import nn
from torch.utils.checkpoint import checkpoint

from systems.substrate.units import FoundModel


def recomputed_units(found: FoundModel, choice: Literal["none", "full"] | tuple[int, ...]) -> frozenset[int]:
    """The units of the chosen blocks. Raises ValueError for a block number the model does not have."""
    blocks = {unit.block: unit.index for unit in found.index.units if unit.block is not None}
    chosen = {"none": (), "full": tuple(blocks)}[choice] if isinstance(choice, str) else choice
    unknown = [number for number in chosen if number not in blocks]
    if unknown:
        raise ValueError(f"recompute: there is no block {unknown[0]}: the model has blocks 0 to {len(blocks) - 1}")
    return frozenset(blocks[number] for number in chosen)


def apply_recompute(found: FoundModel, choice: Literal["none", "full"] | tuple[int, ...]) -> Callable[[], None]:
    """Wrap the chosen blocks; returns what undoes it. Raises ValueError for a block number the model does not have."""
    modules = [found.modules[unit] for unit in sorted(recomputed_units(found, choice))]
    for module in modules:
        _wrap(module)

    def undo() -> None:
        for module in modules:
            module.__dict__.pop("forward", None)

    return undo


def _wrap(module: nn.Module) -> None:
    forward = module.forward

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    module.forward = recomputed
