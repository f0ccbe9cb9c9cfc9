"""Roofs of the host: its memory, CPU Adam, and the swap of a storage's address. No device takes part.

Rates of host memory count the bytes that are read and those that are written.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import torch

from harness.roofs.clock import median_s
from systems.adam.cpu import cpu_kernel
from systems.adam.kernel import AdamKernel, AdamRange, AdamTask
from systems.device.memory.host import HostMapping, host_account
from systems.device.watch.events import EventLog
from systems.planning.layout import ALIGN_BYTES
from systems.substrate.bundle.poison import Poison
from systems.substrate.bundle.storage import RebindableStorage

STATES = ("master", "exp_avg", "exp_avg_sq")
ADAM_BYTES = 28  # a parameter: fp32 master and two moments read and written, bf16 gradient read, bf16 parameter written
STATE_AND_GRADIENT = 14  # bytes a parameter takes
CORES_LEFT = 2  # by CPU Adam in an engine on a device: one launches kernels, one queues copies
UPDATERS = 2  # threads of an engine that hand updates to the kernel
MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class HostSizes:
    """How much is moved, in bytes unless named otherwise. over_s: how long each thing is measured.

    large_updates, small_updates: in how many a pass of Adam is done; small ones are still more than one core's work. rounds:
    how often both are, in turn.
    """

    memory: int = GIB
    adam_parameters: int = 64 * MIB
    large_updates: int = 4
    small_updates: int = 64
    rounds: int = 5
    rebinds: int = 1000
    over_s: float = 0.5

    @property
    def need(self) -> int:
        """Host memory that the largest of the measurements takes."""
        return max(2 * self.memory, 2 * STATE_AND_GRADIENT * self.adam_parameters)


def dram(sizes: HostSizes) -> dict[str, float]:
    """Bytes a second of a copy and of an addition in place, with all of torch's threads."""
    source = torch.ones(sizes.memory, dtype=torch.uint8)
    target = torch.ones_like(source)
    values = source.view(torch.float32)
    copied = median_s(lambda: target.copy_(source), over_s=sizes.over_s)
    added = median_s(lambda: values.add_(1.0), over_s=sizes.over_s)
    return {"copy": 2 * sizes.memory / copied, "add_in_place": 2 * sizes.memory / added}


class AdamPass:
    """State of `parameters` on the host, as an engine's: in huge pages, the gradient where the updated parameters go.

    pieces: updates of one pass, which two threads take in turn as an engine's CPU lane does, so that one always lies ready.
    """

    def __init__(self, parameters: int, pieces: int) -> None:
        self.nbytes, self.pieces = ADAM_BYTES * parameters, pieces
        size = STATE_AND_GRADIENT * parameters + (len(STATES) + 1) * ALIGN_BYTES
        self._memory = HostMapping("roofs", size, host_account(2 * size, EventLog(keep=False)), pinned=False)
        self._memory.touch()
        slot = self._memory.take(torch.bfloat16, parameters)[0].fill_(1e-3)
        state = [self._memory.take(torch.float32, parameters)[0].zero_() for _ in STATES]
        cuts = [parameters * piece // pieces for piece in range(pieces + 1)]
        tasks = []
        for begin, end in pairwise(cuts):
            master, exp_avg, exp_avg_sq, gradient = (tensor[begin:end] for tensor in (*state, slot))
            tasks.append(AdamTask(master, exp_avg, exp_avg_sq, gradient, gradient, [_whole(end - begin)]))
        self._shares = [tasks[first::UPDATERS] for first in range(UPDATERS)]
        self._updaters = ThreadPoolExecutor(UPDATERS, thread_name_prefix="roof-updates")

    def by(self, kernel: AdamKernel) -> Callable[[], None]:
        """One pass over all of it."""

        def take(tasks: Sequence[AdamTask]) -> None:
            for task in tasks:
                kernel.update_all([task], factor=1.0)

        def update() -> None:
            for _ in self._updaters.map(take, self._shares):
                pass

        return update


def _whole(numel: int) -> AdamRange:
    return AdamRange(0, numel, lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decoupled=True, step=1)


def adam_by_threads(sizes: HostSizes, threads: Sequence[int]) -> dict[int, float]:
    """Bytes a second of the project's CPU Adam by its number of threads."""
    one = AdamPass(sizes.adam_parameters, sizes.large_updates)
    return {n: one.nbytes / median_s(one.by(cpu_kernel(threads=n)), over_s=sizes.over_s) for n in threads}


def update_s(sizes: HostSizes, threads: int) -> float:
    """Seconds that an update takes beside its bytes: what a pass in many small ones takes longer than one in few large ones."""
    kernel = cpu_kernel(threads=threads)
    few, many = (AdamPass(sizes.adam_parameters, pieces) for pieces in (sizes.large_updates, sizes.small_updates))
    more = []
    for _ in range(sizes.rounds):
        large, small = (median_s(one.by(kernel), over_s=sizes.over_s / sizes.rounds) for one in (few, many))
        more.append((small - large) / (many.pieces - few.pieces))
    return max(statistics.median(more), 0.0)


def thread_counts(cores: int) -> list[int]:
    """1, 2, 4 and so on, those of an engine on a device, and all cores."""
    return sorted({*(1 << k for k in range(cores.bit_length()) if 1 << k < cores), updating_threads(cores), cores})


def updating_threads(cores: int) -> int:
    """Those of CPU Adam in an engine on a device."""
    return max(cores - CORES_LEFT, 1)


def rebind_s(device: torch.device, sizes: HostSizes) -> float:
    """Seconds to point a storage of the device at another address, from Python."""
    memory = torch.zeros(MIB, dtype=torch.uint8, device=device)
    storage = RebindableStorage(MIB, device, Poison(MIB, device))

    def swap() -> None:
        for _ in range(sizes.rebinds):
            storage.point_at(memory.data_ptr())
            storage.release()

    return median_s(swap, over_s=0.0) / (2 * sizes.rebinds)
