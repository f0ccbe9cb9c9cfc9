"""A process that is killed while it saves leaves a whole checkpoint, the last one or the new one, and the next save works."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import random
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import pytest

from systems import checkpoint
from systems.checkpoint import CheckpointError
from tests.systems import saver
from tests.systems.saver import SYSTEMS

ATTEMPTS = 5  # for each kill: one may come between two saves


@dataclass(frozen=True)
class Death:
    """begun, done: numbers of the last save that had begun, and of the last that was over, if there was one."""

    begun: int
    done: int | None

    @property
    def within(self) -> bool:
        """It came while the process saved."""
        return self.begun != self.done


def start(system: str, folder: Path) -> tuple[multiprocessing.Process, Connection]:
    """From a server that has imported everything, which this process, with its threads, cannot be itself."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([saver.__name__])
    told, tells = context.Pipe(duplex=False)
    process = context.Process(target=saver.train_and_save, args=(system, folder, tells), daemon=True)
    process.start()
    tells.close()
    return process, told  # type: ignore[return-value]


def kill(system: str, folder: Path, last: int | None, *, saves: int, after_s: float) -> Death:
    """Let it save some times, and kill it so many seconds after the next save has begun. last: state that was there before."""
    process, told = start(system, folder)
    told_of: list[tuple[int, list[str] | None]] = []
    try:
        told_of += [told.recv() for _ in range(2 * saves + 1)]
        time.sleep(after_s)
    finally:
        process.kill()
        process.join()
    assert process.exitcode == -signal.SIGKILL, "it was over before"
    with contextlib.suppress(EOFError):
        while True:
            told_of.append(told.recv())
    over = [number for number, entries in told_of if entries is not None]
    assert all(entries is None or len(entries) == 2 for _, entries in told_of), "what a killed save had left is still there"
    return Death(told_of[-1][0], over[-1] if over else last)


def save_s(folder: Path) -> float:
    """What a save takes here, over one that is there."""
    took = []
    with saver.begin("resident") as engine:
        for number in range(1, 5):
            saver.step(engine, number)
            begun = time.perf_counter()
            checkpoint.save(engine, folder, beside=saver.beside(number))
            took.append(time.perf_counter() - begun)
    return median(took[1:])


class Expected:
    """Digests by number of state."""

    def __init__(self) -> None:
        self._made, self._found = saver.states(), list[dict[str, str]]()

    def __getitem__(self, number: int) -> dict[str, str]:
        self._found += itertools.islice(self._made, max(number + 1 - len(self._found), 0))
        return self._found[number]


def loaded(system: str, folder: Path, expected: Expected) -> int | None:
    """The number of the state that is there, every bit of which is that state's; None if there is none."""
    with saver.begin(system, seed=2) as engine:
        try:
            loop, beside, _ = checkpoint.load(engine, folder)
        except CheckpointError:
            assert not (folder / checkpoint.MANIFEST).exists()
            return None
        assert int(beside["number"]) == loop.steps
        assert saver.digests(engine) == expected[loop.steps]
    return loop.steps


def left_over(folder: Path) -> bool:
    return folder.exists() and len(os.listdir(folder)) != 2


def check(kills: int, folder: Path, seed: int, expected: Expected) -> tuple[list[Death], int]:
    """The deaths that came during a save, and how many of all left something behind. The first is that of the first save."""
    luck, systems, deaths, unfinished = random.Random(seed), list(SYSTEMS), list[Death](), 0
    took_s, last = save_s(folder.parent / "measured"), None
    for number in range(ATTEMPTS * kills):
        death = kill(
            systems[number % len(systems)],
            folder,
            last,
            saves=luck.choice((1, 1, 2, 3)) if number else 0,
            after_s=luck.random() * took_s,
        )
        unfinished += left_over(folder)
        last = loaded(luck.choice(systems), folder, expected)
        assert last in (death.begun, death.done), death
        deaths += [death] if death.within else []
        if len(deaths) == kills:
            break
    assert len(deaths) == kills, "void: the process was killed between its saves"
    return deaths, unfinished


@pytest.mark.long
def test_a_save_that_is_killed_leaves_the_last_state_or_the_new_one(tmp_path: Path) -> None:
    """The first that there is, and one over another."""
    check(2, tmp_path / "here", 0, Expected())


@pytest.mark.slow
def test_twenty_saves_that_are_killed(tmp_path: Path) -> None:
    deaths, unfinished = check(20, tmp_path / "here", 1, Expected())
    assert len({death.begun for death in deaths}) == 20
    assert unfinished > 0, "void: no save was killed between its first file and its last"
