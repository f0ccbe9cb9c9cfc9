"""Ranks as threads of one process, for tests: the same order, the same bits, no processes and no ports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch

from systems.ranks.link import Link, check_tags, shard_of
from systems.ranks.ranks import Ranks, in_bytes
from systems.ranks.staging import ordered_sum

Found = TypeVar("Found")
WAIT_S = 60.0  # for the other threads, which work as long


class _Meeting:
    """Where threads of all ranks leave what they bring, and see what all brought. errors: of those who broke it off."""

    def __init__(self, size: int, errors: list[BaseException]) -> None:
        self._errors = errors
        self._brought: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=WAIT_S)

    @contextmanager
    def of(self, rank: int, brings: Any) -> Iterator[list[Any]]:
        """All have come within; none leaves before all are done with it."""
        self._brought[rank] = brings
        self._barrier.wait()
        try:
            yield list(self._brought)
        except BaseException as error:
            self._errors.append(error)
            self._barrier.abort()
            raise
        self._barrier.wait()

    def abort(self) -> None:
        """Whoever waits, or will, gets a BrokenBarrierError."""
        self._barrier.abort()


class _Meetings:
    """Of all threads: what for, and of which ranks. Those that are made once somebody has broken off are broken off too."""

    def __init__(self, errors: list[BaseException]) -> None:
        self._made: dict[tuple[str, tuple[int, ...]], _Meeting] = {}
        self._errors, self._lock, self._over = errors, threading.Lock(), False

    def of(self, key: tuple[str, tuple[int, ...]]) -> _Meeting:
        with self._lock:
            if key not in self._made:
                self._made[key] = _Meeting(len(key[1]), self._errors)
                if self._over:
                    self._made[key].abort()
            return self._made[key]

    def abort(self) -> None:
        with self._lock:
            self._over = True
            for meeting in self._made.values():
                meeting.abort()


class _LoopbackLink(Link):
    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        super().__init__()
        self.rank, self.size, self._meeting = rank, size, meeting

    def gather(self, tag: str, *wholes: torch.Tensor) -> None:
        with self._meeting.of(self.rank, (tag, wholes)) as found:
            check_tags([tag for tag, _ in found])
            for rank, (_, theirs) in enumerate(found):
                if rank != self.rank:
                    for whole, other in zip(wholes, theirs, strict=True):
                        shard_of(whole, rank, self.size).copy_(shard_of(other, rank, self.size))

    def reduce(self, tag: str, *wholes: torch.Tensor) -> None:
        mine = [torch.empty_like(self.own(whole)) for whole in wholes]
        with self._meeting.of(self.rank, (tag, wholes)) as found:
            check_tags([tag for tag, _ in found])
            for number, value in enumerate(mine):
                room = None if self.size == 2 else torch.empty(value.shape, dtype=torch.float32)
                ordered_sum([self.own(theirs[number]) for _, theirs in found], value, room)
        for whole, value in zip(wholes, mine, strict=True):
            self.own(whole).copy_(value)

    def swap(self, tag: str, into: torch.Tensor, source: torch.Tensor) -> None:
        """Of memory past torch: what is compute's own is counted, and how long another thread has it would count too."""
        with self._meeting.of(self.rank, (tag, in_bytes(source.reshape(-1)).numpy().copy())) as found:
            check_tags([tag for tag, _ in found])
            here = np.split(in_bytes(into.view(-1)).numpy(), self.size)
            for part, (_, theirs) in zip(here, found, strict=True):
                part[:] = np.split(theirs, self.size)[self.rank]


class Loopback(Ranks):
    """One rank of several threads; made by `as_threads`. They would share a CUDA device's allocator and its limit."""

    devices = ("cpu",)

    def __init__(self, rank: int, size: int, meetings: _Meetings) -> None:
        self.rank, self.size = self.local_rank, self.local_size = rank, size
        self._meetings, everyone = meetings, tuple(range(size))
        self._control = meetings.of(("control", everyone))
        self.link = _LoopbackLink(rank, size, meetings.of(("link", everyone)))

    def _link_among(self, groups: Sequence[tuple[int, ...]], name: str) -> Link:
        mine = next(members for members in groups if self.rank in members)
        return _LoopbackLink(mine.index(self.rank), len(mine), self._meetings.of((name, mine)))

    def exchange_bytes(self, about: str, told: bytes) -> list[bytes]:
        with self._control.of(self.rank, told) as found:
            return found

    def _bring(self, pieces: Sequence[Sequence[torch.Tensor]], onto: int | None) -> None:
        with self._control.of(self.rank, pieces[self.rank]) as found:
            for source, theirs in enumerate(found):
                if source != self.rank and onto in (None, self.rank):
                    for place, piece in zip(pieces[source], theirs, strict=True):
                        place.copy_(piece)

    def close(self) -> None:
        return

    def fail(self) -> None:
        """This rank will not come any more."""
        self._meetings.abort()


def as_threads(size: int, work: Callable[[Ranks], Found]) -> list[Found]:
    """What `work` returns on each rank. Where it raises on one, that is raised here, and the others are not waited for long."""
    broken_off: list[BaseException] = []
    meetings = _Meetings(broken_off)
    everyone = [Loopback(rank, size, meetings) for rank in range(size)]

    def run(mine: Loopback) -> Found:
        try:
            return work(mine)
        except BaseException:
            mine.fail()
            raise

    with ThreadPoolExecutor(size, thread_name_prefix="rank") as pool:
        futures = [pool.submit(run, mine) for mine in everyone]
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    if errors:
        told = (error for error in (*errors, *broken_off) if not isinstance(error, threading.BrokenBarrierError))
        raise next(told, errors[0])
    return [future.result() for future in futures]
