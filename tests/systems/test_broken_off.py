"""What broke off is tidied up, and costs no more than it has to: no values, no step in progress, no byte of the device."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch

from systems.device.memory.pool import Allocation
from systems.system import Engine
from tests.systems.interrupts import build
from tests.systems.models_plain import squared_error
from tests.systems.models_small import tokens
from tests.systems.running import RESIDENT, ManagedEngine, managed, one_step, parameters_of, settings, start
from tests.systems.setups import SYSTEMS as MANAGED
from tests.systems.setups import in_turn

SYSTEMS: dict[str, tuple[Any, Any]] = {"resident": (RESIDENT, None), **MANAGED}
TIGHT = 200_000
IDS = tokens(1, 2)[0]


class OnPurposeError(Exception):
    pass


BREAKS = [(False, OnPurposeError), (True, KeyboardInterrupt), (False, KeyboardInterrupt), (True, OnPurposeError)]


def begin(system: str, accumulate: int = 1, model: Any = None) -> Engine:
    given = {} if system == "resident" else {"device_memory": TIGHT}
    chosen, options = SYSTEMS[system]
    return start(chosen, build() if model is None else model, settings(accumulate=accumulate, **given), options)


def loss_of(engine: Engine, number: int = 0) -> torch.Tensor:
    return squared_error(engine, IDS[number], 7)


def assert_alike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("system", MANAGED)
def test_memory_that_was_taken_for_nobody_is_free_again(system: str) -> None:
    """Ctrl-C as the pool hands a block out. Closing then finds nothing amiss, and the model has its weights."""
    model = build()
    engine = begin(system, model=model)
    one_step(engine, IDS[:1], squared_error)

    def interrupt(frame: FrameType, event: str, arg: object) -> Any:
        if event == "return":
            raise KeyboardInterrupt
        return interrupt

    sys.settrace(lambda frame, event, arg: interrupt if frame.f_code is Allocation.__init__.__code__ else None)
    try:
        with pytest.raises(KeyboardInterrupt):
            one_step(engine, IDS[:1], squared_error)
    finally:
        sys.settrace(None)
    one_step(engine, IDS[:1], squared_error)
    expected = parameters_of(engine)
    engine.close()
    assert_alike(expected, dict(model.named_parameters()))


@pytest.mark.parametrize("system", MANAGED)
def test_a_block_that_was_lost_costs_no_values(system: str) -> None:
    """Closing says so, and gives them back all the same."""
    model = build()
    engine = begin(system, model=model)
    one_step(engine, IDS[:1], squared_error)
    expected = parameters_of(engine)
    managed(engine).residency.room.allocate(64, "a block of nobody's")
    with pytest.raises(AssertionError, match="was not returned to the pool"):
        engine.close()
    assert_alike(expected, dict(model.named_parameters()))
    with torch.no_grad():
        squared_error(model, IDS[0], 1)


@pytest.mark.parametrize(("system", "past", "error"), in_turn(SYSTEMS, BREAKS))
def test_an_evaluation_that_fails_leaves_the_step_in_progress(system: str, past: bool, error: type[BaseException]) -> None:
    engine, plain = begin(system, 2), begin("resident", 2)
    for number in range(2):
        engine.backward(loss_of(engine, number))
        plain.backward(loss_of(plain, number))
        if number == 1:
            break

        def fail(*_: Any) -> None:
            raise error

        module: Any = engine.module
        handle = module.blocks[1].up.register_forward_hook(fail)
        with torch.no_grad(), pytest.raises(error):
            squared_error(module if past else engine, IDS[0], 7)
        handle.remove()
    engine.step()
    plain.step()
    assert_alike(parameters_of(plain), parameters_of(engine))
    plain.close()
    engine.close()


@pytest.mark.parametrize("system", MANAGED)
def test_a_step_that_an_evaluation_could_not_leave_is_refused(system: str) -> None:
    """It broke off while gradients or states were on their way: the step is over, and who goes on with it is told."""
    engine = begin(system, 2)
    one_step(engine, IDS, squared_error)
    expected = parameters_of(engine)
    engine.backward(loss_of(engine))
    assert isinstance(engine, ManagedEngine)
    module: Any = engine.module

    def fail(*_: Any) -> None:
        engine.in_force.halfway = True
        raise KeyboardInterrupt

    handle = module.blocks[1].up.register_forward_hook(fail)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        loss_of(engine)
    handle.remove()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"call discard\(\), and begin that step anew"):
            loss_of(engine, 1)
    engine.discard()
    assert_alike(expected, parameters_of(engine))
    one_step(engine, IDS, squared_error)
    engine.close()


@pytest.mark.parametrize(("system", "end"), in_turn(SYSTEMS, [("step",), ("discard",)]))
@pytest.mark.one_in(2)
def test_a_loss_belongs_to_its_step(system: str, end: str) -> None:
    """Gone backward through after it, at once or beside another forward pass, it is refused, and the next step is right."""
    engine, plain = begin(system), begin("resident")
    for forward in (False, True):
        stale = loss_of(engine, 0)
        engine.backward(loss_of(engine, 1))
        getattr(engine, end)()
        if end == "step":
            plain.backward(loss_of(plain, 1))
            plain.step()
        if forward:
            loss_of(engine, 1)
        words = "this loss was made in a step that is over" if forward else "call the engine first"
        with pytest.raises((RuntimeError, ValueError), match=words):
            engine.backward(stale)
    assert one_step(engine, IDS[:1], squared_error) == one_step(plain, IDS[:1], squared_error)
    assert_alike(parameters_of(plain), parameters_of(engine))
    plain.close()
    engine.close()


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_second_ctrl_c(system: str) -> None:
    """While the first is being tidied up: the next call does the rest."""
    engine, plain = begin(system), begin("resident")
    one_step(engine, IDS[:1], squared_error)
    one_step(plain, IDS[:1], squared_error)
    device: Any = engine.device if system == "resident" else managed(engine).device  # type: ignore[attr-defined]
    module: Any = engine.module

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = module.blocks[1].up.register_forward_hook(fail)
    drain, device.drain = device.drain, fail
    with pytest.raises(KeyboardInterrupt):
        loss_of(engine)
    device.drain = drain
    handle.remove()
    assert one_step(engine, IDS[:1], squared_error) == one_step(plain, IDS[:1], squared_error)
    assert_alike(parameters_of(plain), parameters_of(engine))
    plain.close()
    engine.close()
