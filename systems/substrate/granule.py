"""A piece of device memory that the pool cuts up.

Note [Which free bytes]
    Every freed block stays a piece of its own, with the tickets of its last users, so that a new owner waits for those whose
    bytes it gets and for nobody else. Among pieces of just the right size the one freed longest ago is taken: what was freed
    last is still being copied out, and compute that got it would stand still until that is over.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from systems.substrate.lanes import Ticket

MANY = 256  # pieces, beyond which neighbours that nobody uses any more are joined


@dataclass
class _Piece:
    """Free bytes [start, stop). freed: a count that grows with every free; 0 where nothing was ever placed."""

    start: int
    stop: int
    tickets: list[Ticket]
    freed: int = 0

    @property
    def idle(self) -> bool:
        return all(ticket.done() for ticket in self.tickets)


@dataclass(frozen=True)
class Fit:
    """Neighbouring pieces [first, last] that hold what was asked for, and how well: the lowest rank is best."""

    first: int
    last: int
    rank: tuple[bool, int, int, int]


class Granule:
    """memory: uint8 tensor, 256-byte aligned.

    last: ticket of whoever may still be using that memory. A caching allocator hands out what was freed on the host while
    kernels that read it are still queued; that is safe on its own stream only, and copies run on others.

    keeps: tickets of finished work too, of which a log is kept.
    """

    def __init__(self, space: str, memory: torch.Tensor, last: Ticket, *, keeps: bool = False) -> None:
        self.space, self.memory, self._keeps = space, memory, keeps
        self._pieces = [_Piece(0, memory.numel(), [last])]
        self._frees = 0

    def find(self, nbytes: int) -> Fit | None:
        """Where nbytes would go; see Note [Which free bytes]. Nothing is taken yet."""
        oldest, where = -1, -1
        for number, piece in enumerate(self._pieces):
            if piece.stop - piece.start == nbytes and (where < 0 or piece.freed < oldest):
                oldest, where = piece.freed, number
        if where >= 0:
            return Fit(where, where, (False, 0, oldest, self._pieces[where].start))
        return min(self._fits(nbytes), key=lambda fit: fit.rank, default=None)

    def take(self, fit: Fit, nbytes: int) -> tuple[int, list[Ticket]]:
        """(start, tickets of the last users) of nbytes at the front of a fit that was just found."""
        taken = self._pieces[fit.first : fit.last + 1]
        start, end = taken[0].start, taken[-1]
        rest = [replace(end, start=start + nbytes, tickets=list(end.tickets))] if end.stop > start + nbytes else []
        self._pieces[fit.first : fit.last + 1] = rest
        return start, list({id(t): t for piece in taken for t in piece.tickets}.values())

    def give(self, start: int, stop: int, tickets: list[Ticket]) -> None:
        self._frees += 1
        insort(self._pieces, _Piece(start, stop, tickets, self._frees), key=lambda piece: piece.start)
        if len(self._pieces) > MANY:
            self._join()

    @property
    def empty(self) -> bool:
        return sum(piece.stop - piece.start for piece in self._pieces) == self.memory.numel()

    @property
    def idle(self) -> bool:
        """Empty, and nobody has work in flight on it."""
        return self.empty and all(piece.idle for piece in self._pieces)

    def _fits(self, nbytes: int) -> Iterator[Fit]:
        for first, last, run in self._runs():
            stop = first
            for begin in range(first, last + 1):
                start = self._pieces[begin].start
                while stop <= last and self._pieces[stop].stop - start < nbytes:
                    stop += 1
                if stop > last:
                    break
                exact = self._pieces[stop].stop - start == nbytes
                freed = max(piece.freed for piece in self._pieces[begin : stop + 1])
                yield Fit(begin, stop, (not exact, 0 if exact else run, freed, start))

    def _runs(self) -> Iterator[tuple[int, int, int]]:
        """Pieces [first, last] without a block between them, and their bytes."""
        first = 0
        for number, piece in enumerate(self._pieces):
            if number + 1 == len(self._pieces) or self._pieces[number + 1].start != piece.stop:
                yield first, number, piece.stop - self._pieces[first].start
                first = number + 1

    def _join(self) -> None:
        joined: list[_Piece] = []
        for piece in self._pieces:
            if joined and joined[-1].stop == piece.start and joined[-1].idle and piece.idle:
                before = joined.pop()
                freed = max(before.freed, piece.freed)
                tickets = before.tickets + piece.tickets if self._keeps else []  # all finished: else they pile up
                piece = _Piece(before.start, piece.stop, tickets, freed)
            joined.append(piece)
        self._pieces = joined
