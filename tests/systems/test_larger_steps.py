"""Batches larger than any before, on a device whose allocator asks nobody, as CUDA's: there has to be room before they come."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy
import pytest
import torch

from systems.device.emulated import EmulatedDevice
from systems.device.watch.events import EventLog
from systems.planning.allowance import EXACT
from systems.substrate.batch_shape import BatchShape, batch_shape_of
from systems.system import Engine
from tests.systems import models_small
from tests.systems.every import STRATEGIES
from tests.systems.models_small import next_token_loss, tokens
from tests.systems.running import (
    AMPLE,
    RESIDENT,
    Run,
    angel_ptm,
    assert_equal,
    finished,
    one_step,
    settings,
)

# Pages of four times the usual size make a quarter of the operations; a matrix still takes several.
OPTIONS = {name: system.Options() for name, system in STRATEGIES.items()} | {"angel-ptm": angel_ptm().Options(page=5120)}
FILL = ("angel-ptm", "elixir")  # the device, with states that stay there
BUDGET = 6_000_000  # bytes: what a plan for short steps takes leaves too little of it for the longest


class SlabDevice(EmulatedDevice):
    """The pool lies in slabs, and activations get what these leave; budget: for both, which is watched and not enforced.

    A slab counts for as long as anything holds its memory, whether the pool still knows of it or not.
    """

    allowance = replace(EXACT, warm_up_share=0.3)
    evicts_for_activations = measures_always = False

    def __init__(self, budget: int, log: EventLog) -> None:
        self.real_budget, self.highest = budget, 0
        self.slabs: dict[int, int] = {}  # bytes, by address
        super().__init__(AMPLE, log)

    @property
    def plannable_bytes(self) -> int:
        return self.real_budget

    def guard(self, *given: Any) -> None:
        super().guard(*given)
        seen = self.account.add_other

        def add_other(nbytes: int, label: str) -> None:
            seen(nbytes, label)
            self.highest = max(self.highest, sum(self.slabs.values()) + self.account.other)

        self.account.add_other = add_other  # type: ignore[method-assign]

    def _new_granule(self, nbytes: int) -> torch.Tensor | None:
        array = numpy.empty(nbytes, dtype=numpy.uint8)
        address = array.ctypes.data
        self.slabs[address] = nbytes
        weakref.finalize(array, self.slabs.pop, address)
        memory = torch.from_numpy(array)
        self.meter.exempt(memory.untyped_storage())
        return memory

    def prepare(self, pool_bytes: int, largest: int, others: int | None = None) -> int:
        self.drain()
        self.pool.trim()
        self.pool.reserve(pool_bytes)
        return pool_bytes if others is None else max(pool_bytes, self.real_budget - others)


Step = Sequence[int]  # length of each micro-batch


def train(engine: Engine, step: Step) -> float:
    """One step of the engine; its loss."""
    return one_step(engine, [tokens(1, 1, 1, length, seed=length)[0, 0] for length in step])


def run(system: str, steps: Sequence[Step]) -> tuple[Run, list[int]]:
    """The highest bytes of each step, too."""
    devices: list[SlabDevice] = []

    def device(log: EventLog) -> SlabDevice:
        devices.append(SlabDevice(BUDGET, log))
        return devices[0]

    asked = settings(clip=0.5, device_memory=BUDGET, accumulate=len(steps[0]))
    engine = STRATEGIES[system].initialize(
        models_small.build("opt", positions=158), asked, OPTIONS[system], device=device
    )
    losses, highest = [], []
    for step in steps:
        devices[0].highest = 0
        losses.append(train(engine, step))
        highest.append(devices[0].highest)
    return finished(engine, losses), highest


@cache
def expected(steps: tuple[tuple[int, ...], ...]) -> Run:
    asked = settings(clip=0.5, accumulate=len(steps[0]))
    engine = RESIDENT.initialize(models_small.build("opt", positions=158), asked, RESIDENT.Options())
    return finished(engine, [train(engine, step) for step in steps])


@pytest.mark.parametrize("system", STRATEGIES)
@pytest.mark.one_in(2)
def test_there_is_room_for_a_batch_larger_than_any_before(system: str) -> None:
    """Without what is tested, the two that fill the device pass the budget by more than a quarter at the longest."""
    steps = ((8,), (8,), (64,), (16,), (128,), (128,), (8,))
    ours, highest = run(system, steps)
    assert_equal(expected(steps), ours)
    assert max(highest) <= BUDGET
    assert ours.counters["fallbacks"] == ours.counters["retraces"] == 2, "a step with 64 and one with 128, and no other"


@pytest.mark.parametrize("system", STRATEGIES)
@pytest.mark.one_in(3)
def test_a_later_micro_batch_may_be_the_large_one(system: str) -> None:
    """What was large in one pass of a step leaves no room in another."""
    steps = ((8, 8), (8, 8), (8, 128), (8, 128), (128, 8), (128, 128), (8, 8))
    ours, highest = run(system, steps)
    assert_equal(expected(steps), ours)
    assert max(highest) <= BUDGET
    assert ours.counters["fallbacks"] == ours.counters["retraces"] == 2


def test_the_shape_of_a_batch() -> None:
    long, wide = torch.zeros(1, 64), torch.zeros(8, 8)
    assert batch_shape_of(((long,), {"mask": wide, "more": [wide, None], "flag": True, "name": "x"})) == BatchShape(192, 64)
    assert batch_shape_of(((), {})) == batch_shape_of("abc") == BatchShape()
    assert not batch_shape_of(long).within(batch_shape_of(wide)) and batch_shape_of(wide).within(batch_shape_of(long))
    assert batch_shape_of(long).join(batch_shape_of([wide, wide])) == BatchShape(128, 64)


EVALUATED = 3  # the step with an evaluation, the second that goes by the plan


@pytest.mark.parametrize(
    ("system", "in_step"),
    [
        *(pytest.param(system, True, id=f"{system}-between micro-batches") for system in STRATEGIES),
        *(
            pytest.param(system, False, id=f"{system}-between steps", marks=() if system in FILL else pytest.mark.slow)
            for system in STRATEGIES
        ),
    ],
)
@pytest.mark.one_in(5)
def test_there_is_room_for_an_evaluation_larger_than_any_step(system: str, in_step: bool) -> None:
    """The plan rests meanwhile, and holds again in the next step."""
    devices: list[SlabDevice] = []

    def device(log: EventLog) -> SlabDevice:
        devices.append(SlabDevice(BUDGET, log))
        return devices[0]

    asked = settings(clip=0.5, device_memory=BUDGET, accumulate=2)
    engine: Any = STRATEGIES[system].initialize(
        models_small.build("opt", positions=158), asked, OPTIONS[system], device=device
    )
    plain = RESIDENT.initialize(models_small.build("opt", positions=158), settings(clip=0.5, accumulate=2), RESIDENT.Options())
    large, fallbacks, following = tokens(1, 1, 4, 128)[0, 0], [], []

    def evaluate() -> None:
        with torch.no_grad():
            ours, theirs = (each(input_ids=large).logits for each in (engine, plain))
        assert torch.equal(ours, theirs)

    def micro_batch(model: Engine, ids: torch.Tensor) -> None:
        model.backward(next_token_loss(model, ids, 30))

    with engine, plain:
        for step in range(EVALUATED + 3):
            for micro in range(2):
                if step == EVALUATED and micro == int(in_step):
                    evaluate()
                    evaluate()
                ids = tokens(1, 1, 1, 8, seed=2 * step + micro)[0, 0]
                micro_batch(engine, ids)
                micro_batch(plain, ids)
            following.append(engine.cursor.following)
            for each in (engine, plain):
                each.step()
                each.drain()
            assert engine.outcomes[-1] == plain.outcomes[-1]
            fallbacks.append(engine.counters()["fallbacks"])
    assert devices[0].highest <= BUDGET
    assert fallbacks == [0] * EVALUATED + [1] * 3, "the evaluation is one, of two passes; the step that is planned for is none"
    assert following[EVALUATED - 1 :] == [True, not in_step, True, True]
