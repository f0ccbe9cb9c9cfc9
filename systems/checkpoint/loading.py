"""Reading a checkpoint: everything is checked, by name and by content, before anything of the engine is changed.

A file is read twice, once for its hash and the values' range and once to restore it; with room in the page cache only the
first time from the disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from systems.checkpoint.client_state import CLIENT_STATE, client_state_of
from systems.checkpoint.manifest import BESIDE, BUFFERS, Manifest, ManifestEntry, read_manifest, warn_of_format
from systems.checkpoint.saving import locked
from systems.checkpoint.several import beside_of_mine, readers_of, warn_of_other_ranks
from systems.checkpoint.state import (
    VALUE,
    CheckpointError,
    LoopState,
    SavedParameter,
    Trained,
    TrainingState,
    copy_into,
    dense,
    parts_of,
    persistent_buffers,
    unsound,
)
from systems.checkpoint.tensors import check_hashes, header, readable, tensor
from systems.ranks.ranks import Ranks
from systems.ranks.side_by_side import side_by_side

NAMED = 3  # parameters that a message lists


class Loaded(NamedTuple):
    """position: where the engine stands. beside: tensors that were saved with it, those that each rank had for itself only
    where as many ranks load as saved. client_state: this rank's then, rank 0's otherwise; empty where none was given.
    """

    position: LoopState
    beside: dict[str, torch.Tensor]
    client_state: dict[str, Any]


def load(engine: Trained, folder: str | os.PathLike[str]) -> Loaded:
    """Restore a checkpoint into an engine whose model has the same parameters, before its first step or between two.

    Returns what of it is the loop's. All ranks load, each for itself; what one refuses, all do.
    Raises CheckpointError, before anything is changed, where a file or tensor is missing, damaged or does not fit the model.
    """
    ranks, source = engine.ranks, Path(folder).absolute()
    with side_by_side(ranks, "what to load into"):
        state, buffers = engine.training_state(), dense(persistent_buffers(engine.module))
    with contextlib.ExitStack() as stack:
        with side_by_side(ranks, "what to load"):
            read_manifest(source)  # it is there
            with readable(source):
                stack.enter_context(locked(source, fcntl.LOCK_SH))
        found = _load(state, buffers, source, ranks)
    with side_by_side(ranks, "what was loaded"):
        engine.training_state()  # waits for the last copy to a device
    return found


def position(folder: str | os.PathLike[str]) -> LoopState:
    """Where the run of a checkpoint stood. Raises CheckpointError."""
    return read_manifest(Path(folder).absolute()).position


def _load(state: TrainingState, buffers: Mapping[str, torch.Tensor], source: Path, ranks: Ranks) -> Loaded:
    with side_by_side(ranks, "the form of a checkpoint"):
        manifest = read_manifest(source)
        warn_of_format(manifest, source)
        files = source / manifest.data
        if files.is_symlink():
            raise CheckpointError(f"{files} cannot be read: it is a link")
        _check_parameters(state, manifest, source)
        _check_files(manifest, files)
        for _ in header(files / BESIDE):  # it is there
            pass
        _check_buffers(buffers, files / BUFFERS)
    readers = readers_of(manifest, source, ranks)
    with side_by_side(ranks, "the content of a checkpoint"):
        share = slice(readers.index(ranks.rank), None, len(readers))
        check_hashes(dict(list((manifest.hashes or {}).items())[share]), files)
        _check_values(dict(list(manifest.parameters.items())[share]), files)
        saved_by, beside = beside_of_mine(files / BESIDE, ranks)
        client = beside.pop(CLIENT_STATE, None)
        client_state = {} if client is None else client_state_of(client, f"{CLIENT_STATE} in {files / BESIDE}")
        saved = {name: tensor(files / BUFFERS, name) for name in buffers}
    with side_by_side(ranks, "what is said of a checkpoint"):
        warn_of_other_ranks(ranks, saved_by, source, files / BESIDE)
    with side_by_side(ranks, "the values of a checkpoint"):
        try:
            _restore(state, manifest, files)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}; it could be read before: of the engine a part is restored, so load again"
            ) from None
        with torch.no_grad():
            for name, buffer in buffers.items():
                copy_into(saved[name], buffer)
        state.control.loop = manifest.position
    return Loaded(state.control.loop, beside, client_state)


def _restore(state: TrainingState, manifest: Manifest, files: Path) -> None:
    for number, described in enumerate(state.parameters):
        entry = manifest.parameters[described.name]
        parts = {part: tensor(files / file, f"{part}/{described.name}") for part, file in entry.files.items()}
        moments = tuple(parts[part] for part in state.moments) if described.trainable else None
        state.write(number, SavedParameter(parts[VALUE], moments), entry.updates)


def _check_parameters(state: TrainingState, manifest: Manifest, source: Path) -> None:
    """The same optimizer, names, shapes and trainable ones in the engine and in the checkpoint."""
    if manifest.optimizer != state.optimizer:
        raise CheckpointError(
            f"the checkpoint in {source} has the moments of {manifest.optimizer}, this engine trains with {state.optimizer}: "
            "initialize with that optimizer"
        )
    parameters = state.parameters
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
        wanted = set(parts_of(state, each.trainable))
        if missing := wanted - set(entry.files):
            raise CheckpointError(f"the checkpoint in {source} lacks {sorted(missing)[0]} of {each.name}")
        if beyond := set(entry.files) - wanted:
            raise CheckpointError(
                f"the checkpoint in {source} has {sorted(beyond)[0]} of {each.name}, which {state.optimizer} as it is here "
                "does not keep"
            )


def _check_buffers(buffers: Mapping[str, torch.Tensor], path: Path) -> None:
    found = {key: shape for key, shape, _ in header(path)}
    for name, buffer in buffers.items():
        if name not in found:
            raise CheckpointError(f"{path} lacks the buffer {name}")
        if found[name] != tuple(buffer.shape):
            raise CheckpointError(f"buffer {name} has the shape {tuple(buffer.shape)}, in {path} {found[name]}")
    if found.keys() - buffers.keys():
        raise CheckpointError(f"{path} is of another model: it has the buffer {sorted(found.keys() - buffers.keys())[0]}")


def _check_files(manifest: Manifest, folder: Path) -> None:
    """Every tensor is in its file, whole."""
    expected: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, entry in manifest.parameters.items():
        for part, file in entry.files.items():
            expected.setdefault(file, {})[f"{part}/{name}"] = entry.shape
    for file, tensors in expected.items():
        for key, shape, dtype in header(folder / file):
            if key in tensors and (shape, dtype) != (tensors[key], "F32"):
                raise CheckpointError(f"{folder / file} has {key} as {dtype} {shape}, expected F32 {tensors[key]}")
            tensors.pop(key, None)
        if tensors:
            raise CheckpointError(f"{folder / file} lacks {next(iter(tensors))}")


def _check_values(parameters: Mapping[str, ManifestEntry], folder: Path) -> None:
    """Training can go on from every value and moment."""
    for name, entry in parameters.items():
        for part, file in entry.files.items():
            if wrong := unsound(part, tensor(folder / file, f"{part}/{name}")):
                what = name if part == "value" else f"{part} of {name}"
                raise CheckpointError(f"{what} in {folder / file} {wrong}: no training can go on from it")
