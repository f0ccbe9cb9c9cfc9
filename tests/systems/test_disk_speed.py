"""How much of a disk's rate updates behind the steps get, beside a plain program that reads and writes the same."""

from __future__ import annotations

import os
import queue
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from systems.device.memory.disk import Disk, DiskPlace, _aligned, _all_of, _bytes
from systems.planning.disk_layout import BUFFERS
from systems.settings import Settings
from systems.strategies.angel_ptm.options import AngelPTMOptions
from systems.system import Engine
from tests.systems.running import angel_ptm, managed, settings, start
from tests.systems.test_lock_free_bound import Case, seconds

LEAST = 0.9  # of the plain program's rate
MIB = 1 << 20
RATE = 10 * MIB  # bytes a second each way


class Pause(torch.autograd.Function):
    """Work that takes no core: a third of it forward, the rest backward."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, work_s: float) -> torch.Tensor:
        ctx.work_s = work_s
        time.sleep(work_s / 3)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(2 * ctx.work_s / 3)
        return gradients[0], None


class Stack(nn.Module):
    """Layers of `width` x `width`, which take `work_s` seconds each beside: far more bytes of states than work."""

    def __init__(self, layers: int, width: int, work_s: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self._work_s = work_s

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            values = torch.tanh(layer(values))
            if self._work_s:
                values = Pause.apply(values, self._work_s)
        return values


class Running:
    """Steps of a stack with all its states on the disk."""

    def __init__(self, engine: Engine, width: int) -> None:
        self.engine, self._shape = engine, (2, width)
        self.disk = managed(engine).disk
        self.steps(4)  # the first has no plan, and is synchronous

    def steps(self, count: int) -> float:
        """Bytes a second of both ways, from rest to rest."""
        before, seconds = self._moved(), self.seconds(count)
        return (self._moved() - before) / seconds

    def seconds(self, count: int) -> float:
        """From rest to rest."""
        began = time.perf_counter()
        for _ in range(count):
            values = torch.ones(self._shape, dtype=torch.bfloat16)
            self.engine.backward(self.engine(values).float().square().mean())
            self.engine.step()
        self.engine.drain()
        return time.perf_counter() - began

    def _moved(self) -> int:
        totals = self.disk._log.totals
        return totals["disk_read_bytes"] + totals["disk_write_bytes"]


@contextmanager
def running(
    folder: Path, layers: int, width: int, *, most: int | None = 4, work_s: float = 0.0, rate: int | None = None
) -> Iterator[Running]:
    """most: steps that updates may be behind; None: synchronous. rate: that the disk is held to."""
    options = AngelPTMOptions(page=4 * MIB, cache=0, states="disk", nonfinite="stop", max_staleness=most)
    asked = settings(device_memory=1 << 30, disk=folder, dtype="bf16", disk_rate=rate)
    with start(angel_ptm(), Stack(layers, width, work_s), asked, options) as engine:
        yield Running(engine, width)


class PlainProgram:
    """Reads and writes the same pieces of as many files, past the page cache, and nothing else."""

    def __init__(self, folder: Path, places: list[DiskPlace]) -> None:
        self._places, size = places, sum(place.nbytes for place in places)
        self._files = [self._file(folder / f"plain-{part}", size) for part in range(places[0].parts)]
        longest = max(place.nbytes for place in places)
        self._buffers = [[_bytes(_aligned(longest)) for _ in self._files] for _ in range(BUFFERS)]

    def _file(self, name: Path, size: int) -> int:
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        os.posix_fallocate(file, 0, size)
        return file

    def rate(self, passes: int) -> float:
        """Bytes a second of both ways, by the faster of two programs."""
        nbytes, best = 2 * passes * sum(place.parts * place.nbytes for place in self._places), 0.0
        for program in (self._both_ways_at_once, self._in_turn):
            began = time.perf_counter()
            program(self._places * passes)
            best = max(best, nbytes / (time.perf_counter() - began))
        return best

    def _both_ways_at_once(self, order: list[DiskPlace]) -> None:
        """One thread reads while another writes, each a piece of all files at once."""
        free, full = queue.Queue[int](), queue.Queue[int]()
        for number in range(BUFFERS):
            free.put(number)
        with ThreadPoolExecutor(2) as ways, ThreadPoolExecutor(2 * len(self._files)) as pieces:

            def move(how: Any, number: int, place: DiskPlace) -> None:
                both = zip(self._files, self._buffers[number], strict=True)
                wait([pieces.submit(_all_of, how, file, data[: place.nbytes], place.offset) for file, data in both])

            def go(how: Any, taken: queue.Queue[int], given: queue.Queue[int]) -> None:
                for place in order:
                    number = taken.get()
                    move(how, number, place)
                    given.put(number)

            for way in [ways.submit(go, os.preadv, free, full), ways.submit(go, os.pwritev, full, free)]:
                way.result()

    def _in_turn(self, order: list[DiskPlace]) -> None:
        """A thread a file, which reads a piece and writes it."""

        def go(file: int, data: memoryview) -> None:
            for place in order:
                for how in (os.preadv, os.pwritev):
                    _all_of(how, file, data[: place.nbytes], place.offset)

        with ThreadPoolExecutor(len(self._files)) as threads:
            for done in threads.map(go, self._files, self._buffers[0]):
                assert done is None

    def close(self) -> None:
        for file in self._files:
            os.close(file)


def test_rates_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="disk_rate is of files in a folder: name it with disk"):
        Settings(disk_rate=5)
    with pytest.raises(ValueError, match="disk_rate is 0"):
        Settings(disk="x", disk_rate=0)


def test_a_disk_held_to_a_rate_is_busy_while_updates_run_behind(tmp_path: Path) -> None:
    """Of eight measurements the best: whoever sleeps on a busy machine wakes late."""
    with running(tmp_path, 12, 256, rate=RATE) as ours:
        reached = 0.0
        for _ in range(8):
            reached = max(reached, ours.steps(15) / (2 * RATE))
            if reached >= LEAST:
                break
    assert LEAST <= reached <= 1


def test_updates_one_after_another_have_a_buffer_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their order is: else the second's read waits for the first's write."""
    taken, read = list[int](), Disk.read

    def reading(disk: Disk, place: DiskPlace, transfers: Any) -> Any:
        taken.append(place.buffer)
        return read(disk, place, transfers)

    with running(tmp_path, BUFFERS + 1, 64) as ours:  # the last layer's buffer is the first's, where a segment has its own
        monkeypatch.setattr(Disk, "read", reading)
        ours.seconds(10)
    assert len(taken) > BUFFERS
    assert all(one != other for one, other in pairwise(taken))


