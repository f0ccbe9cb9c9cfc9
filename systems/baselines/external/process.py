"""The process group that packages run on, and the environment variables that they read; both are put back as they were found.

Note [Averages and sums]
    Gradients of ranks are summed here and averaged by packages. FSDP2 is told to divide by 1. DDP and DeepSpeed divide by the
    number of ranks N, so each backward pass of theirs starts from N times the loss: exact where N is a power of two, else a
    rounding more. Norms, clipping and losses are then those of the sum, as everywhere.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping

import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch import nn

from systems.errors import UnsupportedError
from systems.ranks.beginnings import begin_alike
from systems.ranks.ranks import Ranks, SingleRank
from systems.settings import Settings


def begin(model: nn.Module, settings: Settings, options: BaseModel, ranks: Ranks | None, system: str) -> Ranks:
    """Who trains. UnsupportedError, on all ranks alike, for what a package cannot do, and where ranks were asked otherwise."""
    if settings.optimizer is not None:
        raise UnsupportedError(f"{system} builds its own Adam: give the learning rate and decay, and no `optimizer`")
    if settings.expert_ranks > 1:
        raise UnsupportedError(
            f"{system} gives every rank all experts: leave `expert_ranks` at 1, or use resident or one of this project's own "
            "strategies"
        )
    if ranks is None and settings.ranks != 1:
        raise UnsupportedError(f"{system} is given no other ranks: leave `ranks` at 1")
    mine = SingleRank() if ranks is None else ranks
    begin_alike(mine, settings, options, model)
    return mine


class PackageGroup:
    """torch.distributed's default group, as a package finds it. backends: by kind of device, what it moves tensors with.

    On several ranks it is there already, and theirs. One rank uses and leaves a group of one that is there; else it makes one,
    whose store is a file: no port is opened.

    variables: set until close(), those in `defaults` only where they are not set. The local rank that a package is told is the
    number of this process's CUDA device, which is what it takes it for.
    """

    def __init__(
        self,
        backends: Mapping[str, str],
        ranks: Ranks,
        variables: Mapping[str, str] | None = None,
        defaults: Mapping[str, str] | None = None,
    ) -> None:
        index = torch.cuda.current_device() if "cuda" in backends else ranks.local_rank
        wanted = {"RANK": str(ranks.rank), "WORLD_SIZE": str(ranks.size)}
        wanted |= {"LOCAL_RANK": str(index), "LOCAL_SIZE": str(ranks.local_size), **(variables or {})}
        wanted |= {name: value for name, value in (defaults or {}).items() if name not in os.environ}
        self._before = {name: os.environ.get(name) for name in wanted}
        self._folder: str | None = None
        _check_default_group(ranks, backends)
        os.environ.update(wanted)
        self._open = True
        if not dist.is_initialized():
            self._folder = tempfile.mkdtemp(prefix="one-rank-")
            store = dist.FileStore(os.path.join(self._folder, "store"), 1)
            dist.init_process_group(_in_words(backends), store=store, rank=0, world_size=1)

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        if self._folder is not None:
            if dist.is_initialized():
                dist.destroy_process_group()
            shutil.rmtree(self._folder, ignore_errors=True)
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _in_words(backends: Mapping[str, str]) -> str:
    """As torch reads them."""
    if len(backends) == 1:
        return next(iter(backends.values()))
    return ",".join(f"{device}:{backend}" for device, backend in backends.items())


def _check_default_group(ranks: Ranks, backends: Mapping[str, str]) -> None:
    if not dist.is_initialized():
        if ranks.size > 1:
            raise UnsupportedError("packages talk through torch.distributed, which is not initialized here: use processes")
        return
    if dist.get_world_size() != ranks.size:
        wants = "one" if ranks.size == 1 else str(ranks.size)
        raise UnsupportedError(f"torch.distributed runs {dist.get_world_size()} ranks here, this system wants {wants}")
    if ranks.size == 1:
        return
    there = dict(each.split(":") for each in dist.get_backend_config().split(","))
    if any(there.get(device) != backend for device, backend in backends.items()):
        raise UnsupportedError(
            f"torch.distributed's default group has {dist.get_backend_config()}, this system needs {_in_words(backends)}: "
            "initialize it with backend='cpu:gloo,cuda:nccl', or leave that to systems.initialize"
        )
