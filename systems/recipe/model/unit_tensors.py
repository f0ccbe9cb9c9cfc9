"""Which tensors a unit was given and which it made, found in whatever holds them: containers, objects, the unit itself.

What only running code would show (generators, functions) is not looked into, and nothing is called.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, KeysView, Mapping, Sequence, ValuesView
from functools import cache
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from systems.errors import HiddenUseError

MOST_VALUES = 100_000  # that are looked at for one call of a unit

_Children = Callable[[Any], "list[Any]"]
_LISTS = (list, tuple, set, frozenset, deque, KeysView, ValuesView)
_CLOSED = (nn.Module, type, FunctionType, MethodType, BuiltinFunctionType, ModuleType)
_PLAIN = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, range, slice})
_INTERNAL = frozenset(vars(nn.Module())) | {"forward"}


SEEN = "return it in tensors, lists, dicts or plain objects, or keep it on the module itself"


class TooManyValuesError(Exception):
    """Nobody could say any more where its tensors are."""


def too_many(module: str, does: str) -> HiddenUseError:
    """does: where the values are."""
    return HiddenUseError(
        f"{module} {does} an object with so much in it that what it made cannot be found: {SEEN}, without what leads elsewhere"
    )


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors inside nested containers and plain objects, in order. Raises TooManyValuesError beyond MOST_VALUES."""
    waiting, known, left = [value], {}, MOST_VALUES
    while waiting:
        value = waiting.pop()
        kind: type = type(value)
        if kind in _PLAIN:
            continue
        if isinstance(value, torch.Tensor):
            yield value
            continue
        read = _reader(kind)
        if read is None or id(value) in known:
            continue
        known[id(value)] = value
        children = read(value)
        left -= len(children)
        if left < 0:
            raise TooManyValuesError
        children.reverse()
        waiting += children


@cache
def _reader(kind: type) -> _Children | None:
    """What lists the values in an object of this class; None if nothing is looked for in it."""
    if issubclass(kind, Mapping):
        return lambda value: list(value.values())
    if issubclass(kind, _LISTS):
        return list
    if issubclass(kind, _CLOSED):
        return None
    if kind.__module__.partition(".")[0] in sys.stdlib_module_names and kind is not SimpleNamespace:
        return None  # locks, loggers, threads: they lead anywhere
    slots = [m for c in kind.__mro__ for m in vars(c).values() if isinstance(m, MemberDescriptorType)]
    if not slots and not kind.__dictoffset__:
        return None

    def read(value: Any) -> list[Any]:
        return [*getattr(value, "__dict__", {}).values(), *(_held(slot, value) for slot in slots)]

    return read


def _held(slot: MemberDescriptorType, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:
        return None


class SeenTensor:
    """A tensor as it is now: `still` is False once it was edited in place, for then its gradient is another."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version = weakref.ref(tensor), version_of(tensor)

    def still(self, tensor: torch.Tensor) -> bool:
        return self.tensor() is tensor and self.version == version_of(tensor)


def version_of(tensor: torch.Tensor) -> int:
    """Of one made in inference mode torch keeps none, and no gradient comes to it either."""
    return 0 if tensor.is_inference() else tensor._version


def wanted(value: Any) -> list[torch.Tensor]:
    """Tensors in it that want a gradient, parameters left out."""
    return [t for t in tensors_in(value) if t.requires_grad and not isinstance(t, nn.Parameter)]


def first_of(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The input whose gradient ends a unit's backward: one that something computed, if there is one."""
    return next((t for t in inputs if not t.is_leaf), inputs[0])


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """What it is a view of, for autograd."""
    return tensor._base if tensor._is_view() else None


class Kept:
    """What a unit's forward leaves on the unit: a block may keep a loss of its own as an attribute, at any call."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._sizes: list[tuple[dict[str, Any], int]] = []
        self._places: list[tuple[dict[str, Any], str]] = []
        self._known: dict[int, SeenTensor] = {}  # told at the last call
        self._look()

    def _look(self) -> None:
        held = [vars(part) for part in self._module.modules()]
        self._sizes = [(each, len(each)) for each in held]
        self._places = [(each, name) for each in held for name in each if name not in _INTERNAL]

    def fresh(self) -> list[torch.Tensor]:
        """Tensors that want a gradient, in attributes and in lists and dicts that are attributes; not those told before."""
        for held, size in self._sizes:
            if len(held) != size:
                self._look()
                break
        found: list[torch.Tensor] = []
        for held, name in self._places:
            value = held.get(name)
            kind: type = type(value)
            if _may_hold(kind):
                found += wanted(value)
        if not found and not self._known:
            return found
        before, self._known = self._known, {id(t): SeenTensor(t) for t in found}
        return [t for t in found if id(t) not in before or not before[id(t)].still(t)]


@cache
def _may_hold(kind: type) -> bool:
    return issubclass(kind, (torch.Tensor, list, tuple, dict))
