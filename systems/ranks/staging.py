"""Room for the pieces of an ordered sum, made once, so that a reduction allocates nothing.

One piece of what goes out to all ranks, brought together, one of what comes from them, and one for its sum in fp32, which with
values of 16 bits and two ranks is as large.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from systems.ranks.staging_size import PIECES

ALIGN = 256


class Staged(NamedTuple):
    """part: [ranks, elements], what goes to each, a row of its own each. outgoing: room for it. coming: [ranks, elements], from
    each. total: [elements], fp32. into: where the own sum belongs.
    """

    part: torch.Tensor
    outgoing: torch.Tensor
    coming: torch.Tensor
    total: torch.Tensor
    into: torch.Tensor

    def together(self) -> torch.Tensor:
        """What goes out, row behind row."""
        return self.outgoing.copy_(self.part)

    def add_up(self) -> None:
        """What came: see Note [The ordered sum] in link.py."""
        ordered_sum(self.coming, self.into, self.total)


class Staging:
    """nbytes: of all of it, the same on all ranks; from each piece a rank has at least 256 bytes. size: of the ranks."""

    def __init__(self, nbytes: int, device: torch.device, size: int) -> None:
        self._size, self._each = size, max(nbytes // PIECES // size // ALIGN, 1) * ALIGN
        self._rooms = [torch.empty(size * self._each, dtype=torch.uint8, device=device) for _ in range(PIECES)]
        self.device = self._rooms[0].device

    def pieces(self, whole: torch.Tensor, rank: int) -> Iterator[Staged]:
        """Of a flat tensor that all ranks share evenly, of at least 16 bits an element."""
        shards = whole.view(self._size, -1)
        types = (whole.dtype, whole.dtype, torch.float32)
        outgoing, coming, total = (room.view(dtype) for room, dtype in zip(self._rooms, types, strict=True))
        for part in shards.split(self._each // whole.element_size(), dim=1):
            out, come = (room[: part.numel()].view(part.shape) for room in (outgoing, coming))
            yield Staged(part, out, come, total[: part.shape[1]], part[rank])


def ordered_sum(parts: Sequence[torch.Tensor] | torch.Tensor, into: torch.Tensor, total: torch.Tensor) -> None:
    """Of the ranks' values of one shard, by rank, in fp32, rounded once. total: room for that, fp32."""
    if len(parts) == 2:  # torch adds values of 16 bits in fp32 and rounds once, without the room
        torch.add(parts[0], parts[1], out=into)
        return
    total.copy_(parts[0])
    for part in parts[1:]:
        total += part
    into.copy_(total)
