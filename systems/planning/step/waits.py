"""Who waits for whom: waits are derived from what each operation reads, writes and allocates, never written by hand.

A reader waits for the last writer; a writer for the last writer and every reader since; the first writer of a new range
for the last accesses of the freed range it takes over. Lanes are queues, so a wait within a lane is no wait, and of
several waits on one lane the latest is enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Waits = dict[str, int]  # lane to the latest ticket waited for on it


def merge(waits: Waits, more: Mapping[str, int]) -> None:
    for lane, ticket in more.items():
        if lane not in waits or waits[lane] < ticket:
            waits[lane] = ticket


class Accesses:
    """The latest accesses of every resource."""

    def __init__(self) -> None:
        self._writer: dict[str, tuple[str, int]] = {}
        self._readers: dict[str, Waits] = {}

    def record(self, ticket: int, lane: str, reads: Iterable[str], writes: Iterable[str]) -> Waits:
        """Register an operation; what it must wait for on other lanes."""
        waits: Waits = {}
        written = tuple(writes)
        for name in reads:
            self._wait_for_writer(name, waits)
            self._readers.setdefault(name, {})[lane] = ticket
        for name in written:
            self._wait_for_writer(name, waits)
            if name in self._readers:
                merge(waits, {key: value for key, value in self._readers.pop(name).items() if value != ticket})
        for name in written:
            self._writer[name] = (lane, ticket)
        waits.pop(lane, None)
        return waits

    def latest(self, name: str) -> Waits:
        """Tickets that the next writer of this resource, or of its memory, must wait for."""
        waits = dict(self._readers.get(name, {}))
        self._wait_for_writer(name, waits)
        return waits

    def _wait_for_writer(self, name: str, waits: Waits) -> None:
        if name in self._writer:
            lane, ticket = self._writer[name]
            waits[lane] = max(ticket, waits.get(lane, ticket))


class Barriers:
    """Lanes that now and then wait for each other."""

    def __init__(self, lanes: Iterable[str]) -> None:
        self._last: Waits = {}
        self._owed: dict[str, Waits] = {lane: {} for lane in lanes}

    def join(self) -> None:
        """What each lane is given from now on waits for the last that the others were given."""
        for lane, owed in self._owed.items():
            merge(owed, {other: ticket for other, ticket in self._last.items() if other != lane})

    def record(self, ticket: int, lane: str) -> Waits:
        """Register an operation; what it must wait for because of barriers."""
        if lane not in self._owed:
            return {}
        owed, self._owed[lane], self._last[lane] = self._owed[lane], {}, ticket
        return owed


class FreedRoom:
    """Freed memory in order of freeing. A new range takes what was never used, then, if a copy is its first writer, what was
    freed longest ago; if `own`, the lane that never waits for itself, is, what another lane last used longest ago."""

    def __init__(self, unused_bytes: int, own: str) -> None:
        self._freed: list[tuple[int, Waits]] = [(unused_bytes, {})]
        self._own = own

    def free(self, size: int, waits: Waits) -> None:
        self._freed.append((size, waits))

    def take(self, size: int, *, own: bool) -> Waits:
        """What the first writer of a range of this size waits for."""
        waits: Waits = {}
        while size > 0 and self._freed:
            where = min(range(len(self._freed)), key=self._last_use_by_others) if own else 0
            available, tickets = self._freed[where]
            merge(waits, tickets)
            if available > size:
                self._freed[where] = (available - size, tickets)
            else:
                del self._freed[where]
            size -= available
        return waits

    def _last_use_by_others(self, where: int) -> int:
        return max((ticket for lane, ticket in self._freed[where][1].items() if lane != self._own), default=-1)
