"""Launchers such as torchrun, which start several processes to train one model together. Nothing here imports torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from systems.errors import UnsupportedError

NAMES = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launched:
    """What a launcher says of this process. rank, size: among all; local_rank, local_size: among those of its host."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def launched() -> Launched | None:
    """None where this process is alone. UnsupportedError where it is one of several and the environment says not which one."""
    size = _number("WORLD_SIZE") if os.environ.get("WORLD_SIZE") else 1
    if size < 2:
        return None
    missing = [name for name in NAMES if not os.environ.get(name)]
    if missing:
        raise UnsupportedError(
            f"WORLD_SIZE is {size}, so this process is one of several, but {' and '.join(missing)} {_are(missing)} not set: "
            "start all of them with torchrun, or unset WORLD_SIZE"
        )
    rank, local_rank, local_size, _ = (_number(name) for name in NAMES if name != "MASTER_ADDR")
    for name, value, below in (("RANK", rank, size), ("LOCAL_RANK", local_rank, local_size)):
        if value >= below:
            raise UnsupportedError(f"{name} is {value} of {below} processes, counted from 0: start them with torchrun")
    return Launched(rank=rank, size=size, local_rank=local_rank, local_size=local_size)


def chosen_threads() -> int | None:
    """What the user's OMP_NUM_THREADS asks for. The 1 of torchrun is torchrun's own."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked == "1" and "TORCHELASTIC_RUN_ID" in os.environ:
        return None
    return int(asked) if asked.isdigit() and int(asked) > 0 else None


def _are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _number(name: str) -> int:
    given = os.environ[name]
    if not given.isdigit():
        raise UnsupportedError(f"{name} is {given!r}, which is no number: start this process with torchrun")
    return int(given)
