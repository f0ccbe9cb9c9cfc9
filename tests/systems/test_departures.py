"""Steps that are not like the step before: skipped and swapped blocks, evaluation, other lengths (C02, C03, C04, C07)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from systems.planning.plan import Tier
from systems.system import Engine
from tests.systems import models_small
from tests.systems.every import MANAGED
from tests.systems.models_plain import DIM, Block, Stack, squared_error
from tests.systems.models_small import tokens
from tests.systems.running import (
    AMPLE,
    RANDOM,
    RESIDENT,
    Run,
    assert_equal,
    elixir,
    finished,
    managed,
    one_step,
    settings,
    start,
    train,
)
from tests.systems.setups import in_turn

TIGHT = 130_000  # bytes: about a third of what resident needs for a Stack in fp32


class Route(Stack):
    """Goes through its blocks in the order given, some left out; two heads, an unused Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.other_head = nn.Linear(*self.head.weight.shape)
        self.unused = nn.Linear(*self.head.weight.shape)
        self.order: Sequence[int] = range(len(self.blocks))
        self.heads: Sequence[nn.Module] = (self.head,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            x = self.blocks[number](x)
        return sum(head(x) for head in self.heads)


def route() -> Route:
    torch.manual_seed(0)
    return Route()


def run_routes(system: Any, each_step: Callable[[int, Route], None], steps: int, **given: Any) -> Run:
    model = route()
    engine = start(system, model, settings(clip=1.0, **given))
    return train(engine, tokens(steps, 1), squared_error, each_step=lambda step, _: each_step(step, model))


@cache
def routes_of_resident(each_step: Callable[[int, Route], None], steps: int) -> Run:
    return run_routes(RESIDENT, each_step, steps)


def check_nothing_in_flight(run: Run) -> None:
    engine = run.engine
    ours = managed(engine)
    assert not any(m.holds or m.block for m in ours.residency.bundles)
    assert ours.device.account.pool == 0


ODD = tuple(step == "o" for step in "eeoooeoeeooe")  # in no regular order


def leave_one_out(step: int, model: Route) -> None:
    model.order = (0, 2, 3) if ODD[step] else (0, 1, 2, 3)


@pytest.mark.parametrize("system", MANAGED)
@pytest.mark.one_in(2)
def test_a_block_left_out_of_odd_steps(system: str) -> None:
    """C02. Whatever departs from the plan in force is counted."""
    steps = len(ODD)
    run = run_routes(MANAGED[system], leave_one_out, steps, device_memory=TIGHT)
    assert_equal(routes_of_resident(leave_one_out, steps), run)
    check_nothing_in_flight(run)
    assert all(step["h2d_bytes"] > 0 for step in run.per_step)
    if system != "random":
        changes = [step > 0 and ODD[step] != ODD[step - 1] for step in range(steps)]
        assert [step["fallbacks"] for step in run.per_step] == [int(c) for c in changes]
        assert [step["retraces"] for step in run.per_step] == [int(step == ODD.index(True)) for step in range(steps)]
        assert all(not s["on_demand_fetches"] for s, c in zip(run.per_step[1:], changes[1:], strict=True) if not c)


SWAP = 4  # the step from which on two blocks have changed places


def swap(step: int, model: Route) -> None:
    model.order = (0, 1, 2, 3) if step < SWAP else (0, 2, 1, 3)


@pytest.mark.parametrize("system", MANAGED)
@pytest.mark.one_in(2)
def test_two_blocks_swap_places(system: str) -> None:
    """C02's second half: from a step on for good. One fallback, one new trace, then planned steps again."""
    run = run_routes(MANAGED[system], swap, SWAP + 4, device_memory=TIGHT)
    assert_equal(routes_of_resident(swap, SWAP + 4), run)
    if system != "random":
        assert [step["fallbacks"] for step in run.per_step] == [int(step == SWAP) for step in range(SWAP + 4)]
        assert run.counters["retraces"] == 1
        assert [s["on_demand_fetches"] for s in run.per_step[SWAP + 1 :]] == [0] * 3


def change_heads(step: int, model: Route) -> None:
    model.heads = ((model.head,), (model.other_head,), (model.head, model.other_head))[step % 3]


@pytest.mark.parametrize(("system", "budget"), in_turn(MANAGED, [(TIGHT,), (AMPLE,)]))
@pytest.mark.one_in(2)
def test_two_heads_in_turn_and_one_module_never(system: str, budget: int) -> None:
    """C07. A parameter without a gradient is not stepped and not decayed, and its chunk is let go all the same."""
    run = run_routes(MANAGED[system], change_heads, 9, device_memory=budget)
    assert_equal(routes_of_resident(change_heads, 9), run)
    check_nothing_in_flight(run)
    assert run.adam["unused.weight"].steps == 0
    assert torch.equal(run.parameters["unused.weight"], route().unused.weight)
    assert run.adam["head.weight"].steps == run.adam["other_head.weight"].steps == 6
    assert run.adam["blocks.0.up.weight"].steps == 9


class Idle(Block):
    """A block with a parameter of its own that only some steps use, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.now_and_then = nn.Parameter(torch.ones(DIM))
        self.never = nn.Parameter(torch.ones(5))
        self.on = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.now_and_then if self.on else super().forward(x)


@cache
def idle_run(system: Any, budget: int) -> Run:
    torch.manual_seed(0)
    model = Stack(Idle)
    engine = start(system, model, settings(clip=0.5, device_memory=budget))
    losses = []
    for number, batch in enumerate(tokens(5, 1)):
        for block in model.blocks:
            block.on = number not in (0, 2)
        losses.append(one_step(engine, batch, squared_error))
        engine.drain()
        if system is not RESIDENT:
            assert not any(s.slot_holds_gradient for s in managed(engine).store.segments)
    return finished(engine, losses)


@pytest.mark.parametrize("system", MANAGED)
@pytest.mark.one_in(2)
def test_a_parameter_without_a_gradient_in_a_block_that_has_some(system: str) -> None:
    """Its slot goes to the host with the block's gradients: it has its parameters again when the step is over, also where it
    is a page of its own, so that its states can move to the device afterwards."""
    for memory in (TIGHT + 70_000, AMPLE):
        assert_equal(idle_run(RESIDENT, AMPLE), idle_run(MANAGED[system], memory))


def test_an_unused_module_in_a_language_model() -> None:
    def build() -> nn.Module:
        model = models_small.build("opt")
        model.add_module("unused", nn.Linear(64, 64))
        return model

    ids = tokens(4, 2)
    expected = train(start(RESIDENT, build(), settings(accumulate=2)), ids)
    budget = int(0.4 * (expected.memory.device_peak_bytes or 0))
    run = train(start(elixir(), build(), settings(accumulate=2, device_memory=budget)), ids)
    assert_equal(expected, run)
    assert run.adam["unused.bias"].steps == 0


def test_optimizer_state_leaves_the_device_in_the_middle_of_backward() -> None:
    """Its bundle waits for a gradient that this step does not bring; those it has still count in the norm."""
    runs = []
    for system in (RESIDENT, elixir()):
        model = route()
        engine = start(system, model, settings(clip=1.0))
        losses = []
        for number, batch in enumerate(tokens(5, 1)):
            model.heads = (model.head, model.other_head) if number < 3 else (model.head,)
            value = squared_error(engine, batch[0], 30)
            if number == 3 and system is not RESIDENT:
                ours = managed(engine)
                (bundle,) = {b.index for b in ours.layout.bundles if len(b.units) == 3}  # of both heads and the idle module
                demote, mine = ours.planner.demote, ours.bundles[bundle]
                model.blocks[0].up.weight.register_hook(lambda gradient, move=demote, which=mine: move(which))
                assert ours.store.segments[ours.layout.bundles[bundle].segments[0]].tier is Tier.DEVICE
            engine.backward(value)
            if number == 3 and system is not RESIDENT:
                assert ours.store.segments[ours.layout.bundles[bundle].segments[0]].tier is Tier.HOST
                model.blocks[0].up.weight._backward_hooks.clear()
            engine.step()
            losses.append(value.item())
        runs.append(finished(engine, losses))
    assert_equal(*runs)


@cache
def looking_run(system: Any, budget: int) -> Run:
    engine = start(system, route(), settings(clip=1.0, device_memory=budget))
    losses = []
    for batch in tokens(4, 1):
        engine.backward(squared_error(engine, batch[0], 30))
        losses.append(squared_error(engine, batch[0], 30).item())
        engine.step()
    return finished(engine, losses)


@pytest.mark.parametrize(("system", "budget"), in_turn(MANAGED, [(TIGHT,), (AMPLE,)]))
@pytest.mark.one_in(2)
def test_a_forward_pass_between_backward_and_step(system: str, budget: int) -> None:
    """With gradients enabled and never used: it brings parameters to the device that the step then outdates."""
    assert_equal(looking_run(RESIDENT, AMPLE), looking_run(MANAGED[system], budget))


class DropoutBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.2, self.training)


def evaluating_loop(system: Any, budget: int, look: Callable[[str, Engine], None] = lambda *_: None) -> Run:
    """C03: train 2, evaluate 3 with another batch size, train 2, evaluate without eval(), train; then in odd places."""
    torch.manual_seed(0)
    engine = start(system, Stack(DropoutBlock), settings(accumulate=2, device_memory=budget))
    ids = iter(tokens(7, 2))
    other = tokens(3, 1, batch=5)[:, 0]
    losses: list[float] = []

    def evaluate(batches: torch.Tensor) -> None:
        look("before", engine)
        with torch.no_grad():
            losses.extend(squared_error(engine, batch, 1).item() for batch in batches)
        look("after", engine)

    for _ in range(2):
        losses.append(one_step(engine, next(ids), squared_error))
    engine.eval()
    evaluate(other)
    engine.train()
    for _ in range(2):
        losses.append(one_step(engine, next(ids), squared_error))
    evaluate(other[:1])
    losses.append(one_step(engine, next(ids), squared_error))
    first, second = next(ids)
    loss = squared_error(engine, first, 60)
    evaluate(other[:1])  # between forward and backward
    engine.backward(loss)
    evaluate(other[1:2])  # between two micro-batches
    engine.backward(squared_error(engine, second, 60))
    evaluate(other[2:])  # before the step that uses the gradients
    engine.step()
    with torch.inference_mode():
        losses.append(squared_error(engine, other[0], 1).item())
    losses.append(one_step(engine, next(ids), squared_error))
    return finished(engine, losses)


@cache
def evaluating_resident() -> Run:
    return evaluating_loop(RESIDENT, AMPLE)


@pytest.mark.parametrize(("system", "budget"), in_turn(MANAGED, [(TIGHT + 20_000,), (TIGHT + 50_000,), (AMPLE,)], each=2))
@pytest.mark.one_in(5)
def test_evaluation_is_no_part_of_training(system: str, budget: int) -> None:
    resident: list[tuple[frozenset[int], int]] = []

    def look(when: str, engine: Engine) -> None:
        ours = managed(engine)
        now = (ours.residency.resident(), ours.device.account.pool)
        if when == "after":
            assert now == resident[-1], "what is on the device changed over an evaluation"
        resident.append(now)

    run = evaluating_loop(MANAGED[system], budget, look)
    assert len(resident) == 10
    assert_equal(evaluating_resident(), run)
    assert len(run.engine.outcomes) == 7
    assert run.counters["fallbacks"] == 0 and run.counters["retraces"] == 0
    if system != "random":
        assert len(run.engine.planner.plans) == 1  # type: ignore[attr-defined]


def test_an_evaluation_that_needs_the_optimizer_s_room_is_planned_around() -> None:
    """It drives optimizer states off the device between two steps; the next steps are right, and planned again."""
    ids, big = tokens(6, 1), tokens(1, 1, batch=300)[0, 0]
    runs, on_device, fetched = [], [], []
    for system, budget in ((RESIDENT, AMPLE), (elixir(), 500_000)):
        torch.manual_seed(0)
        engine = start(system, Stack(), settings(device_memory=budget))
        losses = []
        for number, batch in enumerate(ids):
            if number == 3:
                with torch.no_grad():
                    losses.append(squared_error(engine, big, 1).item())
            if system is not RESIDENT:
                on_device.append(count_on_device(engine))
            fetched.append(engine.counters()["on_demand_fetches"])
            losses.append(one_step(engine, batch, squared_error))
        runs.append(finished(engine, losses))
    assert_equal(*runs)
    assert on_device[0] == 0 and on_device[2] > on_device[3], "void: the evaluation needed no room"
    assert on_device[4] == on_device[5] == on_device[2], "the plan is in force again"
    assert fetched[-1] == fetched[-2], "nothing is fetched on demand any more"
    assert runs[1].counters["demotions"] == on_device[2] - on_device[3]


def count_on_device(engine: Engine) -> int:
    return sum(s.tier is Tier.DEVICE for s in managed(engine).store.segments)


LENGTHS = (8, 8, 64, 16, 128, 128)


def length_loop(system: Any, lengths: Sequence[int], budget: int, evict_all: bool = False) -> Run:
    engine = start(system, models_small.build("opt", positions=158), settings(clip=0.5, device_memory=budget))
    losses = []
    for length in lengths:
        if evict_all:
            managed(engine).residency.room.limit_to(0)
        losses.append(one_step(engine, tokens(1, 1, length=length, seed=length)[0]))
    return finished(engine, losses)


@cache
def lengths_of_resident(lengths: tuple[int, ...]) -> Run:
    return length_loop(RESIDENT, lengths, AMPLE)


@cache
def least_bytes_for(length: int) -> int:
    least = length_loop(RANDOM, [length] * 2, AMPLE, evict_all=True).memory.device_peak_bytes
    assert least is not None
    return least


@pytest.mark.parametrize(
    ("system", "lengths"),
    [
        *(pytest.param(system, LENGTHS, id=f"C04-{system}") for system in MANAGED),
        pytest.param("elixir", (8, 96, 96), id="first smaller"),
        pytest.param("patrickstar", (8, 96, 96), id="first smaller, by chunks"),
        pytest.param("elixir", (64, 8, 8, 120), id="first larger"),
    ],
)
@pytest.mark.one_in(5)
def test_longer_sequences_than_the_first_evict_instead_of_failing(system: str, lengths: tuple[int, ...]) -> None:
    """C04: the budget just holds the longest if nothing but what is in use stays, which is how it is found."""
    expected = lengths_of_resident(lengths)
    budget = int(1.03 * least_bytes_for(max(lengths)))
    assert budget < (expected.memory.device_peak_bytes or 0)
    run = length_loop(MANAGED[system], lengths, budget)
    assert_equal(expected, run)
    assert (run.memory.device_peak_bytes or 0) <= budget
    evicted = [step["evictions"] for step in run.per_step] or [run.counters["evictions"]]
    assert sum(evicted) + run.counters.get("demotions", 0) > 0, "void: there was room for all"
