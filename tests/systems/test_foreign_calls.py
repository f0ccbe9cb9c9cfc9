"""Calls around an engine: a compiled forward, and a backward pass that another engine began, are refused in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import systems
from systems.errors import HiddenUseError, UnsupportedError
from systems.system import Engine
from tests.systems.every import STRATEGIES
from tests.systems.setups import in_turn

OURS = sorted(["resident", *STRATEGIES])


class Stack(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def started(system: str, seed: int = 0, **given: Any) -> Engine:
    model = Stack(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    asked = {"device": "cpu", "device_memory": "1MiB", "host_memory": "16MiB", "dtype": "fp32"} | given
    return systems.initialize(model, system=system, optimizer=optimizer, **asked)


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def steps(engine: Engine, forward: Callable[[torch.Tensor], torch.Tensor] | None = None, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + 2):
        loss = ((engine if forward is None else forward)(batch(step)) ** 2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def compiled(function: Any) -> Any:
    return torch.compile(function, backend="eager")


WAYS: dict[str, Callable[[Engine, Any], Any]] = {
    "engine": lambda engine, model: compiled(engine),
    "a function that calls it": lambda engine, model: compiled(lambda x: engine(2 * x)),
    "model": lambda engine, model: compiled(model),
    "model in place": lambda engine, model: model.compile(backend="eager"),
    "block": lambda engine, model: model.blocks.__setitem__(1, compiled(model.blocks[1])),
    "block's forward": lambda engine, model: setattr(model.blocks[1], "forward", compiled(model.blocks[1].forward)),
    "block in place": lambda engine, model: model.blocks[1].compile(backend="eager"),
}


def each_way() -> list[Any]:
    """Every way with resident and one other system, and the rest where time does not count."""
    chosen = {(way, name) for number, way in enumerate(WAYS) for name in ("resident", OURS[number % len(OURS)])}
    pairs = ((way, name) for way in WAYS for name in OURS)
    return [pytest.param(*pair, marks=() if pair in chosen else pytest.mark.slow) for pair in pairs]


@pytest.mark.parametrize(("way", "system"), each_way())
@pytest.mark.one_in(3)
def test_a_compiled_forward_is_refused(way: str, system: str) -> None:
    """On the emulated device torch would compile nothing, and say nothing."""
    torch._dynamo.reset()
    with started(system) as engine:
        forward = WAYS[way](engine, engine.module)
        with pytest.raises(UnsupportedError, match="torch.compile hides modules from the engine"):
            steps(engine, forward)


@pytest.mark.parametrize("system", OURS)
@pytest.mark.one_in(2)
def test_what_is_not_of_the_model_may_be_compiled(system: str) -> None:
    double = compiled(lambda x: 2 * x)
    with started(system) as engine, started(system) as other:
        assert steps(engine, lambda x: engine(double(x))) == steps(other, lambda x: other(2 * x))


@pytest.mark.parametrize(("system", "begins"), in_turn(OURS, [("first",), ("second",)]))
def test_a_loss_through_two_engines_is_refused_and_both_go_on(system: str, begins: str) -> None:
    with started("resident") as alone:
        expected = steps(alone)
    with started(system) as first, started(system, seed=1) as second, started(system, seed=1) as apart:
        loss = (second(first(batch(7))) ** 2).mean()
        with pytest.raises(RuntimeError, match="a loss goes through one engine, so detach what another engine's model made"):
            (first if begins == "first" else second).backward(loss)
        assert steps(first) == expected
        assert steps(second) == steps(apart)
        with torch.no_grad():
            given = first(batch(9))
        assert steps(second, lambda x: second(given)) == steps(apart, lambda x: apart(given))


class Handing(nn.Module):
    """Hands back what it was given beside what it made, or `more`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))
        self.more: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        return x, self.block(x) * self.scale, self.more


@pytest.mark.parametrize("system", OURS)
def test_what_a_model_hands_back_has_a_backward_of_its_own(system: str) -> None:
    weight = torch.ones(8, requires_grad=True)
    with systems.initialize(Handing(), system=system, device="cpu", device_memory="1MiB", dtype="fp32") as engine:
        x = batch(0) + weight
        given, made, _ = engine(x)
        assert given is x
        given.sum().backward(retain_graph=True)
        assert weight.grad is not None and weight.grad.eq(4).all()
        with pytest.raises(RuntimeError, match=r"engine\.backward"):
            made.sum().backward(retain_graph=True)
        engine.discard()
        engine.backward(engine(batch(1) + weight)[1].mean())
        engine.step()


@pytest.mark.parametrize("system", OURS)
def test_a_model_that_returns_too_much_is_refused_in_words(system: str) -> None:
    """With gradients; an evaluation needs nothing of what it returns. The next step is taken."""
    model = Handing()
    with systems.initialize(model, system=system, device="cpu", device_memory="1MiB", dtype="fp32") as engine:
        model.more = list(range(200_000))
        with pytest.raises(HiddenUseError, match=r"module <root> returns.* so much in it .*: return it in tensors"):
            engine(batch(0))
        with torch.no_grad():
            assert torch.equal(engine(batch(0))[0], batch(0))
        model.more = None
        engine.backward(engine(batch(0))[1].mean())
        engine.step()
