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
from systems.settings import Settings

_GROUPS = (
    "_WORLD_GROUP", "_DATA_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP", "_TENSOR_MODEL_PARALLEL_GROUP",
    "_ZERO_PARAM_INTRA_PARALLEL_GROUP", "mesh_device", "mpu",
)  # fmt: skip


def variables(settings: Settings) -> dict[str, dict[str, str]]:
    """Arguments of OneRank. OMP_NUM_THREADS is read by the OpenMP that CPU Adam is linked with, not torch's own.

    They stay set while the engine lives: SuperOffload starts a process that reads them.
    """
    return {
        "variables": {"DS_ACCELERATOR": settings.device},
        "defaults": {"OMP_NUM_THREADS": str(torch.get_num_threads()), extensions.VARIABLE: str(extensions.folder())},
    }


@contextmanager
def accelerator(settings: Settings) -> Iterator[None]:
    """DeepSpeed chooses its accelerator while it is imported: within, it takes the device that the run is on."""
    before = os.environ.get("DS_ACCELERATOR")
    os.environ["DS_ACCELERATOR"] = settings.device
    try:
        yield
    finally:
        if before is None:
            del os.environ["DS_ACCELERATOR"]
        else:
            os.environ["DS_ACCELERATOR"] = before


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
