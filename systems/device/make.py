"""From settings to a device."""

from __future__ import annotations

from systems.device.cuda import CudaDevice
from systems.device.device import Device
from systems.device.emulated import EmulatedDevice
from systems.device.watch.events import EventLog
from systems.machine.threads import cores_each
from systems.settings import Settings


def make_device(settings: Settings, budget: int, log: EventLog) -> Device:
    if settings.device == "cuda":
        return CudaDevice(budget, log, cores=cores_each(settings.ranks_here))
    return EmulatedDevice(budget, log, threads=None if settings.ranks_here == 1 else cores_each(settings.ranks_here))
