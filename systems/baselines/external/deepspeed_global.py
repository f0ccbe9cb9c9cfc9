"""What DeepSpeed changes for the whole process, and putting it back, so that another engine can follow in it.

It reads its accelerator and rank from the environment, replaces torch.nn.functional.linear under ZeRO-3, keeps process
groups and the module stack in module globals, and SuperOffload pins this process to a few cores. The accelerator alone
cannot be changed back.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from systems.baselines.external import extensions
from systems.ranks.launchers import chosen_threads
from systems.ranks.ranks import Ranks
from systems.settings import Settings

_GROUPS = (
    "_WORLD_GROUP", "_DATA_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP", "_TENSOR_MODEL_PARALLEL_GROUP",
    "_ZERO_PARAM_INTRA_PARALLEL_GROUP", "mesh_device", "mpu",
)  # fmt: skip


def variables(settings: Settings, ranks: Ranks) -> dict[str, dict[str, str]]:
    """Arguments of PackageGroup. They stay set while the engine lives: SuperOffload starts a process that reads them.

    On the CPU several ranks share memory, whose name has the launcher's address and port in it: where no launcher has set a
    port, the number of the first rank's process takes its place.
    """
    found = {
        "variables": loading(settings),
        "defaults": {extensions.VARIABLE: str(extensions.folder())},
    }
    if settings.device == "cpu" and ranks.size > 1:
        first, *_ = ranks.exchange("process", os.getpid())
        found["defaults"] |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(first)}
    return found


def loading(settings: Settings) -> dict[str, str]:
    """What DeepSpeed and its extensions read while they are loaded: the accelerator that it takes, and for the OpenMP that CPU
    Adam is linked with, not torch's own, this rank's threads, unless the user has set them.
    """
    threads = {} if chosen_threads() else {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    return {"DS_ACCELERATOR": settings.device} | threads


@contextmanager
def loaded_for(settings: Settings) -> Iterator[None]:
    """Within, DeepSpeed is imported and its extensions are built or loaded, for the device that the run is on."""
    wanted = loading(settings)
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def take_own_cores(ranks: Ranks) -> None:
    """This process's part of its cores: SuperOffload divides those of a process between torch and CPU Adam, on each rank."""
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // ranks.local_size
    if ranks.size > 1 and each > 0:
        os.sched_setaffinity(0, cores[ranks.local_rank * each : (ranks.local_rank + 1) * each])


@contextmanager
def as_found(deepspeed: Any) -> Iterator[None]:
    """On exit the process is as it was, as far as DeepSpeed's sources show."""
    linear, cores = F.linear, os.sched_getaffinity(0)
    try:
        yield
    finally:
        F.linear = linear
        os.sched_setaffinity(0, cores)
        deepspeed.comm.comm.cdb = None
        for name in _GROUPS:
            if hasattr(deepspeed.utils.groups, name):
                setattr(deepspeed.utils.groups, name, None)
        stack = sys.modules.get("deepspeed.runtime.zero.parameter_offload")
        if stack is not None:
            stack.FWD_MODULE_STACK.clear()
