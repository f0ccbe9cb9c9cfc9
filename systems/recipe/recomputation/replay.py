"""What a block's forward began with and what it changes besides its output, so that running it again starts where it began
and leaves no trace.

torch.utils.checkpoint itself restores torch's default generators. What a caller may have set around the call is kept of each:
plain attributes of the block's modules (a switch of an adapter, training mode), which tensors are their parameters and buffers
(torch.func.functional_call), context variables. A block may also count, average or normalise in buffers, draw from a generator
of its own or from those of Python and numpy, and append to the lists that it is given. What of this a forward changes is
learned at the first one, in training and in evaluation; nothing else is copied later. What is missed: see repeats.py.
"""

from __future__ import annotations

import contextvars
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy as shallow_copy
from dataclasses import dataclass
from functools import partial
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn

CACHES = "transformers.cache_utils"
PLAIN = (bool, int, float, str, type(None))
STANDARD = vars(nn.Module()).keys() - {"training"}


class _StatePlace:
    """A tensor that is a buffer or an attribute of a module: what a forward may change."""

    def __init__(self, held: dict[str, Any], name: str) -> None:
        self._held, self._name = held, name
        self.key: object = (id(held), name)

    def get(self) -> Any:
        return self._held.get(self._name)

    def put(self, value: Any) -> None:
        self._held[self._name] = value

    def copy(self) -> Any:
        return _copied(self.get())

    def changed(self, copy: Any) -> bool:
        now = self.get()
        alike = isinstance(now, torch.Tensor) and (now.dtype, now.device) == (copy.dtype, copy.device)
        return not alike or not torch.equal(now, copy)


class _Draws:
    """A generator of random numbers."""

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        self.get, self.put = get, put
        self.copy = get
        self.key: object = get

    def changed(self, copy: Any) -> bool:
        return pickle.dumps(self.get()) != pickle.dumps(copy)


_Changing = _StatePlace | _Draws


@dataclass
class Began:
    """What one call began with. set: what a caller may set, see `_Surroundings`. copies: of what may change."""

    set: _Surroundings
    context: contextvars.Context
    changing: list[_Changing]
    copies: list[Any]
    learns: bool


class Replay:
    """Of one block. `take` before its forward, `learn` after it, `again` around each recomputation."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._places = _Places(())
        self._changing: list[_Changing] = []
        self._learned: set[bool] = set()  # in training, in evaluation

    def take(self) -> Began:
        learns = self._module.training not in self._learned
        if learns:
            self._places = _Places([m for m in self._module.modules() if not isinstance(m, torch.jit.ScriptModule)])
        changing = _all_of(self._module) if learns else self._changing
        copies = [each.copy() for each in changing]
        return Began(self._places.now(), contextvars.copy_context(), changing, copies, learns)

    def learn(self, began: Began) -> None:
        """The first time: keep what changed, of the call's copies too. Asks the device whether buffers are what they were."""
        if not began.learns:
            return
        known = {each.key for each in self._changing}
        pairs = zip(began.changing, began.copies, strict=True)
        changed = [(each, copy) for each, copy in pairs if each.key in known or each.changed(copy)]
        began.changing, began.copies = [each for each, _ in changed], [copy for _, copy in changed]
        self._changing = began.changing
        self._learned.add(self._module.training)

    @contextmanager
    def again(self, began: Began) -> Iterator[None]:
        held, now = began.set.places.now(), [each.get() for each in began.changing]
        began.set.put(held)
        for each, copy in zip(began.changing, began.copies, strict=True):
            each.put(_copied(copy))
        try:
            yield
        finally:
            for each, value in zip(began.changing, now, strict=True):
                each.put(value)
            held.put()


class _Places:
    """Where a caller may set something around a block's call: the attributes, parameters and buffers of its modules."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        tables = [(m.__dict__, m._parameters, m._buffers) for m in modules]
        self.names = [(tuple(own - STANDARD), tuple(p), tuple(b)) for own, p, b in ((t[0].keys(), *t[1:]) for t in tables)]
        self._tables = [table for three in tables for table in three]
        self._sizes = list(map(len, self._tables))
        named = zip((names for three in self.names for names in three), self._tables, strict=True)
        self._looks = [(itemgetter(*names, names[0]), table) for names, table in named if names]  # so always a tuple

    def now(self) -> _Surroundings:
        return _Surroundings(self, self.values())

    def values(self) -> list[Any] | None:
        """All that is set, in one order; None where names have come or gone."""
        if list(map(len, self._tables)) != self._sizes:
            return None
        values: list[Any] = []
        try:
            for look, table in self._looks:
                values += look(table)
        except KeyError:
            return None
        return values


class _Surroundings:
    """What was set at one moment. A block's call is nearly always as the one before, so that is looked at first, quickly."""

    def __init__(self, places: _Places, values: list[Any] | None) -> None:
        self.places, self._values = places, values
        self._held = list(map(_held, places.modules)) if values is None else None

    def put(self, now: _Surroundings | None = None) -> None:
        """Set it again. now: what is set at the moment."""
        values = self.places.values() if now is None else now._values
        if values is not None and self._values is not None and all(map(is_, values, self._values)):
            return
        for module, held in zip(self.places.modules, self._held or self._spelt(), strict=True):
            _hold(module, held)

    def _spelt(self) -> Iterator[tuple[dict[str, Any], ...]]:
        assert self._values is not None
        left = iter(self._values)
        for three in self.places.names:
            values = [dict(zip((*names, names[0]), left, strict=False)) if names else {} for names in three]
            yield {name: value for name, value in values[0].items() if type(value) in PLAIN}, values[1], values[2]


def _held(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """Names to plain attributes, parameters and buffers of a module, as they are now."""
    plain = {name: value for name, value in module.__dict__.items() if type(value) in PLAIN}
    return plain, dict(module._parameters), dict(module._buffers)


def _hold(module: nn.Module, held: tuple[dict[str, Any], ...]) -> None:
    """Back to what `_held` gave."""
    places: tuple[dict[str, Any], ...] = (module.__dict__, module._parameters, module._buffers)
    for now, wanted, live in zip(_held(module), held, places, strict=True):
        for name in now.keys() - wanted.keys():
            del live[name]
        for name, value in wanted.items():
            if name not in now or now[name] is not value:
                live[name] = value


def _all_of(module: nn.Module) -> list[_Changing]:
    inside = list(module.modules())
    holders = [held for m in inside for held in (m._buffers, vars(m))]
    own = {id(v): v for m in inside for v in vars(m).values() if isinstance(v, torch.Generator)}
    draws = [_Draws(generator.get_state, generator.set_state) for generator in own.values()]
    draws.append(_Draws(random.getstate, random.setstate))
    if "numpy.random" in sys.modules:
        numpy_random = sys.modules["numpy.random"]
        draws.append(_Draws(partial(numpy_random.get_state, legacy=False), numpy_random.set_state))
    return [*draws, *(_StatePlace(held, name) for held in holders for name, value in held.items() if _copyable(value))]


def _copyable(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    return value.layout is torch.strided and not (value.is_meta or value.requires_grad or isinstance(value, nn.Parameter))


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
