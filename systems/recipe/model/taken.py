"""Which models engines have: their values lie where an engine keeps them, and no second one may take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

_TAKEN: WeakSet[nn.Module] = WeakSet()
_TAKEN_PARAMETERS: Any = WeakIdKeyDictionary()  # a Parameter may be in several models


def is_taken(what: nn.Module | nn.Parameter) -> bool:
    return what in (_TAKEN if isinstance(what, nn.Module) else _TAKEN_PARAMETERS)


def take(model: nn.Module) -> Callable[[], None]:
    """An engine has the model from now on: its values lie where the engine keeps them. Returns what says that it has them
    again, whatever became of its modules since.
    """
    modules, parameters = WeakSet(module for module in model.modules() if _has_values(module)), WeakIdKeyDictionary()
    parameters.update((parameter, None) for parameter in model.parameters())
    _TAKEN.update(modules)
    _TAKEN_PARAMETERS.update(parameters)

    def release() -> None:
        _TAKEN.difference_update(modules)
        for parameter in parameters:
            _TAKEN_PARAMETERS.pop(parameter, None)
        parameters.clear()  # nobody has a weak reference to them, so that torch.utils.swap_tensors takes them

    return release


def _has_values(module: nn.Module) -> bool:
    """Not so an activation, which a library may share among all its models."""
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())
