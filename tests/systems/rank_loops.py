"""One training loop on several ranks with everything that a loop may do, drawn by a seed; and the same beside resident.

What all ranks do is drawn by the seed alone, and so is what one of them does on its own: how long its batches are, which
parameters get no gradient, which gradient is not finite, which blocks it leaves out while there is a plan to keep to. Ranks
are threads.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from systems.device.emulated import EmulatedDevice
from systems.errors import BudgetError, OutOfMemoryError
from systems.ranks.loopback import as_threads
from systems.ranks.ranks import Ranks
from systems.substrate.engine import ManagedEngine
from tests.planning.races import find_races
from tests.systems.draws import Draw, Maze, draw, random_pass
from tests.systems.every import RESIDENT, STRATEGIES
from tests.systems.models_plain import Stack
from tests.systems.models_small import tokens
from tests.systems.random_loops import JITTER_S, MORE
from tests.systems.running import AMPLE, Run, assert_equal, finished, managed, settings
from tests.systems.test_memory import check_segments
from tests.systems.test_ordering import as_issued, sleeps

ONE_RANK_ONLY = {"stateful", "in-place"}  # running averages, and what H3T refuses
SAME_SIZE = {"late-leaf"}


@dataclass(frozen=True, kw_only=True)
class RankDraw:
    """drawn: what one rank would be asked to do alone. strategy: that all of them have."""

    drawn: Draw
    strategy: str
    size: int

    @property
    def asked(self) -> dict[str, Any]:
        return self.drawn.given | {"ranks": self.size}


def rank_draw(seed: int) -> RankDraw:
    """The seed alone decides. Strategies take turns."""
    names, luck = list(STRATEGIES), random.Random(f"ranks {seed}")
    number = seed
    while True:  # the first draw of this strategy and of a model that several ranks may have
        drawn = draw(number)
        part = drawn.parts[0]
        if part.system == names[seed % len(names)] and drawn.model not in ONE_RANK_ONLY:
            break
        number += 7919
    built = {"scatter": True, "reduction": "ordered"}  # for ranks on a CPU
    built = {name: value for name, value in built.items() if name in type(part.options).model_fields}
    part = replace(part, options=part.options.model_copy(update=built))
    drawn = replace(drawn, parts=(part,), seed=seed, steps=min(drawn.steps, 5), accumulate=min(drawn.accumulate, 2))
    return RankDraw(drawn=drawn, strategy=part.system, size=luck.choice((2, 2, 3)))


def leaves_out(drawn: RankDraw) -> bool:
    """Of the model each block can be."""
    model: Any = drawn.drawn.build(drawn.drawn.seed)
    return type(model).forward is Stack.forward and len(model.blocks) > 1


class RankLoop:
    """Of one rank. model: its own. planned: steps in which it may leave blocks out; None finds those with a plan in force."""

    def __init__(self, drawn: RankDraw, engine: Any, model: Any, rank: int, planned: list[int] | None) -> None:
        self.planned, self.given = [] if planned is None else planned, planned is not None
        self.leaving, self.left_out, self.number = False, 0, 0
        self.skips, self.own_skips = random.Random(f"skips {drawn.drawn.seed}"), random.Random(f"{rank} {drawn.drawn.seed}")
        self.can_leave_out = leaves_out(drawn)
        if self.can_leave_out:
            model.forward = self.forward
        self.draw, self.engine, self.model, self.rank = drawn.drawn, engine, model, rank
        self.size = drawn.size
        seed = drawn.drawn.seed
        self.luck, self.own = random.Random(f"all {seed}"), random.Random(f"rank {rank} {seed}")
        self.ids = tokens(100 * drawn.size, 1, batch=5, seed=seed)[:, 0]
        self.used = 0
        self.losses: list[float] = []

    def micro_loss(self) -> torch.Tensor:
        if isinstance(self.model, Maze):
            self.model.way = random_pass(self.luck)
        ids = self.ids[self.used * self.size + self.rank]
        self.used += 1
        rows = 1 if self.leaving else self.own.choice((1, 2, 5))
        return self.draw.loss(self.engine, ids[:rows], 30)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A stack's, without some blocks."""
        for block in self.model.blocks:
            if self.leaving and torch.is_grad_enabled() and self.own_skips.random() < 0.3:
                self.left_out += 1
            else:
                x = block(x)
        return self.model.head(x)

    def leave_out(self) -> None:
        """Whether this step may, and is the same on all ranks in all else."""
        self.number += 1
        wanted = self.can_leave_out and self.skips.random() < 0.6
        if wanted and not self.given and self.engine.cursor.plan is not None:
            self.planned.append(self.number)
        self.leaving = wanted and self.number in self.planned

    def evaluate(self) -> None:
        if not self.leaving and self.luck.random() < 0.25:
            with torch.no_grad():
                self.losses.append(self.micro_loss().item())

    def idle(self) -> Any:
        """On one rank alone now and then a linear layer of a block does without its bias. What undoes it."""
        inner = [module for block in getattr(self.model, "blocks", ()) for module in block.modules()]
        layers: list[Any] = [module for module in inner if isinstance(module, nn.Linear)]
        if not layers or self.own.random() > 0.3:
            return lambda: None
        layer = self.own.choice(layers)
        layer.forward = lambda x: nn.functional.linear(x, layer.weight)
        return lambda: layer.__dict__.pop("forward")

    def overflow(self) -> Any:
        """On one rank alone now and then a gradient is not finite. What undoes it."""
        if self.draw.early(self.draw.parts[0]) or self.own.random() > 0.15:
            return lambda: None
        parameter = self.own.choice([p for p in self.model.parameters() if p.requires_grad])
        return parameter.register_hook(lambda gradient: gradient * torch.inf).remove

    def step(self) -> None:
        self.leave_out()
        partial = self.draw.accumulate > 1 and self.luck.random() < 0.1
        undo = self.idle(), self.overflow()
        for _ in range(1 if partial else self.draw.accumulate):
            self.evaluate()
            loss = self.micro_loss()
            self.evaluate()
            self.engine.backward(loss)
            self.losses.append(loss.item())
        for each in undo:
            each()
        if not self.draw.early(self.draw.parts[0]):
            self.evaluate()
            if self.luck.random() < 0.1:
                self.engine.set_lr(self.luck.choice((1e-3, 1e-4)))
        self.engine.step()
        self.leaving = False

    def run(self) -> Run:
        for _ in range(self.draw.steps):
            self.step()
            if isinstance(self.engine, ManagedEngine):
                self.engine.drain()
                check_segments(self.engine)
            if self.luck.random() < 0.2:
                self.engine.set_lr(self.luck.choice((1e-3, 1e-4)))
            if not self.draw.early(self.draw.parts[0]) and self.luck.random() < 0.1:
                self.engine.backward(self.micro_loss())
                self.engine.discard()
        return finished(self.engine, self.losses)


