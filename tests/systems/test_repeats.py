"""What a caller has set around a block's call is there again when the block is recomputed, or is missed and refused."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from systems.errors import UnsupportedError
from systems.system import Engine
from tests.systems.models_plain import DIM, squared_error
from tests.systems.models_small import tokens
from tests.systems.running import RESIDENT, Run, assert_equal, finished, one_step, settings, start
from tests.systems.setups import SYSTEMS

ALL = {"resident": (RESIDENT, RESIDENT.Options()), **SYSTEMS}
AROUND: contextvars.ContextVar[float] = contextvars.ContextVar("AROUND", default=1.0)
WORLD = SimpleNamespace(gain=1.0)


class Scaled(nn.Module):
    """Its output depends on all that a caller may set."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)
        self.gain, self.rates = 1.0, nn.Dropout(0.0)
        self.register_buffer("shift", torch.ones(()))

    def forward(self, x: torch.Tensor, given: Any = None) -> torch.Tensor:
        gain = self.gain * AROUND.get() * WORLD.gain * (1.0 if given is None else given.gain)
        return x + torch.tanh(self.rates(self.up(torch.tanh(gain * self.shift * x))))


def attribute(block: Any, x: torch.Tensor) -> torch.Tensor:
    block.gain, block.rates.p = 0.5, 0.25
    x = block(x)
    block.gain, block.rates.p = 1.0, 0.0
    return x


def buffer(block: Any, x: torch.Tensor) -> torch.Tensor:
    before, block.shift = block.shift, torch.full((), 0.5)
    x = block(x)
    block.shift = before
    return x


def context(block: Any, x: torch.Tensor) -> torch.Tensor:
    token = AROUND.set(0.5)
    x = block(x)
    AROUND.reset(token)
    return x


def functional(block: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.func.functional_call(block, {name: 1.25 * p for name, p in block.named_parameters()}, (x,))


def training(block: Any, x: torch.Tensor) -> torch.Tensor:
    block.rates.p = 0.25
    block.eval()
    x = block(x)
    block.train()
    return x


def world(block: Any, x: torch.Tensor) -> torch.Tensor:
    WORLD.gain = 0.5
    x = block(x)
    WORLD.gain = 1.0
    return x


def argument(block: Any, x: torch.Tensor) -> torch.Tensor:
    given = SimpleNamespace(gain=0.5)
    x = block(x, given)
    given.gain = 1.0
    return x


def several(block: Any, x: torch.Tensor) -> torch.Tensor:
    return context(block, buffer(block, attribute(block, x)))


Around = Callable[[Any, torch.Tensor], torch.Tensor]
FOLLOWED: list[Around] = [attribute, buffer, context, training]


class Net(nn.Module):
    def __init__(self, around: Around) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Scaled() for _ in range(3))
        self.around = around

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.around(block, x)
        return x


def started(system: str, around: Around, recompute: Any = "full", **given: Any) -> Engine:
    chosen, options = ALL[system]
    return start(chosen, Net(around), settings(recompute=recompute, **given), options)


def trained(engine: Engine, count: int = 3) -> Run:
    torch.manual_seed(3)
    return finished(engine, [one_step(engine, batch, squared_error) for batch in tokens(count, 1)])


@pytest.mark.parametrize(
    ("system", "around"),
    [*((system, around) for system in ALL for around in (several, functional)), *(("resident", f) for f in FOLLOWED)],
)
@pytest.mark.one_in(2)
def test_what_is_followed(system: str, around: Around) -> None:
    expected = trained(started("resident", around, "none"))
    assert_equal(expected, trained(started(system, around)))


@pytest.mark.parametrize(("system", "around"), [*((system, world) for system in ALL), ("resident", argument)])
def test_what_is_missed_is_refused_and_the_step_is_not_done(system: str, around: Around) -> None:
    engine: Any = started(system, around)
    with pytest.raises(UnsupportedError, match=r"^block blocks.2 came to other values when it was recomputed"):
        trained(engine)
    engine.module.around = lambda block, x: block(x)
    assert_equal(trained(started("resident", engine.module.around)), trained(engine))


@pytest.mark.parametrize("system", ALL)
def test_a_later_step_is_refused_before_its_update(system: str) -> None:
    """When nothing is compared at once any more: where the norm is read."""
    engine: Any = started(system, lambda block, x: block(x))
    batches = tokens(4, 1)
    for batch in batches[:3]:
        one_step(engine, batch, squared_error)
    engine.module.around = world
    with pytest.raises(UnsupportedError, match=r"^block blocks.2 came to other values"):
        one_step(engine, batches[3], squared_error)
    engine.module.around = lambda block, x: block(x)
    losses = [one_step(engine, batch, squared_error) for batch in batches[2:]]
    steps = [one_step(other := started("resident", engine.module.around), batches[0], squared_error)]
    steps += [one_step(other, batch, squared_error) for batch in (*batches[1:3], *batches[2:])]
    assert losses == steps[3:]
    assert_equal(finished(other, []), finished(engine, []))


def test_nonfinite_stop_cannot_take_it_back_and_says_so() -> None:
    chosen, _ = SYSTEMS["h3t"]
    engine: Any = start(chosen, Net(lambda block, x: block(x)), settings(recompute="full"), chosen.Options(nonfinite="stop"))
    batches = tokens(4, 1)
    for batch in batches[:3]:
        one_step(engine, batch, squared_error)
    engine.module.around = world
    one_step(engine, batches[3], squared_error)
    with pytest.raises(UnsupportedError, match="came to other values"):
        engine.drain()
    with pytest.raises(RuntimeError, match="applied already"):
        engine(torch.zeros(2, DIM))
    engine.close(keep=False)


def test_a_module_that_counts_its_calls_in_evaluation_too() -> None:
    """What a forward changes is learned in training and in evaluation: a norm's averages, here, only in the second."""

    class Averaging(Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.mean = nn.BatchNorm1d(DIM)

        def forward(self, x: torch.Tensor, given: Any = None) -> torch.Tensor:
            return self.mean(super().forward(x))

    runs = []
    for recompute in ("none", "full"):
        model: Any = Net(lambda block, x: block(x))
        model.blocks[1] = Averaging()
        torch.manual_seed(1)
        nn.init.normal_(model.blocks[1].up.weight, std=0.1)
        engine = start(RESIDENT, model, settings(recompute=recompute))
        engine.eval()
        one_step(engine, tokens(1, 1)[0], squared_error)
        engine.train()
        runs.append(trained(engine))
        runs[-1].parameters |= {name: value.clone() for name, value in model.named_buffers()}
    assert_equal(*runs)
