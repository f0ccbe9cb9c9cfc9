"""Ctrl-C at one line after another of what a step runs, or as a call returns: training goes on as if it had not come.

One engine is interrupted in step after step, each time at another place. After each its weights are those of `resident` with
the step done, or not done and then repeated, or it refuses by name, and a new engine goes on in its place.

The line of a `with` is left out: Python's tracing comes there once more before what was entered is left, and what is raised
then leaves it never. A signal is not looked at there.
"""

from __future__ import annotations

import ast
import re
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from systems.errors import UnsupportedError
from systems.system import Engine
from tests.systems.models_plain import Stack, squared_error
from tests.systems.models_small import tokens
from tests.systems.running import AdamState, ManagedEngine, adam_states, one_step, parameters_of

OURS = str(Path(__file__).resolve().parents[2] / "systems")
REFUSED = r"parameters belong to two steps|optimizer states could not be brought home"
IN_FINALIZERS = {"_forget", "return_other"}  # where Python prints what is raised, and goes on


class Place(NamedTuple):
    """An event of Python's tracing, in one line of this project's code."""

    file: str
    line: int
    event: str


@cache
def _lines_of_with(path: str) -> frozenset[int]:
    nodes = [node for node in ast.walk(ast.parse(Path(path).read_text())) if isinstance(node, ast.With)]
    return frozenset(line for node in nodes for line in range(node.lineno, node.body[0].lineno))


class Trace(ABC):
    """Calls `see` for each event of this project's code that runs within."""

    @abstractmethod
    def see(self, place: Place) -> None: ...

    def _step(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(OURS) or code.co_name in IN_FINALIZERS:
            return None
        if event == "return" or (event == "line" and frame.f_lineno not in _lines_of_with(code.co_filename)):
            self.see(Place(code.co_filename.removeprefix(OURS), frame.f_lineno, event))
        return self._step

    @contextmanager
    def within(self, engine: object = None) -> Iterator[None]:
        """engine: of others that break it off, this looks at all that is run."""
        before = sys.gettrace()
        sys.settrace(self._step)
        try:
            yield
        finally:
            sys.settrace(before)


class Seen(Trace):
    """How often each place came."""

    def __init__(self) -> None:
        self.counts: Counter[Place] = Counter()

    def see(self, place: Place) -> None:
        self.counts[place] += 1


class Interrupt(Trace):
    """Ctrl-C when the place comes for the given time."""

    def __init__(self, place: Place, time: int) -> None:
        self._place, self._left = place, time

    def see(self, place: Place) -> None:
        if place == self._place:
            self._left -= 1
            if self._left == 0:
                raise KeyboardInterrupt


def build() -> Any:
    torch.manual_seed(0)
    return Stack(count=3)


@dataclass
class Course:
    """What resident makes of the steps, as far as anybody has asked. ids: of one step, used in all."""

    engine: Engine
    ids: torch.Tensor
    losses: list[float] = field(default_factory=list)
    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)
    moments: list[dict[str, AdamState]] = field(default_factory=list)

    def upto(self, steps: int) -> None:
        while len(self.weights) <= steps:
            if self.weights:
                self.losses.append(one_step(self.engine, self.ids, squared_error))
            self.weights.append(parameters_of(self.engine))
            self.moments.append(adam_states(self.engine))

    def matches(self, engine: Engine, steps: int) -> bool:
        self.upto(steps)
        now = parameters_of(engine)
        return all(torch.equal(value, now[name]) for name, value in self.weights[steps].items())


class Sweep:
    """start: makes an engine. after: steps that each engine has taken, undisturbed, before it is interrupted."""

    def __init__(self, start: Callable[[], Engine], course: Course, after: int) -> None:
        self._start, self.course, self._after = start, course, after
        self.happened = self.refused = 0
        self.engine = self._begun()

    def _begun(self) -> Engine:
        engine = self._start()
        for _ in range(self._after):
            one_step(engine, self.course.ids, squared_error)
        engine.drain()
        return engine

    def places(self) -> Counter[Place]:
        """Of one step, which is taken."""
        seen = Seen()
        with seen.within():
            one_step(self.engine, self.course.ids, squared_error)
        return seen.counts

    def interrupt(self, place: Place, time: int) -> None:
        engine, ids = self.engine, self.course.ids
        engine.drain()  # the last step's outcome may be told a step late
        done = len(engine.outcomes)
        try:
            with Interrupt(place, time).within():
                one_step(engine, ids, squared_error)
        except KeyboardInterrupt:
            self.happened += 1
        if self._refuses():
            self.refused += 1
            engine.close()
            self.engine = self._begun()
            return
        now = len(engine.outcomes)
        assert now in (done, done + 1) and self.course.matches(engine, now), f"{place}: weights are of no step"
        self._check_accounts()
        if now == done:
            loss = one_step(engine, ids, squared_error)
            assert self.course.matches(engine, done + 1), f"{place}: the step, repeated, was another"
            assert loss == self.course.losses[done], f"{place}: another loss"

    def _refuses(self) -> bool:
        """By name, if it does. A step that had not begun to end is dropped, or ended if there is no way back."""
        try:
            self.engine.discard()
        except UnsupportedError:
            self.engine.step()
        self.engine.drain()
        try:
            parameters_of(self.engine)
        except RuntimeError as error:
            if re.search(REFUSED, str(error)):
                return True
            raise
        return False

    def _check_accounts(self) -> None:
        """No byte of the device is lost, nothing is held, and no slot has anything but parameters."""
        if isinstance(self.engine, ManagedEngine):
            engine = self.engine
            owned = engine.recovery.owned()
            assert engine.device.account.pool == sum(block.nbytes for block in owned)
            assert not any(managed.holds for managed in engine.residency.bundles)
            assert not any(stored.slot_holds_gradient for stored in engine.store.segments)

    def end(self) -> None:
        """The model has the weights of the last step."""
        engine, steps = self.engine, len(self.engine.outcomes)
        engine.drain()
        self.course.upto(steps)
        for name, (first, second, count) in adam_states(engine).items():
            theirs = self.course.moments[steps][name]
            assert torch.equal(first, theirs.exp_avg) and torch.equal(second, theirs.exp_avg_sq) and count == theirs.steps
        engine.close()
        given = dict(engine.module.named_parameters())
        assert all(torch.equal(value, given[name]) for name, value in self.course.weights[steps].items())


def batch(accumulate: int) -> torch.Tensor:
    return tokens(1, accumulate)[0]


def chosen(counts: Counter[Place], times: Sequence[float]) -> list[tuple[Place, int]]:
    """Each place with the times that lie so far between its first (0) and its last (1)."""
    found = [(place, 1 + round(share * (count - 1))) for place, count in sorted(counts.items()) for share in times]
    return list(dict.fromkeys(found))
