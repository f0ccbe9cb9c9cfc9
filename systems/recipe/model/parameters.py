"""What a live parameter answers while an engine trains it, and the engine's own way past that.

Gradients belong to the engine from `backward` to `step`. A parameter answers None to `.grad`, and code that clips or steps
by itself would take that for "no gradient" and go on in silence. So while there are gradients, asking is refused.

Values belong to it for as long as it is open. `.data` gives a tensor whose edits are counted, as they are of an edit under
no_grad, and is not set to other values: see parameter_watch.py.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

import torch
from torch import nn

from systems.errors import HiddenUseError, UnsupportedError
from systems.state_dicts import COPY, GROUPS

_GRAD: Any = torch._C.TensorBase.grad  # the descriptors behind Tensor.grad and Tensor.data

_DATA: Any = torch._C.TensorBase.data

GRADIENTS = (
    "gradients are with the engine until engine.step(), not in parameter.grad: clip with the argument `clip` of initialize, "
    "read norms in engine.outcomes, and call engine.step() instead of optimizer.step()"
)


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

    def refuse_another(self) -> None:
        """`nn.Parameter(parameter)`."""


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
            raise RuntimeError(GRADIENTS)
        return gradient

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        """A hook that runs as the gradient comes may put another in its place. None where there is none changes nothing."""
        watched, there = self.__dict__.get("_watched"), has_gradient(self)
        if watched is not None and (watched.gradients_pending(there) or (value is not None and not there)):
            raise RuntimeError(f"{GRADIENTS}; what is to be done to a gradient goes into parameter.register_hook")
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

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

    def detach(self) -> torch.Tensor:
        """`nn.Parameter(parameter)` asks for it, and would say something of its own about the class of this one."""
        watched = self.__dict__.get("_watched")
        if watched is not None and sys._getframe(1).f_code is nn.Parameter.__new__.__code__:
            watched.refuse_another()
        return super().detach()

    def set_(self, source: Any = None, *rest: Any, **named: Any) -> Any:
        watched = self.__dict__.get("_watched")
        if watched is None:
            return super().set_(source, *rest, **named)
        watched.place(self, None if rest or named else source)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_watched"}


class MovingParameter(ManagedParameter):
    """One whose value comes and goes: a copy made of the model would hold NaN, and nobody would know before it is loaded."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise UnsupportedError(f"{COPY}copying the model{GROUPS}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(f"{COPY}saving the model{GROUPS}")

    def share_memory_(self) -> Any:
        raise UnsupportedError(f"{COPY}sharing their memory")


def take_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """The engine's own way to a gradient: what autograd left there, which is then gone from there."""
    gradient: torch.Tensor | None = _GRAD.__get__(parameter)
    _GRAD.__set__(parameter, None)
    return gradient


def refuse_sparse(parameter: torch.Tensor, name: str) -> None:
    """HiddenUseError for a gradient that only says where it is not zero."""
    gradient: torch.Tensor | None = _GRAD.__get__(parameter)
    if gradient is not None and gradient.layout is not torch.strided:
        raise HiddenUseError(
            f"parameter {name} has a sparse gradient, which cannot be kept: leave off sparse=True of F.embedding, "
            "sparse_grad=True of torch.gather and the like where it is read"
        )


def has_gradient(parameter: torch.Tensor) -> bool:
    return _GRAD.__get__(parameter) is not None


def data_of(parameter: torch.Tensor) -> torch.Tensor:
    """The engine's own way to the values: edits through it are the engine's, and not counted."""
    values: torch.Tensor = _DATA.__get__(parameter)
    return values


def set_data(parameter: torch.Tensor, values: torch.Tensor) -> None:
    _DATA.__set__(parameter, values)
