"""Checkpoints: all that an engine needs to go on with training, by parameter name, whatever system made it.

A folder holds `checkpoint.json` and the subfolder that this names, with safetensors files: in fp32 each parameter's value (the
master weight) and both moments of those that are trained, and the model's persistent buffers. So a run may go on under another
system, budget, dtype or device. What is not in it belongs to the loop: its data's position, random generators, a torch
optimizer's groups and its scheduler.

Note [Replacing a checkpoint]
    The new one's files go into a subfolder of their own; then `checkpoint.json` is replaced, which is one operation of the file
    system; then every subfolder that it does not name goes, also what a save that was killed had left. Whatever else lies in
    the folder stays. Who saves holds a lock on the folder alone, who loads shares it.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from systems.errors import BudgetError, UnsupportedError
from systems.files import flush
from systems.sizes import format_need, format_size

MANIFEST = "checkpoint.json"
DATA = r"^data-[0-9a-f]{16}$"  # the subfolders
FILE_BYTES = 256 << 20  # a file has no more than these, or one tensor: what is copied meanwhile is both together at most
BUFFERS = "buffers.safetensors"
BESIDE = "beside.safetensors"
Part = Literal["value", "exp_avg", "exp_avg_sq"]
PARTS: tuple[Part, ...] = ("value", "exp_avg", "exp_avg_sq")
NAMED = 3  # parameters that a message lists


class CheckpointError(UnsupportedError):
    """A checkpoint cannot be read, or is not one of this model. Nothing was restored of it."""


@dataclass(frozen=True)
class ParameterState:
    """fp32 tensors on the CPU in the parameter's shape; moments are None where it is frozen."""

    value: torch.Tensor
    exp_avg: torch.Tensor | None
    exp_avg_sq: torch.Tensor | None


@dataclass(frozen=True)
class LoopState:
    """steps: of the optimizer, with those that were skipped. good_steps: since the loss scale last changed."""

    steps: int
    skipped_steps: int
    loss_scale: float
    good_steps: int
    skips_in_a_row: int


@dataclass(frozen=True)
class Described:
    """What is known of a parameter without its values."""

    name: str
    shape: tuple[int, ...]
    trainable: bool


class Control(Protocol):
    """updates: steps that each parameter took."""

    loop: LoopState
    updates: list[int]


class TrainingState(Protocol):
    """What outlives a step of an engine, between two steps. A tied parameter is one, under its first name."""

    @property
    def control(self) -> Control: ...

    @property
    def parameters(self) -> Sequence[Described]: ...

    def read(self, parameter: int, part: Part) -> torch.Tensor:
        """One at a time, since each is a copy: as in ParameterState. Of a frozen parameter there is only the value."""

    def write(self, parameter: int, state: ParameterState) -> None:
        """All of it but its updates."""


class Trained(Protocol):
    """An engine, as far as checkpoints know it."""

    module: torch.nn.Module

    def training_state(self) -> TrainingState:
        """UnsupportedError within a step, and from engines whose package keeps its state to itself."""


class _Entry(BaseModel):
    """files: by part, the file that has it."""

    model_config = ConfigDict(extra="forbid")
    shape: tuple[int, ...]
    trainable: bool
    updates: int = Field(ge=0)
    files: dict[Part, Annotated[str, Field(pattern=r"^[\w-]+\.safetensors$")]]


class _Manifest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    format: Literal[1] = 1
    data: str = Field(pattern=DATA)
    steps: int = Field(ge=0)
    skipped_steps: int = Field(ge=0)
    loss_scale: float = Field(gt=0)
    good_steps: int = Field(ge=0)
    skips_in_a_row: int = Field(ge=0)
    parameters: dict[str, _Entry]


def save(engine: Trained, folder: str | os.PathLike[str], *, beside: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write a checkpoint; one that is there is replaced once the new one is complete: see Note [Replacing a checkpoint].

    Waits for the work of the last step. beside: tensors of the loop's own, which `load` gives back.
    Raises what `check_folder` does, BudgetError where the disk has no room, UnsupportedError within a step and for a model with
    sparse buffers.
    """
    target = check_folder(folder)
    state, buffers = engine.training_state(), _dense(persistent_buffers(engine.module))
    target.mkdir(exist_ok=True)
    with _locked(target, fcntl.LOCK_EX):
        try:
            _tidy(target)
            _check_disk(state, target)
            fresh = target / f"data-{secrets.token_hex(8)}"
            fresh.mkdir()
            manifest = _write_all(state, fresh)
            for name, tensors in ((BUFFERS, buffers), (BESIDE, dict(beside or {}))):
                _write({key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}, fresh / name)
            _write_durably(fresh / MANIFEST, manifest.model_dump_json(indent=1).encode())
            (fresh / MANIFEST).replace(target / MANIFEST)
            flush(target)
            flush(target.parent)
        finally:
            _tidy(target)
            with contextlib.suppress(OSError):
                target.rmdir()  # if nothing is in it


def _tidy(target: Path) -> None:
    """Remove the subfolders that are not the checkpoint's."""
    try:
        kept = _manifest(target).data
    except CheckpointError:
        if (target / MANIFEST).exists():
            return  # who knows what is broken
        kept = None
    for path in target.iterdir():
        if re.match(DATA, path.name) and path.name != kept:
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path, how: int) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # there are file systems without locks
            fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)