def on_ranks(
    drawn: RankDraw, system: Any, options: Any, device_memory: int | None = None, planned: list[int] | None = None
) -> tuple[list[Run], list[int]]:
    """And in which steps blocks were left out; planned: see RankLoop."""
    models = [drawn.drawn.build(drawn.drawn.seed) for _ in range(drawn.size)]
    more = {} if device_memory is None else {"device_memory": device_memory, "log_events": True}
    asked = settings(**drawn.asked, **more)

    def work(ranks: Ranks) -> tuple[Run, list[int]]:
        torch.set_num_threads(1)  # of this thread: how many there are decides bits
        made: dict[str, Any] = {}
        if device_memory is not None and drawn.drawn.parts[0].jitter:
            sleep = sleeps(drawn.drawn.seed + ranks.rank, JITTER_S)
            made["device"] = lambda log: EmulatedDevice(device_memory or AMPLE, log, jitter=sleep)
        engine = system.initialize(models[ranks.rank], asked, options, ranks=ranks, **made)
        loop = RankLoop(drawn, engine, models[ranks.rank], ranks.rank, planned)
        return loop.run(), loop.planned

    found = as_threads(drawn.size, work)
    assert all(steps == found[0][1] for _, steps in found)
    return [run for run, _ in found], found[0][1]


def check(seed: int) -> float:
    """One draw: its loop under its strategy, bit for bit that of resident on the same ranks, in the first budget that holds it.

    Times the drawn budget that took.
    """
    drawn = rank_draw(seed)
    part = drawn.drawn.parts[0]
    try:
        expected, _ = on_ranks(drawn, RESIDENT, RESIDENT.Options(), planned=[])
        peak = max(run.memory.device_peak_bytes or 0 for run in expected)
        for more in MORE:
            try:
                found, left_out = on_ranks(drawn, STRATEGIES[drawn.strategy], part.options, int(peak * part.share * more))
                break
            except (BudgetError, OutOfMemoryError):
                if more == MORE[-1]:
                    raise
        if left_out:
            expected, _ = on_ranks(drawn, RESIDENT, RESIDENT.Options(), planned=left_out)
        for one, other in zip(expected, found, strict=True):
            assert_equal(one, other)
            engine = managed(other.engine)
            assert not find_races(as_issued(engine.log.operations))
    except BaseException as error:
        error.add_note(f"{drawn}\nagain: tests.systems.rank_loops.check({seed})")
        raise
    return more
