"""What a module's forward reads of parameters that other modules own, said before an engine takes the model.

Note [Said and found]
    A read that is said makes the module a user of the parameter from the start, as if it were tied: in the index that
    strategies lay out, in the first step, in forecasts, and on all ranks, which are asked whether they say the same. One that
    is not said is found when it happens (see reads.py), which changes plans from then on. That takes an operation of torch's
    that shows: what a kernel reads by an address is never found.

It is said on the module, so that a copy of the model says it too, of its own parameters.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from weakref import WeakSet

import torch
from torch import nn

from systems.errors import UnsupportedError
from systems.recipe.model.blocks import has_forward
from systems.recipe.model.taken import is_taken

SAID = "_offload_uses"  # attribute of a module: what it reads, a tuple
_SAYING: WeakSet[nn.Module] = WeakSet()
_LOCK = threading.Lock()


def uses(module: nn.Module, *parameters: torch.Tensor) -> None:
    """See systems.uses. Of a module's own class torch's annotations say only that a Parameter is a tensor."""
    if not isinstance(module, nn.Module) or not has_forward(module):
        raise ValueError(f"{_named(module)} has no forward: give the torch.nn.Module whose forward reads the parameters")
    mine = [parameter for parameter in parameters if isinstance(parameter, nn.Parameter)]
    for other in parameters:
        if not isinstance(other, nn.Parameter):
            raise ValueError(
                f"{_named(module)} is to use {type(other).__name__}: give the Parameters themselves, as the model's "
                "parameters() has them (of a parametrized weight: module.parametrizations.weight.original)"
            )
    if is_taken(module) or any(map(is_taken, mine)):
        raise UnsupportedError(
            f"{_named(module)} is said to use parameters of a model that an engine has: call systems.uses before initialize, "
            "or after close()"
        )
    module.__dict__[SAID] = tuple(dict.fromkeys(mine))
    with _LOCK:
        _SAYING.add(module)


def used_by(module: nn.Module) -> tuple[nn.Parameter, ...]:
    """That it is said to use, beside its own."""
    said: tuple[nn.Parameter, ...] = module.__dict__.get(SAID, ())
    return said


def refuse_strange_uses(model: nn.Module, parameters: Mapping[nn.Parameter, Sequence[str]]) -> None:
    """UnsupportedError where one of a model's modules is said to use what is none of its parameters, or what is none of its
    modules one of them. parameters: of the model, with their names.
    """
    names = {id(module): name for name, module in model.named_modules()}
    for module in model.modules():
        strange = next((p for p in used_by(module) if p not in parameters), None)
        if strange is not None:
            raise UnsupportedError(
                f"module {names[id(module)] or '<root>'} is said to use a parameter of shape {tuple(strange.shape)} that this "
                "model does not have, or not any more: call systems.uses anew once the model has its parameters (tied, loaded, "
                "moved from meta), with those alone"
            )
    with _LOCK:
        saying = list(_SAYING)
    for module in saying:
        used = next((p for p in used_by(module) if p in parameters), None)
        if used is not None and id(module) not in names:
            raise UnsupportedError(
                f"{_named(module)} is said to use parameter {parameters[used][0]}, and is no module of this model: make it one "
                "that the model's forward calls, or take that back: systems.uses(module)"
            )


def said_by(model: nn.Module) -> list[str]:
    """In words, in an order that is the model's: for ranks to compare."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        f"{name or '<root>'} uses {names.get(id(parameter), 'another')}"
        for name, module in model.named_modules()
        for parameter in used_by(module)
    ]


def _named(module: object) -> str:
    return f"module {type(module).__name__}" if isinstance(module, nn.Module) else f"{type(module).__name__}"