def check_folder(folder: str | os.PathLike[str]) -> Path:
    """Its full path, once a checkpoint could be written there. ValueError where it is something else, or may not be written."""
    target = Path(folder).absolute()
    try:
        if not _may_take(target):
            raise ValueError(f"{target} is there and is no checkpoint: name a new folder, or one that a checkpoint is in")
        where = target if target.exists() else target.parent
        where.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=where, prefix="data-"):
            pass
    except OSError as error:
        raise ValueError(f"no checkpoint can be written in {target}: {error.strerror}") from None
    return target


def _may_take(target: Path) -> bool:
    """There is nothing yet, a checkpoint, or what is left of one that was not completed."""
    if not target.is_dir():
        return not os.path.lexists(target)
    return (target / MANIFEST).is_file() or all(re.match(DATA, path.name) for path in target.iterdir())


def load(engine: Trained, folder: str | os.PathLike[str]) -> tuple[LoopState, dict[str, torch.Tensor]]:
    """Restore a checkpoint into an engine whose model has the same parameters, before its first step or between two.

    Returns where it stands, and the tensors that were saved beside it.
    Raises CheckpointError, before anything is changed, where a file or tensor is missing or does not fit the model.
    """
    state, source = engine.training_state(), Path(folder).absolute()
    _manifest(source)  # it is there
    with _locked(source, fcntl.LOCK_SH):
        found = _load(state, _dense(persistent_buffers(engine.module)), source)
    engine.training_state()  # waits for the last copy to a device
    return found


def _load(state: TrainingState, buffers: Mapping[str, torch.Tensor], source: Path) -> tuple[LoopState, dict[str, torch.Tensor]]:
    manifest = _manifest(source)
    files = source / manifest.data
    _check_parameters(state.parameters, manifest, source)
    _check_files(manifest, files)
    beside = {key: _tensor(files / BESIDE, key) for key, _, _ in list(_header(files / BESIDE))}
    _check_buffers(buffers, files / BUFFERS)
    for number, described in enumerate(state.parameters):
        entry = manifest.parameters[described.name]
        parts = {part: _tensor(files / file, f"{part}/{described.name}") for part, file in entry.files.items()}
        moments = parts.get("exp_avg"), parts.get("exp_avg_sq")
        state.write(number, ParameterState(parts["value"], *moments))
        state.control.updates[number] = entry.updates
    state.control.loop = _position(manifest)
    with torch.no_grad():
        for name, buffer in buffers.items():
            copy_into(_tensor(files / BUFFERS, name), buffer)
    return state.control.loop, beside


def copy_into(saved: torch.Tensor, buffer: torch.Tensor) -> None:
    """Into a buffer that may be expanded: it has one place then for all its elements along a dimension."""
    for dim, (size, stride) in enumerate(zip(buffer.shape, buffer.stride(), strict=True)):
        if size > 1 and stride == 0:
            saved, buffer = saved.narrow(dim, 0, 1), buffer.narrow(dim, 0, 1)
    buffer.copy_(saved)


def position(folder: str | os.PathLike[str]) -> LoopState:
    """Where the run of a checkpoint stood. Raises CheckpointError."""
    return _position(_manifest(Path(folder).absolute()))


def _position(manifest: _Manifest) -> LoopState:
    return LoopState(**manifest.model_dump(exclude={"format", "data", "parameters"}))


def persistent_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """By name; one that has several is there under the first."""
    found: dict[str, torch.Tensor] = {}
    for path, owner in module.named_modules():
        for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False):
            there = any(buffer is other for other in found.values())
            if name not in owner._non_persistent_buffers_set and not there:
                found[f"{path}.{name}" if path else name] = buffer
    return found


