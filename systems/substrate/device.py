"""The two devices: CUDA, and its emulation on the CPU. Everything that differs between them is here, behind one type.

Note [The emulated device]
    A second slab of host memory with a hard budget; one thread a lane does the copies; compute is the caller's thread. The
    accounts, counters and waits are those of the CUDA device, so claims about traffic and memory can be tested without one.
    Claims about time cannot.
"""

from __future__ import annotations

import contextlib
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch

from systems.cuda_memory import lift_limit, limit_device_memory
from systems.errors import UnsupportedError
from systems.limits import raise_open_files, read_limits
from systems.planning.allowance import CUDA, EXACT
from systems.planning.plan import LaneKind, Tier
from systems.substrate.access import Access
from systems.substrate.adam.cpu import cpu_kernel
from systems.substrate.adam.cuda import cuda_kernel
from systems.substrate.adam.kernel import AdamKernel
from systems.substrate.events import EventLog
from systems.substrate.lanes import CudaTicket, DoneTicket, Lane, Ticket, UpdateLane
from systems.substrate.meter import ActivationMeter, Check, ReadWatch
from systems.substrate.phases import NoPhases, Phases
from systems.substrate.stopwatch import CudaStopwatch, HostStopwatch, Stopwatch
from systems.substrate.tiers import Account, Pool
from systems.substrate.transfers import ComputeLane, Transfers

MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named in Python 3.13 and later
MAX_ADDRESSES = 1 << 44  # bytes: a budget above this is more than any machine has, and processes have 47 bits of addresses
COPY_LANES = (LaneKind.H2D, LaneKind.D2H)


STAGE_BYTES = 64 << 20


