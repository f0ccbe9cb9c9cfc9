"""First values of a model by name, out of a folder's files, one tensor at a time."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import nn

from systems.pretrained.files import FLOATS, Stored, folder_of, refused, stored_tensors
from systems.state_dicts import buffers_by_every_name

NAMED = 3  # of a list in a message
_T = TypeVar("_T", bound=torch.Tensor)
TYPE_NAMES = {dtype: name for name, dtype in FLOATS.items()}


class FolderWeights:
    """Fills a model's parameters by name; `Settings.initial_weights` is one of these.

    Raises UnsupportedError, one line, where the files do not have all of them, or have them in another shape or as integers,
    and, as each is filled, where values are not finite; a tied parameter may be there under any of its names, and names may
    lack the prefix of transformers' base model.

    unused: names of tensors that no parameter takes. buffers: values of the model's persistent ones, by name.
    """

    buffers: Mapping[str, Stored] = MappingProxyType({})

    def __init__(self, folder: Path, model: nn.Module, stored: Mapping[str, Stored]) -> None:
        self._folder = folder
        self._of: dict[str, Stored] = {}
        self.unused = dict.fromkeys(stored)
        missing = []
        for names, parameter in tied(model):
            found = [key for name in names for key in keys_of(name, model) if key in stored]
            if not found:
                missing.append(names[0])
                continue
            check(names[0], stored[found[0]], tuple(parameter.shape), folder)
            self._of |= dict.fromkeys(names, stored[found[0]])
            for key in found:
                self.unused.pop(key, None)
        if missing:
            raise refused(
                f"{folder} holds no weights for {listed(missing)}: save the model that is to be trained "
                "there, or give a folder with its config.json alone to train from random weights"
            )

    def __call__(self, name: str, tensor: torch.Tensor) -> None:
        """Fill `tensor` in place."""
        if name not in self._of:
            raise refused(f"{self._folder} holds no weights for {name}")
        with torch.no_grad():
            tensor.copy_(self._value(name))

    def _value(self, name: str) -> torch.Tensor:
        """Of a parameter. UnsupportedError for one that no training can begin from, whose first loss would not say why."""
        value = self._of[name].read()
        if not value.isfinite().all():
            raise refused(f"{name} has values in {self._of[name].path} that are not finite: no training can begin with it")
        return value

    @contextmanager
    def beside(self, model: nn.Module, carried: Iterable[str] = ()) -> Iterator[None]:
        """Fills what no engine asks for: persistent buffers, and parameters that it carries along as they are, by name. Where
        what is done within fails they have again what they had; an engine may have moved them meanwhile.
        """
        before = {name: _live(model, name).detach().clone() for name in (*self.buffers, *carried)}
        try:
            for name in before:
                _write(model, name, self.buffers[name].read() if name in self.buffers else self._value(name))
            yield
        except BaseException:
            for name, value in before.items():
                _write(model, name, value)
            raise


def _live(model: nn.Module, name: str) -> torch.Tensor:
    """A buffer or a parameter, wherever it is by now."""
    path, _, attribute = name.rpartition(".")
    found: torch.Tensor = getattr(model.get_submodule(path), attribute)
    return found


@torch.no_grad()
def _write(model: nn.Module, name: str, value: torch.Tensor) -> None:
    _live(model, name).copy_(value)


def folder_weights(model: nn.Module, folder: str | os.PathLike[str]) -> FolderWeights:
    """First values of a model, whose parameters may be on the meta device. Nothing of it is changed; its persistent buffers and
    what an engine carries along get theirs by `beside`.

    UnsupportedError as FolderWeights, for persistent buffers likewise, for values in 64 bits, and for names of one parameter
    that have different values. Tensors that the model has no place for are left out, with a warning that names them.
    """
    source = folder_of(folder)
    stored = stored_tensors(source)
    found = FolderWeights(source, model, stored)
    for names, _ in tied(model):
        _check_one_value([key for name in names for key in keys_of(name, model) if key in stored], stored, source)
    found.buffers = {names[0]: _buffer_in(stored, model, names, buffer, source) for names, buffer in _persistent(model)}
    _tell_unused(set(found.unused), model, source)
    return found


def _by_names(named: Iterable[tuple[str, _T]]) -> list[tuple[list[str], _T]]:
    """Every tensor with all its names."""
    found: dict[int, tuple[list[str], _T]] = {}
    for name, tensor in named:
        found.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(found.values())


def tied(model: nn.Module) -> list[tuple[list[str], nn.Parameter]]:
    """Every parameter with all its names."""
    return _by_names(model.named_parameters(remove_duplicate=False))


def keys_of(name: str, model: nn.Module) -> tuple[str, ...]:
    """What a file may call it, which is nothing that the model calls another tensor."""
    bare = name.removeprefix(f"{getattr(model, 'base_model_prefix', '')}.")
    return (name,) if bare == name or _has(model, bare) else (name, bare)


def _has(model: nn.Module, name: str) -> bool:
    path, _, attribute = name.rpartition(".")
    try:
        owner = model.get_submodule(path)
    except AttributeError:
        return False
    return attribute in owner._parameters or attribute in owner._buffers


def check(name: str, stored: Stored, shape: tuple[int, ...], folder: Path) -> None:
    """UnsupportedError for what cannot become the parameter's values."""
    if stored.shape != shape:
        raise refused(f"{name} has shape {stored.shape} in {folder}, {shape} here")
    if stored.dtype is None:
        raise refused(f"{name} is quantized in {stored.path}: train from the weights it was made of")


