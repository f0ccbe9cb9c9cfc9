"""The second version of a bundle: another place on the host for its slots, master weights and moments.

Note [Two versions]
    An update that runs ahead of the norm reads master, moments and gradient of the version that counts, and writes all of the
    other one. The version that counts keeps its values and its gradient meanwhile, so that whoever reads or adds to them finds
    what was there before. If the update was right the two change places and nothing is copied; if not, the other one is
    forgotten. Which one counts is one set of bundles (StepControl.second), exchanged in the statement that makes a step done
    (see Note [When a step is done] in control.py). Bundles follow it after that statement, and may do so twice.
    With several micro-batches the gradient is in the accumulator, which both versions share, as they do the slot.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

import torch

from systems.device.device import Device
from systems.device.lanes.transfers import TrackedMemory
from systems.device.memory.host import HostMapping
from systems.errors import BudgetError
from systems.planning.plan import LaneKind, Tier
from systems.planning.step.operations import Work, of_bundle
from systems.recipe.step.control import StepControl
from systems.substrate.bundle.bundle import ManagedBundle
from systems.substrate.bundle.segments import OptimizerState, SegmentPlace, StoredSegment, Stretch, stretches_in
from systems.substrate.bundle.store import Store


class BundleVersions:
    """Both versions of one bundle. number: of the one that it lies in, 0 or 1; -1 on the way from one to the other."""

    def __init__(self, bundle: ManagedBundle, second: Sequence[SegmentPlace]) -> None:
        self._bundle, self.number = bundle, 0
        self._places = [_place_of(each) for each in bundle.segments], list(second)
        starts = bundle.starts()
        lying = [list(zip(starts, bundle.segments, places, strict=True)) for places in self._places]
        self._stretches = [stretches_in(every) for every in lying]
        self._pairs = list(zip(*self._stretches, strict=False))
        if any([s.start for s in self._stretches[0]] != [s.start for s in each] for each in self._stretches):
            singly = [[part for one in every for part in stretches_in([one])] for every in lying]
            self._pairs = list(zip(*singly, strict=True))

    def take(self, number: int) -> None:
        """It lies in that one. Nothing where it does already."""
        if number != self.number:
            self.number = -1
            self._bundle.lie_in(self._places[number], self._stretches[number])
            self.number = number

    def pairs(self) -> list[tuple[Stretch, Stretch]]:
        """The bundle piece by piece: in the version that counts, and in the other."""
        return [(pair[self.number], pair[1 - self.number]) for pair in self._pairs]

    def states(self) -> list[TrackedMemory]:
        """Of both."""
        return [place.state.memory for places in self._places for place in places]

    def written(self) -> list[TrackedMemory]:
        """What an update out of the version that counts writes: of the other all but the gradient."""
        places = self._places[1 - self.number]
        return [memory for place in places for memory in (place.state.memory, place.slot_memory)]

    def read(self) -> list[TrackedMemory]:
        """What it reads."""
        places = self._places[self.number]
        return [memory for place in places for memory in (place.state.memory, place.slot_memory)]


class SecondVersions:
    """of: the versions of each bundle that has two, by number. mappings: their memory. seconds: that making them took.
    peak_bytes: that they had.
    """

    def __init__(self, store: Store, bundles: Sequence[ManagedBundle], device: Device, control: StepControl) -> None:
        self._store, self._bundles, self._device, self._control = store, bundles, device, control
        self.mappings: list[HostMapping] = []
        self.of: dict[int, BundleVersions] = {}
        self.seconds, self.peak_bytes = 0.0, 0

    def make(self, wanted: Collection[int]) -> None:
        """For these bundles. Where there are some already, or the host has no room left, none is made."""
        if self.of or not wanted:
            return
        began = time.perf_counter()
        bundles = [self._bundles[index] for index in sorted(wanted)]
        segments = [each for bundle in bundles for each in bundle.segments]
        sizes = {part: (torch.float32, sum(each.segment.shard_numel for each in segments)) for part in self._store.stated}
        if all(isinstance(each.state, OptimizerState) and each.state.accumulator is None for each in segments):
            sizes["slots"] = self._store.dtype, sizes["master"][1]
        self.close()  # what Ctrl-C may have left
        if sum(numel * dtype.itemsize for dtype, numel in sizes.values()) > self._store.host.room:
            return
        made: dict[str, HostMapping] = {}
        try:
            for part, (dtype, numel) in sizes.items():
                name = f"host-{part}-2"
                made[part] = HostMapping(name, numel * dtype.itemsize, self._store.host, pinned=part == "slots")
                self._device.meter.exempt(made[part].storage)
                made[part].touch()
            of = {each.index: BundleVersions(each, [self._place(one, made) for one in each.segments]) for each in bundles}
            peak = max(self.peak_bytes, sum(mapping.nbytes for mapping in made.values()))
            mappings = list(made.values())
            # one statement that calls nothing: whatever breaks off finds all of them or none
            self.of, self.mappings, self.peak_bytes = of, mappings, peak
        except BaseException as error:
            for mapping in made.values():
                mapping.close()
            if not isinstance(error, BudgetError):
                raise
        self.seconds += time.perf_counter() - began

    def _place(self, stored: StoredSegment, mappings: Mapping[str, HostMapping]) -> SegmentPlace:
        first, numel = _place_of(stored), stored.segment.shard_numel
        (master, memory), *moments = (mappings[part].take(torch.float32, numel) for part in self._store.stated)
        state = OptimizerState(Tier.HOST, master, tuple(each for each, _ in moments), first.state.accumulator, memory)
        slot, slot_memory = first.slot, first.slot_memory
        if "slots" in mappings:
            slot, slot_memory = mappings["slots"].take(self._store.dtype, numel)
        return SegmentPlace(slot, slot_memory, state)

    def follow(self) -> None:
        """Every bundle lies where the version that counts is. After each change of StepControl.second; harmless at any time."""
        second = self._control.second
        for index, versions in self.of.items():
            number = int(index in second)
            if versions.number != number:
                versions.take(number)

    def bring_home(self, bundle: ManagedBundle) -> None:
        """The first version counts from now on, with all that counted before: values, and a gradient in its slots."""
        versions = self.of.get(bundle.index)
        if versions is None:
            return
        self.follow()
        if versions.number == 0:
            return
        kernel, pairs = self._device.host_kernel, versions.pairs()

        def copy() -> None:
            for second, first in pairs:
                for source, target in zip((second.slot, *second.state), (first.slot, *first.state), strict=True):
                    if source.data_ptr() != target.data_ptr():
                        kernel.copy(target, source)

        home = of_bundle(self._store.layout, Work.BRING_HOME, LaneKind.CPU, bundle.index)
        moved = self._device.transfers.issue(home, copy, writes=[*versions.read(), *versions.written()], priority=bundle.index)
        moved.wait()
        self._control.count_first(bundle.index)  # both are alike: whichever counts if Ctrl-C comes between the two
        versions.take(0)

    @property
    def made(self) -> frozenset[int] | None:
        """Bundles that have two; None as long as these can still be made."""
        return frozenset(self.of) or None

    @property
    def pinned_bytes(self) -> int:
        return sum(mapping.nbytes for mapping in self.mappings if mapping.pinned)

    def release(self) -> None:
        """The memory goes to who has a better claim on it."""
        for index, versions in self.of.items():
            self.bring_home(self._bundles[index])
            for memory in versions.written():
                for ticket in memory.tickets():
                    ticket.wait()
        self.close()

    def close(self) -> None:
        """Call only when nothing is in flight."""
        for versions in self.of.values():
            versions.take(0)  # tensors would keep the mappings alive
        self.of = {}
        for mapping in self.mappings:
            mapping.close()
        self.mappings = []


def _place_of(stored: StoredSegment) -> SegmentPlace:
    state = stored.state
    assert isinstance(state, OptimizerState) and state.tier is Tier.HOST, "only what lies on the host has a second place there"
    return SegmentPlace(stored.slot, stored.slot_memory, state)
