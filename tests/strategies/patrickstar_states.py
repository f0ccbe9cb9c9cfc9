"""Tensor states (table 1), their transitions (figure 6), and Algorithms 1 and 2 as what happens to them.

Nothing stores a state: it follows from who holds a parameter and where in the step that is. `TensorStates` derives it along
a trace. The substrate acts by the same rules without the names: it holds a bundle from ENTER to EXIT of a unit, evicts none
that is held, and knows when a gradient has taken a parameter's place.

| paper | substrate |
|---|---|
| Algorithm 1, line 24: prepare payload on the computing device | Residency.hold: fetches what is absent, making room |
| line 25: param.data points into the chunk | the bundle's storage is pointed at its block |
| lines 26 to 28: a FREE tensor is zeroed | nothing is read before it is written, so nothing is zeroed |
| line 30: state COMPUTE | the hold itself |
| Algorithm 2, line 34: state HOLD_AFTER_FWD or _BWD | Residency.release; at _BWD the gradient is written in place |
| reference counter of a shared parameter | holds nest; BWD is over when no use is left |
| line 38: param.data is a dummy tensor | a storage without a block points to NaNs |
| lines 3 to 17 and 1 to 30: remote chunks | GATHER, REDUCE and sharded segments, with several ranks |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import Enum
from types import MappingProxyType

from systems.planning.layout import ModelIndex
from systems.planning.trace import NO_UNIT, Phase, Trace


class TensorState(Enum):
    """Of a param 16-bit tensor."""

    FREE = "free"  # no payload
    COMPUTE = "compute"  # about to be computed with, on the computing device
    HOLD = "hold"  # payload on either memory
    HOLD_AFTER_FWD = "hold-after-fwd"
    HOLD_AFTER_BWD = "hold-after-bwd"  # the payload is the gradient


HOLD_LIKE = (TensorState.HOLD, TensorState.HOLD_AFTER_FWD, TensorState.HOLD_AFTER_BWD)


class Event(Enum):
    INITIALIZE = "initialize"  # drawn at random or loaded
    ACCESS = "access"  # Algorithm 1
    RELEASE_FWD = "release-fwd"  # Algorithm 2, training_stage FWD
    RELEASE_SHARED = "release-shared"  # in BWD, while the reference counter says that uses are left
    RELEASE_BWD = "release-bwd"  # Algorithm 2, training_stage BWD: the last use is over, the gradient is written
    END_OF_FORWARD = "end-of-forward"  # all of them, lest chunks done with FWD look done with BWD
    UPDATE = "update"  # ADAM is done and param fp32 copied into param 16-bit; or the micro-step's gradient is added up
    RELEASE_REMOTE = "release-remote"  # of another rank's chunk


def _transitions() -> Mapping[tuple[TensorState, Event], TensorState]:
    state, event = TensorState, Event
    return MappingProxyType(
        {
            (state.FREE, event.INITIALIZE): state.HOLD,
            (state.FREE, event.ACCESS): state.COMPUTE,  # a remote chunk, just gathered
            (state.HOLD, event.ACCESS): state.COMPUTE,
            (state.HOLD_AFTER_FWD, event.ACCESS): state.COMPUTE,  # shared by several operators
            (state.COMPUTE, event.RELEASE_FWD): state.HOLD_AFTER_FWD,
            (state.COMPUTE, event.RELEASE_SHARED): state.HOLD,
            (state.COMPUTE, event.RELEASE_BWD): state.HOLD_AFTER_BWD,
            (state.HOLD, event.END_OF_FORWARD): state.HOLD,  # not used in this forward
            (state.HOLD_AFTER_FWD, event.END_OF_FORWARD): state.HOLD,
            (state.HOLD, event.UPDATE): state.HOLD,  # not used in this backward
            (state.HOLD_AFTER_FWD, event.UPDATE): state.HOLD,  # there was no backward to speak of
            (state.HOLD_AFTER_BWD, event.UPDATE): state.HOLD,
            (state.HOLD_AFTER_FWD, event.RELEASE_REMOTE): state.FREE,
            (state.HOLD_AFTER_BWD, event.RELEASE_REMOTE): state.FREE,
        }
    )


TRANSITIONS = _transitions()


def may_move(states: Iterable[TensorState]) -> bool:
    """A chunk with these tensors may be in any place: none in COMPUTE, one at least with a payload (section 6.1.2)."""
    found = set(states)
    return TensorState.COMPUTE not in found and bool(found.intersection(HOLD_LIKE))


class TensorStates:
    """One step, moment by moment. trace: a step as it was traced; its uses in backward are the reference counters.

    KeyError for a transition that figure 6 does not have.
    """

    def __init__(self, index: ModelIndex, trace: Trace) -> None:
        self._parameters = [unit.parameters for unit in index.units]
        self._trace = trace
        self._uses: Counter[tuple[int, int]] = Counter()  # micro-step, parameter: accesses of BWD to come
        for moment in trace.moments:
            if moment.phase is Phase.BACKWARD_ENTER:
                self._uses.update((moment.micro_step, p) for p in self._parameters[moment.unit])
        self._accesses: Counter[int] = Counter()
        self.now = [TRANSITIONS[TensorState.FREE, Event.INITIALIZE]] * len(index.parameters)
        self._forward = True

    def steps(self) -> list[tuple[TensorState, ...]]:
        """The state of every parameter right after each moment."""
        found = []
        for moment in self._trace.moments:
            if moment.unit == NO_UNIT:
                if moment.phase is Phase.BACKWARD_END:
                    self._each(Event.UPDATE)
                    self._forward = True
            elif moment.phase in (Phase.FORWARD_ENTER, Phase.BACKWARD_ENTER):
                if moment.phase is Phase.BACKWARD_ENTER and self._forward:
                    self._each(Event.END_OF_FORWARD)
                    self._forward = False
                for parameter in self._parameters[moment.unit]:
                    self._access(parameter)
            else:
                for parameter in self._parameters[moment.unit]:
                    self._release(parameter, moment.micro_step, backward=moment.phase is Phase.BACKWARD_EXIT)
            found.append(tuple(self.now))
        return found

    def _access(self, parameter: int) -> None:
        """Algorithm 1."""
        self._accesses[parameter] += 1
        if self._accesses[parameter] == 1:
            self._go(parameter, Event.ACCESS)

    def _release(self, parameter: int, micro_step: int, *, backward: bool) -> None:
        """Algorithm 2, with the reference counter that says whether this was the last access."""
        self._accesses[parameter] -= 1
        if backward:
            self._uses[micro_step, parameter] -= 1
        if self._accesses[parameter]:
            return
        over = Event.RELEASE_SHARED if self._uses[micro_step, parameter] else Event.RELEASE_BWD
        self._go(parameter, over if backward else Event.RELEASE_FWD)

    def _each(self, event: Event) -> None:
        for parameter, state in enumerate(self.now):
            if state is not TensorState.COMPUTE:
                self._go(parameter, event)

    def _go(self, parameter: int, event: Event) -> None:
        self.now[parameter] = TRANSITIONS[self.now[parameter], event]
