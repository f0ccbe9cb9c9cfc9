"""Files for master weights and moments that the host has no memory for; how they lie there: planning/disk_layout.py.

A file a part, read and written past the page cache (O_DIRECT) where the file system can do that. Their names are removed once
they are open, so that nothing is left of them whatever ends the process.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from systems.device.lanes.lane import Lane
from systems.device.lanes.ticket import Ticket
from systems.device.lanes.transfers import TrackedMemory, Transfers
from systems.device.memory.account import Account
from systems.device.memory.host import HostMapping
from systems.device.watch.events import EventLog, Extent
from systems.errors import BudgetError
from systems.machine.durable import beside
from systems.machine.uncounted import uncounted
from systems.planning.disk_layout import BLOCK, BUFFERS, buffer_of, disk_bytes, part_bytes, segments_on_disk
from systems.planning.layout import Layout
from systems.planning.plan import LaneKind, Tier
from systems.planning.step.operations import Work, of_bundle
from systems.settings import Settings
from systems.sizes import format_need, format_size


@dataclass(frozen=True)
class DiskPlace:
    """Of a bundle's segment: bytes [offset, offset + nbytes) of each file, the first numel x 4 of them in use.

    parts: how many of the segment there are, a file each. memory: its tickets.
    """

    bundle: int
    segment: int
    offset: int
    nbytes: int
    numel: int
    buffer: int
    parts: int
    memory: TrackedMemory

    @property
    def payload_bytes(self) -> int:
        """Of all parts, without padding."""
        return self.parts * 4 * self.numel


@dataclass(frozen=True)
class DiskBuffer:
    """Host memory for one segment's parts, each as long as the longest."""

    parts: tuple[torch.Tensor, ...]
    memory: TrackedMemory

    def views(self, place: DiskPlace) -> list[torch.Tensor]:
        return [part[: place.numel] for part in self.parts]


