"""The optimizer's part of a step: one Adam pass a segment, on the CPU lane or on the device, where its state lives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from systems.planning.layout import Bundle, Layout
from systems.planning.plan import LaneKind, Tier
from systems.substrate.adam import AdamRange, AdamTask
from systems.substrate.device import Device
from systems.substrate.gradients import Gradients
from systems.substrate.labels import labelled
from systems.substrate.recipe import StepControl
from systems.substrate.residency import Residency
from systems.substrate.store import OptimizerState, Store, StoredSegment
from systems.substrate.tiers import Allocation


class Updates:
    """Issues the updates of a step. Segments are taken lowest unit first: the next forward needs those first."""

    def __init__(
        self,
        layout: Layout,
        store: Store,
        residency: Residency,
        gradients: Gradients,
        device: Device,
        control: StepControl,
    ) -> None:
        self.layout, self.store, self.residency = layout, store, residency
        self.gradients, self.device, self.control = gradients, device, control
        first_unit = {s: min(b.units) for b in layout.bundles for s in b.segments}
        self._order = sorted((s.index for s in layout.segments if s.space.trainable), key=lambda s: (first_unit[s], s))
        self._priority = {s: i for i, s in enumerate(self._order)}

    def norm_of_accumulated(self, fired: Sequence[int]) -> None:
        """With several micro-batches: the partial sums of squares, out of the fp32 accumulators where they live."""
        wanted = frozenset(fired)
        for bundle in self.layout.bundles:
            mine = sorted({p.parameter for s in bundle.segments for p in self.layout.segments[s].placements} & wanted)
            if mine:
                self._norm_of_accumulated(bundle, mine)
        if any(self.store.segments[s].tier is Tier.HOST for s in self._order):
            self.device.lanes[LaneKind.CPU].drain()

    def _norm_of_accumulated(self, bundle: Bundle, parameters: list[int]) -> None:
        states = [self.store.segments[s].state for s in bundle.segments]
        memories = [state.memory for state in states if state is not None]
        on_host = self.store.segments[bundle.segments[0]].tier is Tier.HOST
        kernel = self.device.host_kernel if on_host else self.device.kernel
        pieces: dict[int, list[torch.Tensor]] = {parameter: [] for parameter in parameters}
        for s, state in zip(bundle.segments, states, strict=True):
            assert state is not None and state.accumulator is not None
            for piece in self.layout.segments[s].placements:
                if piece.parameter in pieces:
                    pieces[piece.parameter].append(state.accumulator[piece.here])

        def work() -> None:
            sums = kernel.sum_squares_all([joined(each) for each in pieces.values()])
            self.gradients.partials[bundle.index] = tuple(parameters), sums

        label = f"norm of bundle {bundle.index}"
        if on_host:
            self.device.transfers.issue(LaneKind.CPU, work, reads=memories, label=label, priority=-1)
            return
        self.device.transfers.compute(reads=memories, label=label)
        with labelled(label):
            work()

    def prepare(self, fired: Sequence[int]) -> Callable[[float], None]:
        """Update every segment that has gradients, once the factor (loss scale and clipping) is known: what is returned
        takes it. All that can be done before is done here.
        """
        wanted = frozenset(fired)
        placements = {s: self.store.segments[s].segment.placements for s in self._order}
        return self.prepare_segments([s for s in self._order if any(p.parameter in wanted for p in placements[s])], wanted)

    def prepare_segments(self, segments: Sequence[int], wanted: frozenset[int]) -> Callable[[float], None]:
        """Those on the host one by one, so that each is done early; those on the device as one piece of work."""
        stored = [self.store.segments[s] for s in segments]
        on_host = [each for each in stored if each.tier is not Tier.DEVICE]
        on_device = self._on_device([each for each in stored if each.tier is Tier.DEVICE], wanted)

        def run(factor: float) -> None:
            for each in on_host:
                self._on_host(each, wanted, factor)
            on_device(factor)

        return run

    def discard(self) -> None:
        """The step is skipped: slots that hold a gradient get their parameters back, accumulators are cleared."""
        for s in self._order:
            stored = self.store.segments[s]
            state = stored.state
            assert state is not None
            if state.accumulator is not None:
                self._clear_accumulator(stored)
            if stored.slot_holds_gradient:
                self.store.restore_slot(s)

    def _clear_accumulator(self, stored: StoredSegment) -> None:
        state = stored.state
        assert state is not None and state.accumulator is not None
        accumulator, label = state.accumulator, f"clear accumulator of segment {stored.segment.index}"
        if state.tier is Tier.DEVICE:
            self.device.transfers.compute(writes=[state.memory], label=label)
            accumulator.zero_()
            self.device.transfers.compute(writes=[state.memory], label=label)
        else:
            self.device.transfers.issue(
                LaneKind.CPU,
                lambda: _zero(accumulator),
                writes=[state.memory],
                label=label,
                priority=self._priority[stored.segment.index],
            )

    def _ranges(self, stored: StoredSegment, wanted: frozenset[int]) -> tuple[list[AdamRange], list[slice]]:
        """Ranges to update, and ranges whose slot must get its parameters back because no gradient came."""
        update, untouched = [], []
        for p in stored.segment.placements:
            if p.parameter in wanted:
                update.append(self.control.adam_range(p.parameter, p.offset, p.numel))
            else:
                untouched.append(p.here)
        return update, untouched

    def _on_host(self, stored: StoredSegment, wanted: frozenset[int], factor: float) -> None:
        state, slot, kernel = stored.state, stored.slot, self.device.host_kernel
        assert state is not None
        update, untouched = self._ranges(stored, wanted)

        def work() -> None:
            kernel.update(
                master=state.master,
                exp_avg=state.exp_avg,
                exp_avg_sq=state.exp_avg_sq,
                gradient=slot if state.accumulator is None else state.accumulator,
                out=slot,
                ranges=update,
                factor=factor,
            )
            for where in untouched:
                kernel.cast(state.master[where], slot[where])
            if state.accumulator is not None:
                state.accumulator.zero_()

        index = stored.segment.index
        self.device.transfers.issue(
            LaneKind.CPU,
            work,
            writes=[state.memory, stored.slot_memory],
            label=f"update segment {index}",
            priority=self._priority[index],
        )
        stored.slot_holds_gradient = False
        self.residency.bundles[self.layout.bundle_of_segment[index]].updated = True

    def _on_device(self, segments: Sequence[StoredSegment], wanted: frozenset[int]) -> Callable[[float], None]:
        if not segments:
            return lambda factor: None
        memories, tasks, accumulators = [], [], []
        for stored in segments:
            state, block, out = self._device_copy(stored)
            memories += [state.memory, block.memory]
            if state.accumulator is not None:
                accumulators.append(state.accumulator)
            for p in stored.segment.placements:
                if p.parameter in wanted:
                    where, on_device = p.here, self.gradients.on_device
                    gradient = on_device(p.parameter)[p.piece] if state.accumulator is None else state.accumulator[where]
                    ranges = [self.control.adam_range(p.parameter, 0, p.numel)]
                    moments = state.exp_avg[where], state.exp_avg_sq[where]
                    tasks.append(AdamTask(state.master[where], *moments, gradient, out[where], ranges))
        update = self.device.kernel.prepare_all(tasks)
        label = f"update {len(segments)} segments from {segments[0].segment.index} on"

        def run(factor: float) -> None:
            self.device.transfers.compute(writes=memories, label=label)
            with self.device.phases.of("adam_device"), labelled(label):
                update(factor)
                for accumulator in accumulators:
                    accumulator.zero_()
            self.device.transfers.compute(writes=memories, label=label)

        return run

    def _device_copy(self, stored: StoredSegment) -> tuple[OptimizerState, Allocation, torch.Tensor]:
        """State, block and the parameters in it of a segment that is updated on the device."""
        index, state = stored.segment.index, stored.state
        bundle = self.residency.bundles[self.layout.bundle_of_segment[index]]
        assert state is not None and bundle.block is not None, "a segment updated on the device is always resident"
        before = bundle.bundle.segments[: bundle.bundle.segments.index(index)]
        start = sum(self.layout.segments[s].numel for s in before)
        return state, bundle.block, bundle.block.view(self.store.dtype, start, stored.segment.numel)


def joined(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Flat pieces as one tensor: a view where each begins where the last one ends (so it is on the host), else a copy."""
    first, *rest = pieces
    end = first.data_ptr() + first.nbytes
    for piece in rest:
        if piece.data_ptr() != end or piece.untyped_storage()._cdata != first.untyped_storage()._cdata:
            return torch.cat(list(pieces))
        end += piece.nbytes
    return first.as_strided((sum(piece.numel() for piece in pieces),), (1,))


def _zero(tensor: torch.Tensor) -> None:
    tensor.zero_()
