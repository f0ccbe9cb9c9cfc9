"""One training loop with everything that a loop may do, drawn by a seed, under any system; and the same beside resident.

Everything the loop does follows from the seed, and nothing from the engine. Where a budget refuses, the next larger one is
tried, up to one that holds all: there a refusal is an error as any other.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import systems
from systems.errors import BudgetError, DivergedError, OutOfMemoryError
from systems.settings import AdamSettings, Settings
from systems.substrate.engine import ManagedEngine
from systems.substrate.system import ManagedSystem
from systems.system import Engine
from tests.planning.races import find_races
from tests.systems.draws import Draw, Maze, Part, draw, random_pass
from tests.systems.every import SYSTEMS
from tests.systems.models_small import tokens
from tests.systems.running import (
    HOST,
    Run,
    assert_equal,
    evict_at_once,
    finished,
    host_need,
    managed,
    replace,
    settings,
    start,
)
from tests.systems.test_memory import check_segments
from tests.systems.test_ordering import as_issued, sleeps

MORE = (1.0, 1.25, 1.6, 2.0, 2.6, 3.4, 4.5, 6.0, 20.0)  # times the budget that was drawn
HOST_SHARES = (0.6, 0.75, 0.9, 1.0, 2.0)
JITTER_S = 0.0002
Begin = Callable[[Any, Part], Engine]


class OnPurposeError(Exception):
    pass


class AppliedError(DivergedError):
    """Resident skipped a step whose gradients the part's system has applied already: it has to end here too."""


class Loop:
    """begin: puts a model under a system. folder: for checkpoints; None has one engine from first to last, as resident does."""

    def __init__(self, drawn: Draw, begin: Begin, folder: Path | None) -> None:
        self.draw, self.luck = drawn, random.Random(f"loop {drawn.seed}")
        self._begin, self._folder = begin, folder
        self.part = drawn.parts[0]
        self.model = drawn.build(drawn.seed)
        self.engine = begin(self.model, self.part)
        self.ids = tokens(200, 1, batch=5, seed=drawn.seed)[:, 0]
        self.used, self.lr = 0, AdamSettings().lr
        self.losses: list[float] = []
        self.norms: list[float | None] = []
        self.skipped: list[bool] = []

    @property
    def early(self) -> bool:
        """What is after backward then sees weights that are updated already, and there is no way back."""
        return self.draw.early(self.part)

    def micro_loss(self) -> torch.Tensor:
        """Of the next batch, through blocks in any order where the model has them so."""
        if isinstance(self.model, Maze):
            self.model.way = random_pass(self.luck)
        size = self.luck.choice((2, 5) if self.draw.model == "stateful" else (1, 2, 5))  # it has statistics of a batch
        self.used += 1
        return self.draw.loss(self.engine, self.ids[self.used][:size], 30)

    def evaluate(self) -> None:
        """One that fails leaves the step in progress."""
        if self.luck.random() < 0.3:
            with torch.no_grad():
                try:
                    self.losses.append(self.micro_loss().item())
                except OnPurposeError:
                    self.losses.append(-2.0)

    def disturbed(self) -> Callable[[], None]:
        """A hook that fails or spoils a gradient, now and then; what takes it away again.

        No gradient's hook fails where updates have begun by then: that has its own tests.
        """
        trained = [p for p in self.model.parameters() if p.requires_grad]
        inner = [m for m in self.model.modules() if m._parameters]
        parameter, module, kind = self.luck.choice(trained), self.luck.choice(inner), self.luck.random()

        def fail(*_: Any) -> None:
            raise OnPurposeError

        if kind < 0.1:
            return module.register_forward_hook(fail).remove
        if 0.1 < kind < 0.2 and not self.early:
            return parameter.register_hook(fail).remove
        if 0.2 < kind < (0.25 if self.early else 0.3):
            return parameter.register_hook(lambda gradient: gradient * torch.inf).remove
        return lambda: None

    def step(self) -> None:
        partial = self.draw.accumulate > 1 and self.luck.random() < 0.1
        for _ in range(1 if partial else self.draw.accumulate):
            self.evaluate()
            loss = self.micro_loss()
            self.evaluate()
            self.engine.backward(loss)
            self.losses.append(loss.item())
        if not self.early:
            self.evaluate()
            if self.luck.random() < 0.1:
                self.lr = self.luck.choice((1e-3, 1e-4))
                self.engine.set_lr(self.lr)
        self.engine.step()

    def disturbed_step(self) -> None:
        before, restore = len(self.engine.outcomes), self.disturbed()
        try:
            self.step()
        except OnPurposeError:
            self.losses.append(-1.0)
        finally:
            restore()
        self.engine.drain()
        if self._folder is None and self.early and any(outcome.skipped for outcome in self.engine.outcomes[before:]):
            raise AppliedError

    def between_steps(self) -> None:
        if self.luck.random() < 0.2:
            self.lr = self.luck.choice((1e-3, 1e-4))
            self.engine.set_lr(self.lr)
        if self.luck.random() < 0.2:
            name = self.luck.choice([name for name, _ in self.model.named_parameters()])
            with self.engine.summon(write=True) as values:
                values[name].mul_(0.99)
        if not self.early and self.luck.random() < 0.1:
            self.engine.backward(self.micro_loss())
            self.engine.discard()

    def hand_over(self, part: Part) -> None:
        self.part = part
        if self._folder is None:
            return
        systems.save_checkpoint(self.engine, self._folder)
        self.keep_outcomes(self.engine)
        self.engine.close()
        self.model = self.draw.build(self.draw.seed + 1)
        self.engine = self._begin(self.model, part)
        systems.load_checkpoint(self.engine, self._folder)
        self.engine.set_lr(self.lr)

    def keep_outcomes(self, engine: Engine) -> None:
        self.norms += [outcome.norm for outcome in engine.outcomes]
        self.skipped += [outcome.skipped for outcome in engine.outcomes]

    def run(self, after: Callable[[Engine], None]) -> Run | None:
        """What it came to; None where it diverged, which leaves losses, norms and skips."""
        for step in range(self.draw.steps):
            if step == self.draw.handover:
                self.hand_over(self.draw.parts[1])
            try:
                self.disturbed_step()
            except DivergedError as error:
                if isinstance(error, AppliedError):
                    self.engine.outcomes.pop()
                self.keep_outcomes(self.engine)
                self.engine.close(keep=False)
                return None
            after(self.engine)
            self.between_steps()
        buffers = {f"buffer {name}": value.clone() for name, value in self.model.named_buffers()}
        run = finished(self.engine, self.losses)
        self.keep_outcomes(self.engine)
        run.norms, run.skipped, run.parameters = self.norms, self.skipped, run.parameters | buffers
        return run


