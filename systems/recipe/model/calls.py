"""Calls of a managed model's modules, however they are made: through the engine, by the module itself, by its `forward`.

A call may come past the engine: `model(...)`, `model.generate()`, `model.encoder(x)`. The outermost one is then given what
`engine(...)` has about it: its memory is counted and finds room. Whatever is raised, and Ctrl-C too, what was begun is ended.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from systems.recipe.model.blocks import has_forward
from systems.recipe.model.foreign_calls import ORIGINAL
from systems.recipe.model.units import ROOT, FoundModel

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
    """One in progress. started: its forward has been reached. region: what was opened for it as the outermost one.

    given: what the hooks keep of it until it ends.
    """

    __slots__ = ("given", "module", "region", "started", "unit")

    def __init__(self, module: nn.Module, unit: int) -> None:
        self.module, self.unit, self.started = module, unit, False
        self.region: ExitStack | None = None
        self.given: Any = None


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
            self.end(self.open[-1].module)
        before = self._of_engine
        try:
            self._of_engine = before + 1
            yield
        finally:
            self._of_engine = before

    def attach_all(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            self.attach(module)

    def attach(
        self,
        module: nn.Module,
        unit: int = NO_UNIT,
        before: Before | None = None,
        after: After | None = None,
        *,
        stands_in: bool = False,
    ) -> None:
        """before, after: a call of the module, within `around`; `after` comes whatever is raised.

        stands_in: the unit is not the module, which is taken for it where its call is the outermost one.
        """

        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            outermost = not self.open and not self._of_engine
            mine = outermost or not stands_in
            self._begin(module, unit if mine else NO_UNIT, (args, kwargs), outermost=outermost)
            if before is not None and mine:
                before(module, args, kwargs)

        def end(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not self._unwind(module):
                return  # it did not even begin
            try:
                if after is not None and self.open[-1].unit != NO_UNIT:
                    after(module, args, kwargs, output)
            finally:
                self.end(module)

        handles = [
            module.register_forward_pre_hook(Hook(begin), with_kwargs=True, prepend=True),
            module.register_forward_hook(Hook(end), with_kwargs=True, always_call=True),
        ]
        self._undo += [handle.remove for handle in handles]
        if not isinstance(module, torch.jit.ScriptModule):
            own, forward = module.__dict__.get("forward"), _Forward(self, module, begin, end)
            module.forward = forward
            self._undo.append(functools.partial(put_back, module, forward, own))

    def _begin(self, module: nn.Module, unit: int, given: object, *, outermost: bool) -> None:
        call = _Call(module, unit)
        if self._around is not None and outermost:
            with contextlib.ExitStack() as region:
                region.enter_context(self._around(given))
                call.region = region.pop_all()
        self.open.append(call)

    def look_at(self, error: BaseException) -> bool:
        """True if torch's hooks are not told of it. Of what the outermost call has begun nobody will say that it is over."""
        if isinstance(error, Exception):
            return False
        if self.open and self.open[0].region is not None:
            self._interrupted()
        return True

    def _unwind(self, module: nn.Module) -> bool:
        """End the calls within the innermost one of the module, if there is one: nobody was told of their end."""
        if not any(call.module is module for call in self.open):
            return False
        while self.open[-1].module is not module:
            self._pop()
        return True

    def end(self, module: nn.Module) -> None:
        if self._unwind(module):
            self._pop()

    def _pop(self) -> None:
        call = self.open.pop()
        if call.region is not None:
            call.region.close()

    def detach(self) -> None:
        while self._undo:
            self._undo.pop()()


class Hook:
    """A copy of the module (an average of weights, say), or one that was saved, is nobody's: its calls are not told."""

    __slots__ = ("_tell",)

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell = tell

    def __call__(self, *given: Any) -> None:
        self._tell(*given)

    def __reduce__(self) -> Any:
        """It becomes what takes anything and does nothing, and is there where a file is read without this package."""
        return getattr, (nullcontext(), "__exit__")


class _Forward:
    """`forward` called by itself is a call too. Reached through the hooks, it only looks after what they are not told."""

    def __init__(self, calls: Calls, module: nn.Module, begin: Before, end: After) -> None:
        functools.update_wrapper(self, module.forward)
        vars(self).pop(ORIGINAL, None)  # what is compiled is called by this, which is not
        self._calls, self._module, self._begin, self._end, self._inner = calls, module, begin, end, module.forward
        self._own = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        calls = self._calls
        call = calls.open[-1] if calls.open else None
        if call is None or call.module is not self._module or call.started:
            return self._directly(args, kwargs)
        call.started = True
        try:
            return self._inner(*args, **kwargs)
        except BaseException as error:
            if calls.look_at(error):
                calls.end(self._module)
            raise

    def _directly(self, args: Any, kwargs: Any) -> Any:
        output = None
        try:
            self._begin(self._module, args, kwargs)
            self._calls.open[-1].started = True
            output = self._inner(*args, **kwargs)
        except BaseException as error:
            self._calls.look_at(error)
            raise
        finally:
            self._end(self._module, args, kwargs, output)
        return output

    def __reduce__(self) -> Any:
        return forward_of_copy(self._module, self._own)


def forward_of_copy(module: nn.Module, own: Any) -> Any:
    """What stands before a module's `forward` reduces to that: its class's, or the one that it was given itself."""
    return (getattr, (module, "forward")) if own is None else (itemgetter(0), ((own,),))


def put_back(module: nn.Module, forward: object, own: Any) -> None:
    if module.__dict__.get("forward") is forward:
        del module.__dict__["forward"]
        if own is not None:
            module.forward = own
