"""The fp32 accumulators of a step with several micro-batches: a complete gradient is added where its optimizer is."""

from __future__ import annotations

from systems.planning.plan import LaneKind, Tier
from systems.planning.step.operations import Work, of_bundle
from systems.substrate.moves.ranges import BundleGradient
from systems.substrate.moves.residency import Residency


class Accumulators:
    def __init__(self, residency: Residency) -> None:
        self.layout, self.store, self.device = residency.layout, residency.store, residency.device

    def add(self, bundle: int, gradient: BundleGradient, *, last: bool) -> None:
        """From the range on the device, or from the slots. last: of the step's micro-batches."""
        segments = self.layout.bundles[bundle].segments
        if self.store.segments[segments[0]].tier is Tier.DEVICE:
            self._on_device(bundle, gradient)
        else:
            self._on_host(bundle, frozenset(gradient.fired), last=last)
        gradient.fired.clear()  # they are in the accumulator; what comes late is added there by itself
        gradient.flushed, gradient.parked = True, False

    def _on_host(self, bundle: int, fired: frozenset[int], *, last: bool) -> None:
        runs, kernel = self.store.runs(bundle), self.device.host_kernel

        def work() -> None:
            for run in runs:
                assert run.accumulator is not None
                for p in run.placements:
                    if p.parameter in fired:
                        kernel.accumulate(run.accumulator[p.here], run.slot[p.here])

        segments = [each for run in runs for each in run.stored]
        self.device.transfers.issue(
            of_bundle(self.layout, Work.ACCUMULATE, LaneKind.CPU, bundle),
            work,
            reads=[each.slot_memory for each in segments],
            writes=[each.state.memory for each in segments if each.state is not None],
            priority=bundle,
        )
        if not last:
            self.store.restore_slots(bundle)

    def _on_device(self, bundle: int, gradient: BundleGradient) -> None:
        assert gradient.range is not None
        pieces = self.store.pieces(bundle, gradient.range)
        segments = [self.store.segments[s] for s in self.layout.bundles[bundle].segments]
        memories, label = [each.state.memory for each in segments if each.state is not None], f"accumulate bundle {bundle}"
        self.device.transfers.compute(writes=memories, label=f"{label} begins")
        with self.device.phases.of("accumulate"):
            for stored, piece in zip(segments, pieces, strict=True):
                assert stored.state is not None and stored.state.accumulator is not None
                for place in stored.segment.placements:
                    if place.parameter in gradient.fired:
                        self.device.kernel.accumulate(stored.state.accumulator[place.here], piece[place.here])
        self.device.transfers.compute(reads=[gradient.range.memory], writes=memories, label=f"{label} ends")
