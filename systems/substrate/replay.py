"""What a block's forward changes besides its output, so that running it again starts where it began and leaves no trace.

torch.utils.checkpoint itself restores torch's default generators. A block may also count, average or normalise in buffers and
in plain attributes, draw from a generator of its own or from those of Python and numpy, and append to the lists that it is
given. What of its buffers and attributes a forward changes is learned at the first one; nothing else is copied later.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

PLAIN = (int, float, str, type(None))
Place = tuple[dict[str, Any], str]  # a module's buffers or attributes, and a name in them


class Replay:
    """Of one block. `take` before its forward, `learn` after the first, `again` around each recomputation."""

    def __init__(self, module: nn.Module) -> None:
        inside = list(module.modules())
        self._holders: list[dict[str, Any]] = [h for m in inside for h in (m._buffers, vars(m)) if h]
        values = [value for m in inside for value in vars(m).values()]
        self._generators = list({id(v): v for v in values if isinstance(v, torch.Generator)}.values())
        self._changing: list[tuple[int, str]] | None = None  # (holder, name); None until they were learned

    def take(self) -> _State:
        changing = self._changing
        if changing is None:
            changing = [(i, n) for i, h in enumerate(self._holders) for n, v in h.items() if _copyable(v)]
        values = [(i, n, self._holders[i].get(n)) for i, n in changing]
        return _State([(i, n, v, _copied(v)) for i, n, v in values], [g.get_state() for g in self._generators], _drawn())

    def learn(self, state: _State) -> None:
        """Once; asks the device whether a buffer is what it was."""
        if self._changing is not None:
            return
        state.values = [entry for entry in state.values if self._changed(*entry)]
        self._changing = [(holder, name) for holder, name, _, _ in state.values]

    def _changed(self, holder: int, name: str, before: Any, copy: Any) -> bool:
        now = self._holders[holder].get(name)
        if isinstance(copy, torch.Tensor):
            return now is not before or not torch.equal(now, copy)
        return bool(now != copy)

    @contextmanager
    def again(self, state: _State) -> Iterator[None]:
        places: list[Place] = [(self._holders[holder], name) for holder, name, _, _ in state.values]
        now = [held.get(name) for held, name in places]
        generators, drawn = [g.get_state() for g in self._generators], _drawn()
        self._put(places, [_copied(copy) for _, _, _, copy in state.values], state.generators, state.drawn)
        try:
            yield
        finally:
            self._put(places, now, generators, drawn)

    def _put(self, places: list[Place], values: list[Any], generators: list[torch.Tensor], drawn: _Drawn) -> None:
        for (held, name), value in zip(places, values, strict=True):
            held[name] = value
        for generator, state in zip(self._generators, generators, strict=True):
            generator.set_state(state)
        for put, was in drawn:
            put(was)


_Drawn = list[tuple[Callable[[Any], None], Any]]


class _State:
    """values: (holder, name, what was there, its copy)."""

    __slots__ = ("drawn", "generators", "values")

    def __init__(self, values: list[tuple[int, str, Any, Any]], generators: list[torch.Tensor], drawn: _Drawn) -> None:
        self.values, self.generators, self.drawn = values, generators, drawn


def _drawn() -> _Drawn:
    """The states of Python's generator and, where it is in use, numpy's, with what puts them back."""
    found: _Drawn = [(random.setstate, random.getstate())]
    if "numpy.random" in sys.modules:
        numpy_random = sys.modules["numpy.random"]
        found.append((numpy_random.set_state, numpy_random.get_state(legacy=False)))
    return found


def _copyable(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.layout is torch.strided and not (value.is_meta or value.requires_grad or isinstance(value, nn.Parameter))
    return type(value) in (*PLAIN, bool)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def own_containers(value: Any) -> Any:
    """The same tensors in lists and dicts of their own."""
    if type(value) in (list, tuple, set):
        return type(value)(own_containers(item) for item in value)
    return {key: own_containers(item) for key, item in value.items()} if type(value) is dict else value
