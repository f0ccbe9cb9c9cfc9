"""A checkpoint of several ranks: who writes, who reads what, and what each rank has beside it.

Note [Saved by several ranks]
    A checkpoint of several ranks is that of one: whole tensors by name, which any number of ranks reads. The ranks that see the
    folder share the parameters evenly; each part of one is brought together on its writer, which has files of its own. Rank 0,
    which has the lock, writes the manifest once all files are on their disks. Buffers are rank 0's. What each rank has of its
    own beside the checkpoint (states of random generators, its client_state) is given back where as many ranks load;
    otherwise all have rank 0's client_state.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

import torch

from systems.checkpoint.client_state import CLIENT_STATE
from systems.checkpoint.manifest import BESIDE, MANIFEST, Manifest, read_manifest
from systems.checkpoint.state import CheckpointError, TrainingState, parts_of
from systems.checkpoint.tensors import header, readable, tensor
from systems.machine.durable import prove_folder
from systems.machine.limits import host_identity
from systems.ranks.ranks import Ranks
from systems.ranks.side_by_side import side_by_side

OF_RANKS = "ranks/"  # begins the name of what only several ranks save beside a checkpoint
SIZE = OF_RANKS + "size"


def check_same_folder(ranks: Ranks, folder: Path) -> None:
    """ValueError on all ranks where they name different ones."""
    first, *_ = told = ranks.exchange("the folder of a checkpoint", str(folder))
    for rank, theirs in enumerate(told):
        if theirs != first:
            raise ValueError(
                f"the checkpoint's folder is {first} on rank 0 and {theirs} on rank {rank}: give all ranks the same"
            )


def writers_in(folder: Path, ranks: Ranks) -> list[int]:
    """The ranks that see it, which rank 0 has made, and can write there."""

    def sees() -> bool:
        try:
            prove_folder(folder)
        except OSError:
            return False
        return True

    return [rank for rank, theirs in enumerate(ranks.together("who sees the folder", sees)) if theirs or rank == 0]


def turns_of(state: TrainingState, writers: Sequence[int]) -> Iterator[dict[int, int]]:
    """Who writes which parameter, turn by turn: writer to number. In model order, each goes to who has the least so far."""
    shares: dict[int, list[int]] = {writer: [] for writer in writers}
    loads = dict.fromkeys(writers, 0)
    for number, each in enumerate(state.parameters):
        writer = min(writers, key=loads.__getitem__)
        shares[writer].append(number)
        loads[writer] += math.prod(each.shape) * len(parts_of(state, each.trainable))
    for turn in zip_longest(*shares.values()):
        yield {writer: number for writer, number in zip(shares, turn, strict=True) if number is not None}


def warn_of_buffers(ranks: Ranks, buffers: Mapping[str, torch.Tensor]) -> None:
    """Where they differ, as running averages do: rank 0's count."""
    if ranks.size == 1:
        return
    first, *_ = told = ranks.together("buffers", lambda: {name: _digest(buffer) for name, buffer in buffers.items()})
    different = [name for name in first if any(theirs.get(name) != first[name] for theirs in told)]
    if not different:
        return
    more = f" and {len(different) - 1} more" if len(different) > 1 else ""
    with side_by_side(ranks, "what is said of buffers"):
        if ranks.rank == 0:
            said = f"buffer {different[0]}{more} differ between ranks: the checkpoint has those of rank 0"
            warnings.warn(said, stacklevel=4)


def _digest(buffer: torch.Tensor) -> str:
    return hashlib.sha256(buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def beside_of_all(ranks: Ranks, beside: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """beside: the loop's, of which rank 0's are saved; own: what each rank has for itself."""
    if ranks.size == 1:
        return {**beside, **own}
    told = ranks.together("own tensors", lambda: {key: each.detach().cpu().contiguous().clone() for key, each in own.items()})
    named = {f"{OF_RANKS}{rank}/{key}": each for rank, theirs in enumerate(told) for key, each in theirs.items()}
    return {**beside, SIZE: torch.tensor(ranks.size), **named}


def beside_of_mine(path: Path, ranks: Ranks) -> tuple[int, dict[str, torch.Tensor]]:
    """How many ranks saved that file, and of what it has this rank's and what is everybody's."""
    keys, saved = [key for key, _, _ in header(path)], _saved_by(path)
    found = {key: tensor(path, key) for key in keys if not key.startswith(OF_RANKS)}
    mine = f"{OF_RANKS}{ranks.rank}/"
    if saved == ranks.size:
        found |= {key.removeprefix(mine): tensor(path, key) for key in keys if key.startswith(mine)}
    return saved, found


def ranks_of(folder: str | os.PathLike[str]) -> int:
    """How many ranks saved the checkpoint. Raises CheckpointError."""
    source = Path(folder).absolute()
    return _saved_by(source / read_manifest(source).data / BESIDE)


def _saved_by(path: Path) -> int:
    for key, shape, _ in header(path):
        if key == SIZE:
            if shape:
                raise CheckpointError(f"{path} has {SIZE} of shape {shape}, expected one number")
            return int(tensor(path, key))
    return 1


def warn_of_other_ranks(ranks: Ranks, saved: int, source: Path, beside: Path) -> None:
    """beside: the file."""
    if saved != ranks.size and ranks.rank == 0:
        theirs = [tensor(beside, key) for key, _, _ in header(beside) if re.fullmatch(f"{OF_RANKS}[0-9]+/{CLIENT_STATE}", key)]
        unlike = any(not torch.equal(each, theirs[0]) for each in theirs)
        warnings.warn(
            f"the checkpoint in {source} was saved by {_ranks(saved)} and goes on with {_ranks(ranks.size)}: dropout begins "
            "anew, and a step has another global batch unless `accumulate` or the batches make up for it"
            + ("; client_state is rank 0's, and others had another" if unlike else ""),
            stacklevel=4,
        )


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def readers_of(manifest: Manifest, source: Path, ranks: Ranks) -> Sequence[int]:
    """The ranks that read the very files that this one reads, itself among them: they share the work of checking them.

    CheckpointError where ranks read different checkpoints under the folder's name.
    """
    if ranks.size == 1:
        return [0]

    def found() -> tuple[str, tuple[str, int, int]]:
        with readable(source / MANIFEST):
            file = (source / MANIFEST).stat()
        content = hashlib.sha256(manifest.model_dump_json().encode()).hexdigest()
        return content, (host_identity(), file.st_dev, file.st_ino)

    told = ranks.together("which checkpoint", found)
    for rank, (theirs, _) in enumerate(told):
        if theirs != told[0][0]:
            raise CheckpointError(
                f"ranks 0 and {rank} find different checkpoints in {source}: name a folder that all see, or copy one to all"
            )
    return [rank for rank, (_, files) in enumerate(told) if files == told[ranks.rank][1]]
