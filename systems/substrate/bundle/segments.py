"""A segment with its memory on every tier, and neighbours taken together: many small ones cost no more than a large one.

Note [Stretches]
    A bundle may be cut into many segments, each with a state and tickets of its own. The host hands their places out front
    to back, and in the bundle's block on the device they follow each other too: so neighbours are copied, updated and
    restored as one tensor, by one operation that leaves its ticket on each. Neighbours that do not touch on the host, or
    that differ in what is to be done (one's slot holds a gradient, the other's its parameters), are stretches of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch

from systems.device.lanes.transfers import TrackedMemory
from systems.device.memory.disk import DiskPlace
from systems.device.memory.pool import Allocation
from systems.planning.layout import Placement, Segment
from systems.planning.plan import Tier


@dataclass
class OptimizerState:
    """Flat fp32 tensors of the segment's shard on one tier. moments: see OptimizerRule.moments. accumulator: only with several
    micro-batches.
    """

    tier: Tier
    master: torch.Tensor
    moments: tuple[torch.Tensor, ...]
    accumulator: torch.Tensor | None
    memory: TrackedMemory
    allocation: Allocation | None = None

    def tensors(self) -> list[torch.Tensor]:
        parts = [self.master, *self.moments]
        return parts if self.accumulator is None else [*parts, self.accumulator]


@dataclass
class DiskState:
    """Of a segment whose master and moments are on the disk; its accumulator is on the host. memory: tickets of both."""

    place: DiskPlace
    accumulator: torch.Tensor | None
    tier: Tier = Tier.DISK

    @property
    def memory(self) -> TrackedMemory:
        return self.place.memory

    def tensors(self) -> list[torch.Tensor]:
        """On the host."""
        return [] if self.accumulator is None else [self.accumulator]


@dataclass(frozen=True)
class SegmentPlace:
    """Where a segment of one version of its bundle lies on the host: see Note [Two versions] in versions.py."""

    slot: torch.Tensor
    slot_memory: TrackedMemory
    state: OptimizerState


@dataclass
class StoredSegment:
    """slot: see Note [The slot] in store.py; of no elements where there is none. at_home: the state's place on host or disk,
    kept while it is on the device. rank: whose shard it is that lies there; own: the shard in the segment;
    placements: in the shard; counted: those of them that are no other rank's too.
    """

    segment: Segment
    slot: torch.Tensor
    slot_memory: TrackedMemory
    state: OptimizerState | DiskState | None
    at_home: OptimizerState | DiskState | None
    slot_holds_gradient: bool = False
    rank: int = 0

    def __post_init__(self) -> None:
        segment, rank = self.segment, self.rank
        self.placements, self.own, self.counted = segment.shard(rank), segment.own(rank), segment.counted(rank)

    @property
    def has_slot(self) -> bool:
        return self.slot.numel() > 0

    @property
    def tier(self) -> Tier:
        return Tier.HOST if self.state is None else self.state.tier

    def move_to(self, state: OptimizerState | DiskState) -> None:
        """Its master and moments are there from now on."""
        self.state = state

    def take_slot(self, slot: torch.Tensor, memory: TrackedMemory) -> None:
        """It had none."""
        self.slot, self.slot_memory = slot, memory

    def close(self) -> None:
        """Lets go of all memory."""
        self.state = self.at_home = None
        self.slot = torch.empty(0, dtype=self.slot.dtype)


def lie_in(segments: Sequence[StoredSegment], places: Sequence[SegmentPlace]) -> None:
    """What the segments have on the host is there from now on."""
    for each, place in zip(segments, places, strict=True):
        each.slot, each.slot_memory, each.state, each.at_home = place.slot, place.slot_memory, place.state, place.state


def slots_take_gradients(segments: Iterable[StoredSegment]) -> None:
    """Said before they are written, so that they are restored if Ctrl-C breaks off what follows."""
    for each in segments:
        each.slot_holds_gradient = True


def slots_take_parameters(segments: Iterable[StoredSegment]) -> None:
    """Said once what writes them was issued."""
    for each in segments:
        each.slot_holds_gradient = False


@dataclass(frozen=True)
class Stretch:
    """stored: its segments, or a rank's shard of one. start: its first element in the bundle. slot: theirs as one
    tensor; state: the same of master and moments at home, none if their home is the disk or they have none; accumulator
    likewise. placements: in these tensors, a parameter's pieces as one.
    """

    stored: tuple[StoredSegment, ...]
    start: int
    slot: torch.Tensor
    state: tuple[torch.Tensor, ...]
    accumulator: torch.Tensor | None
    placements: tuple[Placement, ...]

    @property
    def master(self) -> torch.Tensor:
        return self.state[0]

    def on(self, block: Allocation) -> torch.Tensor:
        """Its elements in the bundle's block, or in a gradient range, which lies alike."""
        return block.view(self.slot.dtype, self.start, self.slot.numel())

    def those(self, which: Callable[[StoredSegment], bool]) -> list[Stretch]:
        """The stretches of some of its segments."""
        chosen = [which(each) for each in self.stored]
        if all(chosen):
            return [self]
        starts = accumulate((each.segment.numel for each in self.stored), initial=self.start)
        return stretches_of(
            [placed for placed, wanted in zip(zip(starts, self.stored, strict=False), chosen, strict=True) if wanted]
        )


