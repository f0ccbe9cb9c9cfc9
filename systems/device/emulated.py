"""The emulated device: host memory with a hard budget. See Note [The emulated device] in device.py."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from systems.device.device import Device
from systems.device.lanes.compute import HostCompute
from systems.device.meter import ActivationMeter, Check
from systems.device.watch.events import EventLog
from systems.device.watch.stopwatch import HostStopwatch

MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named in Python 3.13 and later

MAX_ADDRESSES = 1 << 44  # bytes: a budget above this is more than any machine has, and processes have 47 bits of addresses


class EmulatedDevice(Device):
    """budget: bytes of the emulated device. threads: of CPU Adam, None for all cores. jitter: called before every job of a lane
    (tests put random sleeps there).
    """

    meter: ActivationMeter
    torch_device = torch.device("cpu")
    name = "cpu-emulated"
    measures_always = evicts_for_activations = True

    def __init__(
        self, budget: int, log: EventLog, *, jitter: Callable[[], None] | None = None, threads: int | None = None
    ) -> None:
        self._threads = threads
        self.stopwatch = HostStopwatch()
        self.compute = HostCompute(self.stopwatch)
        super().__init__(budget, log)
        self.meter = ActivationMeter(self.account, self._no_room)
        self.start_lanes(jitter)

    def _update_threads(self) -> int | None:
        return self._threads

    def guard(self, make_room: Callable[[Callable[[], bool]], bool], check: Check, watches: Callable[[], bool]) -> None:
        def have_room(nbytes: int) -> None:
            if not make_room(lambda: self.account.room >= nbytes):
                raise self.pool.out_of_memory(nbytes, "an activation")

        self.meter.attend(have_room, check)

    def _no_room(self, nbytes: int) -> None:
        raise self.pool.out_of_memory(nbytes, "an activation")

    def _stream(self) -> None:
        return None

    def _new_granule(self, nbytes: int) -> torch.Tensor | None:
        """Address space of twice the budget, so that holes between blocks never matter; only touched pages cost memory."""
        size = max(min(2 * self.account.budget, MAX_ADDRESSES), nbytes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        slab = torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8)
        self.meter.exempt(slab.untyped_storage())
        return slab

    def metered(self) -> AbstractContextManager[object]:
        return self.meter

    def partials(self, sums: list[list[float] | torch.Tensor]) -> Callable[[], list[float]]:
        def read() -> list[float]:
            self.log.count("host_syncs")
            return [float(number) for part in sums for number in part]

        return read
