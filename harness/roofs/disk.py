"""The roof of a disk past the page cache: which size of request, how many at once, and what each way reaches with them."""

from __future__ import annotations

import mmap
import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from harness.spec import BadInputError
from systems.machine.durable import beside
from systems.sizes import format_size

MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class DiskSizes:
    """total: bytes written, and read, for each of the requests, which are blocks of so many bytes by so many threads."""

    total: int = GIB
    blocks: Sequence[int] = (MIB, 8 * MIB)
    threads: Sequence[int] = (1, 3, 8)


@dataclass(frozen=True)
class Requests:
    """Of `block` bytes, by `threads` threads: bytes a second of writes, of reads, and each way where both are done at once."""

    block: int
    threads: int
    write: float
    read: float
    both: float

    @property
    def told(self) -> str:
        return f"O_DIRECT, blocks of {format_size(self.block)}, {self.threads} at a time"


@dataclass(frozen=True)
class DiskRoof:
    """free: bytes left in the folder before. tried: all requests, none of which beats read, write and both each at its own."""

    free: int
    tried: Sequence[Requests]

    @property
    def read(self) -> Requests:
        return max(self.tried, key=lambda requests: requests.read)

    @property
    def write(self) -> Requests:
        return max(self.tried, key=lambda requests: requests.write)

    @property
    def both(self) -> Requests:
        return max(self.tried, key=lambda requests: requests.both)


def disk(folder: Path, sizes: DiskSizes, flags: int = os.O_DIRECT) -> DiskRoof:
    """Write and read back one file, which is gone afterwards. Raises BadInputError for a folder that cannot be used.

    flags: how the file is opened beside reading and writing.
    """
    if not folder.is_dir():
        raise BadInputError(f"--disk {folder} is no folder: name one on the disk to measure")
    free = shutil.disk_usage(folder).free
    if free < sizes.total:
        raise BadInputError(f"--disk {folder} has {format_size(free)} free, {format_size(sizes.total)} are needed: make room")
    try:
        created = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        opened = beside(folder / "roofs", lambda name: os.open(name, created | flags, 0o600))
    except OSError as error:
        raise BadInputError(
            f"--disk {folder} takes no file opened past the page cache ({error.strerror}): name a folder on a local disk"
        ) from None
    try:
        _written(opened, sizes.total, max(sizes.blocks), 1)  # so that no request is the first to a block of the disk
        return DiskRoof(free, [_tried(opened, sizes.total, *each) for each in product(sizes.blocks, sizes.threads)])
    finally:
        os.close(opened)


def _tried(file: int, total: int, block: int, threads: int) -> Requests:
    written = _written(file, total, block, threads)
    read = _rate(total, block, threads, lambda data, offset: os.preadv(file, [data], offset))

    def both(data: mmap.mmap, offset: int) -> int:
        return min(os.preadv(file, [data], offset), os.pwrite(file, data, offset))

    return Requests(block, threads, written, read, _rate(total, block, threads, both, then=lambda: os.fsync(file)))


def _written(file: int, total: int, block: int, threads: int) -> float:
    return _rate(total, block, threads, lambda data, offset: os.pwrite(file, data, offset), then=lambda: os.fsync(file))


def _rate(
    total: int, block: int, threads: int, move: Callable[[mmap.mmap, int], int], *, then: Callable[[], None] = lambda: None
) -> float:
    """Bytes a second. Each thread moves every so manieth block, through memory of its own."""
    offsets = range(0, total - block + 1, block)

    def work(first: int) -> None:
        data = mmap.mmap(-1, block)  # starts on a page, as O_DIRECT wants it
        data.write(os.urandom(min(block, MIB)))
        for offset in offsets[first::threads]:
            if move(data, offset) != block:
                raise BadInputError("--disk: the disk took part of a block only: is it full?")

    with ThreadPoolExecutor(threads, thread_name_prefix="roof-disk") as workers:
        began = time.perf_counter()
        for _ in workers.map(work, range(threads)):
            pass
        then()
        return len(offsets) * block / (time.perf_counter() - began)
