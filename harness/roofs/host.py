"""Roofs of the host: its memory, CPU Adam, its disk, and the swap of a storage's address. No device takes part.

Rates of host memory count the bytes that are read and those that are written.
"""

from __future__ import annotations

import mmap
import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from harness.roofs.clock import median_s
from harness.spec import BadInputError
from systems.adam.cpu import cpu_kernel
from systems.adam.kernel import AdamKernel, AdamRange, AdamTask
from systems.device.memory.host import HostMapping, host_account
from systems.device.watch.events import EventLog
from systems.machine.durable import beside
from systems.planning.layout import ALIGN_BYTES
from systems.sizes import format_size
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
    disk: int = GIB
    disk_block: int = 8 * MIB
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


@dataclass(frozen=True)
class DiskRoof:
    """free: bytes left in the folder before. Rates in bytes a second, past the page cache."""

    free: int
    read: float
    write: float


def disk(folder: Path, sizes: HostSizes, flags: int = os.O_DIRECT) -> DiskRoof:
    """Write and read back one file, which is gone afterwards. Raises BadInputError for a folder that cannot be used.

    flags: how the file is opened beside reading and writing.
    """
    if not folder.is_dir():
        raise BadInputError(f"--disk {folder} is no folder: name one on the disk to measure")
    free = shutil.disk_usage(folder).free
    if free < sizes.disk:
        raise BadInputError(f"--disk {folder} has {format_size(free)} free, {format_size(sizes.disk)} are needed: make room")
    try:
        created = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        opened = beside(folder / "roofs", lambda name: os.open(name, created | flags, 0o600))
    except OSError as error:
        raise BadInputError(
            f"--disk {folder} takes no file opened past the page cache ({error.strerror}): name a folder on a local disk"
        ) from None
    try:
        return _write_and_read(opened, free, sizes)
    finally:
        os.close(opened)


def _write_and_read(descriptor: int, free: int, sizes: HostSizes) -> DiskRoof:
    block = mmap.mmap(-1, sizes.disk_block)  # starts on a page, as O_DIRECT wants it
    block.write(os.urandom(sizes.disk_block))
    offsets = range(0, sizes.disk - sizes.disk_block + 1, sizes.disk_block)
    moved = len(offsets) * sizes.disk_block
    began = time.perf_counter()
    for offset in offsets:
        if os.pwrite(descriptor, block, offset) != sizes.disk_block:
            raise BadInputError("--disk: the disk took part of a block only: is it full?")
    os.fsync(descriptor)
    written = time.perf_counter()
    for offset in offsets:
        os.preadv(descriptor, [block], offset)
    read = time.perf_counter()
    return DiskRoof(free=free, read=moved / (read - written), write=moved / (written - began))
