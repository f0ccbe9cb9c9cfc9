"""The plan: a strategy's decisions for one traced step, as data.

Operations are tied to trigger moments and issued there in order of priority (low first). What follows from the
mechanism is not listed: a complete gradient is reduced over its group and leaves for its optimizer's tier (at the step's
end, if it stays until then), the update of a segment follows its gradient, and the device copy of a bundle is dropped
when its gradient has left and its update runs elsewhere. `schedule.expand` spells those out for the validator, the
timeline and the simulator.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from systems.planning.layout import Layout
from systems.planning.trace import Moment


class Tier(Enum):
    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class LaneKind(Enum):
    """An ordered queue of work: a CUDA stream, a thread, or a virtual clock in the simulator."""

    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    GATHER = "gather"
    REDUCE = "reduce"
    CPU = "cpu"
    DISK_READ = "disk-read"
    DISK_WRITE = "disk-write"


LINK = "link"  # the one queue of the lanes of collectives, on paper as in a run
COPIES = "copies"  # the one queue of the lanes of copies, under plans that have one
COLLECTIVE = (LaneKind.GATHER, LaneKind.REDUCE)
COPY_LANES = (LaneKind.H2D, LaneKind.D2H)
DEVICE_LANES = (LaneKind.COMPUTE, LaneKind.H2D, LaneKind.D2H, LaneKind.GATHER, LaneKind.REDUCE)  # what a barrier joins


def queue_of(lane: LaneKind, *, one_copy_queue: bool = False) -> str:
    """Operations of one queue are carried out in the order of their issue. one_copy_queue: see Plan."""
    if one_copy_queue and lane in COPY_LANES:
        return COPIES
    return LINK if lane in COLLECTIVE else lane.value


class OpKind(Enum):
    FETCH = "fetch"  # host shard to device, gathered over the group: H2D, then GATHER if the group has several ranks
    DROP = "drop"  # free the device copy; the host's is authoritative, nothing is written
    WRITE_BACK = "write-back"  # write the device copy to the host, then free it (systems without a master shard)
    MOVE = "move"  # this rank's shard to the device, nothing of the others': a later FETCH is GATHER alone. One rank: FETCH
    SHRINK = "shrink"  # free the device copy, but for this rank's shard, which stays there. One rank: nothing


class UpdateRule(Enum):
    AFTER_NORM = "after-norm"  # updates wait for the step's one norm: exact clipping, exact skip of non-finite steps
    WHEN_REDUCED = "when-reduced"  # a segment is updated as soon as its own gradient is complete


class Pages(NamedTuple):
    """Some neighbours among a bundle's segments: numbers of the first, and of the one behind the last.

    Note [Pages]
        On one rank a part of a bundle may be on the device without the rest. A MOVE brings pages, to memory of their own. A
        SHRINK leaves pages where they lie, and frees what lies between and around. Each run of pages is one piece of memory,
        so that what there is of the bundle is not contiguous, and nothing can be computed with it. A FETCH makes it so: it
        takes memory for all of the bundle, brings what is missing, and copies the pages that are there (MERGE), which go then.
    """

    first: int
    stop: int


def pages_bytes(layout: Layout, run: Pages) -> int:
    return sum(segment.numel for segment in layout.segments[run.first : run.stop]) * layout.itemsize


@dataclass(frozen=True)
class Operation:
    """pages: of a MOVE or SHRINK on one rank, what of the bundle it is about: see Note [Pages]."""

    kind: OpKind
    bundle: int
    pages: tuple[Pages, ...] = ()


@dataclass(frozen=True)
class PlannedOperation:
    """first: before gradients leave or inputs come at its moment; behind a barrier there, and behind the ends of holds."""

    trigger: int
    priority: int
    operation: Operation
    first: bool = False


@dataclass(frozen=True)
class Plan:
    """optimizer_tier: per segment, where it is updated: on the device, where its master and moments are then too and it stays
    resident, or on the host, where they are unless they are on the disk (Layout.on_disk).

    resident_at_start: bundles on the device at moment 0 of a steady step (and again at its end).
    sharded: of several ranks, bundles that rest on the device as this rank's shard, which is updated there: FETCH gathers a
    copy of the whole bundle, SHRINK frees it. Those updated on the device that are not among them are there whole for good.
    shards_at_start: of several ranks, other bundles whose shard is on the device at moment 0, be the rest there or not.
    pages_at_start: of one rank, pages of bundles that are on the device at moment 0 without the rest (Note [Pages]).
    rematerialise, offload_inputs: units that are recomputed, and units whose inputs wait on the host for their backward, in
    steps under this plan; None leaves it to the settings and to the strategy.
    provisional: the strategy wants to see a step under this plan, and plans again then. provisional_peak_bytes: in a forecast,
    which sees fewer of such steps than a run has, their highest device peak.
    in_place: bundles updated on the host, or at rest as a shard, whose gradients take their parameters' place on the device (of
    Layout.in_place).
    staying: of one rank, those of them that are updated on the host after the norm and whose gradient stays in its place when
    it is complete. A WRITE_BACK of such a bundle behind its flush sends the gradient to the host; what is there at STEP_END
    leaves then, before the norm.
    barriers: moments at which the device's lanes wait for each other: what any of them is given later comes after all that the
    others were given before. At an enter that is before anything else there; at an exit the unit has let go of its bundles, and
    its gradients in place are written, before. The host's updates go on, and the host does not wait.
    ahead: bundles whose updates run ahead of the norm, into their second versions, where all others wait for it.
    times_lanes: steps under it tell what copies and updates took (Trace.lane_times).
    one_copy_queue: copies to the device and from it are one queue, in the order of their issue; else each way is its own.
    sources of predictions: timeline and simulator; None where nothing was predicted.
    """

    signature: tuple[Moment, ...]
    operations: tuple[PlannedOperation, ...]
    optimizer_tier: tuple[Tier, ...]
    resident_at_start: frozenset[int]
    update_rule: UpdateRule = UpdateRule.AFTER_NORM
    predicted_device_peak_bytes: int | None = None
    predicted_model_peak_bytes: int | None = None
    predicted_non_model_peak_bytes: int | None = None
    predicted_step_time_s: float | None = None
    in_place: frozenset[int] = frozenset()
    rematerialise: frozenset[int] | None = None
    offload_inputs: frozenset[int] | None = None
    provisional: bool = False
    provisional_peak_bytes: int = 0
    barriers: frozenset[int] = frozenset()
    ahead: frozenset[int] = frozenset()
    sharded: frozenset[int] = frozenset()
    shards_at_start: frozenset[int] = frozenset()
    pages_at_start: frozenset[Pages] = frozenset()
    staying: frozenset[int] = frozenset()
    one_copy_queue: bool = False
    times_lanes: bool = False


def optimizer_tiers(layout: Layout, on_device: frozenset[int]) -> tuple[Tier, ...]:
    """Plan.optimizer_tier of a layout whose bundles in `on_device` are updated there and all others on the host."""
    return tuple(Tier.DEVICE if bundle in on_device else Tier.HOST for bundle in layout.bundle_of_segment)
