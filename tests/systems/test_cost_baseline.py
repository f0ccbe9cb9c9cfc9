"""What a steady step costs in bytes and Python calls, never more than in golden/step_costs.txt: a rebuilt inside is no slower.

    python -m tests.systems.test_cost_baseline    writes the baseline anew, to be read before it is committed

Setups are those of test_counted.py; there what is counted is derived, here it is only kept. No event log is kept, so its cost
is in no number. A strategy without lines in the baseline is compared with nothing until it is written anew.

Note [What is a call]
    A frame that is entered, on the thread that runs the step, whose code is of a module of `systems`: methods that
    dataclasses are given are in it, torch and the standard library are not. A generator is entered once for each value, a
    comprehension is no frame in every Python and never counted. A call belongs to the innermost event that is under way; those
    outside all events (`elsewhere`: hooks, the engine's own methods) are counted together.

    What torch's version decides is left out, with all that it calls: the meter of the emulated device, which torch enters for
    each of its operations, and the way in which a storage is pointed elsewhere. Within events torch's operations are counted
    instead (`operations`); those of the model itself differ by version.

Note [The same number each time]
    Freed memory is handed on with the tickets of unfinished work alone, so how far a lane has come decides how many tickets the
    next owner waits for: here the caller waits for each job as soon as it is submitted. What is measured decides plans: here
    all moments take equally long. Where free blocks lie differs from step to step, and with it the calls of a search through
    them: the step that is counted is always the same one. Garbage is collected when it is over.
"""

from __future__ import annotations

import gc
import inspect
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from models import registry as models_registry
from systems import registry
from systems.adam.kernel import AdamKernel
from systems.device.lanes.lane import Lane
from systems.device.meter import ActivationMeter
from systems.planning.plan import LaneKind
from systems.substrate.bundle import states
from systems.substrate.bundle.addresses import default_rebind
from systems.substrate.engine import ManagedEngine
from tests.systems.every import STRATEGIES
from tests.systems.models_small import next_token_loss
from tests.systems.running import one_step, settings, start
from tests.systems.test_counted import LEVELS, SpiedKernel, batch, budget_of

BASELINE = Path(__file__).parent / "golden" / "step_costs.txt"
EVENTS = (
    "begin_step",
    "forward_enter",
    "forward_exit",
    "backward_enter",
    "gradient",
    "backward_exit",
    "end_backward",
    "finish_step",
)
ELSEWHERE = "elsewhere"
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>")  # until Python 3.12
METER: CodeType = inspect.unwrap(ActivationMeter.__torch_dispatch__).__code__  # torch wraps it
MOMENT_S = 1e-3
STEPS_TO_SETTLE = 2  # one that is measured, one whose end is the first that is planned
REMEDY = "if it is meant to be: python -m tests.systems.test_cost_baseline"

Setup = tuple[str, str]
Costs = Mapping[tuple[str, str], int]  # by what it is of (a lane or an event) and its unit


class CallCounter:
    """Counts by the innermost event under way. See Note [What is a call]."""

    def __init__(self) -> None:
        self.costs: Counter[tuple[str, str]] = Counter()
        self._under_way = [ELSEWHERE]
        self._left_out = {METER, ActivationMeter._forget.__code__, default_rebind().__code__}
        self._outside: FrameType | None = None  # the frame that is left out, with all that it calls

    def follow(self, runtime: Any, event: str) -> None:
        call = getattr(runtime, event)

        def followed(*given: Any) -> None:
            self.costs[event, "events"] += 1
            self._under_way.append(event)
            try:
                call(*given)
            finally:
                self._under_way.pop()

        setattr(runtime, event, followed)

    def note(self, frame: FrameType, what: str, argument: Any) -> None:
        """For sys.setprofile."""
        if self._outside is not None:
            if what == "return" and frame is self._outside:
                self._outside = None
        elif what == "call" and frame.f_globals.get("__name__", "").startswith("systems."):
            code, event = frame.f_code, self._under_way[-1]
            if code in self._left_out:
                self._outside = frame
                if code is METER and event != ELSEWHERE:
                    self.costs[event, "operations"] += 1
            elif code.co_name not in COMPREHENSIONS:
                self.costs[event, "calls"] += 1


def wait_for_each_job(lane: Lane) -> None:
    submit = lane.submit

    def submit_and_wait(*given: Any, **more: Any) -> Any:
        ticket = submit(*given, **more)
        profile = sys.getprofile()
        sys.setprofile(None)
        lane.rest()
        sys.setprofile(profile)
        return ticket

    lane.submit = submit_and_wait  # type: ignore[method-assign]


def make_moments_equal(stopwatch: Any) -> None:
    stop = stopwatch.stop
    stopwatch.stop = lambda: tuple(MOMENT_S for _ in stop())


def started(system: str, level: str) -> ManagedEngine:
    shape = models_registry.resolve("opt-tiny")
    weights = models_registry.initial_weights(shape, 0)
    given = settings(dtype="bf16", device_memory=budget_of(level), initial_weights=weights, log_events=False)
    engine = start(STRATEGIES[system], models_registry.build(shape), given)
    assert isinstance(engine, ManagedEngine)
    for lane in engine.device.lanes.values():
        wait_for_each_job(lane)
    make_moments_equal(engine.device.stopwatch)
    return engine


class KernelOfLane:
    """The kernel itself, but for the CPU lane's thread, where what it passes over is counted."""

    def __init__(self, kernel: AdamKernel) -> None:
        self._kernel, self.spied = kernel, SpiedKernel(kernel)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.spied if threading.current_thread().name == "lane-cpu" else self._kernel, name)


