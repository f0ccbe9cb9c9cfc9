"""The updating thread of Algorithm 2: updates what has gradients, the bundle first whose update now wastes least.

Reads, updates and writes have lanes, so that the states of one segment are read while others are updated and written, from
bundle to bundle. All that this thread touches is its own while bundles are buffered, but for the disk's lanes and buffers:
who else wants those has it `pause`. See Note [Lock-free] in bundle/buffered.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle
from typing import Any

import torch

from systems.device.device import Device
from systems.device.lanes.lane import UpdateLane
from systems.device.lanes.ticket import Ticket
from systems.device.lanes.transfers import TrackedMemory, Transfers
from systems.device.memory.disk import Disk, DiskPlace
from systems.machine.device_thread import DeviceThread
from systems.planning.disk_layout import BUFFERS
from systems.planning.layout import Layout, Placement
from systems.planning.plan import LaneKind
from systems.planning.step.operations import Work, of_bundle
from systems.recipe.step.control import StepControl
from systems.substrate.bundle.buffered import Behind, BufferedBundle, GradientSum
from systems.substrate.bundle.segments import DiskState, Stretch

Begun = tuple[BufferedBundle, GradientSum, list[Ticket]]


def next_ready(bundles: Sequence[BufferedBundle]) -> BufferedBundle | None:
    """What is updated next, of bundles in order of use: what wastes least, which is nothing where steps wait for an update; of
    several of those the one that is used first.
    """
    return min((bundle for bundle in bundles if bundle.ready), key=lambda bundle: bundle.waste, default=None)


class UpdatingThread:
    """bundles: those that it goes over, in order of use. updates: that it has published."""

    def __init__(self, layout: Layout, disk: Disk | None, device: Device, control: StepControl, behind: Behind) -> None:
        self._layout, self._disk, self._device, self._control, self._behind = layout, disk, device, control, behind
        self.bundles: list[BufferedBundle] = []
        self.updates = 0
        self._own = UpdateLane(LaneKind.CPU, jitter=device.jitter, threads=device.cpu_lane_threads)
        self._transfers = Transfers({**device.lanes, LaneKind.CPU: self._own}, device.compute, device.log)
        self._places: dict[int, DiskPlace] = {}
        self._buffers = cycle(range(BUFFERS))  # in turn, for updates come in any order
        self._paused = 0
        self._writes: deque[Ticket] = deque()
        self._read: Ticket | None = None  # of the update that was begun last, the last of its reads
        self._busy, self._ends = False, False
        self._thread = DeviceThread(self._run, "updating")
        self._thread.start()

    # ---- other threads

    def go_over(self, bundles: Sequence[BufferedBundle]) -> None:
        """These from now on. It is at rest."""
        self.bundles = list(bundles)

    def finish(self) -> None:
        """Wait until no gradient is uncleared and all is written. Nothing may be pinned, nor added meanwhile."""
        self._behind.wait(lambda: not self._busy and not any(bundle.uncleared for bundle in self.bundles))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing of it is on its way."""
        with self._behind.lock:
            self._paused += 1
        try:
            self._behind.wait(lambda: not self._busy)
            yield
        finally:
            with self._behind.lock:
                self._paused -= 1
                self._behind.changed.notify_all()

    def close(self) -> None:
        with self._behind.lock:
            self._ends = True
            self._behind.changed.notify_all()
        self._thread.join()
        self._own.close()
        self._behind.fail(RuntimeError("the engine is closed"))

    # ---- its own

    def _run(self) -> None:
        try:
            self._go_on()
        except BaseException as error:  # noqa: BLE001  who waits for it is told
            self._behind.fail(error)
        finally:
            self._own.rest()
            with self._behind.lock:
                self._busy = False
                self._behind.changed.notify_all()

    def _go_on(self) -> None:
        """One update is begun while the one before goes on, but has read all that it reads: the later it is chosen, the more
        gradients there are to choose by, and to take.
        """
        before: Begun | None = None
        while True:
            if self._read is not None:
                self._read.wait()
                self._read = None
            found = self._begin(may_wait=before is None)
            if found is None and before is None:
                return
            begun = None if found is None else (*found, self._issue(*found))
            if before is not None:
                self._end(*before)
            before = begun

    def _begin(self, *, may_wait: bool) -> tuple[BufferedBundle, GradientSum] | None:
        """The next bundle with gradients, and these. None: there is none now, or if it may wait, never any more."""
        while True:
            with self._behind.lock:
                ready = None if self._paused or self._ends else next_ready(self.bundles)
                if ready is not None:
                    self._busy = True
                    return ready, ready.take()
                if not may_wait:
                    return None
                if not self._writes:
                    self._busy = False
                    self._behind.changed.notify_all()
                    if self._ends:
                        return None
                    self._behind.changed.wait()
                    continue
                written = self._writes.popleft()
            written.wait()

    def _end(self, bundle: BufferedBundle, taken: GradientSum, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            ticket.wait()
        with self._behind.lock:
            bundle.publish(taken)
            self.updates += 1
            self._behind.changed.notify_all()

    def _issue(self, bundle: BufferedBundle, taken: GradientSum) -> list[Ticket]:
        """The tickets of all that writes the next version."""
        tickets = []
        for stretch, gradient, out in zip(bundle.stretches, taken.tensors, bundle.back, strict=True):
            if stretch.state:
                work = self._update(bundle, taken, list(stretch.state), gradient, out, stretch.placements)
                operation = of_bundle(self._layout, Work.UPDATE, LaneKind.CPU, bundle.index)
                tickets.append(self._transfers.issue(operation, work))
            else:
                tickets += self._through_buffers(bundle, taken, stretch, gradient, out)
        while self._writes and self._writes[0].done():
            self._writes.popleft().wait()
        return tickets

    def _through_buffers(
        self, bundle: BufferedBundle, taken: GradientSum, stretch: Stretch, gradient: torch.Tensor, out: torch.Tensor
    ) -> Iterator[Ticket]:
        """States on the disk, segment by segment."""
        disk, start = self._disk, 0
        assert disk is not None
        for stored in stretch.stored:
            state, segment = stored.state, stored.segment.index
            assert isinstance(state, DiskState)
            here, start = slice(start, start + stored.slot.numel()), start + stored.slot.numel()
            mine = self._places.setdefault(segment, replace(state.place, memory=TrackedMemory(state.memory.extent)))
            place = replace(mine, buffer=next(self._buffers))
            buffer = disk.read(place, self._transfers)
            self._read = buffer.memory.writer
            work = self._update(bundle, taken, buffer.views(place), gradient[here], out[here], stored.placements)
            operation = of_bundle(self._layout, Work.UPDATE, LaneKind.CPU, bundle.index, segment)
            yield self._transfers.issue(operation, work, writes=[buffer.memory])
            self._writes.append(disk.write(place, self._transfers))

    def _update(
        self,
        bundle: BufferedBundle,
        taken: GradientSum,
        state: Sequence[torch.Tensor],
        gradient: torch.Tensor,
        out: torch.Tensor,
        placements: Sequence[Placement],
    ) -> Callable[[], None]:
        """On its lane. Where no gradient came the version gets what the master has."""
        inside, rule, kernel = taken.inside, self._control.groups.chosen.rule, self._device.host_kernel
        assert inside is not None
        ranges, others = list[Any](), list[Placement]()
        for p in placements:
            if p.parameter in taken.fired:
                hyper, count = inside.hyper[inside.group_of[p.parameter]], bundle.counts[p.parameter]
                ranges.append(rule.range(hyper, p.offset, p.numel, count))
            else:
                others.append(p)

        def work() -> None:
            kernel.update(*state, gradient=gradient, out=out, ranges=ranges, factor=1.0)
            for p in others:
                kernel.cast(state[0][p.here], out[p.here])

        return work
