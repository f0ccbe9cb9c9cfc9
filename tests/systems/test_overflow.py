"""A gradient that is not finite: the step changes nothing, is counted and said (invariant 11, case C28)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from systems.errors import DivergedError, UnsupportedError
from systems.recipe.step.control import MAX_SKIPS_IN_A_ROW
from systems.recipe.step.loss_scale import FP16_FIRST_SCALE
from systems.strategies.elixir.options import ElixirOptions
from systems.substrate.system import ManagedSystem
from systems.system import Engine
from tests.systems.every import MANAGED, SYSTEMS
from tests.systems.models_plain import CASES, build
from tests.systems.models_small import tokens
from tests.systems.running import (
    RESIDENT,
    AdamState,
    Run,
    adam_states,
    angel_ptm,
    assert_equal,
    elixir,
    finished,
    one_step,
    parameters_of,
    settings,
    start,
)
from tests.systems.setups import in_turn

LOSS = CASES["stack"].loss
TIGHT = 150_000  # bytes: about 40 % of what resident needs in fp32
BAD_STEP = 2


@dataclass
class Snapshot:
    parameters: dict[str, torch.Tensor]
    adam: dict[str, AdamState]

    @classmethod
    def of(cls, engine: Engine) -> Snapshot:
        engine.drain()
        return cls(parameters_of(engine), adam_states(engine))

    def assert_unchanged(self, engine: Engine) -> None:
        now = Snapshot.of(engine)
        assert all(torch.equal(v, now.parameters[n]) for n, v in self.parameters.items())
        for name, (exp_avg, exp_avg_sq, steps) in self.adam.items():
            theirs = now.adam[name]
            assert torch.equal(exp_avg, theirs.exp_avg) and torch.equal(exp_avg_sq, theirs.exp_avg_sq)
            assert steps == theirs.steps


def spoil(model: Any, value: float, when: Callable[[], bool]) -> None:
    """Put one bad number into the gradient of a weight in the middle of the model."""

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        if not when():
            return gradient
        bad = gradient.clone()
        bad.view(-1)[7] = value
        return bad

    model.blocks[2].up.weight.register_hook(hook)


@cache
def run_with_one_bad_step(system: str, dtype: str, accumulate: int, value: float = torch.inf) -> Run:
    model, current = build("stack"), [0]
    budget = TIGHT if system != "resident" else None
    asked = settings(dtype=dtype, accumulate=accumulate, clip=1.0, **({"device_memory": budget} if budget else {}))
    engine = start(SYSTEMS[system], model, asked)
    spoil(model, value, lambda: current[0] == BAD_STEP)
    losses = []
    for number, batch in enumerate(tokens(4, accumulate)):
        current[0] = number
        before = Snapshot.of(engine)
        losses.append(one_step(engine, batch, LOSS))
        outcome = engine.outcomes[-1]
        assert outcome.step == number + 1
        if number == BAD_STEP:
            assert outcome.skipped
            assert outcome.norm is not None and not abs(outcome.norm) < torch.inf
        if outcome.skipped:
            before.assert_unchanged(engine)
        else:
            assert not all(torch.equal(v, before.parameters[n]) for n, v in parameters_of(engine).items())
    return finished(engine, losses)


@pytest.mark.parametrize(
    ("system", "dtype", "accumulate"), in_turn(MANAGED, list(product(["fp32", "bf16", "fp16"], [1, 2])), each=2)
)
@pytest.mark.one_in(2)
def test_a_bad_step_changes_nothing_and_is_counted(system: str, dtype: str, accumulate: int) -> None:
    expected = run_with_one_bad_step("resident", dtype, accumulate)
    run = run_with_one_bad_step(system, dtype, accumulate)
    assert_equal(expected, run)
    assert run.counters["skipped_steps"] == sum(run.skipped) == expected.counters["skipped_steps"]
    assert run.skipped[BAD_STEP]
    assert dtype == "fp16" or sum(run.skipped) == 1


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.one_in(2)
def test_nan_is_as_bad_as_infinity(system: str) -> None:
    run = run_with_one_bad_step(system, "bf16", 1, torch.nan)
    assert run.skipped == [False, False, True, False]
    assert [repr(o.norm) for o in run.engine.outcomes if o.skipped] == ["nan"]


@pytest.mark.parametrize("system", SYSTEMS)
def test_fp16_lowers_its_loss_scale_and_goes_on(system: str) -> None:
    run = run_with_one_bad_step(system, "fp16", 1)
    scale = FP16_FIRST_SCALE
    for outcome in run.engine.outcomes:
        assert outcome.loss_scale == scale
        scale = scale / 2 if outcome.skipped else scale
    assert scale < FP16_FIRST_SCALE and not run.skipped[-1]
    assert all(n is None or n < 1e3 for n, s in zip(run.norms, run.skipped, strict=True) if not s), "norms are unscaled"


@pytest.mark.parametrize(("system", "dtype"), in_turn(SYSTEMS, [("fp16",), ("bf16",)]))
@pytest.mark.one_in(2)
def test_too_many_bad_steps_in_a_row_end_the_run(system: str, dtype: str) -> None:
    model, bad = build("stack"), [False]
    with start(SYSTEMS[system], model, settings(dtype=dtype, clip=1.0)) as engine:
        spoil(model, torch.inf, lambda: bad[0])
        batch = tokens(1, 1)[0]
        for _ in range(4):
            one_step(engine, batch, LOSS)
        good = sum(not o.skipped for o in engine.outcomes)
        bad[0] = True
        before = Snapshot.of(engine)
        for _ in range(MAX_SKIPS_IN_A_ROW - 1):
            one_step(engine, batch, LOSS)
        with pytest.raises(
            DivergedError, match=rf"^{MAX_SKIPS_IN_A_ROW} steps in a row .*: lower the learning rate, set `clip`"
        ):
            one_step(engine, batch, LOSS)
        assert sum(not o.skipped for o in engine.outcomes) == good
        assert engine.counters()["skipped_steps"] == sum(o.skipped for o in engine.outcomes)
        before.assert_unchanged(engine)


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_loop_can_leave_its_scheduler_alone_at_a_skipped_step(system: str) -> None:
    """As torch's own scaler has it, the loop decides; the outcome of the step is known when step() returns."""
    model, current = build("stack"), [0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    with start(SYSTEMS[system], model, settings(optimizer=optimizer)) as engine:
        spoil(model, torch.inf, lambda: current[0] == BAD_STEP)
        rates = []
        for number, batch in enumerate(tokens(4, 1)):
            current[0] = number
            one_step(engine, batch, LOSS)
            if not engine.outcomes[-1].skipped:
                scheduler.step()
            rates.append(scheduler.get_last_lr()[0])
        assert rates == [5e-4, 2.5e-4, 2.5e-4, 1.25e-4]
        engine.drain()
        assert {state.steps for state in adam_states(engine).values()} == {3}


def test_updates_that_do_not_wait_for_the_norm_stop_at_a_bad_one() -> None:
    """nonfinite=stop: the gradient was applied before the norm was known, so the run must end."""
    model, bad = build("stack"), [False]
    options = ElixirOptions(nonfinite="stop")
    with start(elixir(), model, settings(device_memory=TIGHT), options) as engine:
        spoil(model, torch.inf, lambda: bad[0])
        batch = tokens(1, 1)[0]
        for _ in range(3):
            one_step(engine, batch, LOSS)
        engine.drain()
        assert [o.skipped for o in engine.outcomes] == [False] * 3
        bad[0] = True
        one_step(engine, batch, LOSS)  # its norm is read a step late
        with pytest.raises(DivergedError, match="nonfinite='skip'"):
            one_step(engine, batch, LOSS)


def test_updates_that_do_not_wait_for_the_norm_equal_those_that_do() -> None:
    ids = tokens(4, 1)
    runs = []
    for system, options in ((RESIDENT, None), (elixir(), ElixirOptions(nonfinite="stop"))):
        budget = {} if system is RESIDENT else {"device_memory": TIGHT}
        engine = start(system, build("stack"), settings(dtype="bf16", **budget), options)
        runs.append(finished(engine, [one_step(engine, batch, LOSS) for batch in ids]))
    assert_equal(*runs)


# How updates come not to wait, and what makes them.
STOPPING: Mapping[str, tuple[Callable[[], ManagedSystem], dict[str, Any], str]] = MappingProxyType(
    {
        "option": (elixir, {"nonfinite": "stop"}, "use .*`options=dict\\(nonfinite='skip'\\)`"),
        "variant": (angel_ptm, {"variant": "paper"}, "use .*`options=dict\\(variant='base'\\)`"),
    }
)


@pytest.mark.parametrize("asked", [{"clip": 1.0}, {"dtype": "fp16"}], ids=["clip", "fp16"])
@pytest.mark.parametrize("way", ["option", "variant"])
def test_updates_that_do_not_wait_for_the_norm_cannot_use_it(asked: dict[str, Any], way: str) -> None:
    """What they are told to change is what can be changed: a variant that has stop takes no nonfinite=skip."""
    system, given, told = STOPPING[way]
    with pytest.raises(UnsupportedError, match=told) as found:
        start(system(), build("stack"), settings(**asked), system().Options(**given))
    assert way == "option" or "nonfinite='skip'" not in str(found.value)


@pytest.mark.parametrize("way", STOPPING)
def test_whoever_is_to_wait_for_the_norm_is_told_how(way: str) -> None:
    """Where a gradient was not finite, and where backward is to be taken back."""
    (system, given, told), model, bad = STOPPING[way], build("stack"), [False]
    batch = tokens(1, 1)[0]
    with start(system(), model, settings(), system().Options(**given)) as engine:
        spoil(model, torch.inf, lambda: bad[0])
        engine.backward(LOSS(engine, batch[0], 1))
        with pytest.raises(UnsupportedError, match=told):
            engine.discard()
        engine.step()
        bad[0] = True
        one_step(engine, batch, LOSS)
        with pytest.raises(DivergedError, match=told):
            one_step(engine, batch, LOSS)
