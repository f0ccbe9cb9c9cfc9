"""Finds the units of a model and who uses which parameter: the index that strategies lay out.

A unit is each element of an outermost homogeneous ModuleList (a transformer block), and every module outside those that
owns parameters, itself or in a container without a forward (a ParameterList), or says that it reads others' (see uses.py). A
parameter that is tied, or read by others too, has one entry and several users. The model itself is a unit, the last one if it
has none: it may read what others own, which is then found as it does (see reads.py).

Note [Carried along]
    A frozen parameter that an engine has no compute dtype for stays with the model as it is, like a buffer: the integers and
    8-bit floats of a quantized base, complex or sparse ones, and, in a model of several floating dtypes, one wider than the
    engine's (a scale in fp32). It lies on the compute device, counted as a buffer, is in no unit and moves nowhere. State dicts
    and summon show it as it is; a checkpoint, which holds what is trained, does not have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from systems.errors import UnsupportedError
from systems.planning.layout import ModelIndex, Parameter, Unit
from systems.ranks.group_names import REPLICA, WORLD
from systems.ranks.groups import of_replicas
from systems.recipe.model.blocks import find_blocks, has_forward
from systems.recipe.model.foreign_calls import COMPILED, has_compiled_forward, is_compiled
from systems.recipe.model.shared_memory import refuse_shared_memory
from systems.recipe.model.taken import is_taken
from systems.recipe.model.uses import refuse_strange_uses, used_by

COMPUTED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})  # dtypes of weights
ROOT = "<root>"  # the name of the unit that is the model itself


@dataclass(frozen=True)
class FoundModel:
    """modules and parameters are in the order of index.units and index.parameters.

    owners: per parameter the (module, attribute) pairs it is registered under. carried: by name, see Note [Carried along].
    """

    index: ModelIndex
    modules: tuple[nn.Module, ...]
    parameters: tuple[nn.Parameter, ...]
    owners: tuple[tuple[tuple[nn.Module, str], ...], ...]
    carried: Mapping[str, nn.Parameter]

    @property
    def trains(self) -> bool:
        """Something does: a model may be all frozen."""
        return any(parameter.trainable for parameter in self.index.parameters)


def _owned(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that a module reads in its own forward: those of containers below it, which nobody calls, are its own."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not has_forward(child):
            yield from _owned(child)


def find_units(model: nn.Module, dtype: torch.dtype | None = None, *, compiles: bool = True) -> FoundModel:
    """Raises UnsupportedError for a model that cannot be managed: compiled, sparse, sharing memory, or taken already.

    dtype: that weights will be computed in, where frozen ones that do not fit it may be carried along. compiles: where it will
    run compiled forwards of modules can.
    """
    if torch.is_inference_mode_enabled():
        raise UnsupportedError("torch.inference_mode() is on, and what is made within it never trains: call initialize outside")
    _refuse_modules(model, compiles=compiles)
    parameters, owners = _named(model)
    mixed = _several_dtypes(parameters)
    carried = {p for p in parameters if not p.requires_grad and not _is_weight(p, dtype if mixed else None)}
    for parameter, names in parameters.items():
        if not _is_weight(parameter) and parameter not in carried:
            raise UnsupportedError(
                f"parameter {names[0]} is {parameter.dtype} {parameter.layout}: only dense floats of 16 bits or more train"
            )
    weights = {p: names for p, names in parameters.items() if p not in carried}
    if not weights:
        raise UnsupportedError("the model has no parameters: nothing to train")
    refuse_strange_uses(model, parameters)
    refuse_shared_memory(model, parameters)
    units = [
        (name, module, block, mine)
        for name, module, block, owned in _units(model)
        if (mine := [p for p in dict.fromkeys(owned) if p in weights])
    ]
    if not any(module is model for _, module, _, _ in units):
        units.append((ROOT, model, None, []))
    number, replicas = {p: i for i, p in enumerate(weights)}, of_replicas(model)
    users: dict[nn.Parameter, list[str]] = {p: [] for p in weights}
    for unit_name, _, _, owned in units:
        for parameter in owned:
            users[parameter].append(unit_name)
    index = ModelIndex(
        parameters=tuple(
            Parameter(
                index=number[p],
                name=names[0],
                shape=tuple(p.shape),
                numel=p.numel(),
                trainable=p.requires_grad,
                users=tuple(users[p]),
                group=REPLICA if p in replicas else WORLD,
            )
            for p, names in weights.items()
        ),
        units=tuple(Unit(i, name, tuple(number[p] for p in owned), block) for i, (name, _, block, owned) in enumerate(units)),
    )
    return FoundModel(
        index,
        tuple(module for _, module, _, _ in units),
        tuple(weights),
        tuple(tuple(owners[p]) for p in weights),
        {names[0]: p for p, names in parameters.items() if p in carried},
    )


def _refuse_modules(model: nn.Module, *, compiles: bool) -> None:
    for name, module in model.named_modules():
        if is_taken(module):
            raise UnsupportedError(
                f"{f'module {name}' if name else 'the model'} was given to an engine before, which has its values: close "
                "that one, or build the model anew if it ended in an error"
            )
        if is_compiled(module):
            raise UnsupportedError(f"{f'module {name}' if name else 'the model'} is compiled: {COMPILED}")
        if not compiles and has_compiled_forward(module):
            raise UnsupportedError(
                f"the forward of {f'module {name}' if name else 'the model'} is compiled, and the emulated device, which sees "
                "every operation, would run it as it is: leave it uncompiled here; a CUDA device takes it"
            )
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            what = f"module {name}" if name else "the model"
            raise UnsupportedError(f"{what} is scripted or traced and takes no hooks: pass the module that it was made of")
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise UnsupportedError(f"module {name or '<root>'} makes sparse gradients, which cannot be kept: leave sparse off")


def _units(model: nn.Module) -> Iterator[tuple[str, nn.Module, int | None, list[nn.Parameter]]]:
    """Name, module, block number and parameters of each, repeated ones too."""
    blocks = {name: (block, number) for number, (name, block) in enumerate(find_blocks(model).items())}
    inside = {id(m) for block, _ in blocks.values() for m in block.modules()}
    for name, module in model.named_modules():
        if name in blocks:
            used = [p for part in module.modules() for p in used_by(part)]
            yield name, module, blocks[name][1], [*module.parameters(), *used]
        elif id(module) not in inside and (has_forward(module) or not name):
            yield name or ROOT, module, None, [*_owned(module), *used_by(module)]


def _named(model: nn.Module) -> tuple[dict[nn.Parameter, list[str]], dict[nn.Parameter, list[tuple[nn.Module, str]]]]:
    """Every parameter with all its names, and with the modules that have it."""
    parameters: dict[nn.Parameter, list[str]] = {}
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for name, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            full = f"{name}.{attribute}" if name else attribute
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise UnsupportedError(f"parameter {full} has no shape yet: run the model once before initialize")
            if is_taken(parameter):
                raise UnsupportedError(
                    f"parameter {full} was given to an engine before, in another model, which has its values: close that one, "
                    "make both one model, or give this one a parameter of its own"
                )
            parameters.setdefault(parameter, []).append(full)
            owners.setdefault(parameter, []).append((module, attribute))
    return parameters, owners


def _is_weight(parameter: nn.Parameter, dtype: torch.dtype | None = None) -> bool:
    """Dense and of a floating dtype that is computed in; and, with a dtype, one that this holds all values of."""
    plain = parameter.layout == torch.strided and parameter.dtype in COMPUTED
    return plain and (dtype is None or not loses(parameter.dtype, dtype))


def loses(given: torch.dtype, dtype: torch.dtype) -> bool:
    """True if values in `given` are rounded in dtype."""
    return torch.promote_types(given, dtype) != dtype


def _several_dtypes(parameters: Iterable[nn.Parameter]) -> bool:
    return len({p.dtype for p in parameters if p.dtype in COMPUTED}) > 1
