"""Labels for a profile: what a trace calls each piece of work.

While no profile is being taken a label is one look at a flag, so that timed steps pay nothing for it. A lane's work carries
the label of its operation, as in the event log and in a simulated trace, on the lane's own thread; its issue, on the thread
that runs the step, is called "issue ..." in front of that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal

from torch.autograd import profiler
from torch.profiler import record_function

from systems.planning.step.operations import LaneOperation

_NOTHING = contextlib.nullcontext()


def profiling() -> bool:
    """True while torch's profiler takes a profile of this process."""
    return profiler._is_profiler_enabled


def labelled(label: str) -> AbstractContextManager[object]:
    return record_function(label) if profiler._is_profiler_enabled else _NOTHING


def issuing(operation: LaneOperation) -> AbstractContextManager[object]:
    return record_function(f"issue {operation.label}") if profiler._is_profiler_enabled else _NOTHING


def working(operation: LaneOperation | None) -> AbstractContextManager[object]:
    return record_function(operation.label) if profiler._is_profiler_enabled and operation is not None else _NOTHING


class UnitSpans:
    """Forward and backward of each unit, which begin in one hook and end in another.

    A chain's next backward begins in the moment before the last one ends. What would overlap is cut in two, so that spans
    are always nested, as every trace viewer wants them. name: a unit's own.
    """

    def __init__(self, name: Callable[[int], str]) -> None:
        self._name = name
        self._open: list[tuple[str, record_function]] = []

    def begin(self, phase: Literal["forward", "backward"], unit: int) -> None:
        if profiling():
            self._enter(f"{phase} of {self._name(unit)}")

    def end(self, phase: Literal["forward", "backward"], unit: int) -> None:
        """Nothing if it is not open: the profile began after it."""
        if not self._open:
            return
        name = f"{phase} of {self._name(unit)}"
        if name not in (opened for opened, _ in self._open):
            return
        within: list[str] = []
        while (last := self._leave()) != name:
            within.append(last)
        for cut in reversed(within):
            self._enter(cut)

    def end_all(self) -> None:
        while self._open:
            self._leave()

    def _enter(self, name: str) -> None:
        span = record_function(name)
        span.__enter__()
        self._open.append((name, span))

    def _leave(self) -> str:
        name, span = self._open.pop()
        span.__exit__(None, None, None)
        return name
