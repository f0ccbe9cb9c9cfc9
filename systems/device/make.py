"""From settings to a device."""

from __future__ import annotations

from systems.device.cuda import CudaDevice
from systems.device.device import Device
from systems.device.emulated import EmulatedDevice
from systems.device.watch.events import EventLog
from systems.settings import Settings


def make_device(settings: Settings, budget: int, log: EventLog) -> Device:
    return EmulatedDevice(budget, log) if settings.device == "cpu" else CudaDevice(budget, log)
