"""Roofs of the host: its memory, CPU Adam, its disk, and the swap of a storage's address. No device takes part.

Rates of host memory count the bytes that are read and those that are written.
"""

from __future__ import annotations

import mmap
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.roofs.clock import median_s
from harness.spec import BadInputError
from systems.adam.cpu import cpu_kernel
from systems.adam.kernel import AdamKernel, AdamRange, AdamTask
from systems.machine.durable import beside
from systems.sizes import format_size
from systems.substrate.bundle.poison import Poison
from systems.substrate.bundle.storage import RebindableStorage

ADAM_BYTES = 28  # a parameter: fp32 master and two moments read and written, bf16 gradient read, bf16 parameter written
MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class HostSizes:
    """How much is moved, in bytes unless named otherwise. over_s: how long each thing is measured."""

    memory: int = GIB
    adam_parameters: int = 64 * MIB
    disk: int = GIB
    disk_block: int = 8 * MIB
    rebinds: int = 1000
    over_s: float = 0.5

    @property
    def need(self) -> int:
        """Host memory that the largest of the measurements takes."""
        return max(2 * self.memory, 14 * self.adam_parameters)


def dram(sizes: HostSizes) -> dict[str, float]:
    """Bytes a second of a copy and of an addition in place, with all of torch's threads."""
    source = torch.ones(sizes.memory, dtype=torch.uint8)
    target = torch.ones_like(source)
    values = source.view(torch.float32)
    copied = median_s(lambda: target.copy_(source), over_s=sizes.over_s)
    added = median_s(lambda: values.add_(1.0), over_s=sizes.over_s)
    return {"copy": 2 * sizes.memory / copied, "add_in_place": 2 * sizes.memory / added}


class AdamPass:
    """State of `parameters` on the host, as a segment's: the gradient lies where the updated parameters go."""

    def __init__(self, parameters: int) -> None:
        self.nbytes = ADAM_BYTES * parameters
        slot = torch.full((parameters,), 1e-3, dtype=torch.bfloat16)
        state = [torch.zeros(parameters) for _ in range(3)]
        whole = AdamRange(0, parameters, lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decoupled=True, step=1)
        self._tasks = [AdamTask(state[0], state[1], state[2], slot, slot, [whole])]

    def by(self, kernel: AdamKernel) -> Callable[[], None]:
        """One pass over all of it."""
        return lambda: kernel.update_all(self._tasks, factor=1.0)


def adam_by_threads(sizes: HostSizes, threads: Sequence[int]) -> dict[int, float]:
    """Bytes a second of the project's CPU Adam by its number of threads."""
    one = AdamPass(sizes.adam_parameters)
    return {n: one.nbytes / median_s(one.by(cpu_kernel(threads=n)), over_s=sizes.over_s) for n in threads}


def thread_counts(cores: int) -> list[int]:
    """1, 2, 4 and so on, and all cores."""
    return [*(1 << k for k in range(cores.bit_length()) if 1 << k < cores), cores]


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
