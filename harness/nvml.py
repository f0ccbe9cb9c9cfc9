"""What NVIDIA's management library says of one device: energy, clocks, link, neighbours. Every answer may be None.

The library's Python binding (nvidia-ml-py) is optional; without it, or without a driver, nothing is known and nothing
fails.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# Bits of nvmlDeviceGetCurrentClocksEventReasons that mean slower than asked for.
_THROTTLE_BITS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "thermal limit",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


@dataclass(frozen=True)
class PcieLink:
    """PCIe generation and lanes, now and at most. An idle device lowers its generation: read it under load."""

    generation: int | None = None
    generation_max: int | None = None
    width: int | None = None
    width_max: int | None = None


class Nvml:
    """One device, found by its PCI address, so that CUDA_VISIBLE_DEVICES does not confuse it with another."""

    def __init__(self, library: Any, handle: Any) -> None:
        self._library, self._handle = library, handle

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except self._library.NVMLError:
            return None

    def energy_joules(self) -> float | None:
        millijoules = self._ask(lambda: self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        return None if millijoules is None else millijoules / 1000

    def throttled_by(self) -> list[str] | None:
        bits = self._ask(lambda: self._library.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle))
        return None if bits is None else [name for bit, name in _THROTTLE_BITS.items() if bits & bit]

    def other_processes(self) -> int | None:
        """Compute processes on the device that are not this one."""
        running = self._ask(lambda: self._library.nvmlDeviceGetComputeRunningProcesses(self._handle))
        if running is None:
            return None
        pids = [process.pid for process in running]
        return len(pids) - (1 if os.getpid() in pids else min(1, len(pids)))  # in a container its own pid reads otherwise

    def link(self) -> PcieLink:
        library, handle = self._library, self._handle
        return PcieLink(
            generation=self._ask(lambda: library.nvmlDeviceGetCurrPcieLinkGeneration(handle)),
            generation_max=self._ask(lambda: library.nvmlDeviceGetMaxPcieLinkGeneration(handle)),
            width=self._ask(lambda: library.nvmlDeviceGetCurrPcieLinkWidth(handle)),
            width_max=self._ask(lambda: library.nvmlDeviceGetMaxPcieLinkWidth(handle)),
        )

    def driver(self) -> str | None:
        version = self._ask(self._library.nvmlSystemGetDriverVersion)
        return version.decode() if isinstance(version, bytes) else version


@dataclass
class Watch:
    """What was seen of a device in several looks: the worst of clocks and neighbours, the best of the link."""

    device: Nvml | None
    throttled_by: set[str] = field(default_factory=set)
    other_processes: int | None = None
    best_link: PcieLink = PcieLink()

    def look(self) -> None:
        if self.device is None:
            return
        self.throttled_by.update(self.device.throttled_by() or ())
        others = self.device.other_processes()
        if others is not None:
            self.other_processes = max(others, self.other_processes or 0)
        link = self.device.link()
        if (link.generation or 0, link.width or 0) > (self.best_link.generation or 0, self.best_link.width or 0):
            self.best_link = link


def open_device(pci_address: str) -> Nvml | None:
    """The device at a PCI address such as 00000000:1B:00.0, or None where nothing can be asked."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return Nvml(pynvml, pynvml.nvmlDeviceGetHandleByPciBusId(pci_address.encode()))
    except pynvml.NVMLError:
        return None
