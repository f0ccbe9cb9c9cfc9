"""This rank's part of a bundle's parameters on the device, apart from the bundle's block there. Of several ranks alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from systems.device.memory.pool import Allocation
from systems.substrate.bundle.segments import StoredSegment


class DeviceShard:
    """block: None while there is none. at_home: the bundle rests as it, and is updated on it, so that its own block is a mere
    copy that comes and goes; else it came from the host, and goes as the bundle is dropped.
    """

    def __init__(self, segments: Sequence[StoredSegment]) -> None:
        self._sizes = [each.segment.shard_numel for each in segments]
        self._dtype = segments[0].slot.dtype
        self.block: Allocation | None = None
        self.at_home = False

    def own(self, block: Allocation) -> None:
        """Values are on their way into it."""
        assert self.block is None, "a bundle has one shard on the device"
        self.block = block

    def leave(self) -> Allocation | None:
        """The device. The block is the caller's to free."""
        block, self.block = self.block, None
        return block

    def rest(self, *, at_home: bool) -> None:
        """Whether it is the bundle's home from now on."""
        self.at_home = at_home

    def pieces(self, block: Allocation) -> list[torch.Tensor]:
        """Of its segments, in a block of a shard's size: the parameters' or a gradient's."""
        return list(block.view(self._dtype, 0, sum(self._sizes)).split(self._sizes))