class Disk:
    """direct: False where the file system's page cache takes part. Raises BudgetError where folder or host lack the room."""

    def __init__(self, settings: Settings, layout: Layout, *, budget: int, host: Account, log: EventLog) -> None:
        assert settings.disk is not None
        self._roles = ("master", *layout.moments)
        self.account, self._layout, self._log = Account(Tier.DISK, budget, log), layout, log
        self._folder, self.direct = Path(settings.disk), True
        self._rate = settings.disk_rate
        self._files: list[int] = []
        self._buffers: HostMapping | None = None
        self._threads = ThreadPoolExecutor(2 * len(self._roles), thread_name_prefix="disk")
        try:
            self._open_files(self._folder, disk_bytes(layout))
            self.account.add_pool(disk_bytes(layout), "disk")
            longest = max(map(part_bytes, segments_on_disk(layout)))
            self._buffers = HostMapping("disk-buffers", BUFFERS * len(self._roles) * longest, host, pinned=False)
            self._buffers.touch()
            self.buffers = [self._buffer(self._buffers, longest) for _ in range(BUFFERS)]
        except BaseException:
            self.close()
            raise
        self.places = self._places()

    def _open_files(self, folder: Path, need: int) -> None:
        """need: bytes of all. Raises BudgetError (disk)."""
        have = 0
        try:
            have = shutil.disk_usage(folder).free
            for role in self._roles:
                self._open(folder, role, need // len(self._roles))
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                advice = "make room there, name another folder with `disk`, or raise `host_memory`"
            elif not self._files:
                advice = f"no file can be made there ({error.strerror}): name one that can be written to with `disk`"
            else:
                raise
            raise BudgetError(
                f"the model needs {format_need(need, have)} of disk in {folder} for master weights and moments, "
                f"{format_size(have)} are free: {advice}",
                tier="disk",
                need=need,
                have=have,
            ) from None

    def _open(self, folder: Path, role: str, size: int) -> None:
        """A file of zeros, whose room is taken and whose name is gone."""

        def make(name: Path) -> int | None:
            self._files.append(os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            os.posix_fallocate(self._files[-1], 0, size)
            return _open_direct(name)

        direct = beside(folder / role, make)
        if direct is None:
            self.direct = False
        else:
            buffered, self._files[-1] = self._files[-1], direct
            os.close(buffered)

    def _buffer(self, mapping: HostMapping, longest: int) -> DiskBuffer:
        taken = [mapping.take(torch.float32, longest // 4) for _ in self._roles]
        start, stop = taken[0][1].extent.start, taken[-1][1].extent.stop
        return DiskBuffer(tuple(tensor for tensor, _ in taken), TrackedMemory(Extent(mapping.name, start, stop)))

    def _places(self) -> dict[int, DiskPlace]:
        buffers, offset, found = buffer_of(self._layout), 0, {}
        for segment in segments_on_disk(self._layout):
            size = part_bytes(segment)
            memory = TrackedMemory(Extent("disk", offset, offset + size))
            s, bundle = segment.index, self._layout.bundle_of_segment[segment.index]
            found[s] = DiskPlace(bundle, s, offset, size, segment.shard_numel, buffers[s], len(self._roles), memory)
            offset += size
        return found

    def read(self, place: DiskPlace, transfers: Transfers) -> DiskBuffer:
        """Issue: all parts into the segment's buffer. Who then uses that names its memory."""
        buffer = self.buffers[place.buffer]
        self._log.count("disk_read_bytes", place.payload_bytes)
        work = lambda: self._move(os.preadv, place)  # noqa: E731
        operation = of_bundle(self._layout, Work.READ_STATE, LaneKind.DISK_READ, place.bundle, place.segment)
        transfers.issue(operation, work, reads=[place.memory], writes=[buffer.memory])
        return buffer

    def write(self, place: DiskPlace, transfers: Transfers) -> Ticket:
        """Issue: all parts from the segment's buffer to their files."""
        memory = self.buffers[place.buffer].memory
        self._log.count("disk_write_bytes", place.payload_bytes)
        work = lambda: self._move(os.pwritev, place)  # noqa: E731
        operation = of_bundle(self._layout, Work.WRITE_STATE, LaneKind.DISK_WRITE, place.bundle, place.segment)
        return transfers.issue(operation, work, reads=[memory], writes=[place.memory])

    def _move(self, move: Callable[..., int], place: DiskPlace) -> None:
        """Its files at once; an error is raised when none of them is being read or written any more."""
        parts, began = self.buffers[place.buffer].parts, time.perf_counter()
        jobs = [
            self._threads.submit(_all_of, move, file, _bytes(part)[: place.nbytes], place.offset)
            for file, part in zip(self._files, parts, strict=True)
        ]
        wait(jobs)
        with self._telling():
            for job in jobs:
                job.result()
        if self._rate is not None:
            time.sleep(max(0.0, began + place.payload_bytes / self._rate - time.perf_counter()))

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Whose disk it was: the files have no name."""
        try:
            yield
        except OSError as error:
            said = f"{error.strerror or error}, with optimizer states on the disk"
            raise OSError(error.errno, said, str(self._folder)) from error

    def load(self, place: DiskPlace, role: str, *, settled: bool = False) -> torch.Tensor:
        """A copy of one part, once what is on its way there has come: `settled`, it has. For start-up and what is rare."""
        if not settled:
            _settle(place)
        with uncounted():
            part = _aligned(place.nbytes)
        with self._telling():
            _all_of(os.preadv, self._files[self._roles.index(role)], _bytes(part), place.offset)
        return part[: place.numel]

    def save(self, place: DiskPlace, role: str, values: torch.Tensor) -> None:
        """values: fp32, the whole part. As `load`."""
        _settle(place)
        with uncounted():
            part = _aligned(place.nbytes)
            part[: place.numel].copy_(values)
        with self._telling():
            _all_of(os.pwritev, self._files[self._roles.index(role)], _bytes(part), place.offset)

    def empty_buffers(self) -> None:
        """Their memory goes back to the machine: nothing is read or written any more. Call only when drained."""
        assert self._buffers is not None
        self._buffers.empty()

    @property
    def mappings(self) -> list[HostMapping]:
        """Of its buffers."""
        return [] if self._buffers is None else [self._buffers]

    def close(self) -> None:
        self._threads.shutdown()
        self.buffers = []
        if self._buffers is not None:
            self._buffers.close()
            self._buffers = None
        for file in self._files:
            os.close(file)
        if self._files:
            self.account.add_pool(-self.account.pool, "disk")
        self._files = []


def disk_lanes(jitter: Callable[[], None] | None) -> dict[LaneKind, Lane]:
    return {kind: Lane(kind, jitter=jitter) for kind in (LaneKind.DISK_READ, LaneKind.DISK_WRITE)}


def _open_direct(name: Path) -> int | None:
    """A file for reading and writing past the page cache, tried with one block; None where the file system cannot do that."""
    file = None
    try:
        file = os.open(name, os.O_RDWR | os.O_DIRECT)
        os.preadv(file, [_bytes(_aligned(BLOCK))], 0)
    except OSError as error:
        if file is not None:
            os.close(file)
        if error.errno != errno.EINVAL:
            raise
        return None
    return file


def _settle(place: DiskPlace) -> None:
    for ticket in place.memory.tickets():
        ticket.wait()


def _aligned(nbytes: int) -> torch.Tensor:
    """fp32, on a page of its own, as direct I/O wants it; of a segment without elements there is nothing to map."""
    return torch.empty(0) if nbytes == 0 else torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.float32)


def _bytes(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.numpy()  # of which not every numpy says that it is a buffer
    return memoryview(array).cast("B")


def _all_of(move: Callable[[int, Sequence[memoryview], int], int], file: int, data: memoryview, offset: int) -> None:
    """A read or a write may take less than it was given."""
    done = 0
    while done < len(data):
        moved = move(file, [data[done:]], offset + done)
        if moved <= 0:
            raise OSError(errno.EIO, "the disk's file ends too early")
        done += moved
