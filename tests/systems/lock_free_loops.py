"""A training loop on several ranks whose updates run behind its steps, with all that may come between two, drawn by a seed.

At a staleness of 0 it has the bits of updates that are part of their steps; above it all ranks hold the same, nothing that a
step reads is older than allowed, and each gradient is in one update. Ranks are threads. What goes wrong is not drawn here.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import systems
from systems.device.emulated import EmulatedDevice
from systems.errors import BudgetError, OutOfMemoryError
from systems.ranks.loopback import as_threads
from systems.ranks.ranks import Ranks
from tests.systems.models_small import build, next_token_loss, tokens
from tests.systems.random_loops import JITTER_S, MORE
from tests.systems.running import AMPLE, Run, angel_ptm, assert_equal, finished, managed, settings
from tests.systems.setups import blocks_of
from tests.systems.test_lock_free import Kept, races_of
from tests.systems.test_memory import check_segments
from tests.systems.test_ordering import sleeps

STEPS = ("step", "step", "step", "uneven", "fewer", "silent")
BETWEEN = ("evaluate", "drain", "one drains", "read", "write", "save", "load", "discard", "rate")
LENGTHS = (8, 8, 8, 16)  # of rows: another one has another plan


@dataclass(frozen=True, kw_only=True)
class LockFreeDraw:
    """most: max_staleness; None has each update in its step. share: of the device memory that all of it takes. actions: what is
    done, one after the other, each with a seed of its own.
    """

    seed: int
    model: str
    tied: bool
    frozen: bool
    size: int
    most: int | None
    accumulate: int
    dtype: str
    recompute: str
    share: float
    cache: int | str
    states: str
    actions: tuple[tuple[str, int], ...]

    def build(self) -> Any:
        model = build(self.model, self.seed, tied=self.tied)
        if self.frozen:
            blocks_of(model)[1].requires_grad_(False)
        return model


def draw(seed: int, most_steps: int = 9) -> LockFreeDraw:
    """Of 5 steps at least."""
    luck, actions = random.Random(f"lock-free {seed}"), list[tuple[str, int]]()
    for _ in range(luck.randint(5, most_steps)):
        actions.append((luck.choice(STEPS), luck.randrange(1 << 16)))
        while luck.random() < 0.45:
            actions.append((luck.choice(BETWEEN), luck.randrange(1 << 16)))
    return LockFreeDraw(
        seed=seed,
        model=luck.choice(("opt", "gpt2")),
        tied=luck.random() < 0.5,
        frozen=luck.random() < 0.3,
        size=luck.choice((2, 2, 3, 4)),
        most=luck.choice((0, 0, 1, 2, 5)),
        accumulate=luck.choice((1, 1, 2, 3)),
        dtype=luck.choice(("fp32", "bf16")),
        recompute=luck.choice(("none", "full")),
        share=luck.choice((0.3, 0.5, 0.8, 2.0)),
        cache=luck.choice((0, "auto")),
        states=luck.choice(("host", "host", "disk")),
        actions=tuple(actions),
    )


class LockFreeLoop:
    """Of one rank. folder: for a checkpoint, the same on all."""

    def __init__(self, drawn: LockFreeDraw, engine: Any, rank: int, folder: Path) -> None:
        self.draw, self.engine, self.rank, self.folder = drawn, engine, rank, folder
        self.losses: list[float] = []

    def loss(self, luck: random.Random, length: int) -> torch.Tensor:
        ids = tokens(1, 1, length=length, seed=luck.randrange(1 << 20) + self.rank)[0, 0]
        loss = next_token_loss(self.engine, ids, 100)
        self.losses.append(loss.item())
        return loss

    def step(self, luck: random.Random, what: str) -> None:
        """uneven: on the second rank rows are as long as they like. silent: on one rank a layer does without its bias."""
        length, own, one = luck.choice(LENGTHS), luck.choice(LENGTHS), luck.randrange(self.draw.size)
        length = own if what == "uneven" and self.rank == 1 else length
        inner = [module for block in blocks_of(self.engine.module) for module in block.modules()]
        layers: list[Any] = [module for module in inner if isinstance(module, nn.Linear)]
        with ExitStack() as undo:
            if what == "silent" and layers and self.rank == one:
                layer = luck.choice(layers)
                layer.forward = lambda x: nn.functional.linear(x, layer.weight)
                undo.callback(layer.__dict__.pop, "forward")
            for _ in range(max(1, self.draw.accumulate - (what == "fewer"))):
                self.engine.backward(self.loss(luck, length))
            self.engine.step()

    def between(self, luck: random.Random, what: str) -> None:
        engine, saved = self.engine, self.folder / "saved"
        if what == "evaluate":
            with torch.no_grad():
                self.loss(luck, luck.choice(LENGTHS))
        elif what == "drain":
            engine.drain()
            engine.drain()
            check_segments(managed(engine))
        elif what == "one drains" and self.rank == luck.randrange(self.draw.size):
            engine.drain()
        elif what == "read":
            with engine.summon() as values:
                self.losses.append(sum(value.double().sum().item() for value in values.values()))
        elif what == "write":
            with engine.summon(write=True) as values:
                values[luck.choice(sorted(values))].mul_(0.9)
        elif what == "save":
            systems.save_checkpoint(engine, saved)
        elif what == "load" and self.has_saved:
            systems.load_checkpoint(engine, saved)
        elif what == "discard":
            loss = self.loss(luck, 8)
            if self.draw.accumulate > 1:  # else backward has updated weights
                engine.backward(loss)
            engine.discard()
        elif what == "rate":
            engine.set_lr(luck.choice((1e-3, 1e-4)))

    def run(self) -> Run:
        self.has_saved = False
        for what, seed in self.draw.actions:
            (self.step if what in STEPS else self.between)(random.Random(seed), what)
            self.has_saved |= what == "save"
        return finished(self.engine, self.losses)


def on_ranks(drawn: LockFreeDraw, folder: Path, device_memory: int = AMPLE) -> list[Run]:
    system, models, disk = angel_ptm(), [drawn.build() for _ in range(drawn.size)], folder / "disk"
    disk.mkdir(parents=True)
    asked = settings(
        device_memory=device_memory,
        host_memory=AMPLE,
        ranks=drawn.size,
        accumulate=drawn.accumulate,
        dtype=drawn.dtype,
        recompute=drawn.recompute,
        log_events=True,
        **({"disk": disk, "disk_memory": AMPLE} if drawn.states == "disk" else {}),
    )
    given = {"page": 16384, "cache": drawn.cache, "states": drawn.states, "nonfinite": "stop", "max_staleness": drawn.most}
    options = system.Options.model_validate(given)

    def work(ranks: Ranks) -> Run:
        torch.set_num_threads(1)  # of this thread: how many there are decides bits
        sleep = sleeps(drawn.seed + ranks.rank, JITTER_S)
        engine = system.initialize(
            models[ranks.rank],
            asked,
            options,
            ranks=ranks,
            device=lambda log: EmulatedDevice(device_memory, log, jitter=sleep),
        )
        return LockFreeLoop(drawn, engine, ranks.rank, folder).run()

    found = as_threads(drawn.size, work)
    assert os.listdir(disk) == []
    return found


def found_room(drawn: LockFreeDraw, folder: Path, peak_bytes: int) -> tuple[list[Run], int]:
    """With the first budget that holds it, and that."""
    for more in MORE:
        budget = int(peak_bytes * drawn.share * more)
        try:
            with pytest.MonkeyPatch.context() as monkeypatch:
                kept = Kept(monkeypatch)
                found = on_ranks(drawn, folder / f"{more}", budget)
                if kept.added:  # with room for all that is trained, and its states, nothing is behind
                    assert drawn.most is not None and 1 <= kept.check() <= drawn.most + 1
            return found, budget
        except (BudgetError, OutOfMemoryError):
            if more == MORE[-1]:
                raise
    raise AssertionError("the last budget returns or raises")


def check(drawn: LockFreeDraw, folder: Path) -> None:
    """Beside the same loop with the updates in its steps, and all the memory it wants."""
    try:
        expected = on_ranks(replace(drawn, most=None), folder / "synchronous")
        found, budget = found_room(drawn, folder, max(run.memory.device_peak_bytes or 0 for run in expected))
        _look(drawn, found, budget)
        if drawn.most == 0:
            for one, other in zip(expected, found, strict=True):
                assert_equal(one, other)
    except BaseException as error:
        error.add_note(f"{drawn}")
        raise


def _look(drawn: LockFreeDraw, found: Sequence[Run], budget: int) -> None:
    for mine in found:
        assert all(torch.equal(value, mine.parameters[name]) for name, value in found[0].parameters.items())
        statistics: Any = mine.engine.statistics()
        assert (statistics.staleness_max or 0) <= (drawn.most or 0)
        log = managed(mine.engine).log
        assert all(0 <= each.pool <= each.live <= budget for each in log.bytes if each.tier == "device")
        assert not races_of(mine.engine)