@pytest.mark.slow
def test_steps_ahead_are_nearly_as_fast_as_they_may_be(tmp_path: Path) -> None:
    """Samples a second are 0.9 x min(K + 1, disk step / compute step) of the synchronous ones, where a step's compute takes
    a tenth of what the disk does or less, and nearly what the order of updates can reach at all.
    """
    layers, width, work_s = 12, 256, 0.004

    def step_s(most: int | None, count: int, *, held: bool = True) -> float:
        with running(tmp_path, layers, width, most=most, work_s=work_s, rate=RATE if held else None) as ours:
            return ours.seconds(count) / count

    compute, synchronous = step_s(16, 12, held=False), step_s(None, 6)
    disk = layers * width * width * 12 / RATE
    for most, steps in ((1, 30), (2, 30), (4, 60)):
        possible = seconds(Case(compute, disk, [1] * layers), most=most, steps=steps)[0] / steps
        found = min(step_s(most, steps) for _ in range(2))
        assert synchronous / found >= LEAST * min(most + 1, synchronous / compute), (most, compute, synchronous, found)
        assert possible / found >= LEAST, (most, possible, found)


@pytest.mark.slow
def test_updates_behind_the_steps_have_the_rate_of_a_plain_program(tmp_path: Path) -> None:
    """Each is measured between two measurements of the other, for a disk that others use too changes its rate by the second;
    of all pairs the median, and of five medians the best, where the first is not enough.
    """
    with running(tmp_path, 12, 1024) as ours:
        if not ours.disk.direct:
            pytest.skip("this file system cannot do without its page cache")
        program = PlainProgram(tmp_path, list(ours.disk.places.values()))
        told = list[str]()
        program.rate(1)  # so that no request is the first to a block of the disk
        for _ in range(5):
            ratios, before = list[float](), program.rate(4)
            for _ in range(9):
                mine = ours.steps(10)
                after = program.rate(4)
                ratios.append(mine / ((before + after) / 2))
                before = after
            told.append(f"{statistics.median(ratios):.3f} of {before / 1e9:.2f} GB/s ({min(ratios):.3f} to {max(ratios):.3f})")
            if (median := statistics.median(ratios)) >= LEAST:
                break
        program.close()
    assert median >= LEAST, "; ".join(told)
