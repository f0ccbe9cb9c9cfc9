"""A CUDA device under a budget: torch's allocator, streams and events."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from systems.adam.cuda import cuda_kernel
from systems.device.device import Device, abandon_link
from systems.device.lanes.compute import CudaCompute
from systems.device.meter import AllocatorMeter, Check, ReadWatch
from systems.device.watch.events import EventLog
from systems.device.watch.stopwatch import CudaStopwatch
from systems.errors import UnsupportedError
from systems.machine.allocator import lift_limit, limit_device_memory
from systems.machine.limits import raise_open_files, read_limits
from systems.planning.allowance import CUDA

STAGE_BYTES = 64 << 20


class CudaDevice(Device):
    """budget: bytes that torch's allocator may reserve on the current CUDA device; granules come out of it too.

    cores: this process's share of the host's; None for all that it may use.
    """

    meter: AllocatorMeter
    granule_bytes = 32 << 20
    allowance = CUDA
    cpu_lane_threads = 2  # one alone leaves the cores idle while it waits for the interpreter between two updates

    def __init__(
        self, budget: int, log: EventLog, *, jitter: Callable[[], None] | None = None, cores: int | None = None
    ) -> None:
        if not torch.cuda.is_available():
            raise UnsupportedError("no CUDA device is visible: use `device='cpu'` for the emulated one")
        raise_open_files()
        self._cores = cores or read_limits().cores
        self.torch_device = limit_device_memory(budget)
        self.name = torch.cuda.get_device_name(self.torch_device)
        self.own_kernel, self.stopwatch = cuda_kernel(), CudaStopwatch()
        self._watches: Callable[[], bool] = lambda: False
        self.compute = CudaCompute(self.torch_device, self.stopwatch)
        super().__init__(budget, log)
        self.meter = AllocatorMeter(self.torch_device, self.pool)
        self.start_lanes(jitter)

    def prepare(self, pool_bytes: int, largest: int, others: int | None = None) -> int:
        """One slab: the allocator would round and scatter single blocks. What it has no hole for lets the pool grow as far as
        activations leave it room, and evicts beyond."""
        self.drain()
        self.meter.take_in_peak()
        self.pool.trim()
        torch.cuda.empty_cache()
        slab = self.allowance.slab(pool_bytes, largest, self.account.budget)
        self.pool.reserve(slab)
        return slab if others is None else max(slab, self.allowance.beside(others, self.account.budget))

    def _update_threads(self) -> int | None:
        """All cores but two: one launches kernels, one queues copies."""
        return max(self._cores - 2, 1)

    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.torch_device)

    def _new_granule(self, nbytes: int) -> torch.Tensor | None:
        size = max(self.granule_bytes, nbytes)
        self.meter.take_in_peak()
        try:
            with torch.inference_mode(False):  # what is made within it cannot be written outside
                return torch.empty(size, dtype=torch.uint8, device=self.torch_device)
        except torch.cuda.OutOfMemoryError:
            return None

    def guard(self, make_room: Callable[[Callable[[], bool]], bool], check: Check, watches: Callable[[], bool]) -> None:
        self._read_watch, self._watches = ReadWatch(check), watches

    def metered(self) -> AbstractContextManager[object]:
        return self._read_watch.uncompiled() if self._watches() else contextlib.nullcontext()

    def copy_to_host(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Through a pinned piece at a time: a copy to plain memory runs at a tenth of the link's speed."""
        flat, to = source.reshape(-1), target.view(-1)
        stage = torch.empty(min(flat.numel(), STAGE_BYTES // flat.itemsize), dtype=flat.dtype, pin_memory=True)
        for part, out in zip(flat.split(stage.numel()), to.split(stage.numel()), strict=True):
            piece = stage[: part.numel()]
            piece.copy_(part)
            self.host_kernel.copy(out, piece)

    def partials(self, sums: list[list[float] | torch.Tensor]) -> Callable[[], list[float]]:
        if not any(isinstance(part, torch.Tensor) for part in sums):
            return lambda: [number for part in sums for number in part]
        parts = [torch.as_tensor(part, dtype=torch.float64, device=self.torch_device) for part in sums]
        values = torch.empty(sum(part.numel() for part in parts), dtype=torch.float64, pin_memory=True)
        values.copy_(torch.cat(parts), non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.torch_device))

        def read() -> list[float]:
            self.log.count("host_syncs")
            event.synchronize()
            return values.tolist()

        return read

    def drain(self) -> None:
        super().drain()
        torch.cuda.synchronize(self.torch_device)

    def close(self) -> None:
        abandon_link(self)  # else the device waits for other ranks
        torch.cuda.synchronize(self.torch_device)
        super().close()
        lift_limit()
