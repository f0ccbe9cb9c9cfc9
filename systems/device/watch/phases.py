"""Where the time of a step goes, as in PatrickStar's figures 14 and 15: one step in which nothing overlaps.

Note [Phased steps]
    Before a phase begins and before it ends, everything queued is waited for. So each phase is charged its own time and no
    other's, and the phases add up to the step; it is slower than a timed step by what would have overlapped. Copies have the
    link to themselves here.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal, Protocol, get_args

from systems.planning.step.operations import LaneOperation, Work

Phase = Literal[
    "forward",
    "backward",
    "norm",  # sums of squares out of fp32 accumulators on the host, the step's one decision, and what is left of step()
    "adam_host",  # reads 16-bit gradients and writes 16-bit parameters: their conversion is part of it
    "adam_device",
    "disk_read",  # master and moments that have their home there
    "disk_write",
    "accumulate",  # 16-bit gradients into fp32 accumulators, several micro-batches only
    "conversion",  # fp32 masters to 16-bit parameters by themselves
    "h2d_updated",  # parameters for the first time since the host updated them: figure 14's cpufp32->gpufp16
    "h2d_parameters",  # parameters that had left the device: its cpu->gpu
    "h2d_activations",
    "h2d_gradients",
    "h2d_optimizer",
    "d2h_parameters",  # its gpu->cpu
    "d2h_activations",
    "d2h_gradients",  # its gpufp16->cpufp32
    "d2h_optimizer",
    "gather",  # a bundle's shards to all ranks; waiting for the other ranks is part of it
    "reduce",  # a bundle's gradient over all ranks, and the sums of squares of the own shards
    "other",  # outside of the engine: batches
]
PHASES: tuple[Phase, ...] = get_args(Phase)

# Of a lane's operations; those that compute carries out are charged where it does.
OPERATIONS: dict[Work, Phase] = {
    Work.FETCH: "h2d_parameters",
    Work.MOVE: "h2d_parameters",
    Work.REFILL: "h2d_parameters",
    Work.FETCH_INPUT: "h2d_activations",
    Work.REOPEN: "h2d_gradients",
    Work.STATE_TO_DEVICE: "h2d_optimizer",
    Work.WRITE_BACK: "d2h_parameters",
    Work.OFFLOAD_INPUT: "d2h_activations",
    Work.OFFLOAD: "d2h_gradients",
    Work.OFFLOAD_ADOPTED: "d2h_gradients",
    Work.STATE_TO_HOST: "d2h_optimizer",
    Work.GATHER: "gather",
    Work.REDUCE: "reduce",
    Work.READ_STATE: "disk_read",
    Work.WRITE_STATE: "disk_write",
    Work.UPDATE: "adam_host",
    Work.UPDATE_AHEAD: "adam_host",
    Work.BRING_HOME: "adam_host",
    Work.CLEAR: "adam_host",
    Work.SQUARES: "norm",
    Work.ACCUMULATE: "accumulate",
    Work.RESTORE: "conversion",
}


class Phases(Protocol):
    """Of whom the engine and its mechanism tell what they are at."""

    def of(self, phase: Phase) -> AbstractContextManager[object]:
        """What runs inside is of that phase, but for phases inside of it. A movement has no phases inside."""


class NoPhases:
    """Of every step but a phased one."""

    def of(self, phase: Phase) -> AbstractContextManager[object]:
        return contextlib.nullcontext()


class PhaseClock:
    """drain: waits for everything queued. seconds: of every phase so far, 0 for one that did not occur."""

    def __init__(self, drain: Callable[[], None], clock: Callable[[], float] = time.perf_counter) -> None:
        self._drain, self._clock = drain, clock
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._open: list[Phase] = []
        self._since_s = 0.0

    @property
    def moving(self) -> bool:
        """In a phase of movement, which whoever issues it has named."""
        return bool(self._open) and self._open[-1].startswith(("h2d", "d2h"))

    def around(self, operation: LaneOperation) -> AbstractContextManager[object]:
        """An operation of a lane: a phase of its own, which begins when all before is done, and is waited for."""
        return contextlib.nullcontext() if self.moving else self.of(OPERATIONS[operation.kind])

    @contextmanager
    def of(self, phase: Phase) -> Iterator[None]:
        self._charge()
        self._open.append(phase)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def _charge(self) -> None:
        """Since the last change of phase; waiting for what that phase queued is part of it."""
        self._drain()
        now = self._clock()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since_s
        self._since_s = now
