"""What a block's forward changes besides its output, so that running it again starts where it began and leaves no trace.

torch.utils.checkpoint itself restores torch's default generators. A block may also count, average or normalise in buffers and
in plain attributes, draw from a generator of its own or from those of Python and numpy, and append to the lists that it is
given. What of all this a forward changes is learned at the first one; nothing else is looked at later.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy as shallow_copy
from functools import partial
from typing import Any

import torch
from torch import nn

CACHES = "transformers.cache_utils"
PLAIN = (bool, int, float, str, type(None))


class _Place:
    """A buffer or an attribute of a module: what a forward may change."""

    def __init__(self, held: dict[str, Any], name: str) -> None:
        self._held, self._name = held, name

    def get(self) -> Any:
        return self._held.get(self._name)

    def put(self, value: Any) -> None:
        self._held[self._name] = value

    def copy(self) -> Any:
        return _copied(self.get())

    def changed(self, copy: Any) -> bool:
        now = self.get()
        if not isinstance(copy, torch.Tensor):
            return bool(now != copy)
        alike = isinstance(now, torch.Tensor) and (now.dtype, now.device) == (copy.dtype, copy.device)
        return not alike or not torch.equal(now, copy)


class _Draws:
    """A generator of random numbers."""

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        self.get, self.put = get, put
        self.copy = get

    def changed(self, copy: Any) -> bool:
        return pickle.dumps(self.get()) != pickle.dumps(copy)


_Changing = _Place | _Draws


class Replay:
    """Of one block. `take` before its forward, `learn` after it, `again` around each recomputation."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._changing: list[_Changing] = []
        self._learned = False

    def take(self) -> list[Any]:
        """Copies of what the forward may change."""
        if not self._learned:
            self._changing = _all_of(self._module)
        return [each.copy() for each in self._changing]

    def learn(self, copies: list[Any]) -> None:
        """The first time: keep what changed, of `copies` too. Asks the device whether buffers are what they were."""
        if self._learned:
            return
        pairs = [(each, copy) for each, copy in zip(self._changing, copies, strict=True) if each.changed(copy)]
        self._changing, copies[:] = [each for each, _ in pairs], [copy for _, copy in pairs]
        self._learned = True

    @contextmanager
    def again(self, copies: list[Any]) -> Iterator[None]:
        now = [each.get() for each in self._changing]
        for each, copy in zip(self._changing, copies, strict=True):
            each.put(_copied(copy))
        try:
            yield
        finally:
            for each, value in zip(self._changing, now, strict=True):
                each.put(value)


def _all_of(module: nn.Module) -> list[_Changing]:
    inside = list(module.modules())
    holders = [held for m in inside for held in (m._buffers, vars(m))]
    own = {id(v): v for m in inside for v in vars(m).values() if isinstance(v, torch.Generator)}
    draws = [_Draws(generator.get_state, generator.set_state) for generator in own.values()]
    draws.append(_Draws(random.getstate, random.setstate))
    if "numpy.random" in sys.modules:
        numpy_random = sys.modules["numpy.random"]
        draws.append(_Draws(partial(numpy_random.get_state, legacy=False), numpy_random.set_state))
    return [*draws, *(_Place(held, name) for held in holders for name, value in held.items() if _copyable(value))]


def _copyable(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.layout is torch.strided and not (value.is_meta or value.requires_grad or isinstance(value, nn.Parameter))
    return type(value) in PLAIN


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def own_containers(value: Any) -> Any:
    """The same tensors in lists and dicts of their own, and in caches of keys and values, which a block adds its own to."""
    if type(value) in (list, tuple, set):
        return type(value)(own_containers(item) for item in value)
    if type(value).__module__ == CACHES:
        own = shallow_copy(value)
        own.__dict__.update({name: own_containers(held) for name, held in vars(value).items()})
        return own
    return {key: own_containers(item) for key, item in value.items()} if type(value) is dict else value
