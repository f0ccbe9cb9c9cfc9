"""Launchers such as torchrun, which start several processes to train one model together. Nothing here imports torch."""

from __future__ import annotations

import os

from systems.errors import UnsupportedError


def refuse_launched_ranks() -> None:
    """UnsupportedError where the environment says that this process is one of several."""
    told = os.environ.get("WORLD_SIZE", "1")
    refuse_ranks(int(told) if told.isdigit() else 1, "WORLD_SIZE")


def refuse_ranks(ranks: int, whence: str) -> None:
    if ranks > 1:
        raise UnsupportedError(
            f"{whence} is {ranks}, and each of these processes would train a model of its own, as engines of several ranks do "
            "not exist yet: start one process, without torchrun, and choose its GPU with CUDA_VISIBLE_DEVICES"
        )