class Trial:
    """A draw under its strategy with budgets that may be too small. more: times the device's; host: of what it takes alone."""

    def __init__(self, drawn: Draw, peak_bytes: int, folder: Path, *, more: float, host: float) -> None:
        self._draw, self._peak_bytes, self.more, self._host = drawn, peak_bytes, more, host
        self._folder, self._begun = folder, list[tuple[Any, Settings]]()
        (folder / "disk").mkdir(parents=True)
        self.on_disk = False

    def run(self) -> tuple[Loop, Run | None]:
        try:
            loop = Loop(self._draw, self._begin, self._folder / "checkpoint")
            return loop, loop.run(self._look)
        except BaseException:
            for engine, _ in self._begun:
                with contextlib.suppress(Exception):  # what comes first says what is wrong
                    engine.close(keep=False)
            raise

    def _begin(self, model: Any, part: Part) -> Engine:
        system, given = SYSTEMS[part.system], self._draw.given
        if not isinstance(system, ManagedSystem):
            return start(system, model, settings(**given))
        asked = settings(**given, log_events=True, device_memory=int(self._peak_bytes * part.share * self.more))
        if part.disk:
            at_home = {"states": "host"} if hasattr(part.options, "states") else {}
            options = part.options.model_copy(update=at_home)  # what the host would need without the disk
            needed = host_need(system, self._draw.build(0), options, **self._draw.given, device_memory=asked.device_memory)
            asked = replace(asked, disk=self._folder / "disk", host_memory=int(needed * self._host))
        elif part.spare is not None:
            needed = host_need(system, self._draw.build(0), part.options, **self._draw.given, device_memory=asked.device_memory)
            asked = replace(asked, host_memory=int(needed * max(1.0, self._host) * (1 + part.spare)))
        engine = start(system, model, asked, part.options, sleeps(self._draw.seed, JITTER_S) if part.jitter else None)
        self._begun.append((engine, asked))
        if part.system == "random":
            evict_at_once(engine, seed=self._draw.seed)
        self.on_disk |= bool(managed(engine).layout.on_disk)
        return engine

    def _look(self, engine: Engine) -> None:
        if isinstance(engine, ManagedEngine):
            check_segments(engine)

    def inspect(self) -> None:
        """What the engines, closed by now, have logged and left."""
        for engine, asked in self._begun:
            assert find_races(as_issued(engine.log.operations)) == []
            most = {"device": asked.device_memory, "host": asked.host_memory}
            for event in engine.log.bytes:
                assert 0 <= event.pool <= event.live, event
                assert event.live <= most.get(event.tier, HOST), event
        assert os.listdir(self._folder / "disk") == []


def found_room(drawn: Draw, peak_bytes: int, folder: Path) -> tuple[Trial, Loop, Run | None]:
    """With the first budgets that hold it."""
    device, host = list(MORE), list(HOST_SHARES)
    while True:
        trial = Trial(drawn, peak_bytes, folder / f"{len(device)}-{len(host)}", more=device[0], host=host[0])
        try:
            return trial, *trial.run()
        except (BudgetError, OutOfMemoryError) as error:
            tried = host if error.tier == "host" else device
            if len(tried) == 1:
                raise
            del tried[0]


def check(seed: int, folder: Path) -> list[str]:
    """One draw: its loop under its strategy, bit for bit that of resident; no race, and no byte above a budget.

    What was in it, for a summary.
    """
    drawn = draw(seed)
    plain = Loop(drawn, lambda model, _: start(SYSTEMS["resident"], model, settings(**drawn.given)), None)
    expected = plain.run(lambda _: None)
    peak = plain.engine.memory().device_peak_bytes
    assert peak is not None
    try:
        trial, loop, found = found_room(drawn, peak, folder)
        trial.inspect()
        assert loop.losses == plain.losses
        assert (repr(loop.norms), loop.skipped) == (repr(plain.norms), plain.skipped)
        assert (found is None) == (expected is None), "one diverged"
        if expected is not None and found is not None:
            assert_equal(expected, found)
    except BaseException as error:
        error.add_note(f"{drawn}\nagain: make fuzz SEED={seed} DRAWS=1")
        raise
    seen = {"states on a disk": trial.on_disk, "stopped by nonfinite": found is None, "budget raised": trial.more > MORE[0]}
    return [*drawn.features, *(name for name, is_so in seen.items() if is_so)]
