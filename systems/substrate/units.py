"""Finds the units of a model and who uses which parameter: the index that strategies lay out.

A unit is each element of an outermost homogeneous ModuleList (a transformer block), and every module outside those that
owns parameters, itself or in a container without a forward (a ParameterList). A tied parameter has one entry and several users.
The model itself is a unit, the last one if it owns none: it may read what others own (see reads.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakSet

import torch
from torch import nn

from systems.blocks import find_blocks, has_forward
from systems.errors import UnsupportedError
from systems.planning.layout import ModelIndex, Parameter, Unit

ROOT = "<root>"  # the name of the unit that is the model itself
_TAKEN: WeakSet[nn.Module] = WeakSet()


@dataclass(frozen=True)
class FoundModel:
    """modules and parameters are in the order of index.units and index.parameters.

    owners: per parameter the (module, attribute) pairs it is registered under.
    """

    index: ModelIndex
    modules: tuple[nn.Module, ...]
    parameters: tuple[nn.Parameter, ...]
    owners: tuple[tuple[tuple[nn.Module, str], ...], ...]


def take(model: nn.Module) -> None:
    """An engine has the model from now on, and for good: its values lie where the engine keeps them, and go with it."""
    _TAKEN.update(model.modules())


def _owned(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that a module reads in its own forward: those of containers below it, which nobody calls, are its own."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not has_forward(child):
            yield from _owned(child)


def find_units(model: nn.Module) -> FoundModel:
    """Raises UnsupportedError for a model that cannot be managed: nothing to train, compiled, sparse, or taken already."""
    for name, module in model.named_modules():
        if module in _TAKEN:
            raise UnsupportedError(
                f"{f'module {name}' if name else 'the model'} was given to an engine before, which took its values: build the "
                "model anew, and take values out of the engine with engine.state_dict()"
            )
        if isinstance(module, torch._dynamo.OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None:
            what = f"module {name}" if name else "the model"
            raise UnsupportedError(f"torch.compile fixes the addresses of weights: pass {what} before compiling it")
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise UnsupportedError(f"module {name or '<root>'} makes sparse gradients, which cannot be kept: leave sparse off")
    blocks = {name: (block, number) for number, (name, block) in enumerate(find_blocks(model).items())}
    inside = {id(m) for block, _ in blocks.values() for m in block.modules()}
    units: list[tuple[str, nn.Module, int | None, list[nn.Parameter]]] = []
    for name, module in model.named_modules():
        if name in blocks:
            units.append((name, module, blocks[name][1], list(module.parameters())))
        elif id(module) not in inside and (has_forward(module) or not name):
            owned = list(_owned(module))
            if owned:
                units.append((name or ROOT, module, None, owned))
    if not any(module is model for _, module, _, _ in units):
        units.append((ROOT, model, None, []))

    parameters: dict[nn.Parameter, list[str]] = {}
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for name, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                parameters.setdefault(parameter, []).append(f"{name}.{attribute}" if name else attribute)
                owners.setdefault(parameter, []).append((module, attribute))
    if not parameters:
        raise UnsupportedError("the model has no parameters: nothing to train")
    if not any(parameter.requires_grad for parameter in parameters):
        raise UnsupportedError("no parameter of the model requires a gradient: nothing to train")
    number = {p: i for i, p in enumerate(parameters)}
    users: dict[nn.Parameter, list[str]] = {p: [] for p in parameters}
    for unit_name, _, _, owned in units:
        for parameter in dict.fromkeys(owned):
            users[parameter].append(unit_name)
    for parameter, names in parameters.items():
        if parameter.layout != torch.strided or not parameter.dtype.is_floating_point:
            raise UnsupportedError(f"parameter {names[0]} is {parameter.dtype} {parameter.layout}: only dense floats train")
    index = ModelIndex(
        parameters=tuple(
            Parameter(
                index=number[p],
                name=names[0],
                aliases=tuple(names[1:]),
                shape=tuple(p.shape),
                numel=p.numel(),
                trainable=p.requires_grad,
                users=tuple(users[p]),
            )
            for p, names in parameters.items()
        ),
        units=tuple(
            Unit(i, name, tuple(number[p] for p in dict.fromkeys(owned)), block)
            for i, (name, _, block, owned) in enumerate(units)
        ),
    )
    return FoundModel(index, tuple(m for _, m, _, _ in units), tuple(parameters), tuple(tuple(owners[p]) for p in parameters))
