"""Writing a checkpoint in place of the last one, once there is room for it and it is sound."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from systems.checkpoint.client_state import CLIENT_STATE, client_state_tensor
from systems.checkpoint.manifest import (
    BESIDE,
    BUFFERS,
    DATA,
    MANIFEST,
    FileHash,
    Manifest,
    ManifestEntry,
    read_manifest,
    sealed,
)
from systems.checkpoint.several import beside_of_all, check_same_folder, turns_of, warn_of_buffers, writers_in
from systems.checkpoint.state import (
    ADAM_MOMENTS,
    CheckpointError,
    Part,
    SaveError,
    Trained,
    TrainingState,
    dense,
    parts_of,
    persistent_buffers,
    unsound,
)
from systems.checkpoint.tensors import Writer
from systems.errors import BudgetError, DivergedError
from systems.machine.durable import flush, write_whole
from systems.ranks.ranks import Ranks
from systems.ranks.side_by_side import side_by_side
from systems.sizes import format_need, format_size

OVERHEAD_BYTES = 1024  # of a parameter, for what says where it is; and of the rest


More = Mapping[str, Mapping[str, torch.Tensor]]  # by file: what is no parameter's


def save(
    engine: Trained,
    folder: str | os.PathLike[str],
    *,
    beside: Mapping[str, torch.Tensor] | None = None,
    own: Mapping[str, torch.Tensor] | None = None,
    client_state: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint; one that is there is replaced once the new one is complete: see Note [Replacing a checkpoint].

    Waits for the work of the last step. All ranks save: see Note [Saved by several ranks]. beside: tensors of the loop's own,
    which `load` gives back. own: such as each rank has for itself, under other names. client_state: see
    systems.save_checkpoint; each rank has its own.
    Raises what `check_folder` does, BudgetError where the disk has no room, UnsupportedError within a step, for a model with
    sparse buffers and, before anything is written, for a client_state that JSON does not hold, DivergedError for weights or
    moments that are not finite, and SaveError where writing fails: then the last checkpoint is still there, unless somebody
    removed it. What one rank raises, all do.
    """
    ranks = engine.ranks
    first = ranks.rank == 0
    with side_by_side(ranks, "where to save"):
        client = {CLIENT_STATE: client_state_tensor(client_state)}
        target = check_folder(folder) if first else Path(folder).absolute()
    check_same_folder(ranks, target)
    with side_by_side(ranks, "what to save"):
        state, buffers = engine.training_state(), dense(persistent_buffers(engine.module))
    state.meet()
    warn_of_buffers(ranks, buffers)
    more = {BUFFERS: buffers, BESIDE: beside_of_all(ranks, {**(beside or {}), **client}, {**(own or {}), **client})}
    try:
        with contextlib.ExitStack() as stack:
            with _writing(ranks, "room to save", target):
                if first:
                    stack.enter_context(_alone_in(target, state, more))
            _replace(state, more, target, ranks)
    except BaseException as error:
        if first:
            with contextlib.suppress(OSError):
                target.rmdir()  # if nothing is in it
        if isinstance(error, OSError) and not isinstance(error, SaveError):
            raise _not_saved(error, target) from error
        raise


@contextlib.contextmanager
def _alone_in(target: Path, state: TrainingState, more: More) -> Iterator[None]:
    """Within, nobody else reads or writes there, and there is room. Afterwards there is nothing unfinished."""
    target.mkdir(exist_ok=True)
    with locked(target, fcntl.LOCK_EX):
        try:
            try:
                _tidy(target)
                _check_disk(state, more, target)
                yield
            finally:
                _clear(target)
        except BaseException:  # Ctrl-C may have come while what is left was being removed
            _clear(target)
            raise


@contextlib.contextmanager
def _writing(ranks: Ranks, what: str, target: Path) -> Iterator[None]:
    """As `side_by_side`; SaveError for what keeps a file from being written."""
    with side_by_side(ranks, what):
        try:
            yield
        except OSError as error:
            raise _not_saved(error, target) from error


