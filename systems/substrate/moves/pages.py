"""Pages come to the device, stay there as the rest of their bundle goes, and are merged with it: Note [Pages].

Of one rank. Neighbours are one copy, however many they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from systems.device.device import Device
from systems.device.lanes.transfers import TrackedMemory
from systems.device.watch.labels import labelled
from systems.planning.layout import Layout
from systems.planning.plan import LaneKind, Pages, pages_bytes
from systems.planning.step.operations import Work, of_bundle
from systems.substrate.bundle.bundle import ManagedBundle
from systems.substrate.bundle.pages import DevicePages
from systems.substrate.bundle.segments import StoredSegment, Stretch
from systems.substrate.moves.room import DeviceRoom


class PageSources(Protocol):
    """Residency.sources."""

    def __call__(
        self, managed: ManagedBundle, which: Callable[[StoredSegment], bool] | None = None
    ) -> tuple[Iterable[tuple[Stretch, torch.Tensor]], list[TrackedMemory]]: ...


class PageMoves:
    """sources: where the host has segments' parameters. drop: of a bundle, with its pages."""

    def __init__(
        self, layout: Layout, device: Device, room: DeviceRoom, *, sources: PageSources, drop: Callable[[int], None]
    ) -> None:
        self._layout, self._device, self._room, self._sources, self._drop = layout, device, room, sources, drop

    def move(self, managed: ManagedBundle, run: Pages) -> None:
        """From the host; nothing if the bundle, or any of them, is there or on its way."""
        if managed.block is not None or any(p.run.first < run.stop and run.first < p.run.stop for p in managed.pages):
            return
        device, what, size = self._device, _named(managed, run), pages_bytes(self._layout, run)
        block = self._room.allocate(size, what)
        made = DevicePages(run, _start(managed, run), block)
        try:
            sources, memories = self._sources(managed, lambda each: run.first <= each.segment.index < run.stop)

            def copy() -> None:
                for stretch, source in sources:
                    made.on(stretch).copy_(source, non_blocking=True)

            device.log.count("h2d_bytes", size)
            with device.phases.of("h2d_updated" if managed.updated else "h2d_parameters"):
                move = of_bundle(self._layout, Work.MOVE, LaneKind.H2D, managed.index)
                device.transfers.issue(move, copy, reads=memories, writes=[block.memory])
        except Exception:  # after Ctrl-C a copy may be on its way that left no ticket: the block goes once all is at rest
            device.pool.free(block, what)
            raise
        managed.pages.append(made)

    def leave(self, managed: ManagedBundle, runs: Sequence[Pages]) -> None:
        """The bundle goes, but for these, which stay where they are. All of it goes if the host has newer values, or will."""
        if managed.block is None:
            return
        if managed.updated or any(each.slot_holds_gradient for each in managed.segments):
            self._drop(managed.index)
            return
        with labelled(f"leave pages of bundle {managed.index}"):
            item, starts = self._layout.itemsize, [_start(managed, run) for run in runs]
            kept = [(at * item, at * item + pages_bytes(self._layout, run)) for at, run in zip(starts, runs, strict=True)]
            block = managed.leave()
            assert block is not None
            blocks = self._device.pool.cut(block, kept, f"bundle {managed.index} but for some pages")
            managed.pages.extend(DevicePages(*each) for each in zip(runs, starts, blocks, strict=True))

    def merge(self, managed: ManagedBundle) -> None:
        """All of the bundle, contiguous, out of the pages that are there and, for the rest, from the host."""
        device, what = self._device, f"bundle {managed.index}"
        block = self._room.allocate(managed.nbytes, what, compute=True)
        there = list(managed.pages)  # some may have gone for the room
        had = {number for each in there for number in range(*each.run)}
        try:
            sources, memories = self._sources(managed, lambda each: each.segment.index not in had)
            missing = managed.nbytes - sum(each.block.nbytes for each in there)

            def copy() -> None:
                for stretch, source in sources:
                    stretch.on(block).copy_(source, non_blocking=True)

            if missing:
                device.log.count("h2d_bytes", missing)
                with device.phases.of("h2d_updated" if managed.updated else "h2d_parameters"):
                    fetch = of_bundle(self._layout, Work.FETCH, LaneKind.H2D, managed.index)
                    device.transfers.issue(fetch, copy, reads=memories, writes=[block.memory])
            if there:
                reads, dtype = [each.block.memory for each in there], managed.segments[0].slot.dtype
                device.transfers.compute(reads=reads, writes=[block.memory], label=f"merge {what} begins")
                for each in there:
                    numel = each.block.nbytes // self._layout.itemsize
                    block.view(dtype, each.start, numel).copy_(each.block.view(dtype, 0, numel))
                device.transfers.compute(reads=reads, writes=[block.memory], label=f"merge {what} ends")
        except Exception:  # see move
            device.pool.free(block, what)
            raise
        managed.own(block)
        self.free(managed)

    def free(self, managed: ManagedBundle) -> None:
        """They go."""
        while managed.pages:
            gone = managed.pages.pop()
            self._device.pool.free(gone.block, _named(managed, gone.run))


def _start(managed: ManagedBundle, run: Pages) -> int:
    """The first element in the bundle."""
    return managed.starts()[run.first - managed.segments[0].segment.index]


def _named(managed: ManagedBundle, run: Pages) -> str:
    return f"pages {run.first} to {run.stop} of bundle {managed.index}"
