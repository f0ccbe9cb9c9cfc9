"""Room for the pieces of an ordered sum, made once, so that a reduction allocates nothing.

One piece of what comes from all ranks; one of what goes out to them, where a library takes it row behind row alone; and where
there are more than two, one for the sum in fp32, which is no larger.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

ALIGN = 256


class Staged(NamedTuple):
    """part: [ranks, elements], what goes to each, a row of its own each. coming: [ranks, elements], from each. into: where the
    own sum belongs. outgoing: as part; None without room for it. total: [elements], fp32; None for two ranks.
    """

    part: torch.Tensor
    coming: torch.Tensor
    into: torch.Tensor
    outgoing: torch.Tensor | None
    total: torch.Tensor | None

    def together(self) -> torch.Tensor:
        """What goes out, row behind row."""
        assert self.outgoing is not None, "this staging has no room to bring it together"
        return self.outgoing.copy_(self.part)

    def add_up(self) -> None:
        """What came: see Note [The ordered sum] in link.py."""
        ordered_sum(self.coming, self.into, self.total)


class Staging:
    """nbytes: of all of it, the same on all ranks; from each piece a rank has at least 256 bytes. size: of the ranks. together:
    with room for what goes out.
    """

    def __init__(self, nbytes: int, device: torch.device, size: int, *, together: bool = True) -> None:
        count = 1 + together + (size > 2)
        self._size, self._together, self._each = size, together, max(nbytes // count // size // ALIGN, 1) * ALIGN
        self._rooms = [torch.empty(size * self._each, dtype=torch.uint8, device=device) for _ in range(count)]
        self.device = self._rooms[0].device

    def pieces(self, whole: torch.Tensor, rank: int) -> Iterator[Staged]:
        """Of a flat tensor that all ranks share evenly, of at least 16 bits an element."""
        shards = whole.view(self._size, -1)
        rows = [room.view(whole.dtype) for room in self._rooms[: 1 + self._together]]
        sums = [room.view(torch.float32) for room in self._rooms[len(rows) :]]
        for part in shards.split(self._each // whole.element_size(), dim=1):
            coming, *outgoing = (room[: part.numel()].view(part.shape) for room in rows)
            total = [room[: part.shape[1]] for room in sums]
            yield Staged(part, coming, part[rank], next(iter(outgoing), None), next(iter(total), None))


def ordered_sum(parts: Sequence[torch.Tensor] | torch.Tensor, into: torch.Tensor, total: torch.Tensor | None) -> None:
    """Of the ranks' values of one shard, by rank, in fp32, rounded once. total: room for that, fp32; None for two ranks."""
    if total is None:  # torch adds two values of 16 bits in fp32 and rounds once
        torch.add(parts[0], parts[1], out=into)
        return
    total.copy_(parts[0])
    for part in parts[1:]:
        total += part
    into.copy_(total)
