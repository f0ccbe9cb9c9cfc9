"""From settings to the budgets of device, host and disk: what the user gave is trusted, else the smallest limit counts."""

from __future__ import annotations

import os
import shutil

import torch

from systems.errors import BudgetError, UnsupportedError
from systems.machine.launchers import refuse_launched_ranks, refuse_ranks
from systems.machine.limits import in_memory, read_limits
from systems.settings import Settings


def refuse_other_ranks() -> None:
    """UnsupportedError where this process is one of several that a launcher started to train one model together."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        refuse_ranks(torch.distributed.get_world_size(), "the size of torch.distributed's group")
    else:
        refuse_launched_ranks()


def refuse_absent_device(settings: Settings) -> None:
    """UnsupportedError for CUDA where torch sees no device of it, be it built without."""
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("no CUDA device is visible: use `device='cpu'` for the emulated one")


def host_budget(settings: Settings) -> int:
    """Bytes the host tier may hold."""
    if settings.host_memory is not None:
        return settings.host_memory
    limit = read_limits().host_budget_bytes
    if limit is None:
        raise UnsupportedError("this machine's memory limit cannot be read: give it with `host_memory`")
    return limit


def device_budget(settings: Settings) -> int:
    """Bytes the device may hold. The emulated device is host memory, so its default is the machine's limit for that."""
    if settings.device_memory is not None:
        return settings.device_memory
    if settings.device == "cpu":
        return read_limits().host_budget_bytes or host_budget(settings)
    refuse_absent_device(settings)
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


def disk_budget(settings: Settings) -> int:
    """Bytes that files in the settings' folder may take, 0 without one. Raises BudgetError if there is no such folder, and
    UnsupportedError for one in memory: what lies there is host memory that no budget counts."""
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
    return free if settings.disk_memory is None else settings.disk_memory
