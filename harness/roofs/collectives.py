"""Roofs of several ranks: collectives by size as the project's own link carries them out, and what ranks tell each other.

A process a rank, over NCCL on devices and over gloo on a host. All ranks make the same calls, as many as rank 0 says, and the
slowest rank's time counts.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection, get_context
from pathlib import Path

import torch

from harness.roofs.clock import nothing
from harness.roofs.host import MIB
from harness.spec import BadInputError, Device
from harness.worker import die_with
from systems.messages import one_line
from systems.planning.layout import round_up
from systems.ranks.joining import begun
from systems.ranks.ranks import Ranks

Points = tuple[tuple[int, float], ...]
DTYPE = torch.bfloat16
MOST_CALLS = 200  # of one collective in a row


@dataclass(frozen=True)
class CollectiveSizes:
    """wholes: bytes of the tensors that all ranks have, ascending. over_s: how long each is measured, in so many rounds.

    told: numbers that ranks exchange. patience_s: for all of it; then a rank is taken to be stuck.
    """

    wholes: tuple[int, ...] = (MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
    over_s: float = 0.5
    rounds: int = 5
    told: int = 1000
    patience_s: float = 300.0


@dataclass(frozen=True)
class Collectives:
    """By the bytes that pass a rank's port one way: bytes a second. native: the library's own sum; None where there is none.

    exchange_s: of what ranks tell each other once.
    """

    gathers: Points
    reductions: Points
    native: Points | None
    exchange_s: float


def collectives(ranks: int, device: Device, sizes: CollectiveSizes) -> Collectives:
    """Of so many processes of this host. BadInputError where one of them fails, with what it said."""
    context = get_context("spawn")  # never fork beside CUDA or gloo
    with tempfile.TemporaryDirectory(prefix="roofs-") as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
        meet = f"file://{Path(folder) / 'meet'}"
        started = []
        try:
            for rank, (_, mine) in enumerate(pipes):
                arguments = (os.getpid(), rank, ranks, device, meet, sizes, mine)
                started.append(context.Process(target=_one_of_them, args=arguments, daemon=True, name=f"roofs-{rank}"))
                started[-1].start()
                mine.close()  # so that its end is seen here
            return _heard([theirs for theirs, _ in pipes], sizes.patience_s)
        finally:
            for process in started:
                process.kill()
                process.join()


def _heard(pipes: list[connection.Connection], patience_s: float) -> Collectives:
    """What rank 0 found, once all have."""
    found: dict[int, Collectives | str] = {}
    until = time.monotonic() + patience_s
    while len(found) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in found}
        ready = connection.wait(list(waiting), timeout=max(0.0, until - time.monotonic()))
        if not ready:
            missing = ", ".join(map(str, sorted(waiting.values())))
            raise BadInputError(f"--ranks {len(pipes)}: nothing was heard of rank {missing} for {patience_s:g} s")
        for pipe in ready:
            assert isinstance(pipe, connection.Connection)
            rank = waiting[pipe]
            try:
                found[rank] = pipe.recv()
            except EOFError:
                found[rank] = "its process ended"
    told = {rank: said for rank, said in found.items() if isinstance(said, str)}
    for rank, said in sorted(told.items(), key=lambda each: "another rank is gone" in each[1]):
        raise BadInputError(f"--ranks {len(pipes)}: rank {rank}: {said}")
    first = found[0]
    assert isinstance(first, Collectives)
    return first


def _one_of_them(
    parent_pid: int,
    rank: int,
    size: int,
    device: Device,
    meet: str,
    sizes: CollectiveSizes,
    pipe: connection.Connection,
) -> None:
    """The main function of a rank's process."""
    die_with(parent_pid)
    try:
        torch.set_num_threads(max(torch.get_num_threads() // size, 1))
        with closing(begun(device, rank=rank, size=size, local_rank=rank, where=meet, timeout_s=sizes.patience_s)) as ranks:
            pipe.send(measured(ranks, device, sizes))
    except (RuntimeError, OSError, ValueError) as error:
        pipe.send(one_line(f"{type(error).__name__}: {error}"))


def measured(ranks: Ranks, device: Device, sizes: CollectiveSizes) -> Collectives:
    """By one rank, with all others."""
    link = ranks.link
    gathers = _by_size(ranks, device, sizes, partial(link.gather, "gather"))
    reductions = _by_size(ranks, device, sizes, partial(link.reduce, "reduce"))
    native = None
    if device == "cuda":
        link.sum_by("native")
        native = _by_size(ranks, device, sizes, partial(link.reduce, "reduce"))
        link.sum_by("ordered")
    told = list(range(sizes.told))
    exchange_s = _seconds(ranks, lambda: ranks.exchange("roofs", told), nothing, sizes)
    return Collectives(gathers, reductions, native, exchange_s)


def _by_size(ranks: Ranks, device: Device, sizes: CollectiveSizes, work: Callable[[torch.Tensor], object]) -> Points:
    wait = torch.cuda.synchronize if device == "cuda" else nothing
    points = []
    for nbytes in sizes.wholes:
        whole = torch.zeros(round_up(nbytes // DTYPE.itemsize, ranks.size), dtype=DTYPE, device=device)
        passes = whole.nbytes * (ranks.size - 1) // ranks.size
        points.append((passes, passes / _seconds(ranks, partial(work, whole), wait, sizes)))
    return tuple(points)


def _seconds(ranks: Ranks, work: Callable[[], object], wait: Callable[[], None], sizes: CollectiveSizes) -> float:
    """Of one call, back to back with others: the median round of the slowest rank."""

    def took(calls: int) -> float:
        ranks.exchange("round", calls)  # all begin together
        began = time.perf_counter()
        for _ in range(calls):
            work()
        wait()
        return (time.perf_counter() - began) / calls

    took(1)
    once = ranks.exchange("seconds", took(1))[0]
    calls = min(max(int(sizes.over_s / sizes.rounds / max(once, 1e-9)), 1), MOST_CALLS)
    return max(ranks.exchange("seconds", statistics.median(took(calls) for _ in range(sizes.rounds))))
