"""Calls of a managed model's modules, however they are made: through the engine, by the module itself, by its `forward`.

A call may come past the engine: `model(...)`, `model.generate()`, `model.encoder(x)`. The outermost one is then given what
`engine(...)` has about it: its memory is counted and finds room. Whatever is raised, and Ctrl-C too, what was begun is ended.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from models.blocks import has_forward
from systems.substrate.units import ROOT, FoundModel

NO_UNIT = -1
Around = Callable[[object], AbstractContextManager[object]]
Before = Callable[[nn.Module, Any, Any], None]
After = Callable[[nn.Module, Any, Any, Any], None]


def outer_modules(found: FoundModel) -> list[nn.Module]:
    """Modules around the units, which own nothing themselves: calls of them may be the outermost ones."""
    units = list(zip(found.index.units, found.modules, strict=True))
    mine = {id(module) for _, module in units}
    inside = {id(part) for unit, module in units if unit.block is not None for part in module.modules()}
    root = next(module for unit, module in units if unit.name == ROOT)
    around = [m for m in root.modules() if id(m) not in inside and id(m) not in mine and has_forward(m)]
    return [m for m in around if any(id(part) in mine for part in m.modules())]


class _Call:
    """One in progress. started: its forward has been reached. region: what was opened for it as the outermost one."""

    __slots__ = ("module", "region", "started", "unit")

    def __init__(self, module: nn.Module, unit: int) -> None:
        self.module, self.unit, self.started = module, unit, False
        self.region: ExitStack | None = None


class Calls:
    """around: made for the outermost call that comes past the engine, of its arguments. None: there is no engine.

    interrupted: told of an exception that torch's hooks are not told of (Ctrl-C) and that no call of the engine is around of.
    """

    def __init__(self, around: Around | None = None, interrupted: Callable[[], None] = lambda: None) -> None:
        self._around, self._interrupted = around, interrupted
        self._of_engine = 0
        self.open: list[_Call] = []
        self._undo: list[Callable[[], None]] = []

    @contextmanager
    def of_engine(self) -> Iterator[None]:
        """The engine's own way into the model, or through its backward."""
        while self.open:  # Ctrl-C came between a call's hooks and its forward
            self._end(self.open[-1].module)
        self._of_engine += 1
        try:
            yield
        finally:
            self._of_engine -= 1

    def attach_all(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            self.attach(module)

    def attach(self, module: nn.Module, unit: int = NO_UNIT, before: Before | None = None, after: After | None = None) -> None:
        """before, after: a call of the module, within `around`; `after` comes whatever is raised."""

        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._begin(module, unit, (args, kwargs))
            if before is not None:
                before(module, args, kwargs)

        def end(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            try:
                if after is not None:
                    after(module, args, kwargs, output)
            finally:
                self._end(module)

        handles = [
            module.register_forward_pre_hook(begin, with_kwargs=True, prepend=True),
            module.register_forward_hook(end, with_kwargs=True, always_call=True),
        ]
        self._undo += [handle.remove for handle in handles]
        if not isinstance(module, torch.jit.ScriptModule):
            self._wrap(module, begin, end)

    def _wrap(self, module: nn.Module, begin: Before, end: After) -> None:
        """`forward` called by itself is a call too. Reached through the hooks, it only looks after what they are not told."""
        own, inner = module.__dict__.get("forward"), module.forward

        def directly(args: Any, kwargs: Any) -> Any:
            output = None
            try:
                begin(module, args, kwargs)
                self.open[-1].started = True
                output = inner(*args, **kwargs)
            finally:
                end(module, args, kwargs, output)
            return output

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            call = self.open[-1] if self.open else None
            if call is None or call.module is not module or call.started:
                return directly(args, kwargs)
            call.started = True
            try:
                return inner(*args, **kwargs)
            except Exception:
                raise
            except BaseException:
                outermost = call.region is not None
                self._end(module)
                if outermost:
                    self._interrupted()
                raise

        module.forward = forward  # type: ignore[method-assign]

        def undo() -> None:
            if module.__dict__.get("forward") is forward:
                del module.__dict__["forward"]
                if own is not None:
                    module.forward = own  # type: ignore[method-assign]

        self._undo.append(undo)

    def _begin(self, module: nn.Module, unit: int, given: object) -> None:
        call = _Call(module, unit)
        if self._around is not None and not self.open and not self._of_engine:
            with contextlib.ExitStack() as region:
                region.enter_context(self._around(given))
                call.region = region.pop_all()
        self.open.append(call)

    def _end(self, module: nn.Module) -> None:
        """Of the innermost call of the module, and of those within it that nobody was told the end of."""
        if not any(call.module is module for call in self.open):
            return
        while True:
            call = self.open.pop()
            if call.region is not None:
                call.region.close()
            if call.module is module:
                return

    def detach(self) -> None:
        while self._undo:
            self._undo.pop()()
