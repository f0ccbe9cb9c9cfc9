"""Phases of a step: each its own time, together the whole, and every operation of a lane belongs to one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

import systems
from systems.device.watch.phases import OPERATIONS, PHASES, Phase, PhaseClock
from systems.planning.plan import LaneKind
from systems.planning.step.operations import Work
from systems.strategies.elixir.options import ElixirOptions
from systems.strategies.patrickstar.options import PatrickStarOptions
from tests.random_eviction import RandomOptions
from tests.systems.every import STRATEGIES
from tests.systems.models_small import tokens
from tests.systems.running import (
    RANDOM,
    assert_equal,
    elixir,
    evict_at_once,
    finished,
    one_step,
    patrickstar,
    settings,
    start,
)
from tests.systems.setups import Setup, budget_of, reference


class Clock:
    """Time passes when told to, and when what is queued is drained."""

    def __init__(self) -> None:
        self.now_s, self.queued_s = 0.0, 0.0

    def __call__(self) -> float:
        return self.now_s

    def drain(self) -> None:
        self.now_s, self.queued_s = self.now_s + self.queued_s, 0.0


@st.composite
def phase_trees(draw: st.DrawFn, depth: int = 3) -> tuple[Phase, int, int, list[Any]]:
    """(phase, seconds of the host, seconds queued, phases inside)."""
    children = draw(st.lists(phase_trees(depth - 1), max_size=3)) if depth else []
    return draw(st.sampled_from(PHASES)), draw(st.integers(0, 5)), draw(st.integers(0, 5)), children


@given(phase_trees())
def test_each_phase_is_charged_what_it_did_and_queued(tree: tuple[Phase, int, int, list[Any]]) -> None:
    clock = Clock()
    phases, expected = PhaseClock(clock.drain, clock), dict.fromkeys(PHASES, 0.0)

    def go(node: tuple[Phase, int, int, list[Any]]) -> None:
        phase, host_s, queued_s, children = node
        expected[phase] += host_s + queued_s
        with phases.of(phase):
            clock.now_s += host_s
            clock.queued_s += queued_s
            for child in children:
                go(child)

    go(tree)
    assert phases.seconds == expected
    assert sum(expected.values()) == clock.now_s


def test_an_exception_closes_its_phase() -> None:
    clock = Clock()
    phases = PhaseClock(clock.drain, clock)

    def fail() -> None:
        with phases.of("backward"):
            clock.now_s += 2
            raise KeyError

    with phases.of("other"):
        with pytest.raises(KeyError):
            fail()
        clock.now_s += 1
    assert (phases.seconds["backward"], phases.seconds["other"]) == (2, 1)


def test_every_kind_of_operation_that_a_lane_is_given_has_a_phase() -> None:
    assert set(OPERATIONS.values()) <= set(PHASES)
    issued = re.compile(r"of_bundle\(\s*[\w.]+, Work\.(\w+), LaneKind\.(?!COMPUTE)|LaneOperation\(Work\.(\w+)")
    sources = (path.read_text() for path in Path(systems.__file__).parent.rglob("*.py"))
    kinds = {Work[one or other] for source in sources for one, other in issued.findall(source)}
    assert len(kinds) > 10 and kinds == set(OPERATIONS)


OTHERS = [system for name, system in STRATEGIES.items() if name not in ("elixir", "patrickstar")]
HARD: tuple[tuple[Any, BaseModel, Setup, Callable[[Any], None]], ...] = (
    (RANDOM, RandomOptions(write_back=True, in_place=True), Setup("opt"), evict_at_once),
    (RANDOM, RandomOptions(activations="host"), Setup("gpt2", "full", 2, clip=0.5), evict_at_once),
    (elixir(), ElixirOptions(activations="host"), Setup("opt", "full", 2, "untied", clip=0.5), lambda engine: None),
    (patrickstar(), PatrickStarOptions(activations="host"), Setup("opt", "full"), lambda engine: None),
    *((system, system.Options(), Setup("opt", accumulate=2, clip=0.5), lambda engine: None) for system in OTHERS),
)


@pytest.mark.parametrize("case", HARD, ids=lambda case: f"{case[0].name}-{case[2].accumulate}")
@pytest.mark.one_in(2)
def test_a_phased_step_is_a_step_like_any_other(case: tuple[Any, BaseModel, Setup, Callable[[Any], None]]) -> None:
    """The same bits and the same traffic; every operation of its lanes was in a phase, and they add up to its time."""
    system, options, setup, disturb = case
    asked = settings(
        accumulate=setup.accumulate,
        clip=setup.clip,
        recompute=setup.recompute,
        device_memory=budget_of(setup, "tight"),
        log_events=True,
    )
    engine: Any = start(system, setup.build(), asked, options)
    disturb(engine)
    ids, losses = tokens(3, setup.accumulate), []
    found: dict[str, float] = {}
    for number, batch in enumerate(ids):
        if number == 2:
            begin, plain = len(engine.log.operations), engine.device.transfers
            found = engine.phases_s(lambda batch=batch: losses.append(one_step(engine, batch)))
            assert engine.device.transfers is plain
        else:
            losses.append(one_step(engine, batch))
    operations = [op for op in engine.log.operations[begin:] if op.lane != LaneKind.COMPUTE.value]
    happened = {OPERATIONS[op.what.kind] for op in operations}
    assert {"h2d_parameters", "d2h_gradients", "adam_host"} <= happened
    happened.discard("h2d_parameters")
    assert found["h2d_updated"] > 0
    assert found["h2d_parameters"] > 0 or system is not RANDOM, "what is evicted at once comes again within the step"
    assert ("h2d_activations" in happened) == (setup.recompute == "full")
    assert all(found[phase] > 0 for phase in (*happened, "forward", "backward"))
    assert found["step"] == pytest.approx(sum(found[phase] for phase in PHASES))
    assert (found["accumulate"] > 0) == (setup.accumulate > 1)
    if setup.accumulate == 1 and system.name == "patrickstar":
        assert found["conversion"] == 0, "Adam reads 16 bit and writes 16 bit"
    assert set(found) == {*PHASES, "step"}
    assert_equal(reference(setup), finished(engine, losses))
