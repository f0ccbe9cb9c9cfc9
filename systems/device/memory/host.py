"""Host memory: exact-size mappings for what lies off the device, pinned where a copy engine reads it.

torch's pinned allocator rounds up to powers of two; these mappings have the bytes asked for. Huge pages are advised, and all
pages are touched at once by many threads: left to whoever comes first, they would be faulted in one after the other.

Note [When memory is taken]
    A mapping takes its pages when it is touched. Slots and master weights are at once; moments and accumulators, which begin as
    zeros, when the model's own values are gone. So a model in fp32 and its engine never have more than the engine alone will:
    4 + 2 + 4 bytes a parameter before, 2 + 12 afterwards.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

import torch

from systems.device.lanes.transfers import TrackedMemory
from systems.device.memory.account import Account
from systems.device.watch.events import EventLog, Extent
from systems.errors import BudgetError, OutOfMemoryError
from systems.machine.uncounted import uncounted
from systems.planning.layout import ALIGN_BYTES, PAGE, round_up
from systems.planning.plan import Tier
from systems.sizes import format_size


class HostMapping:
    """Anonymous memory handed out front to back, of zeros; `touch` takes it. pinned: registered with CUDA for full-speed copies
    (no-op without), which takes it too."""

    def __init__(self, name: str, nbytes: int, account: Account, *, pinned: bool) -> None:
        self.name, self._account = name, account
        self._size = round_up(max(nbytes, 1), PAGE)
        self._given_back: dict[int, int] = {}  # pages that the machine has again: their first byte, and bytes
        if self.nbytes > account.room:
            raise BudgetError(
                f"host memory: {name} needs {self.nbytes} bytes, {account.room} of {account.budget} are left: raise "
                "`host_memory`, or lower the model",
                tier="host",
                need=account.live + self.nbytes,
                have=account.budget,
            )
        self._map: mmap.mmap | None = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._bytes: torch.Tensor | None = torch.frombuffer(self._map, dtype=torch.uint8)
        self._used = 0
        self.pinned = pinned and torch.cuda.is_available()
        if self.pinned:
            self.touch()
            status = torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), self.nbytes, 0)
            if int(status) != 0:
                raise BudgetError(
                    f"host memory: {self.nbytes} bytes for {name} could not be pinned (CUDA error {int(status)}): raise "
                    "the locked-memory limit (ulimit -l) or lower the model",
                    tier="host",
                    need=self.nbytes,
                    have=0,
                )
        account.add_pool(self.nbytes, name)

    @property
    def nbytes(self) -> int:
        """Without what the machine has again."""
        return self._size - sum(self._given_back.values())

    @property
    def held_bytes(self) -> int:
        """Of the account."""
        return 0 if self._bytes is None else self.nbytes

    def touch(self) -> None:
        """See Note [When memory is taken]. Before anything is written to it."""
        assert self._bytes is not None
        self._bytes.view(-1, PAGE)[:, 0].zero_()

    @property
    def storage(self) -> torch.UntypedStorage:
        assert self._bytes is not None
        return self._bytes.untyped_storage()

    def take(self, dtype: torch.dtype, numel: int) -> tuple[torch.Tensor, TrackedMemory]:
        """The next `numel` elements, 256-byte aligned, with their tickets."""
        assert self._bytes is not None
        start, stop = self._used, self._used + numel * dtype.itemsize
        self._used = round_up(stop, ALIGN_BYTES)
        return self._bytes[start:stop].view(dtype), TrackedMemory(Extent(self.name, start, stop))

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same bytes as a flat tensor whose storage is its own and keeps the memory, even when the mapping is closed."""
        assert self._map is not None and self._bytes is not None
        if not tensor.numel():
            return torch.empty(0, dtype=tensor.dtype)
        start = tensor.data_ptr() - self._bytes.data_ptr()
        return torch.frombuffer(self._map, dtype=tensor.dtype, count=tensor.numel(), offset=start)

    def discard(self, tensor: torch.Tensor) -> None:
        """Give the whole pages inside `tensor` back to the machine; their content is gone. Pinned pages stay."""
        first, last = self._pages(tensor)
        if last > first and not self.pinned and first not in self._given_back:
            assert self._map is not None
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)
            self._given_back[first] = last - first
            self._account.add_pool(first - last, self.name)

    def missing(self, tensor: torch.Tensor) -> int:
        """Bytes that `reclaim` would take."""
        return self._given_back.get(self._pages(tensor)[0], 0)

    def reclaim(self, tensor: torch.Tensor) -> None:
        """Take discarded pages into use again, zeroed. Raises OutOfMemoryError when the host tier has no room for them."""
        first, last = self._pages(tensor)
        if last <= first or self.pinned or first not in self._given_back:
            return
        if last - first > self._account.room:
            raise OutOfMemoryError(
                f"out of host memory: {self.name} needs {last - first} bytes back from the device, "
                f"{self._account.room} are free: raise `host_memory`",
                tier="host",
                need=last - first,
                have=self._account.room,
            )
        del self._given_back[first]
        self._account.add_pool(last - first, self.name)

    def empty(self) -> None:
        """Give all that is left of it back to the machine, whoever still has a view of it. Not of pinned memory."""
        assert self._map is not None and not self.pinned
        self._map.madvise(mmap.MADV_DONTNEED)
        left, self._given_back = self.nbytes, {0: self._size}
        self._account.add_pool(-left, self.name)

    def _pages(self, tensor: torch.Tensor) -> tuple[int, int]:
        """First byte and end of the whole pages inside `tensor`."""
        assert self._bytes is not None
        start = tensor.data_ptr() - self._bytes.data_ptr()
        return round_up(start, PAGE), (start + tensor.nbytes) // PAGE * PAGE

    def close(self) -> None:
        if self._bytes is None:
            return
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
        self._bytes = self._map = None
        self._account.add_pool(-self.nbytes, self.name)


