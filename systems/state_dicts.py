"""A model's state dict: its buffers, and how it is refused while an engine has the weights, but to the engine's own export."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from weakref import WeakSet

import torch
from torch import nn

from systems.errors import UnsupportedError

_WITH_VALUES: WeakSet[nn.Module] = WeakSet()

COPY = (
    "the engine keeps this model's weights, and what the model shows of them is not all there: engine.state_dict() and "
    "engine.save_pretrained(folder) have them while the engine is open, use these instead of "
)

GROUPS = " (of an optimizer's groups, take all but 'params')"


def buffers_by_every_name(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Persistent ones, in the order of a state dict; one that has several names comes under each."""
    for path, owner in module.named_modules(remove_duplicate=False):
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def refuse_state_dict(model: nn.Module, why: str = f"{COPY}the model's state_dict()") -> Callable[[], None]:
    """Returns what undoes it."""

    def refuse(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if module in _WITH_VALUES:
            return
        raise UnsupportedError(why)

    owners = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
    handles = [module.register_state_dict_pre_hook(refuse) for module in owners]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def refuse_loading(modules: Iterable[nn.Module], refuse: Callable[..., None]) -> Callable[[], None]:
    """Of those with parameters somewhere below, so that a model says it before any part of it has changed. Returns what undoes
    it. refuse: called with what torch's register_load_state_dict_pre_hook says, it raises.
    """
    owners = [module for module in modules if any(True for _ in module.parameters())]
    handles = [module.register_load_state_dict_pre_hook(refuse) for module in owners]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


@contextmanager
def with_values(model: nn.Module) -> Iterator[None]:
    """While parameters that have their values stand in for those of the model, it may be asked for its state dict."""
    _WITH_VALUES.update(model.modules())
    try:
        yield
    finally:
        _WITH_VALUES.difference_update(model.modules())
