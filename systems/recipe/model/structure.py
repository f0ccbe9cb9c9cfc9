"""Which name means which parameter: as it was when the engine was made, and whether it still is.

An engine knows parameters as objects, under the names of initialize; a state dict, summon and checkpoints go by the names of
now. So a model whose parameters or modules were exchanged, wrapped, added, deleted or parametrized since is refused by name:
before the next step trains, and wherever values are given or taken by names. Registering a parameter is refused at once and
leaves the module as it is, for who does so (pruning, a norm of weights) reads the weights next, and they may be absent.
Modules without parameters may come and go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import is_
from typing import Any

import torch
from torch import nn

from systems.errors import UnsupportedError
from systems.recipe.model.foreign_calls import COMPILED

ADVICE = (
    "the engine keeps weights under the names that they had: exchange, add, delete, wrap, prune or parametrize before "
    "initialize, or after close(), which gives the model its weights"
)


class Structure:
    """From construction, once parameters are the engine's, to `end`. parameters: that the engine has, with their names."""

    def __init__(self, model: nn.Module, parameters: Iterable[nn.Parameter], names: Iterable[str]) -> None:
        self._model = model
        self._names = _named(model)
        self._mine = dict(zip(map(id, parameters), names, strict=True))
        self._guarded = list(model.named_modules())
        tables = [module._parameters for _, module in self._guarded]
        self._owners = [(held, name, p) for held in tables for name, p in held.items() if id(p) in self._mine]
        self._remember()
        for name, module in self._guarded:
            if not isinstance(module, torch.jit.ScriptModule):
                module.__dict__["register_parameter"] = _Registration(module, name, self._names)

    def _remember(self) -> None:
        self._held = [
            _Held(held)
            for module in self._model.modules()
            if not isinstance(module, torch.jit.ScriptModule)  # which cannot be changed
            for held in (module._modules, module._parameters)
        ]

    def changed(self) -> UnsupportedError | None:
        """Asked for at every step: as long as no module was exchanged it looks at no name."""
        for held in self._held:
            if not held.same():
                break
        else:
            return None
        error = self.renamed()
        if error is None:
            self._remember()
        return error

    def renamed(self) -> UnsupportedError | None:
        """A name that means another parameter than at initialize, or none, or is new."""
        now = _named(self._model)
        for name, parameter in self._names.items():
            if name in now and now[name] is not parameter:
                return self._replaced(name, now[name])
        gone = next((name for name in self._names if name not in now), None)
        new = next((name for name in now if name not in self._names), None)
        if new is not None and any(isinstance(module, torch._dynamo.OptimizedModule) for module in self._model.modules()):
            return UnsupportedError(COMPILED)
        if gone is not None:
            aside = "" if new is None else f", and {new} is new"
            return UnsupportedError(f"parameter {gone} is gone since initialize{aside}: {ADVICE}")
        return None if new is None else UnsupportedError(f"parameter {new} is new since initialize: {ADVICE}")

    def lost(self) -> UnsupportedError | None:
        """A parameter that is in the place of another, and was not trained: what closing has to tell."""
        now = _named(self._model)
        strange = (
            name for name, p in self._names.items() if name in now and now[name] is not p and id(now[name]) not in self._mine
        )
        name = next(strange, None)
        return None if name is None else self._replaced(name, now[name])

    def _replaced(self, name: str, now: nn.Parameter) -> UnsupportedError:
        if id(now) in self._mine:
            return UnsupportedError(f"parameter {name} is {self._mine[id(now)]} of initialize now: {ADVICE}")
        return UnsupportedError(
            f"parameter {name} was replaced by another, which the engine does not train: give it its values inside "
            "engine.summon(write=True), or replace it before initialize, or after close()"
        )

    def put_back(self) -> bool:
        """Parameters of the engine are their modules' again, where one from elsewhere has their name. False if none was."""
        replaced = [owner for owner in self._owners if id(owner[0].get(owner[1], owner[2])) not in self._mine]
        for held, name, parameter in replaced:
            held[name] = parameter
        return bool(replaced)

    def end(self) -> None:
        for _, module in self._guarded:
            module.__dict__.pop("register_parameter", None)


class _Held:
    """Of a module, its children or its parameters."""

    __slots__ = ("_held", "_names", "_values")

    def __init__(self, held: Mapping[str, Any]) -> None:
        self._held, self._names, self._values = held, held.keys() - (), tuple(held.values())

    def same(self) -> bool:
        held, values = self._held, self._values
        return len(held) == len(values) and (
            not values or (all(map(is_, held.values(), values)) and held.keys() == self._names)
        )


class _Registration:
    """Stands before a module's `register_parameter`, by which setattr goes too."""

    def __init__(self, module: nn.Module, path: str, names: Mapping[str, nn.Parameter]) -> None:
        self._module, self._path, self._names = module, path, names

    def __call__(self, name: str, param: nn.Parameter | None) -> None:
        module = self._module
        full = f"{self._path}.{name}" if self._path else name
        if module._parameters.get(name) is not param and self._names.get(full) is not param:  # as was, or put back
            raise UnsupportedError(f"parameter {full} is registered while the engine is open: {ADVICE}")
        type(module).register_parameter(module, name, param)

    def __reduce__(self) -> Any:
        """A copy of the module has its own, with nothing before it."""
        return getattr, (self._module, "register_parameter")


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every name of each, in the order of a state dict."""
    return {
        f"{path}.{name}" if path else name: parameter
        for path, module in model.named_modules(remove_duplicate=False)
        for name, parameter in module._parameters.items()
        if parameter is not None
    }
