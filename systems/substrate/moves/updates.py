"""The optimizer's part of a step: one pass a bundle, on the CPU lane or on the device, where its state lives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch

from systems.device.device import Device
from systems.device.lanes.transfers import TrackedMemory
from systems.device.memory.pool import Allocation
from systems.device.watch.labels import labelled
from systems.planning.layout import Layout, Placement
from systems.planning.plan import LaneKind, Tier
from systems.planning.step.demand import first_uses
from systems.planning.step.operations import Work, of_bundle
from systems.planning.trace import Moment
from systems.recipe.step.control import StepControl
from systems.substrate.bundle.bundle import ManagedBundle
from systems.substrate.bundle.segments import DiskState, OptimizerState, StoredSegment, slots_take_parameters
from systems.substrate.bundle.versions import SecondVersions
from systems.substrate.moves.gradients import Gradients
from systems.substrate.moves.lock_free import LockFree, paused
from systems.substrate.moves.tiers import TierMoves

Updated = tuple[StoredSegment, Allocation, torch.Tensor, "torch.Tensor | None"]


class Issue(Protocol):
    """Issues updates that were prepared. done: bundles that have theirs already, and need none."""

    def __call__(self, factor: float, done: frozenset[int] = frozenset()) -> None: ...


class Updates:
    """Issues the updates of a step, in the order in which the next one needs the bundles: see `follow`.

    gather: see Residency.gather; None on one rank. lock_free: None where updates are part of their steps. order: trained
    bundles, in that order.
    """

    def __init__(
        self,
        layout: Layout,
        bundles: Sequence[ManagedBundle],
        tiers: TierMoves,
        gradients: Gradients,
        device: Device,
        control: StepControl,
        versions: SecondVersions,
        gather: Callable[[ManagedBundle], None] | None,
        lock_free: LockFree | None,
    ) -> None:
        self._gather, self.lock_free = gather, lock_free
        self.layout, self.device, self.control, self._versions = layout, device, control, versions
        self._bundles, self._tiers, self._gradients, self._disk = bundles, tiers, gradients, tiers.store.disk
        self.order: list[ManagedBundle] = []
        self._priority: dict[int, int] = {}
        self.follow(None)

    def follow(self, moments: Sequence[Moment] | None) -> None:
        """Bundles used first in a step of these moments are updated first. None: no step is known; those of the model's first
        units then.
        """
        uses = {b.index: min(b.units) for b in self.layout.bundles} if moments is None else first_uses(self.layout, moments)
        never = 0 if moments is None else len(moments)
        trainable = (b.index for b in self.layout.bundles if b.trainable)
        order = sorted(trainable, key=lambda bundle: (uses.get(bundle, never), bundle))
        self.order = [self._bundles[index] for index in order]
        self._priority = {index: place for place, index in enumerate(order)}
        if self.lock_free is not None:
            self.lock_free.follow(self.order, planned=moments is not None)

    def prepare(self, fired: Sequence[int], also: Collection[int] = ()) -> Issue:
        """Update every bundle that has gradients, once the factor (loss scale and clipping) is known: what is returned takes
        it, and the bundles that are updated already. All that can be done before is done here.

        also: bundles in whose slots are zeros, as they were summed over ranks and nothing came on any.
        """
        wanted = frozenset(fired)
        mine = [b for b in self.order if not wanted.isdisjoint(b.gradients.parameters) or b.index in also]
        return self.prepare_bundles(mine, wanted)

    def prepare_bundles(self, bundles: Sequence[ManagedBundle], wanted: frozenset[int]) -> Issue:
        """Those on the host one by one, so that each is done early; those on the device as one piece of work."""
        on_device = self._on_device(bundles, wanted)

        def run(factor: float, done: frozenset[int] = frozenset()) -> None:
            for bundle in bundles:
                if bundle.index in done:
                    self._kept(bundle)
                elif bundle.buffering.now is not None:
                    assert self.lock_free is not None
                    self.lock_free.add(bundle, wanted)
                else:
                    self._on_host(bundle, wanted, factor)
                    self._through_buffers(bundle, wanted, factor)
            on_device(factor)

        return run

    def ahead(
        self,
        bundle: ManagedBundle,
        wanted: frozenset[int],
        factor: float,
        *,
        is_dropped: Callable[[], bool],
    ) -> None:
        """Out of the version that counts into the other, whole: what gets no gradient is copied."""
        versions = self._versions.of[bundle.index]
        pieces = [
            (old, new, [self._range(p) for p in old.placements if p.parameter in wanted]) for old, new in versions.pairs()
        ]
        kernel = self.device.host_kernel

        def work() -> None:
            if is_dropped():
                return
            for old, new, update in pieces:
                gradient = old.slot if old.accumulator is None else old.accumulator
                kernel.update(*old.state, gradient=gradient, out=new.slot, ranges=update, factor=factor, into=new.state)
                for p in old.placements:
                    if p.parameter not in wanted:
                        for source, target in zip(old.state, new.state, strict=True):
                            kernel.copy(target[p.here], source[p.here])
                        kernel.cast(old.state[0][p.here], new.slot[p.here])

        self.device.transfers.issue(
            of_bundle(self.layout, Work.UPDATE_AHEAD, LaneKind.CPU, bundle.index),
            work,
            reads=versions.read(),
            writes=versions.written(),
            priority=self._priority[bundle.index],
        )

    def _kept(self, bundle: ManagedBundle) -> None:
        """An update that ran ahead was right."""
        versions = self._versions.of[bundle.index]
        added = [old.accumulator for old, _ in versions.pairs() if old.accumulator is not None]
        if added:
            self.device.transfers.issue(
                of_bundle(self.layout, Work.CLEAR, LaneKind.CPU, bundle.index),
                lambda: _zero(*added),
                writes=versions.states(),
                priority=self._priority[bundle.index],
            )
        bundle.update_on_host()

    def discard(self) -> None:
        """The step is skipped: slots that hold a gradient get their parameters back, accumulators are cleared."""
        for bundle in self.order:
            for stored in bundle.segments:
                self._clear_accumulator(bundle, stored)
            self._tiers.restore_slots(bundle, lambda each: each.slot_holds_gradient)

    def _clear_accumulator(self, bundle: ManagedBundle, stored: StoredSegment) -> None:
        state = stored.state
        assert state is not None
        if state.accumulator is None:
            return
        accumulator = state.accumulator
        if state.tier is Tier.DEVICE:
            label = f"clear accumulator of segment {stored.segment.index}"
            self.device.transfers.compute(writes=[state.memory], label=label)
            accumulator.zero_()
            self.device.transfers.compute(writes=[state.memory], label=label)
        else:
            self.device.transfers.issue(
                of_bundle(self.layout, Work.CLEAR, LaneKind.CPU, bundle.index, stored.segment.index),
                lambda: _zero(accumulator),
                writes=[state.memory],
                priority=self._priority[bundle.index],
            )

    def _on_host(self, bundle: ManagedBundle, wanted: frozenset[int], factor: float) -> None:
        """One job, which leaves its ticket on all segments. Where no gradient came the slot gets its parameters back."""
        stretches = bundle.stretches if bundle.updated_on_host else bundle.stretches_of(lambda each: each.tier is Tier.HOST)
        if not stretches:
            return
        ranges = [[self._range(p) for p in stretch.placements if p.parameter in wanted] for stretch in stretches]

        def work() -> None:
            for stretch, update in zip(stretches, ranges, strict=True):
                self._update(stretch.state, stretch.accumulator, stretch.slot, update, stretch.placements, wanted, factor)

        updated = [each for stretch in stretches for each in stretch.stored]
        self.device.transfers.issue(
            of_bundle(self.layout, Work.UPDATE, LaneKind.CPU, bundle.index),
            work,
            writes=[memory for each in updated if each.state is not None for memory in (each.state.memory, each.slot_memory)],
            priority=self._priority[bundle.index],
        )
        slots_take_parameters(updated)
        bundle.update_on_host()

    def _through_buffers(self, bundle: ManagedBundle, wanted: frozenset[int], factor: float) -> None:
        """Segments whose states are on the disk: each is read into its buffer, updated there and written back, while others are
        read and written."""
        if bundle.index not in self.layout.on_disk:
            return
        with paused(self.lock_free):
            for stored in bundle.segments:
                if isinstance(stored.state, DiskState):
                    self._through_buffer(bundle, stored, stored.state, wanted, factor)
                    bundle.update_on_host()

    def _through_buffer(
        self, bundle: ManagedBundle, stored: StoredSegment, state: DiskState, wanted: frozenset[int], factor: float
    ) -> None:
        disk, place, segment, transfers = self._disk, state.place, stored.segment, self.device.transfers
        assert disk is not None
        ranges = [self._range(p) for p in stored.placements if p.parameter in wanted]
        buffer = disk.read(place, transfers)

        def work() -> None:
            self._update(buffer.views(place), state.accumulator, stored.slot, ranges, stored.placements, wanted, factor)

        changed = [buffer.memory, stored.slot_memory, *([state.memory] if state.accumulator is not None else [])]
        update = of_bundle(self.layout, Work.UPDATE, LaneKind.CPU, bundle.index, segment.index)
        try:
            transfers.issue(update, work, writes=changed, priority=self._priority[bundle.index])
        except BaseException:  # Ctrl-C, which may have come before the update left its ticket: the write must not overtake it
            self.device.lanes[LaneKind.CPU].rest()
            raise
        finally:  # what was updated is written in any case, or what was read
            disk.write(place, transfers)
        slots_take_parameters([stored])

    def _update(
        self,
        state: Sequence[torch.Tensor],
        accumulator: torch.Tensor | None,
        slot: torch.Tensor,
        ranges: list[Any],
        placements: Sequence[Placement],
        wanted: frozenset[int],
        factor: float,
    ) -> None:
        """On the CPU lane. state: master and moments. Where no gradient came the slot gets its parameters back."""
        kernel, gradient = self.device.host_kernel, slot if accumulator is None else accumulator
        kernel.update(*state, gradient=gradient, out=slot, ranges=ranges, factor=factor)
        for p in placements:
            if p.parameter not in wanted:
                kernel.cast(state[0][p.here], slot[p.here])
        if accumulator is not None:
            accumulator.zero_()

    def _range(self, p: Placement) -> Any:
        return self.control.update_range(p.parameter, p.offset, p.numel)

    def _on_device(self, bundles: Sequence[ManagedBundle], wanted: frozenset[int]) -> Callable[[float], None]:
        segments = [found for bundle in bundles for found in _updated_there(bundle)]
        if not segments:
            return lambda factor: None
        kernel, memories, tasks, accumulators = self.device.kernel, [], [], []
        for stored, block, out, total in segments:
            state = stored.state
            assert isinstance(state, OptimizerState)
            memories += [state.memory, block.memory]
            if state.accumulator is not None:
                accumulators.append(state.accumulator)
            for p in stored.placements:
                if p.parameter in wanted:
                    where, added = p.here, total if state.accumulator is None else state.accumulator
                    gradient = self._gradients.on_device(p.parameter)[p.piece] if added is None else added[where]
                    ranges = [self.control.update_range(p.parameter, 0, p.numel)]
                    moments = [each[where] for each in state.moments]
                    tasks.append(kernel.task(state.master[where], *moments, gradient, out[where], ranges))
        update = kernel.prepare_all(tasks)
        label = f"update {len(segments)} segments from {segments[0][0].segment.index} on"

        reduced = [] if self._gather is None else _ranges(bundles)

        def run(factor: float) -> None:
            self.device.transfers.compute(reads=reduced, writes=memories, label=label)
            with self.device.phases.of("adam_device"), labelled(label):
                update(factor)
                for accumulator in accumulators:
                    accumulator.zero_()
            self.device.transfers.compute(reads=reduced, writes=memories, label=label)

        return run

    def gather(self, reduced: Collection[int]) -> None:
        """Of several ranks: each has updated its shards on the device of those bundles that were reduced in this step, and are
        there whole.
        """
        assert self._gather is not None
        for bundle in self.order:
            if bundle.states_on_device and bundle.index in reduced and bundle.scattered and not bundle.shard.at_home:
                self._gather(bundle)


def _updated_there(bundle: ManagedBundle) -> list[Updated]:
    """Segments that are updated on the device, with the block of their parameters and these in it, and their part of the sum
    over ranks where that has been split off.
    """
    if not bundle.states_on_device:
        return []
    shard, gradient = bundle.shard, bundle.gradients
    block = shard.block if shard.at_home else bundle.block
    assert block is not None, "a segment updated on the device is always there, or its shard is"
    pieces = shard.pieces(block) if shard.at_home else bundle.own_pieces(block)
    totals: Sequence[torch.Tensor | None] = [None] * len(pieces)
    if gradient.range is not None and gradient.range.nbytes < bundle.nbytes:
        totals = shard.pieces(gradient.range)
    found = zip(bundle.segments, pieces, totals, strict=True)
    return [(each, block, piece, total) for each, piece, total in found if each.tier is Tier.DEVICE]


def _ranges(bundles: Sequence[ManagedBundle]) -> list[TrackedMemory]:
    """Of gradients that were reduced and stay on the device: compute must not read them before."""
    there = [bundle for bundle in bundles if bundle.states_on_device]
    blocks = [bundle.block if bundle.gradients.written else bundle.gradients.range for bundle in there]
    return [block.memory for block in blocks if block is not None]


def _zero(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        tensor.zero_()
