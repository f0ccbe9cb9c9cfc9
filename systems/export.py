"""What leaves an engine for other programs: the state dict that the model would give, and a folder in transformers' format.

Both are made by the model itself, whose parameters have their values for that while: so names of tied weights, buffers, hooks
and extra state are as the model has them. What an engine needs to go on training is a checkpoint's (systems.checkpoint).
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import nn
from torch.utils._pytree import tree_map

from systems.checkpoint import TrainingState, copy_into
from systems.errors import BudgetError, UnsupportedError
from systems.machine.limits import free_host_memory
from systems.ranks.ranks import Ranks
from systems.ranks.side_by_side import side_by_side
from systems.settings import TORCH_DTYPE
from systems.sizes import format_need, format_size
from systems.state_dicts import with_values

ALIGNMENT = 64  # bytes, of a tensor in a scratch file
PARTLY_HERE = (
    "save_pretrained: with `expert_ranks={}` no rank has all experts: save a checkpoint, load it with `expert_ranks=1`, "
    "and do it there; engine.state_dict() has all of them here too"
)
SPARE = 2  # values are spilled to a file unless the host has room for them so many times

Place = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


class Exporting(Protocol):
    """An engine (systems.system.Engine), as far as it is asked here."""

    module: nn.Module
    ranks: Ranks

    @property
    def has_training_state(self) -> bool: ...

    def training_state(self) -> TrainingState: ...

    def masters(self) -> AbstractContextManager[dict[str, torch.Tensor]]: ...

    def make_host_room(self, nbytes: int) -> None: ...


@torch.inference_mode(False)  # what is made within it is of little use outside
def state_dict(engine: Exporting, dtype: str | torch.dtype) -> dict[str, Any]:
    """See Engine.state_dict."""
    wanted = _dtype(dtype)
    with side_by_side(engine.ranks, "state_dict"):
        need = engine.ranks.local_size * sum(nbytes for _, nbytes in _sizes(engine, wanted))
        engine.make_host_room(need)
        check_host(need, "state_dict", "write them with engine.save_pretrained(folder), or ask for dtype='bf16'")
    elsewhere: dict[str, torch.Tensor] = {}
    with _whole(engine, wanted, _in_memory, elsewhere=elsewhere) as values:
        found: dict[str, Any] = engine.module.state_dict()
    kept = {value.untyped_storage().data_ptr(): value for value in values}
    copies: dict[Any, torch.Tensor] = {}

    def own(leaf: Any) -> Any:
        """As it is where it is a copy already; a buffer may be on the device, and lives on."""
        if not isinstance(leaf, torch.Tensor) or (leaf.layout is torch.strided and leaf.untyped_storage().data_ptr() in kept):
            return leaf
        key = id(leaf) if leaf.layout is not torch.strided else (leaf.data_ptr(), leaf.dtype, leaf.shape, leaf.stride())
        return copies.setdefault(key, leaf.detach().to("cpu", copy=True))

    for name, entry in found.items():
        found[name] = tree_map(own, entry)
    return type(found)({**found, **elsewhere}) if elsewhere else found


def save_pretrained(
    engine: Exporting, folder: str | os.PathLike[str], dtype: str | torch.dtype, more: Mapping[str, Any]
) -> None:
    """See Engine.save_pretrained."""
    wanted, module, target, ranks = _dtype(dtype), engine.module, Path(folder).absolute(), engine.ranks
    place: Place = _in_memory
    writes = ranks.rank == 0
    with side_by_side(ranks, "save_pretrained"):
        if ranks.expert_ranks > 1:
            raise UnsupportedError(PARTLY_HERE.format(ranks.expert_ranks))
        if not callable(getattr(module, "save_pretrained", None)):
            raise UnsupportedError(
                f"save_pretrained: {type(module).__name__} has none of its own, as transformers' models have: "
                "torch.save(engine.state_dict(), file) keeps its weights"
            )
        sizes = _sizes(engine, wanted)
        if writes:
            if target.exists() and not target.is_dir():
                raise ValueError(f"save_pretrained: {target} is a file: name a folder, which is made if need be")
            with _writing(target):
                target.mkdir(parents=True, exist_ok=True)
                place = _place(target, sizes)
    with _whole(engine, wanted, place, onto=0), _config_as_it_was(module), side_by_side(ranks, "save_pretrained's end"):
        if writes:
            with _writing(target):
                module.save_pretrained(target, **more)  # type: ignore[operator]


@contextlib.contextmanager
def _writing(target: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ValueError(f"save_pretrained: {target} cannot be written: {error}") from error


@contextlib.contextmanager
def by_all_names(
    module: nn.Module, values: MutableMapping[str, torch.Tensor], *, write: bool, ranks: Ranks
) -> Iterator[dict[str, torch.Tensor]]:
    """Values, given by first name, under every name, and copies of what a state dict has beside them: persistent buffers, and
    parameters that are no engine's (integers).

    write: what is edited is put into `values`, or into the model, in the end. Then each name has a tensor of its own, so that a
    loop over all of them edits none twice; where one of a weight's names was edited, that counts, and where several were, they
    have to agree. ValueError, before anything is changed, where they do not, or where an entry is missing or of another shape.
    Of several ranks, the first one's edits count, in its `values` and in all models; an expert's of the first that has it.
    """
    live: dict[str, torch.Tensor] = {}  # by first name, as the next
    names: dict[str, list[str]] = {}
    first_of: dict[int, str] = {}
    found: dict[str, torch.Tensor] = {}
    with torch.inference_mode(False):
        for name, tensor, _ in _named(module):
            first = first_of.setdefault(id(tensor), name)
            names.setdefault(first, []).append(name)
            if first != name:
                found[name] = found[first].clone() if write else found[first]
            elif first in values:
                found[name] = values[name]
            else:
                live[name] = tensor
                found[name] = tensor.detach().to("cpu", copy=True)
    before = {name: (tensor, tensor._version) for name, tensor in found.items()}
    if not write:
        yield found
        return
    final: dict[str, torch.Tensor] = {}
    with side_by_side(ranks, "the end of summon(write=True)"):
        yield found
        if ranks.rank < ranks.expert_ranks:
            final = {first: _agreed(found, before, several) for first, several in names.items()}
    values.update({first: tensor for first, tensor in final.items() if first in values})
    edited = [first for first in live if final and any(_edited(found, before, name) for name in names[first])]
    with torch.no_grad():
        for first in ranks.exchange("what summon(write=True) edited", edited)[0]:
            tensor = live[first]
            value = ranks.of_first(f"summon(write=True) of {first}", final[first].to(tensor.dtype) if final else tensor)
            copy_into(value.to(tensor.device), tensor)


Before = Mapping[str, tuple[torch.Tensor, int]]


def _edited(found: Mapping[str, torch.Tensor], before: Before, name: str) -> bool:
    return found[name] is not before[name][0] or found[name]._version != before[name][1]


def _agreed(found: Mapping[str, torch.Tensor], before: Before, names: list[str]) -> torch.Tensor:
    """The one value that the names of a tensor stand for."""
    for name in names:
        given, shape = found.get(name), tuple(before[name][0].shape)
        if not isinstance(given, torch.Tensor) or tuple(given.shape) != shape:
            what = "missing" if given is None else tuple(getattr(given, "shape", ())) or type(given).__name__
            raise ValueError(f"summon: {name} is {what} now: leave a tensor of shape {shape} there")
    chosen, *others = [name for name in names if _edited(found, before, name)] or names
    value = found[chosen].detach()
    for other in others:
        if not torch.equal(found[other].detach().to(value).nan_to_num(), value.nan_to_num()):
            raise ValueError(f"summon: {chosen} and {other} are one weight and have different values now: give both the same")
    return value


def _named(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Every name, in the order of a state dict, of parameters and persistent buffers (True)."""
    for path, owner in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                yield prefix + name, parameter, False
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                yield prefix + name, buffer, True