def stretches_of(placed: Iterable[tuple[int, StoredSegment]]) -> list[Stretch]:
    """Of some segments of a bundle, in order, each with its first element in the bundle."""
    groups: list[tuple[int, list[StoredSegment]]] = []
    for start, stored in placed:
        if groups and _touch(groups[-1][1][-1], stored):
            groups[-1][1].append(stored)
        else:
            groups.append((start, [stored]))
    return [_stretch(start, stored) for start, stored in groups]


def stretches_in(placed: Sequence[tuple[int, StoredSegment, SegmentPlace]]) -> list[Stretch]:
    """Of all segments of a bundle, each with its first element in the bundle, as they lie in these places."""
    owners = {each.segment.index: each for _, each, _ in placed}
    there = [
        (start, StoredSegment(each.segment, place.slot, place.slot_memory, place.state, place.state, rank=each.rank))
        for start, each, place in placed
    ]
    return [
        replace(stretch, stored=tuple(owners[each.segment.index] for each in stretch.stored)) for stretch in stretches_of(there)
    ]


def joined(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Flat pieces as one tensor: a view where each begins where the last one ends, else a copy."""
    if all(follows(one, other) for one, other in pairwise(pieces)):
        return pieces[0].as_strided((sum(piece.numel() for piece in pieces),), (1,))
    return torch.cat(list(pieces))


def _stretch(start: int, stored: Sequence[StoredSegment]) -> Stretch:
    slot, *others = (joined(pieces) for pieces in zip(*map(_places, stored), strict=True))
    home = stored[0].at_home
    accumulator = others.pop() if home is not None and home.accumulator is not None else None
    placements: list[Placement] = []
    offset = 0
    for each in stored:
        for piece in each.placements:
            here = offset + piece.offset
            last = placements[-1] if placements else None
            if last is not None and last.parameter == piece.parameter and last.here.stop == here:
                placements[-1] = replace(last, numel=last.numel + piece.numel)
            else:
                placements.append(replace(piece, offset=here))
        offset += each.slot.numel()
    return Stretch(tuple(stored), start, slot, tuple(others), accumulator, tuple(placements))


def _places(stored: StoredSegment) -> list[torch.Tensor]:
    """On the host."""
    return [stored.slot] if stored.at_home is None else [stored.slot, *stored.at_home.tensors()]


def _touch(one: StoredSegment, other: StoredSegment) -> bool:
    """Shards of neighbours lie apart on the device."""
    if not one.segment.space.alone:
        return False
    ours, theirs = _places(one), _places(other)
    return len(ours) == len(theirs) and all(map(follows, ours, theirs))


def follows(one: torch.Tensor, other: torch.Tensor) -> bool:
    """The other begins where the one ends."""
    here = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return here and other.data_ptr() == one.data_ptr() + one.nbytes
