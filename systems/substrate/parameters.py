"""What a user's code may no longer do to parameters once an engine trains them, and how it is told.

Gradients belong to the engine from `backward` to `step`. A parameter answers None to `.grad`, and code that clips or steps
by itself would take that for "no gradient" and go on in silence. So while there are gradients, asking is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from systems.errors import UnsupportedError

Pending = Callable[[bool], bool]
_WITH_VALUES: WeakSet[nn.Module] = WeakSet()
_GRAD: Any = torch._C.TensorBase.grad  # the descriptor behind Tensor.grad


class ManagedParameter(nn.Parameter):
    """A parameter whose gradient is with the engine. The class of a live parameter is exchanged, so its identity stays."""

    _pending: Pending

    @property
    def grad(self) -> torch.Tensor | None:
        gradient: torch.Tensor | None = _GRAD.__get__(self)
        if "_pending" in self.__dict__ and self._pending(gradient is not None):
            raise RuntimeError(
                "gradients are with the engine until engine.step(), not in parameter.grad: clip with the argument `clip` of "
                "initialize, read norms in engine.outcomes, and call engine.step() instead of optimizer.step()"
            )
        return gradient

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _GRAD.__set__(self, value)


COPY = (
    "the engine keeps this model's weights, and what the model shows of them is not all there: engine.state_dict() and "
    "engine.save_pretrained(folder) have them while the engine is open, use these instead of "
)


class MovingParameter(ManagedParameter):
    """One whose value comes and goes: a copy made of the model would hold NaN, and nobody would know before it is loaded."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise UnsupportedError(f"{COPY}copying the model")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(f"{COPY}saving the model")


def refuse_state_dict(model: nn.Module) -> None:
    """For good: when its engine is closed, a model has no weights left."""

    def refuse(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if module in _WITH_VALUES:
            return
        raise UnsupportedError(f"{COPY}the model's state_dict()")

    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.register_state_dict_pre_hook(refuse)


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


class ParameterWatch:
    """Refuses reads of `.grad` while `pending`, and notices edits that went past the engine. `end` undoes it all.

    pending: asked with whether there is something in `.grad`.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        pending: Pending,
        kind: type[ManagedParameter] = ManagedParameter,
    ) -> None:
        self._names, self._parameters = names, parameters
        self._classes: list[Any] = [type(p) for p in parameters]
        for parameter in parameters:
            if type(parameter) is nn.Parameter:
                parameter.__class__ = kind
                parameter._pending = pending  # type: ignore[attr-defined]
        self._trainable = [p.requires_grad for p in parameters]
        self._versions = [p._version for p in parameters]

    def check(self) -> None:
        """UnsupportedError for a parameter edited in place or unfrozen since initialize; asks the device nothing."""
        for number, parameter in enumerate(self._parameters):
            if parameter._version != self._versions[number]:
                raise UnsupportedError(
                    f"parameter {self._names[number]} was edited in place, which the engine does not see: edit it inside "
                    "engine.summon(write=True)"
                )
            if parameter.requires_grad and not self._trainable[number]:
                raise UnsupportedError(
                    f"parameter {self._names[number]} was frozen when the engine was made and has no optimizer state: set "
                    "requires_grad before initialize"
                )

    def end(self) -> None:
        for parameter, kind in zip(self._parameters, self._classes, strict=True):
            if isinstance(parameter, ManagedParameter):
                parameter.__class__ = kind
                parameter.__dict__.pop("_pending", None)
