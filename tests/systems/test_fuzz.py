"""Random sequences of everything a training loop may do, each beside resident, bit for bit (invariants 1 to 3, 11, 15)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from systems.strategies.elixir.options import ElixirOptions
from systems.system import Engine
from tests.planning.races import find_races, issued_operations
from tests.random_eviction import RandomOptions
from tests.systems.models_plain import DIM, Stack, squared_error
from tests.systems.models_small import tokens
from tests.systems.running import (
    AMPLE,
    RANDOM,
    RESIDENT,
    Run,
    assert_equal,
    elixir,
    evict_at_once,
    finished,
    h3t,
    settings,
    start,
)
from tests.systems.test_memory import check_segments

STEPS = 8
MICRO_BATCHES = 2


class OnPurposeError(Exception):
    pass


@dataclass
class Pass:
    """One way through the model. order: block numbers, repeats allowed. recompute: by block, how; absent is not at all."""

    order: Sequence[int]
    heads: Sequence[int]
    recompute: dict[int, bool] = field(default_factory=dict)
    batch: int = 2


class Maze(Stack):
    """Does what the pass says: any blocks in any order, some checkpointed, one or two heads, a scale of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(2)])
        self.heads[1].weight = self.head.weight
        self.scale = nn.Parameter(torch.tensor(0.9))
        self.way = Pass((0,), (0,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(x.to(self.scale.dtype)) * self.scale
        for number in self.way.order:
            block = self.blocks[number]
            if number in self.way.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=self.way.recompute[number])
            else:
                x = block(x)
        return sum(self.heads[h](x) for h in self.way.heads) * self.scale


def random_pass(luck: random.Random) -> Pass:
    order = [luck.randrange(4) for _ in range(luck.choice((1, 3, 4, 6)))]
    if luck.random() < 0.5:
        order = [0, 1, 2, 3]
    recompute = {number: luck.random() < 0.5 for number in range(4) if luck.random() < 0.3}
    return Pass(order, luck.choice(((0,), (1,), (0, 1))), recompute, luck.choice((1, 2, 5)))


class Loop:
    """One training loop; everything it does follows from the seed, and nothing from the engine."""

    def __init__(self, seed: int, system: Any, given: dict[str, Any], options: Any = None) -> None:
        self.luck = random.Random(seed)
        torch.manual_seed(seed)
        self.model = Maze()
        if self.luck.random() < 0.3:
            self.model.blocks[1].requires_grad_(False)
        self.engine = start(system, self.model, settings(accumulate=MICRO_BATCHES, **given), options)
        self.ids = tokens(200, 1, batch=5, seed=seed)[:, 0]
        self.used = 0
        self.losses: list[float] = []

    def batch(self, size: int) -> torch.Tensor:
        self.used += 1
        return self.ids[self.used][:size]

    def evaluate(self) -> None:
        if self.luck.random() < 0.3:
            self.model.way = random_pass(self.luck)
            with torch.no_grad():
                self.losses.append(squared_error(self.engine, self.batch(self.luck.choice((1, 5))), 1).item())

    def disturbed(self) -> Callable[[], None]:
        """A hook that fails or spoils a gradient, now and then; what takes it away again."""
        block, kind = self.model.blocks[self.luck.randrange(4)], self.luck.random()

        def fail(*_: Any) -> None:
            raise OnPurposeError

        if kind < 0.1:
            handle = block.down.register_forward_hook(fail)
        elif kind < 0.2 and block.up.weight.requires_grad:
            handle = block.up.weight.register_hook(fail)
        elif kind < 0.3 and block.up.weight.requires_grad:
            handle = block.up.weight.register_hook(lambda gradient: gradient * torch.inf)
        else:
            return lambda: None
        return handle.remove

    def step(self) -> None:
        for _ in range(MICRO_BATCHES):
            self.evaluate()
            way = random_pass(self.luck)
            self.model.way = way
            loss = squared_error(self.engine, self.batch(way.batch), 30)
            self.evaluate()
            self.engine.backward(loss)
            self.losses.append(loss.item())
        self.evaluate()
        self.engine.step()

    def run(self, after: Callable[[Engine], None]) -> Run:
        for _ in range(STEPS):
            restore = self.disturbed()
            try:
                self.step()
            except OnPurposeError:
                self.losses.append(-1.0)
            finally:
                restore()
            if self.luck.random() < 0.2:
                self.engine.set_lr(self.luck.choice((1e-3, 1e-4)))
            if self.luck.random() < 0.2:
                with self.engine.summon(write=True) as values:
                    values["scale"].mul_(0.99)
            self.engine.drain()
            after(self.engine)
        return finished(self.engine, self.losses)


def check(seed: int) -> None:
    luck = random.Random(-seed)
    given: dict[str, Any] = dict(dtype=luck.choice(("fp32", "bf16")), clip=luck.choice((0.0, 0.5)))
    expected = Loop(seed, RESIDENT, given).run(lambda _: None)
    log = dict(log_events=True)
    options = ElixirOptions(prefetch=luck.randrange(4), variant=luck.choice(("master-shard", "write-back")))
    for budget in (AMPLE, 600_000 if given["dtype"] == "fp32" else 400_000):
        loop = Loop(seed, elixir(), given | log | {"device_memory": budget}, options)
        run = loop.run(lambda engine: check_segments(engine.parts))  # type: ignore[attr-defined]
        assert_equal(expected, run)
        assert find_races(issued_operations(run.engine.log.operations)) == []  # type: ignore[attr-defined]
    switches = h3t().Options(solver="drawn" if seed % 2 else "best")
    loop = Loop(seed, h3t(), given | log | {"device_memory": 600_000 if given["dtype"] == "fp32" else 400_000}, switches)
    assert_equal(expected, loop.run(lambda engine: check_segments(engine.parts)))  # type: ignore[attr-defined]
    assert find_races(issued_operations(loop.engine.log.operations)) == []  # type: ignore[attr-defined]
    if seed % 2:
        given["recompute"] = "full"
    moving = RandomOptions(chunk_parameters=luck.choice((1, 3, 7)), activations="host" if seed % 2 else "device")
    loop = Loop(seed, RANDOM, given, moving)
    evict_at_once(loop.engine, seed=seed)
    assert_equal(expected, loop.run(lambda engine: check_segments(engine.parts)))  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(3))
def test_a_random_loop_equals_resident(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_many_random_loops_equal_resident(part: int) -> None:
    for seed in range(100 + 10 * part, 110 + 10 * part):
        check(seed)
