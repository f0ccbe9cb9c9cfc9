"""Room on the device: bytes for who asks, with others evicted for them if need be.

On several ranks nobody is: what is there decides what is fetched, and that all ranks gather (Note [The one rule] in
ranks/ranks.py). What does not fit there is out of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from systems.device.device import Device
from systems.device.memory.pool import Allocation
from systems.substrate.bundle.bundle import ManagedBundle


class DeviceRoom:
    """evict: sends a bundle away; None on several ranks. limit: pool bytes beyond which `allocate` evicts, or does not make the
    pool grow; lifted by a plan. most: of those in use, beyond which it evicts; no more than the limit.

    leaves: on several ranks, whether no plan says now when a bundle goes, so that it is dropped once its last holder lets it
    go; None on one rank, where it stays until room is needed.
    """

    def __init__(self, device: Device, bundles: Sequence[ManagedBundle], evict: Callable[[int], None] | None) -> None:
        self._device, self._bundles, self._evict = device, bundles, evict
        self._choose: Callable[[Sequence[int]], int] = lambda candidates: candidates[0]
        self._relieve: Callable[[], bool] = lambda: False
        self.limit = self.most = device.plannable_bytes
        self.leaves: Callable[[int], bool] | None = None

    def ask(self, *, choose: Callable[[Sequence[int]], int], relieve: Callable[[], bool]) -> None:
        """choose: which of these un-held bundles is evicted. relieve: asked as a last resort to send a gradient off early, or
        optimizer state home; it returns False when there is nothing left that it could move off the device.
        """
        self._choose, self._relieve = choose, relieve

    def let_go(self, leaves: Callable[[int], bool]) -> None:
        """Of several ranks: see `leaves`."""
        self.leaves = leaves

    def limit_to(self, nbytes: int, most: int | None = None) -> None:
        """Of the pool. most: of what is in use of it, where that is less."""
        self.limit = nbytes
        self.most = nbytes if most is None else min(most, nbytes)

    def evictable(self) -> list[int]:
        return [m.index for m in self._bundles if (m.block is not None or m.pages) and not m.holds and not m.pinned]

    def make(self, fits: Callable[[], bool]) -> bool:
        """Evict until fits() is true; False if it never is."""
        while not fits():
            candidates = self.evictable()
            if self._evict is None:
                return fits()
            if candidates:
                self._device.log.count("evictions")
                self._evict(self._choose(candidates))
            elif not self._relieve():
                return fits()  # once more: what an allocator refuses once it may grant the next time
        return True

    def allocate(self, nbytes: int, what: str, *, compute: bool = False) -> Allocation:
        """Device bytes, evicting for them if need be. Raises OutOfMemoryError when nothing is left to evict.

        compute: who uses them first, compute or a copy.
        """
        found: list[Allocation] = []

        def fits() -> bool:
            pool, evicts = self._device.pool, self._evict is not None
            if evicts and pool.live_bytes + nbytes > self.most and self.evictable():
                return False
            allocation = pool.allocate(nbytes, what, limit=self.limit, compute=compute)
            if allocation is None and not (evicts and self.evictable()):
                allocation = pool.allocate(nbytes, what, compute=compute)
            if allocation is not None:
                found.append(allocation)
            return allocation is not None

        if not self.make(fits):
            raise self._device.pool.out_of_memory(nbytes, what)
        return found[0]
