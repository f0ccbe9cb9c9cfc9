"""Nothing is read or written out of order: races, deadlocks, and sleeps thrown in (invariant 6, case C29)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest

from systems.device.emulated import EmulatedDevice
from systems.device.watch.events import LoggedOperation
from systems.planning.step.operations import IssuedOperation
from systems.planning.step.schedule import expand
from systems.planning.step.validator import circular_wait, validate
from systems.strategies.elixir.options import ElixirOptions
from tests.planning.races import find_races, issued_operations
from tests.systems.models_plain import CASES, build
from tests.systems.models_small import tokens
from tests.systems.running import (
    RANDOM,
    RESIDENT,
    Run,
    assert_equal,
    elixir,
    evict_at_once,
    managed,
    settings,
    start,
    train,
    train_as,
)
from tests.systems.setups import STEPS, SYSTEMS, Setup, budget_of, in_turn, reference

SETUPS = [Setup("opt", clip=0.5), Setup("gpt2", "full", 2, "untied", "bf16")]


def name_of(value: Any) -> str | None:
    return value.model if isinstance(value, Setup) else None


def sleeps(seed: int = 0, most_s: float = 0.001) -> Callable[[], None]:
    luck = random.Random(seed)

    def sleep() -> None:
        if luck.random() < 0.5:
            time.sleep(luck.random() * most_s)

    return sleep


def as_issued(operations: Sequence[LoggedOperation]) -> list[IssuedOperation]:
    """For the detector, which takes a lane for a queue. The CPU lane picks its jobs, so each of them is on its own here."""
    found = issued_operations(operations)
    return [replace(o, lane=f"cpu {o.ticket}") if o.lane == "cpu" else o for o in found]


@cache
def logged(setup: Setup, system: str, level: str, jitter: bool) -> tuple[Run, tuple[LoggedOperation, ...]]:
    chosen, options = SYSTEMS[system]
    asked: dict[str, Any] = dict(dtype=setup.dtype, clip=setup.clip, recompute=setup.recompute, log_events=True)
    asked["device_memory"] = budget_of(setup, level)
    ids = tokens(STEPS, setup.accumulate)
    run = train_as(chosen, setup.build(), ids, options, sleeps() if jitter else None, **asked)
    return run, tuple(run.engine.log.operations)  # type: ignore[attr-defined]


LOGGED = in_turn(
    [
        ("elixir", "half", True),
        ("elixir", "tight", False),
        ("patrickstar", "tight", True),
        ("h3t", "half", True),
        ("h3t", "tight", False),
        ("random", "tight", False),
        ("random write-back", "tight", True),
    ],
    [(setup,) for setup in SETUPS],
)


@pytest.mark.parametrize(("system", "level", "jitter", "setup"), LOGGED, ids=name_of)
@pytest.mark.one_in(4)
def test_no_race_in_what_was_issued(system: str, level: str, jitter: bool, setup: Setup) -> None:
    run, operations = logged(setup, system, level, jitter)
    lanes = {o.lane for o in operations}
    assert lanes == {"compute", "h2d", "d2h", "cpu"} and len(operations) > 200, "void: hardly anything was logged"
    assert [str(race) for race in find_races(as_issued(operations))] == []
    assert_equal(reference(setup), run)


@pytest.mark.parametrize(
    ("system", "lane", "label"),
    [
        *product(["elixir", "random"], ["h2d"], ["fetch"]),
        *product(["elixir", "random"], ["d2h"], ["offload bundle"]),
        *product(["elixir", "random"], ["cpu"], ["update bundle"]),
        *product(["elixir", "random"], ["compute"], ["hold for"]),
        ("random", "compute", "gradient of"),
    ],
)
def test_a_forgotten_wait_is_found(system: str, lane: str, label: str) -> None:
    """Take the waits from one operation of each kind at a time: some of these must matter, and then a race is named."""
    _, operations = logged(SETUPS[0], system, "tight", False)
    issued = as_issued(operations)
    chosen = [i for i, o in enumerate(operations) if o.lane == lane and o.label.startswith(label) and o.waits]
    assert chosen, f"void: no {label} waits for anything"
    for index in reversed(chosen):
        planted = [*issued[:index], replace(issued[index], waits=()), *issued[index + 1 :]]
        if any(operations[index].ticket in (race.first, race.second) for race in find_races(planted)):
            return
    raise AssertionError(f"none of {len(chosen)} is missed")


@pytest.mark.parametrize(
    ("system", "level", "jitter", "setup"), [row for row in LOGGED if row.values[0] in ("elixir", "h3t")], ids=name_of
)
def test_every_plan_made_is_valid_and_cannot_deadlock(system: str, level: str, jitter: bool, setup: Setup) -> None:
    run, _ = logged(setup, system, level, jitter)
    assert_sound(managed(run.engine))


def assert_sound(engine: Any) -> None:
    """Every plan that it made is valid, and its schedule has no circular wait and no race."""
    layout, context = engine.layout, engine.strategy._context
    plans = [(trace, plan) for trace, plan in engine.planner.plans.values() if plan is not None]
    assert plans
    for trace, plan in plans:
        validate(layout, trace, plan, context)
        schedule = expand(layout, trace, plan, context)
        assert circular_wait(schedule.operations) == []
        assert find_races(schedule.issued()) == []


MANY = [15, pytest.param(50, marks=pytest.mark.slow)]  # steps


@cache
def undisturbed(steps: int) -> Run:
    return train(start(RESIDENT, build("stack"), settings(clip=1.0)), tokens(steps, 1), CASES["stack"].loss)


@pytest.mark.parametrize("steps", MANY)
@pytest.mark.parametrize(("prefetch", "jitter"), [(0, True), (1, True), (4, True), (4, False)])
def test_sleeping_copies_change_no_bit(prefetch: int, jitter: bool, steps: int) -> None:
    budget = int(0.35 * (undisturbed(steps).memory.device_peak_bytes or 0))
    asked = settings(clip=1.0, device_memory=budget)
    engine = start(elixir(), build("stack"), asked, ElixirOptions(prefetch=prefetch), sleeps(prefetch) if jitter else None)
    run = train(engine, tokens(steps, 1), CASES["stack"].loss)
    assert_equal(undisturbed(steps), run)
    assert all(step["h2d_bytes"] > 0 for step in run.per_step)
    on_demand = sum(step["on_demand_fetches"] for step in run.per_step[1:])
    assert on_demand == 0, "the plan fetches all there is to fetch, with a prefetch depth of 0 too"


@pytest.mark.parametrize("steps", MANY)
def test_sleeping_copies_and_eager_eviction_change_no_bit(steps: int) -> None:
    engine = start(RANDOM, build("stack"), settings(clip=1.0), None, sleeps())
    evict_at_once(engine)
    assert_equal(undisturbed(steps), train(engine, tokens(steps, 1), CASES["stack"].loss))


@pytest.mark.parametrize(
    ("system", "setup"), in_turn(["elixir", "random write-back"], [(setup,) for setup in SETUPS]), ids=name_of
)
def test_updates_that_overlap_change_no_bit(system: str, setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, where the CPU lane has two threads: norms, accumulations, restored slots and updates of all segments."""
    monkeypatch.setattr(EmulatedDevice, "cpu_lane_threads", 2)
    chosen, options = SYSTEMS[system]
    asked: dict[str, Any] = dict(dtype=setup.dtype, clip=setup.clip, recompute=setup.recompute)
    asked["device_memory"] = budget_of(setup, "tight")
    run = train_as(chosen, setup.build(), tokens(STEPS, setup.accumulate), options, sleeps(), **asked)
    assert_equal(reference(setup), run)
