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


def apply_recompute(found: FoundModel, choice: Literal["none", "full"] | tuple[int, ...]) -> Callable[[], None]:
    """Wrap the chosen blocks; returns what undoes it. Raises ValueError for a block number the model does not have."""
    blocks = {unit.block: found.modules[unit.index] for unit in found.index.units if unit.block is not None}
    if choice == "none":
        chosen: tuple[int, ...] = ()
    elif choice == "full":
        chosen = tuple(blocks)
    else:
        chosen = tuple(choice)
    unknown = [number for number in chosen if number not in blocks]
    if unknown:
        raise ValueError(f"recompute: there is no block {unknown[0]}: the model has blocks 0 to {len(blocks) - 1}")
    for number in chosen:
        _wrap(blocks[number])

    def undo() -> None:
        for number in chosen:
            blocks[number].__dict__.pop("forward", None)

    return undo


def _wrap(module: nn.Module) -> None:
    forward = module.forward

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    module.forward = recomputed