def remove_unfinished(folder: str | os.PathLike[str]) -> None:
    """What a save left whose process was killed, unless somebody else is at it."""
    target = Path(folder).absolute()
    with contextlib.suppress(OSError), locked(target, fcntl.LOCK_EX | fcntl.LOCK_NB):
        _clear(target)


def _clear(target: Path) -> None:
    with contextlib.suppress(OSError):
        _tidy(target)
        target.rmdir()  # if nothing is in it


def _replace(state: TrainingState, more: More, target: Path, ranks: Ranks) -> None:
    first, name = ranks.rank == 0, f"data-{secrets.token_hex(8)}"
    with _writing(ranks, "the folder of the files", target):
        if first:
            (target / name).mkdir()
    fresh = target / ranks.exchange("its name", name)[0]
    writers = writers_in(fresh, ranks)
    with Writer(fresh, rank=ranks.rank, ranks=ranks.size) as writer:
        entries = dict(_entries(state, writer, writers, ranks, target))
        with _writing(ranks, "the last files", target):
            for name, tensors in more.items() if first else ():
                writer.write(name, {key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()})
            hashes = writer.finish() if ranks.rank in writers else {}
    told = ranks.exchange("what is in the files", (entries, hashes))
    with _writing(ranks, "the manifest", target):
        if first:
            _write_manifest(state, told, target, fresh)


def _write_manifest(
    state: TrainingState, told: Sequence[tuple[dict[str, ManifestEntry], dict[str, FileHash]]], target: Path, fresh: Path
) -> None:
    """told: by each rank, of the files that it wrote."""
    found = {name: entry for entries, _ in told for name, entry in entries.items()}
    parameters = {described.name: found[described.name] for described in state.parameters}
    hashes = {name: each for _, theirs in told for name, each in theirs.items()}
    position, optimizer = vars(state.control.loop), state.optimizer
    content = sealed(Manifest(**position, data=fresh.name, parameters=parameters, hashes=hashes, optimizer=optimizer))
    write_whole(target / MANIFEST, content, over="file", aside=fresh / MANIFEST)  # what is in a subfolder goes with that
    flush(target)
    flush(target.parent)


def _entries(
    state: TrainingState, writer: Writer, writers: Sequence[int], ranks: Ranks, target: Path
) -> Iterator[tuple[str, ManifestEntry]]:
    """Of the parameters that this rank writes. In each turn, every writer gets one as long as it has any left."""
    for turn in turns_of(state, writers):
        mine, files = turn.get(ranks.rank), dict[Part, str]()
        for part in parts_of(state, True):
            with _writing(ranks, f"{part} of parameters {list(turn.values())}", target):
                brought = [  # what keeps one rank from that keeps all, or comes behind the last collective within
                    state.bring(number, part, writer_rank)
                    for writer_rank, number in turn.items()
                    if part in parts_of(state, state.parameters[number].trainable)
                ]
                for values in brought:
                    if values is not None and mine is not None:
                        files[part] = _add(writer, part, state.parameters[mine].name, values)
        if mine is not None:
            described = state.parameters[mine]
            yield (
                described.name,
                ManifestEntry(
                    shape=described.shape,
                    trainable=described.trainable,
                    updates=state.updates(mine),
                    files=files,
                ),
            )


def _add(writer: Writer, part: Part, name: str, values: torch.Tensor) -> str:
    """The name of the file it comes into."""
    if wrong := unsound(part, values):
        what = name if part == "value" else f"{part} of {name}"
        raise DivergedError(f"no checkpoint is written, for {what} {wrong}; the one before it stays, if there is one")
    return writer.add(f"{part}/{name}", values)


def _not_saved(error: OSError, target: Path) -> SaveError:
    """One line, wherever it came from; the folder may be gone by now."""
    said = error.strerror or str(error)
    what = error.filename if isinstance(error.filename, str) else str(target)
    last = "the one before it is still there" if (target / MANIFEST).is_file() else "there is none before it"
    text = f"the checkpoint in {target} was not written: {said}: {what}; {last}"
    return SaveError(error.errno, text, what)


