"""Where every segment lives at rest: its slot on the host, and master weights and moments on host, disk or device.

Note [The slot]
    Each segment that may leave the device has one host slot in the compute dtype. It holds the parameters; from the flush of a
    step's gradient to the update it holds that gradient instead (14 bytes a parameter). While it does, parameters are read from
    the master, which rounds to the same bits. A segment whose bundle never moves has its parameters in the bundle's block on
    the device from the beginning, and nothing on the host until the engine closes: `give_slots`.
"""

from __future__ import annotations

import torch

from systems.device.device import Device
from systems.device.lanes.transfers import TrackedMemory
from systems.device.memory.account import Account
from systems.device.memory.disk import Disk
from systems.device.memory.host import HostMapping, release_freed
from systems.device.watch.events import Extent
from systems.errors import BudgetError
from systems.planning.layout import ALIGN_BYTES, Layout, Placement, Segment, round_up
from systems.planning.plan import Tier
from systems.ranks.ranks import Ranks
from systems.recipe.model.giving_back import check_fresh
from systems.sizes import format_need, format_size
from systems.substrate.bundle.segments import DiskState, OptimizerState, StoredSegment

TAKEN_FIRST = ("slots", "master")
ACCUMULATOR = "accumulator"


class Store:
    """All segments of one rank. Construction allocates the host, and the device for what never moves.

    stated: names of master and moments, in their order. disk: for the layout's bundles on disk, whose place it has; the
    caller closes it.
    Raises BudgetError when a tier is too small.
    """

    def __init__(
        self,
        layout: Layout,
        device: Device,
        host: Account,
        dtype: torch.dtype,
        *,
        accumulate: int,
        disk: Disk | None = None,
        ranks: Ranks,
    ) -> None:
        self.ranks = ranks
        self.layout, self.device, self.host, self.dtype, self.disk = layout, device, host, dtype, disk
        settled = {s for b in layout.bundles if not b.movable for s in b.segments}
        moving = [s for s in layout.segments if s.index not in settled]
        at_home = [s for s in moving if s.space.trainable]
        slot_bytes = sum(s.shard_numel for s in moving) * dtype.itemsize
        on_host = [s for s in at_home if layout.bundle_of_segment[s.index] not in layout.on_disk]
        self.stated = ("master", *layout.moments)
        self._adds, self._parts = accumulate > 1, len(self.stated) + (accumulate > 1)  # of a state that is not on the disk
        users = dict.fromkeys(self.stated, on_host) | ({ACCUMULATOR: at_home} if self._adds else {})
        sizes = {part: sum(s.shard_numel for s in those) * 4 for part, those in users.items()}
        _check_host(slot_bytes, sum(sizes.values()), have=host.room)
        self._mappings: dict[str, HostMapping] = {}
        self._no_slot = torch.empty(0, dtype=dtype), TrackedMemory(Extent("no-slot", 0, 0))
        self.segments: list[StoredSegment] = []
        try:
            for part, size in {"slots": slot_bytes, **sizes}.items():
                if {"slots": moving, **users}[part]:  # be they of no elements
                    self._mappings[part] = HostMapping(f"host-{part}", size, host, pinned=part == "slots")
            for part, mapping in self._mappings.items():
                device.meter.exempt(mapping.storage)
                if part in TAKEN_FIRST:
                    mapping.touch()
            device.pool.reserve(_settled_bytes(layout, self._parts))  # a granule for each state would have a hole in each
            for segment in layout.segments:
                self.segments.append(self._place(segment, settled=segment.index in settled))
        except BaseException:
            self.close()
            raise

    def _place(self, segment: Segment, *, settled: bool) -> StoredSegment:
        """settled: on the device from the beginning, with no place on the host to go back to."""
        slot, slot_memory = self._no_slot if settled else self._mappings["slots"].take(self.dtype, segment.shard_numel)
        if settled and segment.space.trainable:
            there = self.room_on_device(segment)
            if there is None:
                need = segment.shard_numel * 4 * self._parts
                raise BudgetError(
                    f"the optimizer state of segment {segment.index}, which stays on the device, needs {format_size(need)} "
                    f"there, {format_size(max(self.device.account.room, 0))} are free: raise `device_memory`",
                    tier="device",
                    need=need,
                    have=max(self.device.account.room, 0),
                )
            for tensor in there.tensors()[1:]:
                tensor.zero_()
            return StoredSegment(segment, slot, slot_memory, there, None, rank=self.ranks.group(segment.space.group).rank)
        trained = segment.space.trainable
        added = self._mappings[ACCUMULATOR].take(torch.float32, segment.shard_numel)[0] if trained and self._adds else None
        state: OptimizerState | DiskState | None = None
        if trained and self.layout.bundle_of_segment[segment.index] in self.layout.on_disk:
            assert self.disk is not None
            state = DiskState(self.disk.places[segment.index], added)
        elif trained:
            taken = [self._mappings[part].take(torch.float32, segment.shard_numel) for part in self.stated]
            (master, memory), *moments = taken
            state = OptimizerState(Tier.HOST, master, tuple(tensor for tensor, _ in moments), added, memory)
        return StoredSegment(segment, slot, slot_memory, state, state, rank=self.ranks.group(segment.space.group).rank)

    def room_on_device(self, segment: Segment) -> OptimizerState | None:
        """Room on the device for a segment's state, of any content; None if there is not enough now."""
        numel = segment.shard_numel
        allocation = self.device.pool.allocate(numel * 4 * self._parts, f"optimizer state of segment {segment.index}")
        if allocation is None:
            return None
        master, *moments = (allocation.view(torch.float32, i * numel, numel) for i in range(self._parts))
        accumulator = moments.pop() if self._adds else None
        return OptimizerState(Tier.DEVICE, master, tuple(moments), accumulator, allocation.memory, allocation)

    def part(self, stored: StoredSegment, part: str) -> torch.Tensor:
        """Master or a moment of a trained segment where it is, from the disk as a copy. Call only when drained."""
        state = stored.state
        if isinstance(state, DiskState):
            assert self.disk is not None
            return self.disk.load(state.place, part)
        assert state is not None
        return state.tensors()[self.stated.index(part)]

    def overwrite_part(self, stored: StoredSegment, part: str, values: torch.Tensor, place: Placement | None = None) -> None:
        """Of a trained segment, all of it or a parameter's piece. Call only when drained."""
        state = stored.state
        if isinstance(state, DiskState):
            assert self.disk is not None
            if place is not None:
                whole = self.part(stored, part)
                whole[place.here].copy_(values)
                values = whole
            self.disk.save(state.place, part, values)
        else:
            self.part(stored, part)[slice(None) if place is None else place.here].copy_(values)

    def discard(self, state: OptimizerState | DiskState) -> None:
        """Of a state at home that is on the device now: its pages on the host go back to the machine."""
        for name, tensor in _on_host(state, self.stated):
            self._mappings[name].discard(tensor)

    def missing(self, state: OptimizerState | DiskState) -> bool:
        """The host has no room for it to come back as things are."""
        return sum(self._mappings[name].missing(tensor) for name, tensor in _on_host(state, self.stated)) > self.host.room

    def reclaim(self, state: OptimizerState | DiskState) -> None:
        """The way back. Raises OutOfMemoryError when the host has no room for them."""
        for name, tensor in _on_host(state, self.stated):
            self._mappings[name].reclaim(tensor)

    def take_rest(self) -> None:
        """Once nothing of the model's own memory is held any more: see Note [When memory is taken] in memory/host.py."""
        release_freed()
        for part, mapping in self._mappings.items():
            if part not in TAKEN_FIRST:
                mapping.touch()

    def give_slots(self, *, more: bool) -> None:
        """To the segments that have none, in fresh memory of their size. What else the host has of segments goes back to the
        machine before, but for the slots: only an engine that closes may ask, drained, once. more: there is more to be made
        room for than slots.

        Raises BudgetError where the host has no room.
        """
        without = [each for each in self.segments if not each.has_slot]
        if not without and not more:
            return
        for part in (*self.stated, ACCUMULATOR):
            if part in self._mappings:
                self._mappings[part].empty()
        if self.disk is not None:
            self.disk.empty_buffers()
        if not without:
            return
        need = sum(each.segment.shard_numel for each in without) * self.dtype.itemsize
        check_fresh(need, self.host.room)
        made = self._mappings["values"] = HostMapping("host-values", need, self.host, pinned=False)
        for each in without:
            each.take_slot(*made.take(self.dtype, each.segment.shard_numel))

    def own(self, slot: torch.Tensor) -> torch.Tensor:
        """A slot, or a part of one, as what keeps its memory: see HostMapping.own."""
        there = slot.untyped_storage()._cdata
        mapping = next(m for m in self._mappings.values() if m.storage._cdata == there)
        return mapping.own(slot)

    @property
    def slot_bytes(self) -> int:
        return sum(self._mappings[name].nbytes for name in ("slots", "values") if name in self._mappings)

    @property
    def mappings(self) -> list[HostMapping]:
        return list(self._mappings.values())

    @property
    def pinned_bytes(self) -> int:
        return sum(m.nbytes for m in self._mappings.values() if m.pinned)

    def close(self) -> None:
        for stored in self.segments:
            if isinstance(stored.state, OptimizerState) and stored.state.allocation is not None:
                self.device.pool.free(stored.state.allocation, f"close segment {stored.segment.index}")
            stored.close()  # tensors would keep the mappings alive
        for mapping in self._mappings.values():
            mapping.close()


