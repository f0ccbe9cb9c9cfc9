"""step() that breaks off anywhere: it is done, or not at all, or the next one is refused in words.

Ctrl-C is raised at one line of this project's code after another; allocations and operations fail by number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from systems.errors import UnsupportedError
from systems.system import Engine
from tests.systems import every
from tests.systems.interrupts import REFUSED, Place, Trace
from tests.systems.models_plain import CASES, build
from tests.systems.models_small import tokens
from tests.systems.running import (
    RESIDENT,
    Run,
    assert_equal,
    finished,
    h3t,
    managed,
    one_step,
    settings,
    start,
)
from tests.systems.setups import in_turn

LOSS = CASES["stack"].loss
TIGHT = 150_000  # bytes: about 40 % of what resident needs
STEPS = 3
SYSTEMS: dict[str, tuple[Any, Any]] = {
    **{name: (system, None) for name, system in every.SYSTEMS.items()},
    "h3t": (h3t(), h3t().Options(solver="drawn")),
    **{f"{name} stop": way for name, way in every.with_option("nonfinite", "stop").items()},
}


class OnPurposeError(Exception):
    pass


def started(system: str, accumulate: int) -> Engine:
    chosen, options = SYSTEMS[system]
    budget = {} if system == "resident" else {"device_memory": TIGHT}
    clip = 0.0 if system.endswith("stop") else 1.0
    return start(chosen, build("stack"), settings(accumulate=accumulate, clip=clip, **budget), options)


@cache
def undisturbed(accumulate: int, clip: bool) -> Run:
    engine = start(RESIDENT, build("stack"), settings(accumulate=accumulate, clip=1.0 if clip else 0.0))
    return finished(engine, [one_step(engine, batch, LOSS) for batch in tokens(STEPS, accumulate)])


class Lines(Trace):
    """Ctrl-C at line `number` of what this project's code runs within, and none if there are fewer."""

    def __init__(self, number: int) -> None:
        self._left = number
        self.where = ""

    def see(self, place: Place) -> None:
        if place.event == "line":
            self._left -= 1
            if self._left == 0:
                self.where = f"{place.file}:{place.line}"
                raise KeyboardInterrupt


class Calls:
    """An error at call `number` of an allocation of device memory, or of an operation; `late`: when it has been issued."""

    def __init__(self, what: str, number: int, *, late: bool = False) -> None:
        self.what, self.late, self._left = what, late, number

    @contextmanager
    def within(self, engine: Engine) -> Iterator[None]:
        device = managed(engine).device
        owner = device.pool if self.what == "allocate" else device.transfers
        call = getattr(owner, self.what)

        def failing(*args: Any, **kwargs: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                if self.late:
                    call(*args, **kwargs)
                raise OnPurposeError
            return call(*args, **kwargs)

        setattr(owner, self.what, failing)
        try:
            yield
        finally:
            setattr(owner, self.what, call)


def disturbed(system: str, accumulate: int, broken: int, fault: Any) -> bool:
    """Train with one fault in step() of step number `broken`, and check what it left. False if it did not happen."""
    engine = started(system, accumulate)
    ids = tokens(STEPS, accumulate)
    losses = [one_step(engine, batch, LOSS) for batch in ids[:broken]]
    steps = len(losses)
    value, happened = passes(engine, ids[broken]), False
    try:
        with fault.within(engine):
            engine.step()
    except (KeyboardInterrupt, OnPurposeError):
        happened = True
    if refuses_to_go_on(engine):
        engine.close()
        return happened
    if len(engine.outcomes) == steps:
        value = one_step(engine, ids[broken], LOSS)
    losses = [*losses, value, *(one_step(engine, batch, LOSS) for batch in ids[broken + 1 :])]
    assert_equal(undisturbed(accumulate, not system.endswith("stop")), finished(engine, losses))
    return happened


def passes(engine: Engine, batch: torch.Tensor) -> float:
    """All of a step but its end."""
    count, total = sum(micro[:, 1:].numel() for micro in batch), 0.0
    for micro in batch:
        loss = LOSS(engine, micro, count)
        engine.backward(loss)
        total += loss.item()
    return total


def refuses_to_go_on(engine: Engine) -> bool:
    """In words, if it does. A step that had not begun to end is dropped, or ended if there is no way back."""
    try:
        engine.discard()
    except UnsupportedError:
        engine.step()
    engine.drain()
    try:
        with torch.no_grad():
            LOSS(engine, tokens(1, 1)[0][0], 1)
    except RuntimeError as error:
        if re.search(REFUSED, str(error)):
            return True
        raise
    return False


ROWS = [row for row in product(SYSTEMS, [1, 2]) if not row[0].endswith("stop") or row[1] == 1]  # 2 accumulate, and so wait


@pytest.mark.parametrize("row", range(len(ROWS)), ids=["-".join(map(str, row)) for row in ROWS])
@pytest.mark.one_in(5)
def test_ctrl_c_at_a_line(row: int) -> None:
    """A few lines of each, other ones for each system."""
    system, accumulate = ROWS[row]
    happened = [disturbed(system, accumulate, 1, Lines(number)) for number in range(40 + 61 * row, 2200, 1150)]
    assert happened[0], "void: there is no such line"


@pytest.mark.parametrize(
    ("system", "what", "late"),
    in_turn([name for name in SYSTEMS if name != "resident"], [("issue", False), ("issue", True), ("allocate", False)]),
)
@pytest.mark.one_in(3)
def test_an_operation_or_an_allocation_that_fails(system: str, what: str, late: bool) -> None:
    """In the first step, whose end brings optimizer states to the device, early and late."""
    accumulate = 1 + (late and not system.endswith("stop"))
    happened = [disturbed(system, accumulate, 0, Calls(what, number, late=late)) for number in (1, 3)]
    by_times = system == "h3t stop"  # what its plan brings, if anything, goes by what was measured
    assert happened[0] or what == "allocate" or by_times, "void: nothing failed"  # not every plan brings something


@pytest.mark.slow
@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize(("system", "accumulate"), ROWS)
def test_ctrl_c_at_many_lines(system: str, accumulate: int, broken: int) -> None:
    number, step = 1, 1
    while disturbed(system, accumulate, broken, Lines(number)):
        step += number > 200
        number += step
    assert number > 1, "void: there is no such line"


@pytest.mark.slow
@pytest.mark.parametrize("what", ["issue", "allocate"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("system", "accumulate"), [row for row in ROWS if row[0] != "resident"])
def test_every_operation_and_allocation(system: str, accumulate: int, what: str, late: bool) -> None:
    for broken in (0, 1):
        number = 1
        while disturbed(system, accumulate, broken, Calls(what, number, late=late)):
            number += 1
        assert number > 1 or what == "allocate", "void: a step issues nothing"