def _tidy(target: Path) -> None:
    """Remove the subfolders that are not the checkpoint's."""
    try:
        kept = read_manifest(target).data
    except CheckpointError:
        if os.path.lexists(target / MANIFEST):
            return  # who knows what is broken
        kept = None
    for path in target.iterdir():
        if re.fullmatch(DATA, path.name) and path.name != kept:
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def locked(folder: Path, how: int) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, how)
        except BlockingIOError:
            raise
        except OSError:  # there are file systems without locks
            pass
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
        _prove_subfolder(where)
    except OSError as error:
        raise ValueError(f"no checkpoint can be written in {target}: {error.strerror}") from None
    return target


def _prove_subfolder(folder: Path) -> None:
    """What will be made there is a folder, so one is tried, by a name that anybody else takes for what a killed save left."""
    probe = folder / f"data-{secrets.token_hex(8)}"
    try:
        probe.mkdir()
    finally:
        with contextlib.suppress(FileNotFoundError):
            probe.rmdir()


def _may_take(target: Path) -> bool:
    """There is nothing yet, a checkpoint, or what is left of one that was not completed."""
    if not target.is_dir():
        return not os.path.lexists(target)
    return (target / MANIFEST).is_file() or all(re.fullmatch(DATA, path.name) for path in target.iterdir())


def check_room(model: torch.nn.Module, folder: str | os.PathLike[str], *, saves: int = 1, moments: int = ADAM_MOMENTS) -> None:
    """Before training, with a model of any device: BudgetError where the disk has no room for so many checkpoints of it, each
    of which is written beside the last one. moments: that the optimizer keeps of a parameter. Raises what `check_folder` does.
    """
    target = check_folder(folder)
    new = need_bytes(((p.numel(), p.requires_grad) for p in model.parameters()), persistent_buffers(model).values(), moments)
    try:
        kept: str | None = read_manifest(target).data
    except CheckpointError:
        kept = None
    old = _taken(target / kept) if kept else 0
    stale = sum(_taken(path) for path in target.glob("data-*") if re.fullmatch(DATA, path.name) and path.name != kept)
    free = shutil.disk_usage(target if target.exists() else target.parent).free + stale
    if new > free:
        raise _no_room(f"the checkpoint takes {format_need(new, free)}", new, free, target)
    if saves > 1 and new + new > free + old:
        both = f"each save writes a checkpoint of {format_size(new)} beside the last: {format_need(new + new, free + old)}"
        raise _no_room(both, new + new, free + old, target)


def _taken(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return sum(path.lstat().st_size for path in folder.iterdir())
    return 0


def need_bytes(parameters: Iterable[tuple[int, bool]], tensors: Iterable[torch.Tensor], moments: int = ADAM_MOMENTS) -> int:
    """Of a checkpoint. parameters: (elements, trained). moments: of a trained one."""
    states = sum(4 * numel * (1 + moments * trainable) + OVERHEAD_BYTES for numel, trainable in parameters)
    return states + sum(each.numel() * each.element_size() for each in tensors) + OVERHEAD_BYTES


def _check_disk(state: TrainingState, more: More, folder: Path) -> None:
    sizes = ((math.prod(p.shape), p.trainable) for p in state.parameters)
    need = need_bytes(sizes, (tensor for tensors in more.values() for tensor in tensors.values()), len(state.moments))
    have = shutil.disk_usage(folder).free
    if need > have:
        raise _no_room(f"the checkpoint takes {format_need(need, have)}", need, have, folder)


def _no_room(what: str, need: int, have: int, folder: Path) -> BudgetError:
    have_text = f"{format_size(have)} are free in {folder}: make room there, or name another folder"
    return BudgetError(f"{what}, {have_text}", tier="disk", need=need, have=have)
