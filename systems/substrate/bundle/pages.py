"""Pages of a bundle on the device, without the rest of it: see Note [Pages] in systems/planning/plan.py. Of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from systems.device.memory.pool import Allocation
from systems.planning.plan import Pages
from systems.substrate.bundle.segments import StoredSegment, Stretch


@dataclass(frozen=True)
class DevicePages:
    """A run of them in one piece of memory. start: its first element in the bundle."""

    run: Pages
    start: int
    block: Allocation

    def on(self, stretch: Stretch) -> torch.Tensor:
        """Elements of a stretch that lies within."""
        return self.block.view(stretch.slot.dtype, stretch.start - self.start, stretch.slot.numel())

    def pieces(self, segments: Sequence[StoredSegment]) -> Iterator[tuple[StoredSegment, torch.Tensor]]:
        """Of a bundle's segments those that are in it, each with its elements there."""
        at = 0
        for each in segments:
            if self.run.first <= each.segment.index < self.run.stop:
                yield each, self.block.view(each.slot.dtype, at, each.segment.numel)
                at += each.segment.numel
