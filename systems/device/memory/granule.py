"""A piece of device memory that the pool cuts up.

Note [Which free bytes]
    Every freed block stays a piece of its own, with the tickets of its last users, so that a new owner waits for those whose
    bytes it gets and for nobody else. Among pieces of just the right size a copy gets the one freed longest ago. Compute gets
    the one whose last copy is longest ago, however lately it was freed: it need not wait for what compute itself did there,
    but would stand still until a gradient has left that is still being copied out.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from systems.device.lanes.ticket import Ticket

MANY = 256  # pieces, beyond which neighbours that nobody uses any more are joined, or that have been free for long


@dataclass
class _Piece:
    """Free bytes [start, stop). freed: a count that grows with every free; 0 where nothing was ever placed.

    copied: ticket of the last copy from or to these bytes; 0 if there was none.
    """

    start: int
    stop: int
    tickets: list[Ticket]
    freed: int = 0
    copied: int = 0

    @property
    def idle(self) -> bool:
        return all(ticket.done() for ticket in self.tickets)

    def rank(self, *, compute: bool) -> tuple[int, int]:
        """Lower is better, for compute or for a copy."""
        return (self.copied, self.freed) if compute else (self.freed, 0)


@dataclass(frozen=True)
class Fit:
    """Neighbouring pieces [first, last] that hold what was asked for, and how well: the lowest rank is best."""

    first: int
    last: int
    rank: tuple[bool, int, tuple[int, int], int]


class Granule:
    """memory: uint8 tensor, 256-byte aligned.

    last: ticket of whoever may still be using that memory. A caching allocator hands out what was freed on the host while
    kernels that read it are still queued; that is safe on its own stream only, and copies run on others.

    keeps: tickets of finished work too, of which a log is kept. by_clock: which pieces are joined may depend on what is
    finished by now; else on the order of frees alone.
    """

    def __init__(self, space: str, memory: torch.Tensor, last: Ticket, *, keeps: bool = False, by_clock: bool = True) -> None:
        self.space, self.memory, self._keeps, self._by_clock = space, memory, keeps, by_clock
        self._pieces = [_Piece(0, memory.numel(), [last])]
        self._frees = 0

    def find(self, nbytes: int, *, compute: bool) -> Fit | None:
        """Where nbytes would go that compute, or else a copy, uses first; see Note [Which free bytes]. Nothing is taken yet."""
        best, where = (0, 0), -1
        for number, piece in enumerate(self._pieces):
            if piece.stop - piece.start == nbytes:
                rank = piece.rank(compute=compute)
                if where < 0 or rank < best:
                    best, where = rank, number
        if where >= 0:
            return Fit(where, where, (False, 0, best, self._pieces[where].start))
        return min(self._fits(nbytes, compute=compute), key=lambda fit: fit.rank, default=None)

    def take(self, fit: Fit, nbytes: int) -> tuple[int, list[Ticket]]:
        """(start, tickets of the last users) of nbytes at the front of a fit that was just found."""
        taken = self._pieces[fit.first : fit.last + 1]
        start, end = taken[0].start, taken[-1]
        rest = [replace(end, start=start + nbytes, tickets=list(end.tickets))] if end.stop > start + nbytes else []
        self._pieces[fit.first : fit.last + 1] = rest
        return start, list({id(t): t for piece in taken for t in piece.tickets}.values())

    def give(self, start: int, stop: int, tickets: Sequence[Ticket]) -> None:
        """Free bytes. tickets: of their last users."""
        self._frees += 1
        waits = list({id(t): t for t in tickets if self._keeps or not t.done()}.values())
        copied = max((t.id for t in tickets if not t.compute), default=0)  # of all: which bytes are free is no matter of time
        insort(self._pieces, _Piece(start, stop, waits, self._frees, copied), key=lambda piece: piece.start)
        if len(self._pieces) > MANY:
            self._join()

    def keep(self, taken: Sequence[tuple[int, int]], last: Ticket) -> None:
        """Only these ranges are taken: what else is not free was lost, and has had its last use with this ticket."""
        free: list[tuple[int, int]] = []
        start = 0
        for begin, end in [*sorted(taken), (self.memory.numel(),) * 2]:
            if start < begin:
                free.append((start, begin))
            start = end
        if free != [(self._pieces[first].start, self._pieces[stop].stop) for first, stop, _ in self._runs()]:
            self._pieces = [_Piece(begin, end, [last], self._frees) for begin, end in free]

    @property
    def empty(self) -> bool:
        return sum(piece.stop - piece.start for piece in self._pieces) == self.memory.numel()

    @property
    def idle(self) -> bool:
        """Empty, and nobody has work in flight on it."""
        return self.empty and all(piece.idle for piece in self._pieces)

    def _fits(self, nbytes: int, *, compute: bool) -> Iterator[Fit]:
        for first, last, run in self._runs():
            stop = first
            for begin in range(first, last + 1):
                start = self._pieces[begin].start
                while stop <= last and self._pieces[stop].stop - start < nbytes:
                    stop += 1
                if stop > last:
                    break
                exact = self._pieces[stop].stop - start == nbytes
                worst = max(piece.rank(compute=compute) for piece in self._pieces[begin : stop + 1])
                yield Fit(begin, stop, (not exact, 0 if exact else run, worst, start))

    def _runs(self) -> Iterator[tuple[int, int, int]]:
        """Pieces [first, last] without a block between them, and their bytes."""
        first = 0
        for number, piece in enumerate(self._pieces):
            if number + 1 == len(self._pieces) or self._pieces[number + 1].start != piece.stop:
                yield first, number, piece.stop - self._pieces[first].start
                first = number + 1

    def _is_old(self, piece: _Piece) -> bool:
        return piece.idle if self._by_clock else piece.freed <= self._frees - MANY // 2

    def _join(self) -> None:
        joined: list[_Piece] = []
        for piece in self._pieces:
            if joined and joined[-1].stop == piece.start and self._is_old(joined[-1]) and self._is_old(piece):
                before = joined.pop()
                both = before.tickets + piece.tickets
                tickets = both if self._keeps else [ticket for ticket in both if not ticket.done()]  # else they pile up
                freed, copied = max(before.freed, piece.freed), max(before.copied, piece.copied)
                piece = _Piece(before.start, piece.stop, tickets, freed, copied)
            joined.append(piece)
        self._pieces = joined
