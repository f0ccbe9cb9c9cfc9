"""The two states of a bundle, which tensors exist in each, and which may follow which.

What is legal is looked at where `CHECKED` says so: in every test, and in a process with OFFLOAD_CHECK_STATES=1.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

CHECKED = os.environ.get("OFFLOAD_CHECK_STATES") == "1"


class ParameterState(Enum):
    """Where a bundle's parameters are. It follows from the block and from where the storage points, so that nothing that
    breaks off leaves another state than what is there.

    ABSENT      There is no block; the storage points at poison. The host's slots (or masters) have the values.
    SHARDED     The same of several ranks, but for this one's part, which is on the device.
    FETCHING    There is a block, and a copy into it is on its way; the storage points at poison still.
    RESIDENT    The storage points at the block, which compute is ordered behind.
    """

    ABSENT = "absent"
    SHARDED = "sharded"
    FETCHING = "fetching"
    RESIDENT = "resident"


class GradientState(Enum):
    """Where a bundle's gradient of this micro-step is. See Note [Life of a gradient] in gradient.py.

    NONE          Nothing has come.
    IN_AUTOGRAD   `waiting` has it: the tensors that autograd made.
    COLLECTING    `range` has it: device memory that lies like the bundle's parameters. A unit may have reserved it before the
                  first gradient came.
    IN_PLACE      The bundle's block has those of the parameters in `written`, which holds it; others may be `waiting`.
    PARKED        The slots have what came, which is not all; nothing was added to the accumulator yet.
    KEPT          It is complete and stays on the device, in `waiting` or `range`, until it is updated there. Of several ranks
                  the range may be a shard's by then, or the bundle's block has it. Or it is for the host and leaves at the
                  step's end, in what was the bundle's block.
    SENT          It is complete and left: the slots have it, or the accumulator.
    """

    NONE = "none"
    IN_AUTOGRAD = "in autograd"
    COLLECTING = "collecting"
    IN_PLACE = "in place"
    PARKED = "parked"
    KEPT = "kept"
    SENT = "sent"


P, G = ParameterState, GradientState

PARAMETER_MOVES: Mapping[ParameterState, frozenset[ParameterState]] = {
    P.ABSENT: frozenset({P.SHARDED, P.FETCHING}),
    P.SHARDED: frozenset({P.FETCHING, P.ABSENT}),
    P.FETCHING: frozenset({P.RESIDENT, P.ABSENT, P.SHARDED}),
    P.RESIDENT: frozenset({P.ABSENT, P.SHARDED}),
}
# Any state is left for NONE as well: when a micro-step begins, when a step ends, when it is given up.
GRADIENT_MOVES: Mapping[GradientState, frozenset[GradientState]] = {
    G.NONE: frozenset({G.IN_AUTOGRAD, G.COLLECTING}),
    G.IN_AUTOGRAD: frozenset({G.COLLECTING, G.IN_PLACE, G.KEPT, G.SENT}),
    G.COLLECTING: frozenset({G.PARKED, G.KEPT, G.SENT, G.NONE}),
    G.IN_PLACE: frozenset({G.COLLECTING, G.KEPT, G.SENT}),
    G.PARKED: frozenset({G.COLLECTING, G.SENT}),
    G.KEPT: frozenset({G.IN_AUTOGRAD, G.SENT, G.COLLECTING}),
    G.SENT: frozenset({G.COLLECTING, G.IN_AUTOGRAD}),
}

State = TypeVar("State", ParameterState, GradientState)


def check(moves: Mapping[State, frozenset[State]], before: State, after: State) -> None:
    """AssertionError where the second state may not follow the first."""
    assert after in moves[before], f"a bundle's {type(before).__name__} goes from {before.name} to {after.name}"
