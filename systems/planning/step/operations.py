"""Operations as values: what a schedule is made of, what the runtime issues, and what profile, event log and traces call it.

One name for one thing: a schedule can be laid beside a run, because both say `fetch bundle 3 (model.layers.5)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from systems.planning.layout import Layout
from systems.planning.plan import LaneKind


class Work(Enum):
    """Kinds of operations. The last group is bookkeeping: on no lane, taking no time."""

    COMPUTE = "compute"  # the model, from one moment to the next
    FETCH = "fetch"  # host slots to the device
    MOVE = "move"  # the same to a shard there
    SHRINK = "shrink"  # a device copy's own part to a shard beside it
    MERGE = "merge"  # pages that are on the device, to the bundle's copy there
    GATHER = "gather"  # a bundle's shards to all ranks of its group
    WRITE_BACK = "write-back"  # device copy to the host slots
    REDUCE = "reduce"  # a bundle's gradient over its group
    SQUARES = "squares"  # sums of squares: of a gradient, or, on the host's lane, out of a bundle's accumulators
    OFFLOAD = "offload"  # gradient to the host slots of its own parameters
    ACCUMULATE = "accumulate"  # gradient into the fp32 accumulator
    RESTORE = "restore"  # host slots from the masters, where they held a gradient
    NORM = "norm"  # the one host wait of a step
    UPDATE = "update"  # Adam on a bundle, or on one segment of it whose state is on the disk
    UPDATE_AHEAD = "update-ahead"  # the same before the norm is known, out of a bundle's one version into its other
    CLEAR = "clear"  # an accumulator, where the step is skipped or its bundle was updated ahead
    READ_STATE, WRITE_STATE = "read-state", "write-state"  # a segment's master and moments between the disk and its buffer
    OFFLOAD_INPUT = "offload-input"  # a recomputed unit's input to the host, behind what made it
    FETCH_INPUT = "fetch-input"  # its own, and the one needed next, when a unit's backward begins

    # of steps that leave their plan, and of what lies between steps: in no schedule
    REFILL = "refill"  # parameters over which gradients were written, from the host
    REOPEN = "reopen"  # a gradient that was sent off too early, back to the device
    OFFLOAD_ADOPTED = "offload-adopted"  # gradients in autograd's buffers, to the slots
    BRING_HOME = "bring-home"  # a bundle's second version into its first
    STATE_TO_DEVICE, STATE_TO_HOST = "state-to-device", "state-to-host"  # a segment's master and moments, for good

    HOLD = "hold"
    RELEASE = "release"
    DROP = "drop"
    ALLOCATE = "allocate"  # a gradient range
    FREE = "free"
    BARRIER = "barrier"  # the device's lanes wait for each other


class LaneOperation(NamedTuple):
    """A piece of work of a lane. name: of the units concerned, as the model calls them; "" where none is. Of compute what it
    does: `forward of model.layers.5`.

    bundle, segment: -1 where it is not one's; an operation of a whole bundle names no segment.
    """

    kind: Work
    lane: LaneKind
    name: str = ""
    bundle: int = -1
    segment: int = -1

    @property
    def label(self) -> str:
        """What a reader is shown, everywhere: `update bundle 3, segment 7 (model.layers.5)`."""
        return label_of(self.kind, self.name, self.bundle, self.segment)


def label_of(kind: Work, name: str, bundle: int, segment: int) -> str:
    if kind is Work.COMPUTE:
        return name
    words = [kind.value]
    if bundle >= 0:
        words.append(f"bundle {bundle}" + (f", segment {segment}" if segment >= 0 else ""))
    if name:
        words.append(f"({name})")
    return " ".join(words)


def of_bundle(layout: Layout, kind: Work, lane: LaneKind, bundle: int, segment: int = -1) -> LaneOperation:
    return LaneOperation(kind, lane, layout.bundle_names[bundle], bundle, segment)


def before_updates(layout: Layout, bundle: int = -1) -> int:
    """Priority on the host's lane of what is done before any update there, as others wait for it: the host for the norm, the
    next micro-batch for parameters. Updates have 0 and more, in the order of the next step's uses.
    """
    return bundle - len(layout.bundles)


class ScheduledOperation(NamedTuple):
    """ticket: place in issue order. lane None: bookkeeping. bundle: -1 where none; segment: -1 for all of the bundle's.

    bytes: payload moved by this rank; of compute Trace.exchange_bytes. device_delta: bytes the device pool grows by. seconds:
    known compute time.
    reads, writes: resources; of bookkeeping that frees memory, reads says which, if it is not the bundle's copy or range.
    waits, room_waits: tickets of this step, for data and for memory; previous_waits: the same of the step before.
    planned: False for what the plan should have asked for and did not (an on-demand fetch).
    """

    ticket: int
    moment: int
    kind: Work
    lane: LaneKind | None
    bundle: int = -1
    segment: int = -1
    bytes: int = 0
    device_delta: int = 0
    seconds: float = 0.0
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    waits: tuple[int, ...] = ()
    room_waits: tuple[int, ...] = ()
    previous_waits: tuple[int, ...] = ()
    planned: bool = True
    name: str = ""

    @property
    def label(self) -> str:
        return label_of(self.kind, self.name, self.bundle, self.segment)


@dataclass(frozen=True)
class IssuedOperation:
    """One piece of work in issue order. reads and writes name resources; waits are tickets issued earlier."""

    ticket: int
    lane: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    waits: tuple[int, ...] = ()


def param(bundle: int) -> str:
    return f"device:param:{bundle}"


def grad(bundle: int) -> str:
    return f"device:grad:{bundle}"


def shard(bundle: int) -> str:
    """This rank's part of the parameters, beside a copy of the whole bundle or without one."""
    return f"device:shard:{bundle}"


def pages(first: int) -> str:
    """Neighbouring segments in memory of their own, of which this is the first."""
    return f"device:pages:{first}"


def grad_shard(bundle: int) -> str:
    """This rank's part of a gradient that was summed over ranks."""
    return f"device:grad-shard:{bundle}"


def slot(segment: int) -> str:
    return f"host:slot:{segment}"


def state(segment: int) -> str:
    return f"state:{segment}"