class Device(ABC):
    """One rank's device with its lanes, pool and accounts.

    name: of its model, as its maker gives it. account: DEVICE bytes, pool and activations. kernel: Adam where the device's own
    memory is updated. host_kernel: Adam on the CPU lane, whose jobs cpu_lane_threads threads take.
    """

    torch_device: torch.device
    label: str
    name: str
    stopwatch: Stopwatch
    allowance = EXACT
    measures_always = False  # memory at each moment costs nothing: read it in planned steps too
    activations: Callable[[], int] | None = None  # reckons their bytes anew, where the device itself does not count them
    evicts_for_activations = False  # while they are made: else there has to be room for them before
    cpu_lane_threads = 1

    def __init__(self, budget: int, log: EventLog) -> None:
        self.log, self.access = log, Access()
        self.account = Account(Tier.DEVICE, budget, log)
        self.phases: Phases = NoPhases()
        self.host_kernel: AdamKernel = cpu_kernel(threads=self._update_threads())
        self.pool = Pool(self.account, self._new_granule, lambda: self._mark(log.next_ticket()))

    def _update_threads(self) -> int | None:
        """Threads of CPU Adam; None for all cores."""
        return None

    def start_lanes(self, jitter: Callable[[], None] | None) -> None:
        self.jitter = jitter
        self.lanes = {kind: Lane(kind, stream=self._stream(), jitter=jitter) for kind in COPY_LANES}
        self.lanes[LaneKind.CPU] = UpdateLane(LaneKind.CPU, jitter=jitter, threads=self.cpu_lane_threads)
        self.transfers = Transfers(self.lanes, ComputeLane(self._order, self._mark), self.log)

    @property
    def plannable_bytes(self) -> int:
        """What a plan may fill, activations included."""
        return self.allowance.plannable(self.account.budget)

    def prepare(self, pool_bytes: int, largest: int, others: int | None = None) -> int:
        """A plan whose blocks need this many bytes at once comes into force; nothing but pinned blocks is resident.

        largest: bytes of its largest block that moves. others: the highest bytes beside the pool, where they are known.
        Returns the bytes that the pool may grow to.
        """
        return self.plannable_bytes

    @property
    @abstractmethod
    def kernel(self) -> AdamKernel:
        """Adam for tensors on this device."""

    @abstractmethod
    def _stream(self) -> torch.cuda.Stream | None: ...

    @abstractmethod
    def _order(self, ticket: Ticket) -> None: ...

    @abstractmethod
    def _mark(self, id: int) -> Ticket: ...

    @abstractmethod
    def _new_granule(self, nbytes: int) -> torch.Tensor | None: ...

    @abstractmethod
    def metered(self) -> AbstractContextManager[object]:
        """Forward and backward run inside this."""

    @abstractmethod
    def start_interval(self) -> tuple[int, int]:
        """Peak non-model bytes since the last call, and the same had gradients been kept in autograd's buffers."""

    @abstractmethod
    def hand_over(self, nbytes: int) -> None:
        """A gradient was copied out of autograd's buffer."""

    def copy_to_host(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """target (host, contiguous) = source (device), of the same type; done on return. For start-up, not for a step."""
        target.copy_(source)

    @abstractmethod
    def partials(self, sums: list[list[float] | torch.Tensor]) -> Callable[[], list[float]]:
        """Partial sums of squares as numbers, in order; the host waits, once a step, when the result is called for."""

    @abstractmethod
    def peak_bytes(self) -> int: ...

    def guard(self, make_room: Callable[[Callable[[], bool]], bool], check: Check, watches: Callable[[], bool]) -> None:
        """From here on activations that need room may evict, and `check` is told of operations.

        make_room(fits): evicts until fits() is true; False if it never is.

        The emulated device sees every operation and can do both; CUDA's allocator asks nobody, and there operations are shown
        while `watches()`, asked as a pass begins: it takes time.
        """
        return

    def exempt(self, storage: torch.UntypedStorage) -> None:
        """These bytes are in the account as model data already: never count them as activations."""
        return

    def drain(self) -> None:
        """Block until all lanes are done; raises the first error, after that: who is told of it may give memory back."""
        for lane in self.lanes.values():
            lane.rest()
        for lane in self.lanes.values():
            lane.drain()

    def close(self) -> None:
        for lane in self.lanes.values():
            lane.close()
        self.pool.close()


class EmulatedDevice(Device):
    """budget: bytes of the emulated device. jitter: called before every job of a lane (tests put random sleeps there)."""

    torch_device = torch.device("cpu")
    label = name = "cpu-emulated"
    measures_always = evicts_for_activations = True

    def __init__(self, budget: int, log: EventLog, *, jitter: Callable[[], None] | None = None) -> None:
        self.stopwatch = HostStopwatch()
        super().__init__(budget, log)
        self.meter = ActivationMeter(self.account, self._no_room)
        self.activations = self.meter.live_bytes
        self.start_lanes(jitter)

    def guard(self, make_room: Callable[[Callable[[], bool]], bool], check: Check, watches: Callable[[], bool]) -> None:
        def have_room(nbytes: int) -> None:
            if not make_room(lambda: self.account.room >= nbytes):
                raise self.pool.out_of_memory(nbytes, "an activation")

        self.meter.attend(have_room, check)

    def exempt(self, storage: torch.UntypedStorage) -> None:
        self.meter.exempt(storage)

    def _no_room(self, nbytes: int) -> None:
        raise self.pool.out_of_memory(nbytes, "an activation")

    @property
    def kernel(self) -> AdamKernel:
        return self.host_kernel

    def _stream(self) -> None:
        return None

    def _order(self, ticket: Ticket) -> None:
        with self.stopwatch.waiting():
            ticket.wait()

    def _mark(self, id: int) -> Ticket:
        return DoneTicket(id)

    def _new_granule(self, nbytes: int) -> torch.Tensor | None:
        """Address space of twice the budget, so that holes between blocks never matter; only touched pages cost memory."""
        size = max(min(2 * self.account.budget, MAX_ADDRESSES), nbytes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        slab = torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8)
        self.meter.exempt(slab.untyped_storage())
        return slab

    def metered(self) -> AbstractContextManager[object]:
        return self.meter

    def start_interval(self) -> tuple[int, int]:
        return self.meter.start_interval()

    def hand_over(self, nbytes: int) -> None:
        self.meter.hand_over(nbytes)

    def partials(self, sums: list[list[float] | torch.Tensor]) -> Callable[[], list[float]]:
        def read() -> list[float]:
            self.log.count("host_syncs")
            return [float(number) for part in sums for number in part]

        return read

    def peak_bytes(self) -> int:
        return self.account.peak


class CudaDevice(Device):
    """budget: bytes that torch's allocator may reserve on the current CUDA device; granules come out of it too."""

    label = "cuda"
    granule_bytes = 32 << 20
    allowance = CUDA
    cpu_lane_threads = 2  # one alone leaves the cores idle while it waits for the interpreter between two updates

    def __init__(self, budget: int, log: EventLog, *, jitter: Callable[[], None] | None = None) -> None:
        if not torch.cuda.is_available():
            raise UnsupportedError("no CUDA device is visible: use `device='cpu'` for the emulated one")
        raise_open_files()
        self.torch_device = limit_device_memory(budget)
        self.name = torch.cuda.get_device_name(self.torch_device)
        self._kernel, self.stopwatch = cuda_kernel(), CudaStopwatch()
        self._watches: Callable[[], bool] = lambda: False
        self._handed_over = self._reserved_peak = self._interval_peak = 0
        super().__init__(budget, log)
        self.start_lanes(jitter)

    def prepare(self, pool_bytes: int, largest: int, others: int | None = None) -> int:
        """One slab: the allocator would round and scatter single blocks. What it has no hole for lets the pool grow as far as
        activations leave it room, and evicts beyond."""
        self.drain()
        self._take_in_peak()
        self.pool.trim()
        torch.cuda.empty_cache()
        slab = self.allowance.slab(pool_bytes, largest, self.account.budget)
        self.pool.reserve(slab)
        return slab if others is None else max(slab, self.allowance.beside(others, self.account.budget))

    @property
    def kernel(self) -> AdamKernel:
        return self._kernel

    def _update_threads(self) -> int | None:
        """All cores but two: one launches kernels, one queues copies."""
        return max(read_limits().cores - 2, 1)

    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.torch_device)

    def _order(self, ticket: Ticket) -> None:
        with self.stopwatch.waiting():
            ticket.order(torch.cuda.current_stream(self.torch_device))

    def _mark(self, id: int) -> Ticket:
        event, stream = torch.cuda.Event(), torch.cuda.current_stream(self.torch_device)
        event.record(stream)
        return CudaTicket(id, event, stream)

    def _new_granule(self, nbytes: int) -> torch.Tensor | None:
        size = max(self.granule_bytes, nbytes)
        self._take_in_peak()
        try:
            with torch.inference_mode(False):  # what is made within it cannot be written outside
                return torch.empty(size, dtype=torch.uint8, device=self.torch_device)
        except torch.cuda.OutOfMemoryError:
            return None

    def guard(self, make_room: Callable[[Callable[[], bool]], bool], check: Check, watches: Callable[[], bool]) -> None:
        self._read_watch, self._watches = ReadWatch(check), watches

    def metered(self) -> AbstractContextManager[object]:
        return self._read_watch if self._watches() else contextlib.nullcontext()

    def start_interval(self) -> tuple[int, int]:
        self._take_in_peak()
        peak, self._interval_peak = self._interval_peak, 0
        kept, self._handed_over = peak + self._handed_over, 0
        return peak, kept

    def _take_in_peak(self) -> None:
        """Peak of what is not the pool's since the last call; called before the pool grows or shrinks."""
        other = torch.cuda.max_memory_allocated(self.torch_device) - self.pool.reserved_bytes
        self._interval_peak = max(self._interval_peak, other)
        self._reserved_peak = self.peak_bytes()
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def hand_over(self, nbytes: int) -> None:
        self._handed_over += nbytes

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

    def peak_bytes(self) -> int:
        return max(self._reserved_peak, torch.cuda.max_memory_reserved(self.torch_device))

    def drain(self) -> None:
        super().drain()
        torch.cuda.synchronize(self.torch_device)

    def close(self) -> None:
        torch.cuda.synchronize(self.torch_device)
        super().close()
        lift_limit()


@contextlib.contextmanager
def ambient() -> Iterator[None]:
    """Settings of torch that forward and backward rely on: autocast keeps no copies of weights that move and change."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