def counted_step(engine: ManagedEngine) -> Costs:
    counter, before = CallCounter(), engine.counters()
    for event in EVENTS:
        counter.follow(engine.runtime, event)
    kernel: Any = KernelOfLane(engine.device.host_kernel)
    engine.device.host_kernel = kernel
    gc.disable()
    sys.setprofile(counter.note)
    try:
        one_step(engine, batch(), next_token_loss)
    finally:
        sys.setprofile(None)
        gc.enable()
    engine.drain()
    grown = {name: count - before.get(name, 0) for name, count in engine.counters().items()}
    assert not any(grown[name] for name in ("fallbacks", "evictions", "on_demand_fetches")), "void: not a steady step"
    moved = {name.removesuffix("_bytes"): count for name, count in grown.items() if name.endswith("_bytes")}
    moved[LaneKind.CPU.value] = kernel.spied.bytes.total()
    return {**{(lane, "bytes"): count for lane, count in moved.items() if count}, **counter.costs}


@cache
def costs_of(system: str, level: str) -> Costs:
    """As a run has them, which does not look whether states follow each other as they may."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states, "CHECKED", False)
        return costs_of_a_run(system, level)


def costs_of_a_run(system: str, level: str) -> Costs:
    engine = started(system, level)
    for _ in range(STEPS_TO_SETTLE):
        one_step(engine, batch(), next_token_loss)
    plan = engine.cursor.plan
    assert plan is not None and not plan.provisional, "void: not settled"
    found = counted_step(engine)
    assert engine.cursor.plan is plan, "void: not a steady step"
    engine.close()
    return found


def as_lines(setup: Setup, costs: Costs) -> Iterator[str]:
    """Lanes, then events as they come in a step."""
    order = {name: number for number, name in enumerate((*EVENTS, ELSEWHERE), start=1)}
    for (what, unit), count in sorted(costs.items(), key=lambda item: (order.get(item[0][0], 0), item[0])):
        yield " ".join((*setup, what, str(count), unit))


def from_lines(lines: Iterable[str]) -> dict[Setup, dict[tuple[str, str], int]]:
    found: dict[Setup, dict[tuple[str, str], int]] = {}
    for system, level, what, count, unit in map(str.split, lines):
        found.setdefault((system, level), {})[what, unit] = int(count)
    return found


def bytes_of(costs: Costs) -> dict[str, int]:
    return {what: count for (what, unit), count in costs.items() if unit == "bytes"}


def dearer(setup: Setup, now: Costs, then: Costs) -> list[str]:
    """What there is more of than there was, bytes aside."""
    return [
        f"{setup[0]} at {setup[1]}: {what} costs {now[what, unit]} {unit} a step, {then.get((what, unit), 0)} in the baseline"
        for what, unit in now
        if unit != "bytes" and now[what, unit] > then.get((what, unit), 0)
    ]


def compared(recorded: Iterable[Setup], strategies: Iterable[str]) -> list[Setup]:
    """Neither a strategy that is not recorded yet nor one that does not load."""
    there = set(strategies)
    return [setup for setup in recorded if setup[0] in there]


RECORDED = from_lines(BASELINE.read_text().splitlines()) if BASELINE.exists() else {}

each = pytest.mark.parametrize("setup", compared(RECORDED, STRATEGIES), ids="-".join)


@each
@pytest.mark.one_in(4)
def test_a_steady_step_moves_the_bytes_it_did(setup: Setup) -> None:
    assert bytes_of(costs_of(*setup)) == bytes_of(RECORDED[setup]), REMEDY


@each
def test_a_steady_step_makes_no_more_calls_than_it_did(setup: Setup) -> None:
    more = dearer(setup, costs_of(*setup), RECORDED[setup])
    assert not more, "\n".join(["", *more, REMEDY])


def test_what_is_recorded_is_there_at_both_budgets() -> None:
    """A strategy that was renamed or removed is in no comparison: its lines go too."""
    found = registry.find()
    assert RECORDED
    assert {system for system, _ in RECORDED} <= {name for name, entry in found.items() if entry.exposes == "STRATEGY"}
    assert set(RECORDED) == {(system, level) for system, _ in RECORDED for level in LEVELS}


def test_a_strategy_that_is_not_recorded_is_left_alone() -> None:
    assert compared([("elixir", "half")], ["elixir", "new"]) == [("elixir", "half")]
    assert compared([("elixir", "half"), ("h3t", "half")], ["elixir"]) == [("elixir", "half")]


def test_more_is_told_with_both_numbers_and_less_is_welcome() -> None:
    then = {("h2d", "bytes"): 4, ("gradient", "calls"): 7, ("gradient", "events"): 2}
    setup = ("elixir", "half")
    assert not dearer(setup, then, then)
    assert not dearer(setup, {**then, ("gradient", "calls"): 6}, then)
    more = dearer(setup, {**then, ("gradient", "calls"): 8, ("gradient", "operations"): 1}, then)
    assert more == [
        "elixir at half: gradient costs 8 calls a step, 7 in the baseline",
        "elixir at half: gradient costs 1 operations a step, 0 in the baseline",
    ]


def test_lines_are_read_as_they_were_written() -> None:
    costs = {("h2d", "bytes"): 4, ("begin_step", "calls"): 7, (ELSEWHERE, "calls"): 2}
    lines = list(as_lines(("elixir", "half"), costs))
    assert lines == ["elixir half h2d 4 bytes", "elixir half begin_step 7 calls", "elixir half elsewhere 2 calls"]
    assert from_lines(lines) == {("elixir", "half"): costs}


if __name__ == "__main__":
    setups = [(system, level) for system in STRATEGIES for level in LEVELS]
    BASELINE.write_text("".join(f"{line}\n" for setup in setups for line in as_lines(setup, costs_of(*setup))))
