"""What a model is called with, as every engine of this project's own hands it on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from systems.errors import UnsupportedError


def cast_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Floating tensors in the dtype of the weights, as FSDP2's mixed precision casts them (`cast_forward_inputs`).

    An argument without any that is in another dtype is handed on as it is: a model may put something into it.
    """

    def differs(leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dtype != dtype

    def cast(given: Any) -> Any:
        if not any(map(differs, tree_leaves(given))):
            return given
        return tree_map(lambda leaf: leaf.to(dtype) if differs(leaf) else leaf, given)

    return tuple(map(cast, args)), {name: cast(given) for name, given in kwargs.items()}


def refuse_training_nothing(trains: bool, what: str) -> None:
    if not trains:
        raise ValueError(f"{what}: no parameter of the model requires a gradient: there is nothing to train")


def refuse_wanted_gradients(inputs: object) -> None:
    """For a model that is all frozen, and so runs without gradients."""
    if torch.is_grad_enabled() and any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(inputs)):
        raise UnsupportedError(
            "no parameter of the model requires a gradient, and an engine that has nothing to train gives none to its inputs: "
            "detach them, or train something of the model"
        )