def check_host(need: int, what: str, advice: str) -> None:
    """BudgetError if the host has no room for `need` bytes more."""
    have = free_host_memory()
    if have is not None and need > have:
        raise BudgetError(
            f"{what}: the values take {format_need(need, have)} of host memory, {format_size(have)} are free: {advice}",
            tier="host",
            need=need,
            have=have,
        )


def _dtype(given: str | torch.dtype) -> torch.dtype:
    found = TORCH_DTYPE.get(given) if isinstance(given, str) else given
    if found is None or found not in TORCH_DTYPE.values():
        raise ValueError(f"dtype is {given!r}: give {' or '.join(map(repr, TORCH_DTYPE))}, or torch's name of it")
    return found


def _one_by_one(engine: Exporting, onto: int | None) -> Iterator[tuple[str, torch.Tensor | None]]:
    """First name and value of each parameter; all at once only where a package has no other way. onto: the rank that gets them,
    where the others get None.
    """
    if not engine.has_training_state:
        with engine.masters() as values:
            yield from values.items()
        return
    state = engine.training_state()
    for number, described in enumerate(state.parameters):
        yield described.name, state.read(number, "value") if onto is None else state.bring(number, "value", onto)


def _names(engine: Exporting) -> set[str] | None:
    """First names of the engine's parameters. None: all that are floating, of a package that carries none along."""
    if not engine.has_training_state:
        return None
    return {described.name for described in engine.training_state().parameters}


