"""Ctrl-C before and after every operation, free, allocation and state write of a step: see interrupts.py."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from time import sleep
from typing import Any

import pytest

from systems.strategies.elixir.options import ElixirOptions
from systems.strategies.patrickstar.options import PatrickStarOptions
from systems.system import Engine
from tests.systems.interrupts import Course, Sweep, batch, build, chosen
from tests.systems.running import RESIDENT, elixir, patrickstar, settings, start
from tests.systems.setups import SYSTEMS as MANAGED

SYSTEMS: dict[str, tuple[Any, Any]] = {
    "resident": (RESIDENT, None),
    **MANAGED,
    "elixir stop": (elixir(), ElixirOptions(nonfinite="stop")),
    "elixir slow": (elixir(), ElixirOptions()),  # its lanes: what was issued is still to run
    "patrickstar inputs": (patrickstar(), PatrickStarOptions(activations="host")),
}
TIGHT = 150_000  # bytes: about half of what resident needs
CHUNKED = 200_000
SAMPLE = 5  # places of each system


def begin(system: str, accumulate: int) -> Engine:
    budget = CHUNKED if system == "random write-back" else TIGHT
    given: dict[str, Any] = {} if system == "resident" else {"device_memory": budget}
    if system.endswith("inputs"):
        given["recompute"] = "full"
    chosen_system, options = SYSTEMS[system]
    jitter = (lambda: sleep(3e-3)) if system.endswith("slow") else None
    return start(chosen_system, build(), settings(accumulate=accumulate, **given), options, jitter)


@cache
def course(accumulate: int) -> Course:
    return Course(begin("resident", accumulate), batch(accumulate))


@pytest.mark.parametrize(("number", "system"), list(enumerate(SYSTEMS)), ids=list(SYSTEMS))
@pytest.mark.one_in(4)
def test_ctrl_c_anywhere_in_a_step(number: int, system: str) -> None:
    """Some places of each, other ones for each system."""
    luck = random.Random(number)
    accumulate = 1 + (number % 2 and system != "elixir stop")
    sweep = Sweep(lambda: begin(system, accumulate), course(accumulate), 1)
    for place, time in luck.sample(chosen(sweep.places(), [luck.random()]), SAMPLE):
        sweep.interrupt(place, time)
    sweep.end()
    assert sweep.happened > SAMPLE // 2, "void: hardly any interrupt came"


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("system", SYSTEMS)
def test_ctrl_c_everywhere_in_a_step(system: str, accumulate: int) -> None:
    """A step under a plan."""
    sweep = Sweep(lambda: begin(system, accumulate), course(accumulate), 1)
    places = chosen(sweep.places(), [0.0, 1.0])
    for place, time in places:
        sweep.interrupt(place, time)
    sweep.end()
    assert sweep.happened > len(places) // 2, "void: hardly any interrupt came"


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("system", SYSTEMS)
def test_ctrl_c_everywhere_in_a_first_step(system: str, accumulate: int) -> None:
    """What only a step without a plan runs, which makes one and puts it into force."""
    sweep = Sweep(lambda: begin(system, accumulate), course(accumulate), 0)
    first = sweep.places()
    usual = sweep.places()
    sweep.end()
    for place, time in chosen(Counter({place: count for place, count in first.items() if place not in usual}), [0.0]):
        sweep = Sweep(lambda: begin(system, accumulate), course(accumulate), 0)
        sweep.interrupt(place, time)
        assert sweep.happened == 1, f"void: {place} did not come again"
        sweep.end()
