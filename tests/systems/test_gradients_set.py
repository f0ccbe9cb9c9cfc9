"""`parameter.grad` set or deleted by the user: refused where it would be lost or added in silence, followed in a hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from systems.system import Engine
from tests.systems.models_small import tokens
from tests.systems.running import assert_equal, finished, one_step
from tests.systems.setups import in_turn
from tests.systems.test_structure import ALL, DIM, Net, loss, started, steps

ONES = torch.ones(DIM, DIM)


def weight(engine: Engine) -> Any:
    module: Any = engine.module
    return module.blocks[1].weight


def put(parameter: Any) -> None:
    parameter.grad = ONES


def clear(parameter: Any) -> None:
    parameter.grad = None


def delete(parameter: Any) -> None:
    del parameter.grad


def refused(engine: Engine, *attempts: Callable[[Any], None]) -> None:
    for attempt in attempts:
        with pytest.raises(RuntimeError, match=r"with the engine until engine\.step\(\).*register_hook"):
            attempt(weight(engine))


@pytest.mark.parametrize(("system", "accumulate"), in_turn(ALL, [(1,), (2,)]))
@pytest.mark.one_in(2)
def test_a_gradient_that_is_set_past_the_engine_is_refused(system: str, accumulate: int) -> None:
    """And changes nothing: what follows is as if nobody had tried."""
    runs = []
    for chosen in ("resident", system):
        engine = started(chosen, accumulate=accumulate)
        losses = []
        for batch in tokens(2, accumulate):
            total = 0.0
            for number, micro in enumerate(batch):
                value = loss(engine, micro, 1)
                refused(engine, put, *([clear, delete] if number else []))
                engine.backward(value)
                refused(engine, put, clear, delete)
                total += value.item()
            engine.step()
            losses.append(total)
        runs.append(finished(engine, losses))
    assert_equal(*runs)


@pytest.mark.parametrize("system", ALL)
@pytest.mark.one_in(2)
def test_clearing_what_is_not_there_changes_nothing(system: str) -> None:
    runs = []
    for chosen in ("resident", system):
        engine = started(chosen)
        losses = []
        for batch in tokens(2, 1):
            for parameter in engine.module.parameters():
                parameter.grad = None
                delete(parameter)
            losses.append(one_step(engine, batch, loss))
        runs.append(finished(engine, losses))
    assert_equal(*runs)


@pytest.mark.parametrize(("system", "accumulate"), in_turn(ALL, [(2,), (1,)]))
@pytest.mark.one_in(2)
def test_a_hook_may_put_another_gradient_in_its_place(system: str, accumulate: int) -> None:
    """One that was registered before initialize sees the gradient as it comes; None drops it."""

    def halve(parameter: Any) -> None:
        parameter.grad = parameter.grad * 0.5

    runs = []
    for chosen in ("resident", system):
        model: Any = Net()
        model.blocks[0].weight.register_post_accumulate_grad_hook(halve)
        model.blocks[2].bias.register_post_accumulate_grad_hook(clear)
        engine = started(chosen, model, accumulate=accumulate)
        runs.append(finished(engine, [one_step(engine, batch, loss) for batch in tokens(3, accumulate)]))
    assert_equal(*runs)
    assert runs[1].adam["blocks.2.bias"].steps == 0 and runs[1].adam["blocks.0.weight"].steps == 3
    plain = started("resident", accumulate=accumulate)
    unhalved = finished(plain, [one_step(plain, batch, loss) for batch in tokens(3, accumulate)])
    assert not torch.equal(runs[1].parameters["blocks.0.weight"], unhalved.parameters["blocks.0.weight"])


@pytest.mark.parametrize("system", ALL)
def test_a_closed_engine_lets_go_of_gradients(system: str) -> None:
    engine = started(system)
    steps(engine, 1)
    engine.close()
    weight(engine).grad = ONES
    assert isinstance(weight(engine), nn.Parameter) and torch.equal(weight(engine).grad, ONES)
    delete(weight(engine))
    assert weight(engine).grad is None
