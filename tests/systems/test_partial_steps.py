"""Fewer micro-batches than a step has: taken with what is there, or dropped; the plan stays, and learns nothing."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from systems.errors import UnsupportedError
from systems.strategies.elixir.options import ElixirOptions
from systems.system import Engine
from tests.systems.models_plain import CASES, build
from tests.systems.models_small import tokens
from tests.systems.running import RESIDENT, Run, assert_equal, elixir, finished, managed, one_step, settings, start
from tests.systems.setups import SYSTEMS as MANAGED
from tests.systems.setups import in_turn

LOSS = CASES["stack"].loss
SYSTEMS: dict[str, tuple[Any, Any]] = {"resident": (RESIDENT, None), **MANAGED}


def begin(system: str, **given: Any) -> Engine:
    chosen, options = SYSTEMS[system]
    budget = {} if system == "resident" else {"device_memory": 260_000}
    return start(chosen, build("stack"), settings(clip=1.0, **budget | given), options)


def epochs(system: str, micro_batches: int, **given: Any) -> Run:
    """Two epochs of `micro_batches` in steps of three; the last step of each has what is left."""
    engine = begin(system, accumulate=3, **given)
    ids, losses = tokens(2, micro_batches), []
    for epoch in ids:
        losses += [one_step(engine, window, LOSS) for window in epoch.split(3)]
    return finished(engine, losses)


@pytest.mark.parametrize(("system", "micro_batches", "dtype"), in_turn(MANAGED, [(4, "fp32"), (5, "bf16")]))
@pytest.mark.one_in(2)
def test_the_last_window_of_an_epoch(system: str, micro_batches: int, dtype: str) -> None:
    expected, run = of_resident(micro_batches, dtype), epochs(system, micro_batches, dtype=dtype)
    assert_equal(expected, run)
    assert len(run.skipped) == 4
    assert run.counters["fallbacks"] == 0 and run.counters["retraces"] == 0, "it is no departure, and teaches nothing"


@pytest.mark.parametrize("system", [name for name in MANAGED if not name.startswith("random")])
@pytest.mark.one_in(2)
def test_the_plan_stays_in_force(system: str) -> None:
    """What it has at rest is there again, so that the step after a partial one moves what it moved before."""
    engine = begin(system, accumulate=2)
    ids = tokens(6, 2)
    moved = []
    for number, batch in enumerate(ids):
        plan = engine.cursor.plan  # type: ignore[attr-defined]
        before = engine.counters()
        one_step(engine, batch[:1] if number == 4 else batch, LOSS)
        moved.append({key: value - before.get(key, 0) for key, value in engine.counters().items()})
        if number == 4:
            assert engine.cursor.plan is plan and plan is not None  # type: ignore[attr-defined]
            assert managed(engine).residency.resident() >= plan.resident_at_start
    for key in ("h2d_bytes", "d2h_bytes", "on_demand_fetches"):
        assert moved[5].get(key, 0) == moved[3].get(key, 0)
    engine.close()


@cache
def of_resident(micro_batches: int, dtype: str) -> Run:
    return epochs("resident", micro_batches, dtype=dtype)


@cache
def without_drops() -> Run:
    engine = begin("resident", accumulate=2)
    return finished(engine, [one_step(engine, batch, LOSS) for batch in tokens(3, 2)])


@pytest.mark.parametrize(
    ("system", "done"), in_turn(SYSTEMS, [("one and a forward",), ("all",), ("forward",), ("one of two",)])
)
@pytest.mark.one_in(2)
def test_micro_batches_can_be_dropped(system: str, done: str) -> None:
    """In the first step and in a planned one; what follows is what follows without them."""
    engine, losses = begin(system, accumulate=2), []
    engine.discard()  # there is nothing yet
    for batch in tokens(3, 2):
        for number in range({"forward": 0, "one of two": 1, "one and a forward": 1, "all": 2}[done]):
            engine.backward(LOSS(engine, 3 + batch[number] // 2, 7))
        if done.endswith("forward"):
            LOSS(engine, batch[0], 7)
        engine.discard()
        losses.append(one_step(engine, batch, LOSS))
    assert_equal(without_drops(), finished(engine, losses))


def test_updates_that_have_begun_cannot_be_dropped() -> None:
    with start(elixir(), build("stack"), settings(), ElixirOptions(nonfinite="stop")) as engine:
        batch = tokens(1, 1)[0]
        LOSS(engine, batch[0], 1)
        engine.discard()
        engine.backward(LOSS(engine, batch[0], 1))
        with pytest.raises(UnsupportedError, match=r"discard: backward has updated weights already .*call step\(\)"):
            engine.discard()
        engine.step()
        assert torch.isfinite(torch.tensor(one_step(engine, batch, LOSS)))
