"""What CUDA (cuda.py) and its emulation on the CPU (emulated.py) have in common, and where they differ: one type.

Note [The emulated device]
    A second slab of host memory with a hard budget; one thread a lane does the copies; compute is the caller's thread. The
    accounts, counters and waits are those of the CUDA device, so claims about traffic and memory can be tested without one.
    Claims about time cannot.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch

from systems.adam.cpu import cpu_kernel
from systems.adam.kernel import AdamKernel
from systems.device.lanes.access import Access
from systems.device.lanes.compute import ComputeLane
from systems.device.lanes.lane import Lane, LinkLane, UpdateLane
from systems.device.lanes.transfers import Transfers
from systems.device.memory.account import Account
from systems.device.memory.pool import Pool
from systems.device.meter import Check, Meter
from systems.device.watch.events import EventLog
from systems.device.watch.phases import NoPhases, PhaseClock, Phases
from systems.device.watch.stopwatch import Stopwatch
from systems.optimizers.choice import Chosen, chosen
from systems.planning.allowance import EXACT, Allowance
from systems.planning.plan import COPY_LANES, LaneKind, Tier
from systems.ranks.ranks import Ranks
from systems.settings import Settings


class Device(ABC):
    """One rank's device with its lanes, pool and accounts.

    name: of its model, as its maker gives it. account: DEVICE bytes, pool and activations. kernel: the optimizer's where the
    device's own memory is updated. host_kernel: the same on the CPU lane, whose jobs cpu_lane_threads threads take.
    compute: the caller's lane. meter: measures what is not the pool's.
    """

    torch_device: torch.device
    name: str
    stopwatch: Stopwatch
    compute: ComputeLane
    meter: Meter
    allowance: Allowance = EXACT
    measures_always = False  # memory at each moment costs nothing: read it in planned steps too
    evicts_for_activations = False  # while they are made: else there has to be room for them before
    cpu_lane_threads = 1
    own_kernel: AdamKernel | None = None  # where the host's does not do

    def __init__(self, budget: int, log: EventLog) -> None:
        self.log, self.access = log, Access()
        self.account = Account(Tier.DEVICE, budget, log)
        self.phases: Phases = NoPhases()
        self.host_kernel: AdamKernel = cpu_kernel(threads=self._update_threads())
        self.pool = Pool(self.account, self._new_granule, lambda: self.compute.mark(log.next_ticket()))

    def _update_threads(self) -> int | None:
        """Threads of CPU Adam; None for all cores."""
        return None

    def start_lanes(self, jitter: Callable[[], None] | None) -> None:
        self.jitter = jitter
        self.lanes = {kind: Lane(kind, stream=self._stream(), jitter=jitter) for kind in COPY_LANES}
        self.lanes[LaneKind.CPU] = UpdateLane(LaneKind.CPU, jitter=jitter, threads=self.cpu_lane_threads)
        self.transfers = Transfers(self.lanes, self.compute, self.log)

    def watch_phases(self, clock: PhaseClock | None) -> None:
        """Steps are phased from here on (Note [Phased steps] in phases.py); None: they are not."""
        self.phases = NoPhases() if clock is None else clock
        self.transfers.watch(clock)

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
    def kernel(self) -> AdamKernel:
        """The optimizer's, for tensors on this device."""
        return self.host_kernel if self.own_kernel is None else self.own_kernel

    @abstractmethod
    def _stream(self) -> torch.cuda.Stream | None: ...

    @abstractmethod
    def _new_granule(self, nbytes: int) -> torch.Tensor | None: ...

    @abstractmethod
    def metered(self) -> AbstractContextManager[object]:
        """Forward and backward run inside this."""

    def copy_to_host(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """target (host, contiguous) = source (device), of the same type; done on return. For start-up, not for a step."""
        target.copy_(source)

    @abstractmethod
    def partials(self, sums: list[list[float] | torch.Tensor]) -> Callable[[], list[float]]:
        """Partial sums of squares as numbers, in order; the host waits, once a step, when the result is called for."""

    def guard(self, make_room: Callable[[Callable[[], bool]], bool], check: Check, watches: Callable[[], bool]) -> None:
        """From here on activations that need room may evict, and `check` is told of operations.

        make_room(fits): evicts until fits() is true; False if it never is.

        The emulated device sees every operation and can do both; CUDA's allocator asks nobody, and there operations are shown
        while `watches()`, asked as a pass begins: it takes time.
        """
        return

    def drain(self) -> None:
        """Block until all lanes are done; raises the first error, after that: who is told of it may give memory back."""
        for lane in self.lanes.values():
            lane.rest()
        for lane in self.lanes.values():
            lane.drain()

    def close(self) -> None:
        abandon_link(self)  # first, as others wait for it
        for lane in self.lanes.values():
            lane.close()
        self.pool.close()


@contextlib.contextmanager
def ambient() -> Iterator[None]:
    """Settings of torch that forward and backward rely on: autocast keeps no copies of weights that move and change."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def follow_optimizer(device: Device, settings: Settings) -> Chosen:
    """Its kernels update from now on as the optimizer of the settings does, which is returned. UnsupportedError as `chosen`."""
    found = chosen(settings)
    device.host_kernel = found.rule.kernel(device.host_kernel)
    if device.own_kernel is not None:
        device.own_kernel = found.rule.kernel(device.own_kernel)
    return found


def join_ranks(device: Device, ranks: Ranks) -> None:
    """It is one of several ranks', this one's: their collectives have one lane, be they gathers or reductions.

    Reductions have their room on the device from here on. On the emulated one that is host memory, as for the link.
    """
    link = ranks.link
    lane = LinkLane(LaneKind.GATHER, ranks.abandon, stream=device._stream(), jitter=device.jitter, in_caller=link.queues)
    device.lanes.update({LaneKind.GATHER: lane, LaneKind.REDUCE: lane})
    device.pool.of_rank(ranks.rank)
    device.allowance = device.allowance.on(ranks.size)
    staging = device.allowance.staging(device.account.budget)
    if staging:
        link.stage(staging, device.torch_device)
        device.meter.set_aside(staging)


def abandon_link(device: Device) -> None:
    """See LinkLane.abandon. Nothing on one rank."""
    link = device.lanes.get(LaneKind.GATHER)
    if isinstance(link, LinkLane):
        link.abandon()
