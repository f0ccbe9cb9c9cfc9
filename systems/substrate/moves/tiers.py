"""Optimizer states on their way between tiers, and parameters on their way back into slots that held a gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from systems.device.device import Device
from systems.planning.layout import Layout
from systems.planning.plan import LaneKind, Tier
from systems.planning.step.operations import Work, before_updates, of_bundle
from systems.substrate.bundle.bundle import ManagedBundle
from systems.substrate.bundle.segments import (
    DiskState,
    OptimizerState,
    StoredSegment,
    slots_take_gradients,
    slots_take_parameters,
)
from systems.substrate.bundle.store import Store


class TierMoves:
    """A segment's master and moments lie on the device, or at home: on the host or the disk."""

    def __init__(self, layout: Layout, store: Store, bundles: Sequence[ManagedBundle], device: Device) -> None:
        self.layout, self.store, self.device = layout, store, device
        self._bundles = bundles
        self._room_on_host: Callable[[], None] = lambda: None

    def ask(self, *, room_on_host: Callable[[], None]) -> None:
        """room_on_host: gives back what the host can do without; called where there is too little for a state to come home."""
        self._room_on_host = room_on_host

    def to_device(self, index: int) -> bool:
        """Move a segment's master and moments to the device for good. False, and nothing changed, if they do not fit now."""
        stored, bundle = self.store.segments[index], self._bundles[self.layout.bundle_of_segment[index]]
        old, disk = stored.state, self.store.disk
        assert old is not None and old.tier is not Tier.DEVICE and not stored.slot_holds_gradient
        new = self.store.room_on_device(stored.segment)
        if new is None:
            return False
        targets, sources, memories = new.tensors(), old.tensors(), [old.memory]
        move = of_bundle(self.layout, Work.STATE_TO_DEVICE, LaneKind.H2D, bundle.index, index)

        def copy() -> None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)

        self.device.log.count("h2d_bytes", sum(tensor.nbytes for tensor in targets))
        try:
            if isinstance(old, DiskState):
                assert disk is not None
                buffer = disk.read(old.place, self.device.transfers)
                sources, memories = [*buffer.views(old.place), *sources], [old.memory, buffer.memory]
            self.device.transfers.issue(move, copy, reads=memories, writes=[new.memory]).wait()
        except Exception:  # after Ctrl-C a copy may be on its way that left no ticket: the room goes once all is at rest
            assert new.allocation is not None
            self.device.pool.free(new.allocation, f"optimizer state of segment {index}")
            raise
        stored.move_to(new)
        bundle.count_states()
        self.store.discard(old)
        return True

    def to_home(self, index: int) -> None:
        """The way back, when the device's room is needed for something else; the slot gets the parameters again."""
        stored, bundle = self.store.segments[index], self._bundles[self.layout.bundle_of_segment[index]]
        old, new, disk = stored.state, stored.at_home, self.store.disk
        assert isinstance(old, OptimizerState) and new is not None and old.allocation is not None
        if self.store.missing(new):
            self._room_on_host()
        self.store.reclaim(new)
        sources, targets, memories = old.tensors(), new.tensors(), [new.memory]
        move = of_bundle(self.layout, Work.STATE_TO_HOST, LaneKind.D2H, bundle.index, index)
        if isinstance(new, DiskState):
            assert disk is not None
            buffer = disk.buffers[new.place.buffer]
            targets, memories = [*buffer.views(new.place), *targets], [new.memory, buffer.memory]

        def copy() -> None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)

        self.device.log.count("d2h_bytes", old.allocation.nbytes)
        try:
            self.device.transfers.issue(move, copy, reads=[old.memory], writes=memories).wait()
            if isinstance(new, DiskState):
                assert disk is not None
                disk.write(new.place, self.device.transfers).wait()
        except BaseException:  # it is on the device still
            self.store.discard(new)
            raise
        slots_take_gradients([stored])  # or what it had before the state left: restored now, or by who gives up the step
        stored.move_to(new)
        self.device.pool.free(old.allocation, f"optimizer state of segment {index}")
        bundle.count_states()
        self.restore_slots(bundle, lambda each: each is stored)

    def restore_slots(self, bundle: ManagedBundle, which: Callable[[StoredSegment], bool] | None = None) -> None:
        """Put the parameters back where a gradient lies: cast them anew from the master (skipped step, abort).

        Of a buffered bundle nobody reads them there.
        """
        if bundle.buffering.now is not None:
            slots_take_parameters(bundle.segments)
            return
        stretches = bundle.stretches if which is None else bundle.stretches_of(which)
        restored = [each for stretch in stretches for each in stretch.stored]
        if not restored:
            return
        kernel, disk = self.device.host_kernel, self.store.disk
        away = [(each.at_home.place, each.slot) for each in restored if isinstance(each.at_home, DiskState)]

        def work() -> None:
            for stretch in stretches:
                if stretch.state:
                    kernel.cast(stretch.master, stretch.slot)
            for place, slot in away:
                assert disk is not None
                kernel.cast(disk.load(place, "master", settled=True), slot)

        self.device.transfers.issue(
            of_bundle(self.layout, Work.RESTORE, LaneKind.CPU, bundle.index),
            work,
            reads=[each.at_home.memory for each in restored if each.at_home is not None],
            writes=[each.slot_memory for each in restored],
            priority=before_updates(self.layout, bundle.index),
        )
        slots_take_parameters(restored)
