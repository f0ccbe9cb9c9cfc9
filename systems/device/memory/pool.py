"""The pool that hands out device memory.

Note [Accounting in program order]
    A free takes effect in the accounts when it is issued, even if a copy out of that memory is still in flight: the next
    owner of the very bytes inherits its tickets. So live bytes are a function of the order of calls, the same on every run
    and the same in the planner's timeline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from systems.device.lanes.ticket import Ticket
from systems.device.lanes.transfers import TrackedMemory
from systems.device.memory.account import Account
from systems.device.memory.granule import Fit, Granule
from systems.device.watch.events import Extent
from systems.errors import OutOfMemoryError
from systems.messages import LEAST_OF_A_BATCH
from systems.planning.layout import ALIGN_BYTES, round_up
from systems.sizes import format_size


class Allocation:
    """Device bytes in use. data: uint8 tensor of exactly the bytes asked for; memory: its tickets."""

    def __init__(self, granule: Granule, start: int, nbytes: int, reserved: int, tickets: list[Ticket]) -> None:
        self.granule, self.start, self.nbytes, self.reserved = granule, start, nbytes, reserved
        self.data = granule.memory[start : start + nbytes]
        self.memory = TrackedMemory(Extent(granule.space, start, start + reserved), tickets)
        self.views: dict[int, torch.Tensor] = {}  # of parameters, made once

    def view(self, dtype: torch.dtype, offset: int, numel: int) -> torch.Tensor:
        """`numel` elements from element `offset` on, as a flat tensor."""
        size = dtype.itemsize
        return self.data[offset * size : (offset + numel) * size].view(dtype)

    def make_view(self, parameter: int, dtype: torch.dtype, offset: int, numel: int) -> torch.Tensor:
        """The same, kept in `views`: the parameter has its place there as long as the block lasts."""
        size = dtype.itemsize
        found = self.views[parameter] = self.data[offset * size : (offset + numel) * size].view(dtype)
        return found


class Pool:
    """Allocation out of granules, under an account's budget.

    new_granule: makes a granule of at least the given bytes, or returns None when the device has no more.
    mark: a ticket for all compute queued so far.
    """

    def __init__(self, account: Account, new_granule: Callable[[int], torch.Tensor | None], mark: Callable[[], Ticket]) -> None:
        self.account, self._new_granule, self.mark = account, new_granule, mark
        self._granules: list[Granule] = []
        self._made = 0
        self._where, self._by_clock = "", True

    def of_rank(self, rank: int) -> None:
        """One of several, for which where things lie is the same as for the others; before anything is allocated."""
        self._where, self._by_clock = f" on rank {rank}", False

    def allocate(self, nbytes: int, label: str, *, limit: int | None = None, compute: bool = False) -> Allocation | None:
        """None if it does not fit now: the caller makes room and asks again.

        limit: bytes of granules that the pool does not grow beyond for it. compute: who uses it first, compute or a copy.
        """
        if nbytes > self.account.room:
            return None
        placed = self._place(round_up(max(nbytes, 1), ALIGN_BYTES), limit, compute=compute)
        if placed is None:
            return None
        granule, fit, reserved = placed
        start, tickets = granule.take(fit, reserved)
        self.account.add_pool(nbytes, label)
        return Allocation(granule, start, nbytes, reserved, tickets)

    def _place(self, reserved: int, limit: int | None, *, compute: bool) -> tuple[Granule, Fit, int] | None:
        for granule in self._granules:
            fit = granule.find(reserved, compute=compute)
            if fit is not None:
                return granule, fit, reserved
        if limit is not None and self.reserved_bytes + reserved > limit:
            return None
        memory = self._new_granule(reserved)
        if memory is None:
            return None
        granule = self._add(memory)
        fit = granule.find(reserved, compute=compute)
        assert fit is not None, "a granule is made large enough for what it is made for"
        return granule, fit, reserved

    def free(self, allocation: Allocation, label: str) -> None:
        """Give the bytes back; whoever gets them next waits for the tickets left on them."""
        self.account.add_pool(-allocation.nbytes, label)
        allocation.granule.give(allocation.start, allocation.start + allocation.reserved, allocation.memory.tickets())

    def cut(self, allocation: Allocation, kept: Sequence[tuple[int, int]], label: str) -> list[Allocation]:
        """Of its bytes only these stay in use, from the first of a pair to before the second, each pair as an allocation of its
        own where it lies. In order, and in multiples of ALIGN_BYTES.
        """
        granule, memory, begin, found = allocation.granule, allocation.memory, allocation.start, list[Allocation]()
        at = begin
        for first, stop in kept:
            assert not (first | stop) % ALIGN_BYTES, f"{label}: bytes {first} to {stop} do not lie between two boundaries"
            part = Allocation(granule, begin + first, stop - first, stop - first, [])
            part.memory = memory.part(part.memory.extent)
            found.append(part)
            if at < begin + first:
                granule.give(at, begin + first, memory.tickets())
            at = begin + stop
        if at < begin + allocation.reserved:
            granule.give(at, begin + allocation.reserved, memory.tickets())
        self.account.add_pool(sum(part.nbytes for part in found) - allocation.nbytes, label)
        return found

    def settle(self, owned: Sequence[Allocation], last: Ticket, *, other: int | None = None) -> None:
        """Nothing but this is in use: see Note [What breaks off] in recovery.py. last: of all work so far, which is done.

        other: bytes of activations, where they are known.
        """
        for granule in self._granules:
            mine = [block for block in owned if block.granule is granule]
            granule.keep([(block.start, block.start + block.reserved) for block in mine], last)
        self.account.settle(pool=sum(block.nbytes for block in owned), other=other)

    def trim(self) -> None:
        """Give granules that are empty, and that nobody has work in flight on, back to the device's allocator."""
        self._granules = [g for g in self._granules if not g.idle]

    def reserve(self, nbytes: int) -> None:
        """Have at least `nbytes` in all, what is missing in one granule, so that a plan's blocks lie together; what is empty
        goes first."""
        self.trim()
        missing = nbytes - self.reserved_bytes
        if missing > 0:
            memory = self._new_granule(missing)
            if memory is not None:
                self._add(memory)

    def _add(self, memory: torch.Tensor) -> Granule:
        self._made += 1
        name = f"{self.account.tier.value}{self._made}"
        granule = Granule(name, memory, self.mark(), keeps=self.account.keeps_log, by_clock=self._by_clock)
        self._granules.append(granule)
        return granule

    @property
    def reserved_bytes(self) -> int:
        return sum(g.memory.numel() for g in self._granules)

    @property
    def live_bytes(self) -> int:
        return self.account.pool

    def close(self) -> None:
        granules, self._granules = self._granules, []
        assert all(g.empty for g in granules), "a device block was not returned to the pool"

    def out_of_memory(self, nbytes: int, what: str) -> OutOfMemoryError:
        have, can_go = max(self.account.room, 0), "can be evicted" if self._by_clock else "may go"
        return OutOfMemoryError(
            f"out of device memory{self._where}: {what} needs {format_size(nbytes)}, {format_size(have)} of "
            f"{format_size(self.account.budget)} are free and nothing more {can_go}: raise `device_memory`, or lower "
            f"the batch or the sequence length ({LEAST_OF_A_BATCH})",
            tier=self.account.tier.value,
            need=nbytes,
            have=have,
        )