class HostSlot:
    """Pinned bytes that hold one tensor at a time; memory has their tickets."""

    def __init__(self, mapping: HostMapping) -> None:
        self.mapping = mapping
        self._bytes: torch.Tensor | None
        self._bytes, self.memory = mapping.take(torch.uint8, mapping.nbytes)

    def view(self, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
        """A tensor over the first of its bytes. Call only on a lane: there nobody counts what looks like a new tensor."""
        assert self._bytes is not None, "the slot is closed"
        return self._bytes[: shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def close(self) -> None:
        """Call only when nobody has work in flight on it."""
        self._bytes = None
        self.mapping.close()


class HostSlots:
    """Slots for what comes and goes every step: made at first need, kept for the next, replaced when too small."""

    def __init__(self, name: str, account: Account) -> None:
        self._name, self._account = name, account
        self._make_room: Callable[[], None] = lambda: None
        self._free: list[HostSlot] = []
        self._all: list[HostSlot] = []
        self._made = self.peak_bytes = 0

    def ask(self, *, room: Callable[[], None]) -> None:
        """room: gives back what the host can do without; called where there is too little for another slot."""
        self._make_room = room

    def take(self, nbytes: int, *, expected: int) -> HostSlot:
        """A slot of at least `nbytes`. expected: how many of that size will be asked for, this one too, for the message.

        Raises BudgetError if the host has no room for a new one.
        """
        fitting = [slot for slot in self._free if slot.mapping.nbytes >= nbytes]
        if fitting:
            slot = min(fitting, key=lambda slot: slot.mapping.nbytes)
            self._free.remove(slot)
            return slot
        size = round_up(max(nbytes, 1), PAGE)
        while self._free and (self._account.room < size or len(self._free) > expected - 1):
            self._discard(self._free[0])
        if size > self._account.room:
            self._make_room()
        if size > self._account.room:
            need = size * expected
            raise BudgetError(
                f"`options=dict(activations='host')` needs {format_size(need)} of host memory for {expected} more of the "
                f"blocks' inputs, {format_size(max(self._account.room, 0))} of {format_size(self._account.budget)} are left: "
                "raise `host_memory`, lower the batch or the sequence length, or leave activations on the device",
                tier="host",
                need=self._account.live + need,
                have=self._account.budget,
            )
        self._made += 1
        with uncounted():
            slot = HostSlot(HostMapping(f"{self._name}-{self._made}", size, self._account, pinned=True))
        self._all.append(slot)
        self.peak_bytes = max(self.peak_bytes, sum(each.mapping.nbytes for each in self._all))
        return slot

    def give(self, slot: HostSlot) -> None:
        """Whoever gets it next waits for the tickets left on it."""
        self._free.append(slot)

    def _discard(self, slot: HostSlot) -> None:
        for ticket in slot.memory.tickets():
            ticket.wait()
        self._free.remove(slot)
        self._all.remove(slot)
        slot.close()

    @property
    def mappings(self) -> list[HostMapping]:
        return [slot.mapping for slot in self._all]

    @property
    def pinned_bytes(self) -> int:
        return sum(slot.mapping.nbytes for slot in self._all if slot.mapping.pinned)

    def give_all(self) -> None:
        """Nobody has a slot any more, not even who broke off while it took or gave one. Call only when drained."""
        self._free = list(self._all)

    def close(self) -> None:
        """Call only when drained."""
        for slot in self._all:
            slot.close()
        self._all.clear()
        self._free.clear()


def release_freed() -> None:
    """Memory that was freed goes back to the machine: the C library keeps blocks below 32 MB for later, and asks only the end
    of its heap whether it is needed."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(ctypes.c_size_t(0))


def host_account(budget: int, log: EventLog) -> Account:
    return Account(Tier.HOST, budget, log)