def listed(names: list[str]) -> str:
    """The first of them."""
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def _check_one_value(keys: list[str], stored: Mapping[str, Stored], folder: Path) -> None:
    """keys: of one parameter."""
    for key in keys:
        if stored[key].dtype is torch.float64:
            raise refused(f"{key} is F64 in {stored[key].path}, and master weights are in fp32: convert it before")
    first, *others = dict.fromkeys(keys)
    for other in others:
        if stored[other].shape != stored[first].shape or not torch.equal(stored[first].read(), stored[other].read()):
            raise refused(
                f"{first} and {other} are one weight of the model, and have different values in {folder}: set "
                "tie_word_embeddings to false in its config.json, or leave one of them in the files"
            )


def _persistent(model: nn.Module) -> list[tuple[list[str], torch.Tensor]]:
    """Every persistent buffer with all its names."""
    return _by_names(buffers_by_every_name(model))


def _buffer_in(
    stored: Mapping[str, Stored], model: nn.Module, names: Sequence[str], buffer: torch.Tensor, folder: Path
) -> Stored:
    name = names[0]
    held = next((stored[key] for each in names for key in keys_of(each, model) if key in stored), None)
    if held is None:
        raise refused(f"{folder} holds no values for the buffer {name}: save the model that is to be trained there")
    if buffer.layout is not torch.strided:
        raise refused(f"buffer {name} is sparse, which no file of {folder} is: make it dense or not persistent")
    if held.shape != tuple(buffer.shape) or (held.dtype is not None) != buffer.is_floating_point():
        kind = "integers" if held.dtype is None else TYPE_NAMES[held.dtype]
        raise refused(f"buffer {name} is {kind} {held.shape} in {folder}, {buffer.dtype} {tuple(buffer.shape)} here")
    return held


def _tell_unused(names: set[str], model: nn.Module, folder: Path) -> None:
    """But for buffers, among them tables that a model makes anew, which older versions of transformers wrote."""
    own = {key for name, _ in model.named_buffers(remove_duplicate=False) for key in keys_of(name, model)}
    if left := sorted(names - own):
        warnings.warn(str(refused(f"{folder} has {listed(left)}, which the model has no place for: left out")), stacklevel=3)
