"""A bundle with all that is true of it: its place on every tier, its parameters, its optimizer states, its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate as running_sums
from typing import cast

import torch

from systems.device.memory.pool import Allocation
from systems.planning.layout import Bundle, Layout
from systems.planning.plan import Tier
from systems.substrate.bundle import states
from systems.substrate.bundle.buffered import Buffering
from systems.substrate.bundle.gradient import BundleGradient
from systems.substrate.bundle.pages import DevicePages
from systems.substrate.bundle.segments import SegmentPlace, StoredSegment, Stretch, lie_in, stretches_of
from systems.substrate.bundle.shard import DeviceShard
from systems.substrate.bundle.states import PARAMETER_MOVES, ParameterState
from systems.substrate.bundle.storage import RebindableStorage


class ManagedBundle:
    """ManagedBundle is a bundle of the layout with what is true of it now.

    What it is      index: its number in the layout, which alone knows its units: it learns new ones. movable: by layout.
                    scattered: see FlatSpace.
                    nbytes: of its parameters; shard_nbytes: of this rank's. segments: on every tier. stretches: those with
                    slots, as few as can be.
    Parameters      storage: the permanent one. block: the device memory behind it, while there is any. shard: of several
                    ranks, this one's part on the device. pages: of one rank, what is there without the rest. holds: who needs
                    it there, and how often. updated: on the host, since it was last on the device.
    States          states_on_device: how many of its segments have their optimizer state there. updated_on_host: all segments
                    are updated on the host. pinned: its block stays on the device: it never moves by layout, or is updated
                    there.
                    buffering: its versions, while its updates run behind the steps: see Note [Lock-free] in buffered.py.
    Gradient        gradient: None where no parameter is trained. gradients: the same, for who knows that one is.
                    stays_in_autograd: until the device updates it.
    """

    def __init__(
        self, bundle: Bundle, layout: Layout, segments: Sequence[StoredSegment], storage: RebindableStorage, *, accumulate: int
    ) -> None:
        self.index, self.movable, self.nbytes = bundle.index, bundle.movable, layout.bundle_bytes(bundle.index)
        self.segments, self.scattered = tuple(segments), bundle.scattered
        self.shard_nbytes = sum(each.segment.shard_numel for each in segments) * layout.itemsize
        self.stretches = stretches_of(zip(self.starts(), segments, strict=True)) if self.movable else []

        self.storage = storage
        self.block: Allocation | None = None
        self.shard = DeviceShard(segments)
        self.pages: list[DevicePages] = []
        self.holds: dict[object, int] = {}
        self.updated = False

        self.states_on_device = 0
        self.pinned = self.updated_on_host = self.stays_in_autograd = False
        self.buffering = Buffering()

        self.gradient: BundleGradient | None = None
        if bundle.trainable:
            mine = (number for number, place in layout.places.items() if place.bundle == bundle.index)
            self.gradient = BundleGradient(tuple(mine))
        self.gradients = cast(BundleGradient, self.gradient)
        space = segments[0].segment.space
        self._whole = space.ranks == 1  # a shard is
        self._alone = accumulate == 1 and space.alone
        self.count_states()

    @property
    def state(self) -> ParameterState:
        if self.block is None:
            return ParameterState.ABSENT if self.shard.block is None else ParameterState.SHARDED
        return ParameterState.RESIDENT if self.storage.resident else ParameterState.FETCHING

    def count_states(self) -> int:
        """Of its segments, those whose optimizer state is on the device. To be called whenever one has moved."""
        there = sum(each.tier is Tier.DEVICE for each in self.segments)
        self.states_on_device = there
        self.updated_on_host = all(each.tier is Tier.HOST for each in self.segments)
        self.pinned = not self.movable or (there > 0 and not self.shard.at_home)
        self.stays_in_autograd = self._alone and there == len(self.segments)
        return there

    def starts(self) -> list[int]:
        """The first element of each segment's shard in the bundle."""
        begins = running_sums((each.segment.numel for each in self.segments), initial=0)
        return [begin + each.own.start for begin, each in zip(begins, self.segments, strict=False)]

    def own_pieces(self, block: Allocation) -> list[torch.Tensor]:
        """Of its segments, this rank's shards in a block of the bundle."""
        sizes = [each.segment.numel for each in self.segments]
        pieces = block.view(self.segments[0].slot.dtype, 0, sum(sizes)).split(sizes)
        return list(pieces) if self._whole else [piece[each.own] for each, piece in zip(self.segments, pieces, strict=True)]

    def pieces(self, block: Allocation) -> list[torch.Tensor]:
        """A block of the bundle cut into its segments, as flat tensors of the compute dtype."""
        sizes = [each.segment.numel for each in self.segments]
        return list(block.view(self.segments[0].slot.dtype, 0, sum(sizes)).split(sizes))  # one operation for any number

    def at_rest(self) -> list[torch.Tensor]:
        """Its segments in the compute dtype where they are as long as nothing moves them: in their slots, or in the block of
        a bundle that never does.
        """
        if self.movable:
            return [each.slot for each in self.segments]
        assert self.block is not None, "a bundle that never moves is always resident"
        return self.own_pieces(self.block)

    def stretches_of(self, which: Callable[[StoredSegment], bool]) -> list[Stretch]:
        """Some of its segments, as few stretches as can be: see Note [Stretches] in segments.py."""
        return [part for stretch in self.stretches for part in stretch.those(which)]

    def lie_in(self, places: Sequence[SegmentPlace], stretches: list[Stretch]) -> None:
        """What its segments have on the host is there, in these stretches."""
        lie_in(self.segments, places)
        self.stretches = stretches

    def close(self) -> None:
        """Lets go of the host's memory."""
        self.stretches = []

    # ---- its parameters on the device

    def own(self, block: Allocation) -> None:
        """A copy into the block is on its way, from the host or from the shard."""
        if states.CHECKED:
            states.check(PARAMETER_MOVES, self.state, ParameterState.FETCHING)
        self.block, self.updated = block, False

    def leave(self) -> Allocation | None:
        """The device. The block is the caller's to free."""
        assert not self.holds, f"bundle {self.index} dropped while held"
        self.storage.release()
        block, self.block = self.block, None
        return block

    def update_on_host(self) -> None:
        """An update there was issued: what the device has of it, if anything, is old."""
        self.updated = True

    # ---- who needs it there

    def hold_once(self, key: object) -> None:
        """However often it is said."""
        self.holds[key] = 1

    def release_all(self, key: object) -> None:
        """Of that key, if there is one."""
        self.holds.pop(key, None)


def shows(bundle: ManagedBundle, parameter: int) -> bool:
    """Its values are on the device, and no gradient is written over them."""
    return bundle.storage.resident and (bundle.gradient is None or parameter not in bundle.gradient.written)


def hold(bundles: Iterable[ManagedBundle], key: object) -> None:
    """Once more."""
    for bundle in bundles:
        bundle.holds[key] = bundle.holds.get(key, 0) + 1


def release(bundles: Iterable[ManagedBundle], key: object) -> None:
    """One of the holds of that key."""
    for bundle in bundles:
        bundle.holds[key] -= 1
        if not bundle.holds[key]:
            del bundle.holds[key]