def _dense(buffers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for name, buffer in buffers.items():
        if buffer.layout is not torch.strided:
            raise UnsupportedError(f"checkpoint: buffer {name} is sparse, which no file takes: make it dense or not persistent")
    return buffers


def _check_disk(state: TrainingState, folder: Path) -> None:
    need = sum(4 * math.prod(p.shape) * (3 if p.trainable else 1) for p in state.parameters)
    have = shutil.disk_usage(folder).free
    if need > have:
        raise BudgetError(
            f"the checkpoint takes {format_need(need, have)}, {format_size(have)} are free in {folder}: name another folder",
            tier="disk",
            need=need,
            have=have,
        )


def _write_all(state: TrainingState, folder: Path) -> _Manifest:
    writer = _Writer(folder)
    entries = {}
    for number, described in enumerate(state.parameters):
        parts = PARTS if described.trainable else PARTS[:1]
        files = {part: writer.add(f"{part}/{described.name}", state.read(number, part)) for part in parts}
        entries[described.name] = _Entry(
            shape=described.shape,
            trainable=described.trainable,
            updates=state.control.updates[number],
            files=files,
        )
    writer.flush()
    return _Manifest(**vars(state.control.loop), data=folder.name, parameters=entries)


class _Writer:
    """Gathers tensors into files."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        self._waiting: dict[str, torch.Tensor] = {}

    def add(self, key: str, tensor: torch.Tensor) -> str:
        """The name of the file it comes into."""
        if sum(each.nbytes for each in self._waiting.values()) + tensor.nbytes > FILE_BYTES:
            self.flush()
        self._waiting[key] = tensor.contiguous()
        return self._name

    @property
    def _name(self) -> str:
        return f"state-{self._count:05d}.safetensors"

    def flush(self) -> None:
        if self._waiting:
            _write(self._waiting, self._folder / self._name)
            self._waiting, self._count = {}, self._count + 1


def _write(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Raises OSError, which the package tells by its number only, in words."""
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        found = re.search(r"\(os error (\d+)\)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from None
    path.chmod(path.parent.stat().st_mode & 0o666)  # the package's files are their owner's alone
    flush(path)


def _write_durably(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    flush(path)
    flush(path.parent)


def _manifest(source: Path) -> _Manifest:
    path = source / MANIFEST
    try:
        return _Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint in {source}: {MANIFEST} is not there") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{path} is broken{f' at {where}' if where else ''}: {first['msg'].lower()}") from None


def _check_parameters(parameters: Sequence[Described], manifest: _Manifest, source: Path) -> None:
    """The same names, shapes and trainable ones in the model and in the checkpoint."""
    names = {each.name for each in parameters}
    for found, problem in (
        (sorted(names - manifest.parameters.keys()), "lacks"),
        (sorted(manifest.parameters.keys() - names), "is of another model: it has"),
    ):
        if found:
            more = f" and {len(found) - NAMED} more parameters" if len(found) > NAMED else ""
            raise CheckpointError(f"the checkpoint in {source} {problem} {', '.join(found[:NAMED])}{more}")
    for each in parameters:
        entry = manifest.parameters[each.name]
        if entry.shape != each.shape:
            raise CheckpointError(f"{each.name} has the shape {each.shape}, in the checkpoint in {source} {entry.shape}")
        if entry.trainable != each.trainable:
            here, there = ("trained", "frozen") if each.trainable else ("frozen", "trained")
            raise CheckpointError(f"{each.name} is {here}, and was {there} in the run of the checkpoint in {source}")
        missing = set(PARTS if each.trainable else PARTS[:1]) - set(entry.files)
        if missing:
            raise CheckpointError(f"the checkpoint in {source} lacks {sorted(missing)[0]} of {each.name}")


def _check_buffers(buffers: Mapping[str, torch.Tensor], path: Path) -> None:
    found = {key: shape for key, shape, _ in _header(path)}
    for name, buffer in buffers.items():
        if name not in found:
            raise CheckpointError(f"{path} lacks the buffer {name}")
        if found[name] != tuple(buffer.shape):
            raise CheckpointError(f"buffer {name} has the shape {tuple(buffer.shape)}, in {path} {found[name]}")
    if found.keys() - buffers.keys():
        raise CheckpointError(f"{path} is of another model: it has the buffer {sorted(found.keys() - buffers.keys())[0]}")


def _check_files(manifest: _Manifest, folder: Path) -> None:
    """Every tensor is in its file, whole."""
    expected: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, entry in manifest.parameters.items():
        for part, file in entry.files.items():
            expected.setdefault(file, {})[f"{part}/{name}"] = entry.shape
    for file, tensors in expected.items():
        for key, shape, dtype in _header(folder / file):
            if key in tensors and (shape, dtype) != (tensors[key], "F32"):
                raise CheckpointError(f"{folder / file} has {key} as {dtype} {shape}, expected F32 {tensors[key]}")
            tensors.pop(key, None)
        if tensors:
            raise CheckpointError(f"{folder / file} lacks {next(iter(tensors))}")


def _header(path: Path) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Name, shape and type of each tensor in a file. Its length is checked against them."""
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                view = file.get_slice(key)
                yield key, tuple(view.get_shape()), view.get_dtype()
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def _tensor(path: Path, key: str) -> torch.Tensor:
    try:
        with safe_open(path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(key)
            return tensor
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
