"""Pages of a bundle on the device, without the rest of it: see Note [Pages] in systems/planning/plan.py. Of one rank."""

from __future__ import annotations

from collections.abc import Iterable
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


def in_pages(pages: Iterable[DevicePages], stored: StoredSegment, start: int) -> list[torch.Tensor]:
    """A segment in the run that has it, if one does. start: its first element in the bundle."""
    segment, dtype = stored.segment, stored.slot.dtype
    there = (each for each in pages if each.run.first <= segment.index < each.run.stop)
    return [each.block.view(dtype, start - each.start, segment.numel) for each in there]
