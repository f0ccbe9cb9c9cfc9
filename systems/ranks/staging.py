"""Room for the pieces of an ordered sum, made once, so that a reduction allocates nothing.

One piece of what comes from the other ranks; where a library takes rows behind each other alone, of what goes out too, with the
own row among both; and where there are more than two ranks, of the sum in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

ALIGN = 256


class Staged(NamedTuple):
    """part: [ranks, elements], what goes to each, a row of its own each. coming: by rank, where its row belongs; the own one is
    there. into: where the own sum belongs, which is the own row. came, outgoing: [ranks, elements], where a library puts all
    rows, and takes them from; without that way there is nothing in them. total: [elements], fp32; None for two ranks.
    """

    part: torch.Tensor
    coming: Sequence[torch.Tensor]
    into: torch.Tensor
    came: torch.Tensor
    outgoing: torch.Tensor
    total: torch.Tensor | None

    def together(self) -> torch.Tensor:
        """What goes out, row behind row."""
        return self.outgoing.copy_(self.part)

    def add_up(self) -> None:
        """What came: see Note [The ordered sum] in link.py."""
        ordered_sum(self.coming, self.into, self.total)


class Staging:
    """nbytes: of all of it, the same on all ranks; a row of a piece has at least 256 bytes. size: of the ranks. together: for a
    library that takes rows behind each other.
    """

    def __init__(self, nbytes: int, device: torch.device, size: int, *, together: bool = True) -> None:
        self._size, self._together, self._rows = size, together, _rows(size, together=together)
        self._each = max(nbytes // sum(self._rows) // ALIGN, 1) * ALIGN
        self._rooms = [torch.empty(count * self._each, dtype=torch.uint8, device=device) for count in self._rows]
        self.device = self._rooms[0].device

    def shared_by(self, size: int) -> Staging:
        """For fewer ranks, in the same memory, unless that is too small to be cut for them."""
        mine, room = Staging(0, self.device, size, together=self._together), self._rooms[0]
        each = room.numel() // sum(mine._rows) // ALIGN * ALIGN
        if each:
            mine._each, mine._rooms = each, list(room[: sum(mine._rows) * each].split([count * each for count in mine._rows]))
        return mine

    def pieces(self, whole: torch.Tensor, rank: int) -> Iterator[Staged]:
        """Of a flat tensor that all ranks share evenly, of at least 16 bits an element."""
        shards, total = whole.view(self._size, -1), self._rooms[2].view(torch.float32)
        rooms = [(room.view(whole.dtype), count) for room, count in zip(self._rooms[:2], self._rows, strict=False)]
        for part in shards.split(self._each // whole.element_size(), dim=1):
            numel, into = part.shape[1], part[rank]
            came, goes = (room[: count * numel].view(count, numel) for room, count in rooms)
            rows = list(came)
            if not self._together:
                rows.insert(rank, into)
            yield Staged(part, rows, into, came, goes, total[:numel] if len(total) else None)


def _rows(size: int, *, together: bool) -> tuple[int, int, int]:
    """Of a piece: what comes, what goes out behind each other, and the sum in fp32, which has two of 16 bits."""
    return size if together else size - 1, size if together else 0, 2 if size > 2 else 0


def ordered_sum(parts: Sequence[torch.Tensor] | torch.Tensor, into: torch.Tensor, total: torch.Tensor | None) -> None:
    """Of the ranks' values of one shard, by rank, in fp32, rounded once. total: room for that, fp32; None for two ranks."""
    if total is None:  # torch adds two values of 16 bits in fp32 and rounds once
        torch.add(parts[0], parts[1], out=into)
        return
    total.copy_(parts[0])
    for part in parts[1:]:
        total += part
    into.copy_(total)
