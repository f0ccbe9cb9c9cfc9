"""From settings to the budgets of device, host and disk: what the user gave is trusted, else the smallest limit counts."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass

import torch

from systems.errors import BudgetError, UnsupportedError
from systems.machine.limits import in_memory, read_limits
from systems.settings import Settings

CONTEXT_BYTES = 768 << 20  # 747 MiB lay beside torch's allocator on an H200 that ran full


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Bytes of the host's memory and of the disk; the device has its own."""

    host: int
    disk: int


def refuse_absent_device(settings: Settings) -> None:
    """UnsupportedError for CUDA where torch sees no device of it, be it built without."""
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("no CUDA device is visible: use `device='cpu'` for the emulated one")


def host_budget(settings: Settings) -> int:
    """Bytes the host tier of one rank may hold: those of a host share its memory evenly."""
    if settings.host_memory is not None:
        return settings.host_memory // settings.ranks_here
    limit = read_limits().host_budget_bytes
    if limit is None:
        raise UnsupportedError("this machine's memory limit cannot be read: give it with `host_memory`")
    return limit // settings.ranks_here


def device_budget(settings: Settings) -> int:
    """Bytes the device may hold. The emulated device is host memory, so its default is the machine's limit for that. Of a GPU
    it is what a process can have: its CUDA context and kernels are in nobody's account. Equal on equal GPUs: ranks agree.
    """
    if settings.device_memory is not None:
        return settings.device_memory
    if settings.device == "cpu":
        limit = read_limits().host_budget_bytes
        return limit // settings.ranks_here if limit else host_budget(settings)
    refuse_absent_device(settings)
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return total - min(CONTEXT_BYTES, total // 32)


def disk_budget(settings: Settings) -> int:
    """Bytes that one rank's files in the settings' folder may take, 0 without one. Raises BudgetError if there is no such
    folder, and UnsupportedError for one in memory: what lies there is host memory that no budget counts.
    """
    if settings.disk is None:
        return 0
    try:
        free, memory = shutil.disk_usage(settings.disk).free, in_memory(settings.disk)
    except OSError as error:
        raise BudgetError(
            f"`disk` {os.fspath(settings.disk)} cannot be used ({error.strerror}): name a folder on a disk",
            tier="disk",
            need=settings.disk_memory or 0,
            have=0,
        ) from None
    if memory is not None:
        raise UnsupportedError(
            f"`disk` {os.fspath(settings.disk)} is in memory ({memory}), so what is written there takes host memory that no "
            "budget counts: name a folder on a disk, or leave it out and raise `host_memory`"
        )
    return (free if settings.disk_memory is None else settings.disk_memory) // settings.ranks_here
