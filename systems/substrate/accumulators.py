"""The fp32 accumulators of a step with several micro-batches: a complete gradient is added where its optimizer is."""

from __future__ import annotations

from systems.planning.plan import LaneKind, Tier
from systems.substrate.gradient_ranges import BundleGradient
from systems.substrate.residency import Residency


class Accumulators:
    def __init__(self, residency: Residency) -> None:
        self.layout, self.store, self.device = residency.layout, residency.store, residency.device

    def add(self, bundle: int, gradient: BundleGradient, *, last: bool) -> None:
        """From the range on the device, or from the slots. last: of the step's micro-batches."""
        segments = self.layout.bundles[bundle].segments
        if self.store.segments[segments[0]].tier is Tier.DEVICE:
            self._on_device(bundle, gradient)
        else:
            for s in segments:
                self._on_host(s, frozenset(gradient.fired), last=last)
        gradient.fired.clear()  # they are in the accumulator; what comes late is added there by itself
        gradient.flushed, gradient.parked = True, False

    def _on_host(self, segment: int, fired: frozenset[int], *, last: bool) -> None:
        stored = self.store.segments[segment]
        state, slot, kernel = stored.state, stored.slot, self.device.host_kernel
        assert state is not None and state.accumulator is not None
        accumulator = state.accumulator
        wheres = [p.here for p in stored.segment.placements if p.parameter in fired]

        def work() -> None:
            for where in wheres:
                kernel.accumulate(accumulator[where], slot[where])

        self.device.transfers.issue(
            LaneKind.CPU,
            work,
            reads=[stored.slot_memory],
            writes=[state.memory],
            label=f"accumulate segment {segment}",
            priority=segment,
        )
        if not last:
            self.store.restore_slot(segment)

    def _on_device(self, bundle: int, gradient: BundleGradient) -> None:
        assert gradient.range is not None
        pieces = self.store.pieces(bundle, gradient.range)
        for s, piece in zip(self.layout.bundles[bundle].segments, pieces, strict=True):
            stored = self.store.segments[s]
            state = stored.state
            assert state is not None and state.accumulator is not None
            self.device.transfers.compute(writes=[state.memory], label=f"accumulate segment {s} begins")
            with self.device.phases.of("accumulate"):
                for place in stored.segment.placements:
                    if place.parameter in gradient.fired:
                        self.device.kernel.accumulate(state.accumulator[place.here], piece[place.here])
            self.device.transfers.compute(
                reads=[gradient.range.memory], writes=[state.memory], label=f"accumulate segment {s} ends"
            )
