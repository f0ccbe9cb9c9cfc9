"""Shards on the device: a rank's part of a bundle moves there, stays as the rest goes, or rests there for good.

What a bundle's state is then: states.py. How the rest comes: Residency.fetch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from systems.device.device import Device
from systems.device.lanes.transfers import TrackedMemory
from systems.planning.layout import Layout
from systems.planning.plan import LaneKind
from systems.planning.step.operations import Work, of_bundle
from systems.substrate.bundle.bundle import ManagedBundle
from systems.substrate.bundle.segments import Stretch
from systems.substrate.moves.room import DeviceRoom

Sources = tuple[Iterable[tuple[Stretch, torch.Tensor]], list[TrackedMemory]]


class Drop(Protocol):
    """Residency.drop."""

    def __call__(self, index: int, *, keep_shard: bool = False) -> None: ...


class Shards:
    """sources: where the host has a bundle's parameters. fetch, drop: of the bundle's block.

    On one rank a shard is the whole bundle: to move is to fetch, and nothing is left to shrink.
    """

    def __init__(
        self,
        layout: Layout,
        bundles: Sequence[ManagedBundle],
        device: Device,
        room: DeviceRoom,
        *,
        sources: Callable[[ManagedBundle], Sources],
        fetch: Callable[[int], None],
        drop: Drop,
        alone: bool,
    ) -> None:
        self._layout, self._bundles, self._device, self._room = layout, bundles, device, room
        self._sources, self._fetch, self._drop, self._alone = sources, fetch, drop, alone

    def move(self, index: int) -> None:
        """From the host; nothing if it, or the bundle, is there or on its way."""
        managed = self._bundles[index]
        if managed.block is not None or managed.shard.block is not None:
            return
        if self._alone:
            self._fetch(index)
            return
        device, what = self._device, f"shard of bundle {index}"
        block = self._room.allocate(managed.shard_nbytes, what)
        try:
            sources, memories = self._sources(managed)
            numbers = [each.segment.index for each in managed.segments]
            pieces = dict(zip(numbers, managed.shard.pieces(block), strict=True))

            def copy() -> None:
                for stretch, source in sources:
                    pieces[stretch.stored[0].segment.index].copy_(source, non_blocking=True)

            device.log.count("h2d_bytes", managed.shard_nbytes)
            with device.phases.of("h2d_updated" if managed.updated else "h2d_parameters"):
                move = of_bundle(self._layout, Work.MOVE, LaneKind.H2D, index)
                device.transfers.issue(move, copy, reads=memories, writes=[block.memory])
        except Exception:  # after Ctrl-C a copy may be on its way that left no ticket: the block goes once all is at rest
            device.pool.free(block, what)
            raise
        managed.shard.own(block)

    def shrink(self, index: int) -> None:
        """Free the bundle's block, but for this rank's part. All of it goes if the host has newer values, or will."""
        managed = self._bundles[index]
        if managed.block is None or self._alone:
            return
        if managed.shard.block is None:
            if managed.updated or any(each.slot_holds_gradient for each in managed.segments):
                self._drop(index)
                return
            self._split_off(managed)
        self._drop(index, keep_shard=True)

    def _split_off(self, managed: ManagedBundle) -> None:
        """A copy of this rank's part of the block."""
        block, device, label = managed.block, self._device, f"shrink bundle {managed.index}"
        assert block is not None
        shard = self._room.allocate(managed.shard_nbytes, f"shard of bundle {managed.index}", compute=True)
        device.transfers.compute(reads=[block.memory], writes=[shard.memory], label=f"{label} begins")
        for piece, own in zip(managed.shard.pieces(shard), managed.own_pieces(block), strict=True):
            piece.copy_(own)
        device.transfers.compute(reads=[block.memory], writes=[shard.memory], label=f"{label} ends")
        managed.shard.own(shard)

    def settle(self, index: int) -> None:
        """The shard is the bundle's home from now on."""
        managed = self._bundles[index]
        if managed.shard.at_home:
            return
        if managed.block is not None:
            self.shrink(index)
        else:
            self.move(index)
        managed.shard.rest(at_home=True)
        managed.count_states()

    def leave_home(self, index: int, *, whole: bool) -> None:
        """The shard is home no more. whole: all of the bundle is there in its stead."""
        if whole:
            self._fetch(index)
        self.forget(index)

    def forget(self, index: int) -> None:
        """It is no home any more; its values are in the bundle's block, or at home."""
        managed = self._bundles[index]
        managed.shard.rest(at_home=False)
        block = managed.shard.leave()
        if block is not None:
            self._device.pool.free(block, f"shard of bundle {index}")
        managed.count_states()

    def clear(self) -> None:
        """None is there that is no home, nor the copies of their bundles."""
        for managed in self._bundles:
            if managed.shard.block is not None and not managed.shard.at_home:
                self._drop(managed.index)
