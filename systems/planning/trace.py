"""The trace: what one optimizer step did, unit by unit, as the runtime saw it.

A moment is one event of a unit. Moment 0 is STEP_BEGIN (before the first forward) and the last is STEP_END (the
optimizer has been given its gradients). A trace covers all micro-steps of one optimizer step. It is a hint for
planning, never a truth.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple


class Phase(Enum):
    STEP_BEGIN = "step-begin"
    FORWARD_ENTER = "forward-enter"  # the unit's parameters must be resident from here
    FORWARD_EXIT = "forward-exit"  # ... to here
    BACKWARD_ENTER = "backward-enter"  # likewise; recomputation happens inside
    BACKWARD_EXIT = "backward-exit"  # the unit's gradients are complete for this micro-step
    BACKWARD_END = "backward-end"  # of a micro-step; gradients that were still open are flushed here
    STEP_END = "step-end"


ENTER = (Phase.FORWARD_ENTER, Phase.BACKWARD_ENTER)
EXIT = (Phase.FORWARD_EXIT, Phase.BACKWARD_EXIT)
NO_UNIT = -1


@dataclass(frozen=True)
class Moment:
    """unit: index into ModelIndex.units, NO_UNIT at the step's two ends and at BACKWARD_END."""

    phase: Phase
    unit: int = NO_UNIT
    micro_step: int = 0


class LaneTime(NamedTuple):
    """What a lane did while it was timed. nbytes: of parameters, this rank's part, be they copied or updated."""

    lane: str
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Trace:
    """Measurements have one entry a moment and cover the time from that moment to the next.

    non_model_bytes: peak device bytes that are not parameters, gradient ranges or optimizer state of the substrate
    (activations, temporaries, gradients in autograd's own buffers).
    compute_time_s: seconds of compute from this moment to the next, without its waits for other lanes.
    flushes: per moment the bundles whose gradient was complete there and left for the optimizer.
    adopted_peak_bytes: as non_model_bytes, but with the gradients produced within the interval left in autograd's own
    buffers (those of earlier intervals not counted). What an interval costs when gradients are adopted, not ranged.
    gradient_bytes: bytes of the gradients first produced in the interval, each parameter once a step, padding excluded;
    their running sum is what adopted gradients of earlier intervals hold.
    Both are empty where they were not measured (forward-only steps, nominal traces): bounds are used instead.
    recomputed, offloaded: units that were recomputed, and whose inputs waited on the host, in this step (where a strategy
    chooses). input_bytes: (unit, bytes of its hidden state) of units that may be.
    inputs_left: per moment the units whose inputs left for the host before the next; empty where that was not seen.
    lane_times: of copies and of the host's updates that ended in the step; empty unless its plan asked for them.
    exchange_bytes: of tokens, to experts of other ranks and back, that pass a port in the interval; their time is in compute's.
    Empty where none do, and where only their time is known.
    """

    moments: tuple[Moment, ...]
    non_model_bytes: tuple[int, ...]
    compute_time_s: tuple[float, ...]
    flushes: tuple[tuple[int, ...], ...]
    adopted_peak_bytes: tuple[int, ...] = ()
    gradient_bytes: tuple[int, ...] = ()
    recomputed: frozenset[int] = frozenset()
    offloaded: frozenset[int] = frozenset()
    input_bytes: tuple[tuple[int, int], ...] = ()
    inputs_left: tuple[tuple[int, ...], ...] = ()
    lane_times: tuple[LaneTime, ...] = ()
    exchange_bytes: tuple[int, ...] = ()

    @cached_property
    def signature(self) -> tuple[Moment, ...]:
        """Two steps with equal signatures can run the same plan."""
        return self.moments

    @property
    def measured_adopted(self) -> bool:
        """True if adopted_peak_bytes and gradient_bytes are there."""
        return bool(self.adopted_peak_bytes) and bool(self.gradient_bytes)

    def __len__(self) -> int:
        return len(self.moments)
