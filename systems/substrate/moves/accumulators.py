"""The fp32 accumulators of a step with several micro-batches: a complete gradient is added where its optimizer is."""

from __future__ import annotations

from systems.planning.plan import LaneKind, Tier
from systems.planning.step.operations import Work, before_updates, of_bundle
from systems.substrate.bundle.bundle import ManagedBundle
from systems.substrate.bundle.gradient import BundleGradient
from systems.substrate.bundle.states import GradientState
from systems.substrate.moves.tiers import TierMoves


class Accumulators:
    def __init__(self, tiers: TierMoves) -> None:
        self._tiers, self.layout, self.device = tiers, tiers.layout, tiers.device

    def add(self, bundle: ManagedBundle, gradient: BundleGradient, *, last: bool) -> None:
        """From the range on the device, or from the slots. last: of the step's micro-batches."""
        if bundle.segments[0].tier is Tier.DEVICE:
            self._on_device(bundle, gradient)
        else:
            self._on_host(bundle, frozenset(gradient.fired), last=last)
        gradient.fired.clear()  # they are in the accumulator; what comes late is added there by itself
        gradient.to(GradientState.SENT)

    def _on_host(self, bundle: ManagedBundle, fired: frozenset[int], *, last: bool) -> None:
        stretches, kernel = bundle.stretches, self.device.host_kernel

        def work() -> None:
            for stretch in stretches:
                assert stretch.accumulator is not None
                for p in stretch.placements:
                    if p.parameter in fired:
                        kernel.accumulate(stretch.accumulator[p.here], stretch.slot[p.here])

        segments = [each for stretch in stretches for each in stretch.stored]
        self.device.transfers.issue(
            of_bundle(self.layout, Work.ACCUMULATE, LaneKind.CPU, bundle.index),
            work,
            reads=[each.slot_memory for each in segments],
            writes=[each.state.memory for each in segments if each.state is not None],
            priority=before_updates(self.layout, bundle.index),
        )
        if not last:
            self._tiers.restore_slots(bundle)

    def _on_device(self, bundle: ManagedBundle, gradient: BundleGradient) -> None:
        assert gradient.range is not None
        pieces = bundle.own_pieces(gradient.range)
        memories = [each.state.memory for each in bundle.segments if each.state is not None]
        label = f"accumulate bundle {bundle.index}"
        if bundle.segments[0].segment.space.ranks > 1:
            self.device.transfers.order_compute(reads=[gradient.range.memory], label=f"{label} once it is reduced")
        self.device.transfers.compute(writes=memories, label=f"{label} begins")
        with self.device.phases.of("accumulate"):
            for stored, piece in zip(bundle.segments, pieces, strict=True):
                assert stored.state is not None and stored.state.accumulator is not None
                for place in stored.placements:
                    if place.parameter in gradient.fired:
                        self.device.kernel.accumulate(stored.state.accumulator[place.here], piece[place.here])
        self.device.transfers.compute(reads=[gradient.range.memory], writes=memories, label=f"{label} ends")