def _settled_bytes(layout: Layout, parts: int) -> int:
    """Of the pool, for bundles that never move and the states of their segments, of so many parts each."""
    there = [bundle for bundle in layout.bundles if not bundle.movable]
    trained = [layout.segments[s] for bundle in there if bundle.trainable for s in bundle.segments]
    sizes = [*(layout.bundle_bytes(bundle.index) for bundle in there), *(4 * parts * s.shard_numel for s in trained)]
    return sum(round_up(nbytes, ALIGN_BYTES) for nbytes in sizes)


def _check_host(slot_bytes: int, state_bytes: int, *, have: int) -> None:
    need = slot_bytes + state_bytes
    if need > have:
        raise BudgetError(
            f"the model needs {format_need(need, have)} of host memory ({format_size(slot_bytes)} for parameters, "
            f"{format_size(state_bytes)} for master weights and moments), {format_size(have)} are there: raise "
            "`host_memory` or take a smaller model",
            tier="host",
            need=need,
            have=have,
        )


def _on_host(state: OptimizerState | DiskState, stated: tuple[str, ...]) -> list[tuple[str, torch.Tensor]]:
    """Its tensors there, each with its mapping."""
    names = (ACCUMULATOR,) if isinstance(state, DiskState) else (*stated, ACCUMULATOR)
    return list(zip(names, state.tensors(), strict=False))
