"""Which bundles are on the device: fetch, hold, release, drop.

The states of a bundle's parameters are in states.py. Who owns a block: see Note [What breaks off] in recovery.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence

import torch

from systems.device.device import Device
from systems.device.lanes.transfers import TrackedMemory
from systems.device.memory.pool import Allocation
from systems.device.watch.labels import labelled
from systems.machine.uncounted import uncounted
from systems.planning.layout import Layout, space_of
from systems.planning.plan import LaneKind
from systems.planning.step.operations import Work, of_bundle
from systems.substrate.bundle.bundle import ManagedBundle, hold, release
from systems.substrate.bundle.segments import StoredSegment, Stretch
from systems.substrate.bundle.store import Store
from systems.substrate.moves.pages import PageMoves
from systems.substrate.moves.room import DeviceRoom
from systems.substrate.moves.shards import Shards
from systems.substrate.moves.tags import issued


class Residency:
    """writes_back: what is evicted is copied to the host first, instead of being dropped, if the host is its home. groups: of
    the ranks that hold each bundle.
    """

    def __init__(
        self, layout: Layout, bundles: Sequence[ManagedBundle], store: Store, device: Device, *, write_back: bool
    ) -> None:
        self.layout, self.bundles, self.device = layout, bundles, device
        self.writes_back = write_back
        self._store = store
        alone, come = store.ranks.size == 1, self.fetch
        self.groups = [store.ranks.group(space_of(layout, bundle.index).group) for bundle in bundles]
        self.room = DeviceRoom(device, bundles, self.evict if alone else None)
        self.pages = PageMoves(layout, device, self.room, sources=self.sources, drop=self.drop)
        self.shards = Shards(layout, bundles, device, self.room, sources=self.sources, fetch=come, drop=self.drop, alone=alone)

    def settle(self, managed: ManagedBundle) -> None:
        """A block for a bundle that never moves, before it has values."""
        managed.own(self.room.allocate(managed.nbytes, f"bundle {managed.index}", compute=True))

    def fetch(self, index: int) -> None:
        """Start bringing a bundle to the device; nothing if it is there or on its way."""
        managed = self.bundles[index]
        if managed.block is not None:
            return
        assert managed.movable, f"bundle {index} never moves, and the host has nothing of it"
        if managed.pages:
            self.pages.merge(managed)
            return
        block, shard = self.room.allocate(managed.nbytes, f"bundle {index}"), managed.shard.block
        fetch = of_bundle(self.layout, Work.FETCH, LaneKind.H2D, index)
        try:
            if shard is None:
                sources, memories = self.sources(managed)

                def copy() -> None:
                    for stretch, source in sources:
                        stretch.on(block).copy_(source, non_blocking=True)

                self.device.log.count("h2d_bytes", managed.shard_nbytes)
                with self.device.phases.of("h2d_updated" if managed.updated else "h2d_parameters"):
                    self.device.transfers.issue(fetch, copy, reads=memories, writes=[block.memory])
            if self._store.ranks.size > 1:
                self.gather(managed, block, shard)
        except Exception:  # after Ctrl-C a copy may be on its way that left no ticket: the block goes once all is at rest
            self.device.pool.free(block, f"bundle {index}")
            raise
        managed.own(block)

    def gather(self, managed: ManagedBundle, block: Allocation | None = None, shard: Allocation | None = None) -> None:
        """A block of it, its own if none is given, is brought together from all ranks of its group, be that this one alone of
        several. shard: where this rank's part is; None where the block has it.
        """
        block, group = managed.block if block is None else block, self.groups[managed.index]
        assert block is not None, "a bundle is gathered on the device"
        gather = of_bundle(self.layout, Work.GATHER, LaneKind.GATHER, managed.index)
        pieces, own = managed.pieces(block), list[tuple[torch.Tensor, torch.Tensor]]()
        if shard is not None:
            own = list(zip(managed.own_pieces(block), managed.shard.pieces(shard), strict=True))

        def work() -> None:
            for target, source in own:
                target.copy_(source, non_blocking=True)
            group.link.gather(tag, *pieces)

        self.device.log.count("gather_bytes", managed.nbytes - managed.nbytes // group.size)
        reads = [] if shard is None else [shard.memory]
        world = self._store.ranks
        tag = issued(world.link, gather, of_all=group.size == world.size)
        self.device.transfers.issue(gather, work, reads=reads, writes=[block.memory])

    def sources(
        self, managed: ManagedBundle, which: Callable[[StoredSegment], bool] | None = None
    ) -> tuple[Iterable[tuple[Stretch, torch.Tensor]], list[TrackedMemory]]:
        """Slots, or masters where the slot holds a gradient (they round to the same bits). Gone through as they are read.

        which: of these segments alone, in a bundle that is not buffered.
        """
        if managed.buffering.now is not None:
            assert which is None
            return managed.buffering.now.source()
        if which is None and not any(each.slot_holds_gradient for each in managed.segments):
            return [(stretch, stretch.slot) for stretch in managed.stretches], [each.slot_memory for each in managed.segments]
        slots = managed.stretches_of(lambda each: not each.slot_holds_gradient and (which is None or which(each)))
        masters = managed.stretches_of(lambda each: each.slot_holds_gradient and (which is None or which(each)))
        memories = [each.slot_memory for stretch in slots for each in stretch.stored]
        memories += [each.at_home.memory for stretch in masters for each in stretch.stored if each.at_home is not None]
        sources = [(stretch, stretch.slot) for stretch in slots]
        return [*sources, *((stretch, self._master(stretch)) for stretch in masters)], memories

    def _master(self, stretch: Stretch) -> torch.Tensor:
        """From the disk as a copy, which waits for what is on its way there."""
        if stretch.state:
            return stretch.master
        with uncounted():
            return torch.cat([self._store.part(each, "master") for each in stretch.stored])

    def hold(self, indices: Sequence[int], key: object) -> None:
        """Compute is about to read the bundles: fetch what is absent, order compute behind the copies, pin them."""
        held = [self.bundles[i] for i in indices]
        hold(held, key)
        try:
            for managed in held:
                if managed.block is None:
                    self.device.log.count("on_demand_fetches")
                    self.fetch(managed.index)
        except BaseException:
            release(held, key)
            raise
        blocks = [managed.block for managed in held if managed.block is not None]
        with labelled("wait for bundles"):
            self.device.transfers.order_compute(reads=[b.memory for b in blocks], label=f"hold for {key}")
        for managed in held:
            if managed.block is not None and not managed.storage.resident:
                managed.storage.point_at(managed.block.data.data_ptr())

    def release(self, indices: Sequence[int], key: object) -> None:
        """Compute has read the bundles."""
        held = [m for m in map(self.bundles.__getitem__, indices) if key in m.holds]
        release(held, key)
        used = [m.block.memory for m in held if m.block is not None]
        self.device.transfers.compute(reads=used, label=f"release by {key}")
        if self.room.leaves is not None:
            for managed in held:
                if not managed.holds and not managed.pinned and self.room.leaves(managed.index):
                    self.drop(managed.index)

    def evict(self, index: int) -> None:
        if self.writes_back and not self.bundles[index].shard.at_home:
            self.write_back(index)
        else:
            self.drop(index)

    def drop(self, index: int, *, keep_shard: bool = False) -> None:
        """Free the device copy; the host's is authoritative, or the shard, if that is the bundle's home. One that is not goes
        too, unless it is to be kept.
        """
        managed = self.bundles[index]
        shard = managed.shard
        goes = shard.block is not None and not shard.at_home and not keep_shard
        if managed.block is None and not goes and not managed.pages:
            return
        with labelled(f"drop bundle {index}"):
            block = managed.leave()
            if block is not None:
                self.device.pool.free(block, f"bundle {index}")
            if managed.pages:
                self.pages.free(managed)
            if goes:
                self.shards.forget(index)

    def write_back(self, index: int) -> None:
        """Copy the device's parameters to the host slots, then drop them."""
        managed = self.bundles[index]
        block = managed.block
        if block is None:
            return
        if not any(each.slot_holds_gradient for each in managed.segments):
            stretches = managed.stretches

            def copy() -> None:
                for stretch in stretches:
                    stretch.slot.copy_(stretch.on(block), non_blocking=True)

            self.device.log.count("d2h_bytes", managed.shard_nbytes)
            self.device.transfers.issue(
                of_bundle(self.layout, Work.WRITE_BACK, LaneKind.D2H, index),
                copy,
                reads=[block.memory],
                writes=[each.slot_memory for each in managed.segments],
            )
        self.drop(index)

    def refill(self, managed: ManagedBundle, parameters: frozenset[int]) -> None:
        """Read these parameters of a bundle from the host again, into the block that is there; all of it from the shards, if it
        rests as them.
        """
        block = managed.block
        assert block is not None
        if managed.shard.at_home:
            self.gather(managed, block, managed.shard.block)
            return
        pairs, sources, buffered = [], [], managed.buffering.now
        values = [each.slot for each in managed.stretches] if buffered is None else buffered.version_of(buffered.produced)
        for stretch, source in zip(managed.stretches, values, strict=True):
            target, here = stretch.on(block), [piece.here for piece in stretch.placements if piece.parameter in parameters]
            if here:
                assert not any(each.slot_holds_gradient for each in stretch.stored)
                sources += [each.slot_memory for each in stretch.stored]
                pairs += [(target[where], source[where]) for where in here]

        def copy() -> None:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

        self.device.log.count("h2d_bytes", sum(target.nbytes for target, _ in pairs))
        self.device.transfers.issue(
            of_bundle(self.layout, Work.REFILL, LaneKind.H2D, managed.index),
            copy,
            reads=sources,
            writes=[block.memory],
        )
        if self._store.ranks.size > 1:
            self.gather(managed, block)

    def resident(self) -> frozenset[int]:
        return frozenset(m.index for m in self.bundles if m.block is not None)

    def release_all(self, *, but: object = None) -> None:
        """A step or a pass was given up: nobody will say any more that compute has read what is held, so it is said here.

        but: a key that goes on holding.
        """
        for managed in self.bundles:
            over = [key for key in managed.holds if key != but]
            if over and managed.block is not None:
                with contextlib.suppress(Exception):  # of a copy to the device that failed: then nothing read it either
                    self.device.transfers.compute(reads=[managed.block.memory], label=f"bundle {managed.index} is let go")
            for key in over:
                managed.release_all(key)

    def close(self) -> None:
        self.release_all()
        for managed in self.bundles:
            managed.shard.rest(at_home=False)
            self.drop(managed.index)