def _sizes(engine: Exporting, dtype: torch.dtype) -> list[tuple[str, int]]:
    """Bytes of each parameter, and of persistent buffers, as they will be written."""
    seen: set[int] = set()
    sizes, ours = [], _names(engine)
    for name, tensor, is_buffer in _named(engine.module):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            stays = is_buffer or not tensor.is_floating_point() or (ours is not None and name not in ours)
            sizes.append((name, tensor.numel() * (tensor.itemsize if stays else dtype.itemsize)))
    if engine.ranks.expert_ranks > 1:
        here, state = {name for name, *_ in _named(engine.module)}, engine.training_state()
        sizes += [(p.name, math.prod(p.shape) * dtype.itemsize) for p in state.parameters if p.name not in here]
    return sizes


def _in_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def _place(folder: Path, sizes: list[tuple[str, int]]) -> Place:
    """Where values lie until they are written: in memory if there is ample room, otherwise in a scratch file of the folder."""
    need = sum(nbytes for _, nbytes in sizes)
    have = free_host_memory()
    in_memory = have is None or SPARE * need <= have
    scratch = 0 if in_memory else sum(-(-nbytes // ALIGNMENT) * ALIGNMENT for _, nbytes in sizes)
    free = shutil.disk_usage(folder).free
    if need + scratch > free:
        aside = "" if in_memory else ", half of them for a moment, since the host has no memory for them"
        raise BudgetError(
            f"save_pretrained: the values take {format_need(need + scratch, free)}{aside}, {format_size(free)} are free in "
            f"{folder}: name another folder",
            tier="disk",
            need=need + scratch,
            have=free,
        )
    return _in_memory if in_memory else _scratch(folder, scratch)


def _scratch(folder: Path, nbytes: int) -> Place:
    """Its file has no name, and is gone with the last tensor in it."""
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        memory = mmap.mmap(file.fileno(), nbytes)
    used = 0

    def place(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nonlocal used
        count, start = math.prod(shape), used
        used += -(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        if not count:
            return _in_memory(shape, dtype)
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape)

    return place


@contextlib.contextmanager
def _whole(
    engine: Exporting,
    dtype: torch.dtype,
    place: Place,
    onto: int | None = None,
    elsewhere: dict[str, torch.Tensor] | None = None,
) -> Iterator[list[torch.Tensor]]:
    """Within, the engine's parameters are others, with values in that dtype; gives the values. onto: the only rank where.
    elsewhere: takes those of experts that other ranks' models have, by name.
    """
    module = engine.module
    live: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor, is_buffer in _named(module):
        if not is_buffer:
            live.setdefault(id(tensor), (name, tensor))
    number_of = {name: key for key, (name, _) in live.items()}
    stand_ins: dict[int, nn.Parameter] = {}
    for name, value in _one_by_one(engine, onto):
        if value is None:
            continue
        target = place(tuple(value.shape), dtype if value.is_floating_point() else value.dtype).copy_(value)
        key = number_of.get(name)
        if key is None and elsewhere is not None and engine.ranks.expert_ranks > 1:
            elsewhere[name] = target
            continue
        if key is None:
            raise UnsupportedError(
                f"parameter {name} is gone since initialize: keep the model's modules while its engine is open"
            )
        stand_ins[key] = nn.Parameter(target, requires_grad=live[key][1].requires_grad and target.is_floating_point())
    changed = []
    try:
        for owner in module.modules():
            for attribute, parameter in owner._parameters.items():
                if id(parameter) in stand_ins:
                    changed.append((owner, attribute, parameter))
                    owner._parameters[attribute] = stand_ins[id(parameter)]
        with with_values(module):
            yield [parameter.detach() for parameter in stand_ins.values()]
    finally:
        for owner, attribute, parameter in changed:
            owner._parameters[attribute] = parameter


@contextlib.contextmanager
def _config_as_it_was(module: nn.Module) -> Iterator[None]:
    """transformers writes the dtype of the parameters into the config, which goes on being the live model's."""
    config = getattr(module, "config", None)
    attributes = dict(vars(config)) if hasattr(config, "__dict__") else {}
    try:
        yield
    finally:
        if attributes:
            vars(config).clear()
            vars(config).update(attributes)
