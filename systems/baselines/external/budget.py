"""Budgets and peaks of packages that keep no accounts of their own.

Device: torch's allocator is told the budget, so a package that wants more runs out of memory as on a smaller device.
Host: nothing stops a package, so what it is known to need is worked out beforehand and refused if it cannot be.
"""

from __future__ import annotations

import psutil
import torch

from systems.errors import BudgetError
from systems.machine.allocator import lift_limit, limit_device_memory
from systems.machine.budgets import device_budget, host_budget
from systems.reports import MemoryReport
from systems.settings import Settings
from systems.sizes import format_need, format_size

ONE_MEMORY = "device and host are one memory here: `device_memory` does not bind this package, and its device peak is unknown"


def pinned_bytes(nbytes: int) -> int:
    """What torch's pinned allocator takes for a tensor: the next power of two, 0 for nothing."""
    return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0


def check_host(settings: Settings, *, system: str, need: int) -> None:
    """BudgetError when the package is known to hold more host memory than is allowed. Loads and sets nothing."""
    have = host_budget(settings)
    if need > have:
        raise BudgetError(
            f"{system} needs about {format_need(need, have)} of host memory for model states{_each(settings)}, "
            f"{format_size(have)} are allowed: lower the model, raise `host_memory`, or take more of the device",
            tier="host",
            need=need,
            have=have,
        )


def _each(settings: Settings) -> str:
    return f" on each of {settings.ranks_here} ranks" if settings.ranks_here > 1 else ""


class BudgetInForce:
    """The budgets of one engine, in force from here on, and its peaks."""

    def __init__(self, settings: Settings) -> None:
        self._host = host_budget(settings)
        self._device: int | None = None
        if settings.device == "cuda":
            self._device = device_budget(settings)
            limit_device_memory(self._device)
        self._process = psutil.Process()
        self._before = self._process.memory_info().rss
        self._peak = 0

    def look(self) -> None:
        """Take note of the process's resident memory; cheap enough for every step."""
        self._peak = max(self._peak, self._process.memory_info().rss - self._before)

    def _started_processes(self) -> int:
        """Resident bytes of the processes that this one started."""
        total = 0
        for process in self._process.children(recursive=True):
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return total

    def report(self) -> MemoryReport:
        """host_peak_bytes: resident memory beyond what there was at first, as seen at step boundaries, and that of
        started processes as they are now."""
        self.look()
        cuda = self._device is not None
        pinned = torch.cuda.host_memory_stats().get("allocated_bytes.peak") if cuda and torch.cuda.is_initialized() else None
        return MemoryReport(
            device_peak_bytes=torch.cuda.max_memory_reserved() if cuda else None,
            device_budget_bytes=self._device,
            host_peak_bytes=self._peak + self._started_processes(),
            host_pinned_bytes=pinned if cuda else 0,
            host_budget_bytes=self._host,
        )

    def lift(self) -> None:
        """The next engine of this process sets its own."""
        if self._device is not None:
            lift_limit()
