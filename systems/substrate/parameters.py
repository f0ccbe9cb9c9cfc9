"""What a live parameter answers while an engine trains it, and the engine's own way past that.

Gradients belong to the engine from `backward` to `step`. A parameter answers None to `.grad`, and code that clips or steps
by itself would take that for "no gradient" and go on in silence. So while there are gradients, asking is refused.

Values belong to it for as long as it is open. `.data` gives a tensor whose edits are counted, as they are of an edit under
no_grad, and is not set to other values: see parameter_watch.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import nn

from systems.errors import UnsupportedError

_WITH_VALUES: WeakSet[nn.Module] = WeakSet()
_GRAD: Any = torch._C.TensorBase.grad  # the descriptors behind Tensor.grad and Tensor.data
_DATA: Any = torch._C.TensorBase.data


class Watched(Protocol):
    """What has an eye on one parameter."""

    def gradients_pending(self, there: bool) -> bool:
        """Asking for the gradient would mislead. there: something is in `.grad`."""

    def hides_gradient(self) -> bool:
        """The module that asks is being converted, and leaves the gradient alone if there is none."""

    def exchange(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """`parameter.data = value`."""

    def place(self, parameter: nn.Parameter, source: object) -> None:
        """`parameter.set_(source)`."""


class ManagedParameter(nn.Parameter):
    """A parameter whose gradient and values are with the engine. The class of a live one is exchanged: its identity stays.

    A copy of it has no `_watched` and is free.
    """

    _watched: Watched

    @property
    def grad(self) -> torch.Tensor | None:
        gradient: torch.Tensor | None = _GRAD.__get__(self)
        watched = self.__dict__.get("_watched")
        if watched is None:
            return gradient
        if watched.hides_gradient():
            return None
        if watched.gradients_pending(gradient is not None):
            raise RuntimeError(
                "gradients are with the engine until engine.step(), not in parameter.grad: clip with the argument `clip` of "
                "initialize, read norms in engine.outcomes, and call engine.step() instead of optimizer.step()"
            )
        return gradient

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _GRAD.__set__(self, value)

    @property
    def data(self) -> torch.Tensor:
        """As Tensor.data, but with the parameter's own version counter."""
        return self.detach() if "_watched" in self.__dict__ else data_of(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        watched = self.__dict__.get("_watched")
        if watched is None:
            set_data(self, value)
        else:
            watched.exchange(self, value)

    def set_(self, source: Any = None, *rest: Any, **named: Any) -> Any:
        watched = self.__dict__.get("_watched")
        if watched is None:
            return super().set_(source, *rest, **named)
        watched.place(self, None if rest or named else source)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_watched"}


COPY = (
    "the engine keeps this model's weights, and what the model shows of them is not all there: engine.state_dict() and "
    "engine.save_pretrained(folder) have them while the engine is open, use these instead of "
)
GROUPS = " (of an optimizer's groups, take all but 'params')"


class MovingParameter(ManagedParameter):
    """One whose value comes and goes: a copy made of the model would hold NaN, and nobody would know before it is loaded."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise UnsupportedError(f"{COPY}copying the model{GROUPS}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(f"{COPY}saving the model{GROUPS}")

    def share_memory_(self) -> Any:
        raise UnsupportedError(f"{COPY}sharing their memory")


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


def take_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """The engine's own way to a gradient: what autograd left there, which is then gone from there."""
    gradient: torch.Tensor | None = _GRAD.__get__(parameter)
    _GRAD.__set__(parameter, None)
    return gradient


def has_gradient(parameter: torch.Tensor) -> bool:
    return _GRAD.__get__(parameter) is not None


def data_of(parameter: torch.Tensor) -> torch.Tensor:
    """The engine's own way to the values: edits through it are the engine's, and not counted."""
    values: torch.Tensor = _DATA.__get__(parameter)
    return values


def set_data(parameter: torch.Tensor, values: torch.Tensor) -> None:
    _DATA.__set__(parameter, values)
