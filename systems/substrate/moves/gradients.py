"""Gradients on their way from autograd to the optimizer's tier: see Note [Life of a gradient] in bundle/gradient.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from systems.device.device import Device
from systems.device.lanes.transfers import TrackedMemory
from systems.device.watch.events import Extent
from systems.errors import UnsupportedError
from systems.planning.layout import Layout
from systems.planning.plan import LaneKind, Tier
from systems.planning.step.operations import Work, of_bundle
from systems.ranks.ranks import Ranks
from systems.substrate.bundle.bundle import ManagedBundle
from systems.substrate.bundle.gradient import LEFT
from systems.substrate.bundle.segments import slots_take_gradients
from systems.substrate.bundle.states import GradientState
from systems.substrate.moves.accumulators import Accumulators
from systems.substrate.moves.in_place import InPlace
from systems.substrate.moves.ranges import Ranges
from systems.substrate.moves.reductions import Reductions
from systems.substrate.moves.residency import Residency
from systems.substrate.moves.squares import Squares
from systems.substrate.moves.staying import StayingGradients
from systems.substrate.moves.tiers import TierMoves


class Gradients:
    """bundles: those that are trained, by number. user: a unit that reads each parameter (the only one, where gradients are
    written in place). early: updates do not wait for the norm.
    """

    def __init__(
        self,
        layout: Layout,
        residency: Residency,
        tiers: TierMoves,
        device: Device,
        dtype: torch.dtype,
        *,
        accumulate: int,
        user: Mapping[int, int],
        ranks: Ranks,
        early: bool,
    ) -> None:
        self.layout, self.device, self._dtype = layout, device, dtype
        self.accumulate, self._waits = accumulate, accumulate == 1 and not early
        self.last_micro_step = accumulate == 1
        self.bundles = {bundle.index: bundle for bundle in residency.bundles if bundle.gradient is not None}
        self.squares = Squares(layout, device, self.on_device)
        self._ranges, self._gather = Ranges(residency, dtype), residency.gather
        self.staying = StayingGradients(self._ranges)
        several = accumulate > 1
        groups, sums = residency.groups, self.squares
        self.reductions = Reductions(ranks, groups, layout, device, sums, several=several) if ranks.size > 1 else None
        self._accumulators = Accumulators(tiers)
        self.in_place = InPlace(self._ranges, residency, layout.in_place, user, several=accumulate > 1, together=ranks.size > 1)

    def bytes_in_autograd(self) -> int:
        return sum(t.nbytes for bundle in self.bundles.values() for t in bundle.gradients.waiting.values())

    def enter(self, bundle: ManagedBundle, unit: int) -> None:
        """A unit's backward is about to begin."""
        if bundle.gradient is not None:
            self.in_place.enter(bundle, unit, bundle.gradient)

    def reserve(self, bundle: ManagedBundle) -> None:
        """A unit's backward begins: have a range for each of its gradients."""
        gradient = bundle.gradient
        if gradient is None or gradient.range is not None or bundle.stays_in_autograd or gradient.state in LEFT:
            return
        if not self.in_place.takes(bundle, gradient):
            self._ranges.open(bundle, gradient)

    def exit(self, bundle: ManagedBundle, unit: int) -> None:
        """A unit's backward has ended, and none of its calls is still to come."""
        if bundle.gradient is not None:
            self.in_place.exit(bundle, unit, bundle.gradient)

    def accept(self, bundle: ManagedBundle, parameter: int, value: torch.Tensor) -> None:
        """Take a gradient over from autograd, rounded where its parameter was read in another dtype."""
        value = value.to(self._dtype)
        gradient = bundle.gradients
        if self.reductions is not None and gradient.state in LEFT:
            raise UnsupportedError(
                f"a gradient of bundle {bundle.index} ({self.layout.bundle_names[bundle.index]}) came after it was summed over "
                "all ranks: something reads its parameters that was not seen in forward"
            )
        if gradient.stays:
            self.staying.leave(bundle)
        again = parameter in gradient.fired
        if gradient.range is None and bundle.stays_in_autograd:
            if again:
                gradient.waiting[parameter].add_(value)
            else:
                gradient.wait(parameter, value)
            if gradient.state is not GradientState.IN_AUTOGRAD:  # it had left already
                gradient.to(GradientState.IN_AUTOGRAD)
        elif self.in_place.takes(bundle, gradient):
            self.in_place.keep(bundle, parameter, value, gradient)
        else:
            block = gradient.range if gradient.range is not None else self._ranges.open(bundle, gradient)
            target = self._ranges.view(block, parameter)
            if again:
                target.add_(value.reshape(-1))
            else:
                target.copy_(value.reshape(-1))
            self.device.meter.hand_over(value.nbytes)
        gradient.fired.add(parameter)
        gradient.fired_in_step.add(parameter)

    def park(self, bundle: ManagedBundle) -> None:
        """Free an incomplete gradient's range if its bytes can wait elsewhere."""
        gradient = bundle.gradients
        if self.accumulate == 1 or not gradient.fired:
            self.flush(bundle)
        elif bundle.segments[0].tier is not Tier.DEVICE:
            assert gradient.range is not None
            label = f"gradient of bundle {bundle.index} waits"
            self.device.transfers.compute(writes=[gradient.range.memory], label=label)
            self._ranges.offload(bundle, gradient.range)
            self._ranges.free(bundle, gradient)
            gradient.to(GradientState.PARKED)

    def flush(self, bundle: ManagedBundle) -> None:
        """The bundle's gradient leaves for its optimizer's tier."""
        gradient = bundle.gradients
        if self.reductions is not None and gradient.state in LEFT:
            return  # it is reduced, and stays on the device until its update
        if gradient.state is GradientState.PARKED:
            self._accumulators.add(bundle, gradient, last=self.last_micro_step)
            if self.last_micro_step:
                self.squares.leave_accumulated(bundle)
            return
        if self.reductions is not None and not gradient.fired:
            self._ranges.bring_zeros(bundle, gradient, in_place=self.in_place.takes(bundle, gradient))
        if not gradient.fired:  # reserved, but nothing came: the unit's output was not used
            self._ranges.free(bundle, gradient)
            gradient.to(GradientState.NONE)
            return
        if bundle.stays_in_autograd and gradient.range is None:
            gradient.to(GradientState.KEPT)
            return
        self.sum_complete([bundle])
        on_device = bundle.segments[0].tier is Tier.DEVICE
        block = gradient.range
        if block is None and on_device and gradient.written:
            self.in_place.leave(bundle, gradient, self.reductions, waits=self._waits)
            gradient.leave(GradientState.KEPT, reduced=True)
            return
        if block is None and gradient.written and bundle.index in self.staying.allowed:
            self.staying.stay(bundle)
            return
        if block is None:
            gradient.leave(GradientState.SENT)
            if gradient.written:
                self.in_place.leave(bundle, gradient, self.reductions)
            return
        if self.reductions is not None:
            self.reductions.complete(gradient, lambda parameter: self._ranges.view(block, parameter))
        self.device.transfers.compute(writes=[block.memory], label=f"gradient of bundle {bundle.index} ends")
        if self.reductions is not None:
            shard = self._ranges.allocate_shard(bundle) if on_device and self._waits and bundle.scattered else None
            self.reductions.reduce(bundle, block, shard)
            if shard is not None:
                self._ranges.keep_shard(bundle, gradient, shard)
            elif not bundle.scattered:
                self._gather(bundle, block)
        if on_device and self.accumulate == 1:
            gradient.leave(GradientState.KEPT, reduced=self.reductions is not None)
            return  # the range, or this rank's part of it, stays until the update
        if not on_device:
            self._ranges.offload(bundle, block)
        if self.accumulate > 1:
            self._accumulators.add(bundle, gradient, last=self.last_micro_step)
        self._ranges.free(bundle, gradient)
        gradient.leave(GradientState.SENT)
        if self.accumulate > 1 and self.last_micro_step:
            self.squares.leave_accumulated(bundle)

    def sum_complete(self, bundles: Sequence[ManagedBundle]) -> None:
        """Leave the sums of squares of gradients that are about to be flushed for the norm, in one pass.

        Bringing one together may want room, for which another is sent off, with its sums: that one is left out.
        """
        together: list[ManagedBundle] = []
        for bundle in bundles:
            gradient = bundle.gradients
            stays = bundle.stays_in_autograd and gradient.range is None
            if gradient.summed or gradient.state is GradientState.PARKED or stays or not gradient.fired:
                continue
            if not bundle.stays_in_autograd:
                self.in_place.assemble(bundle, gradient)
            together.append(bundle)
        there = [b for b in together if b.gradients.range is not None or b.gradients.written]
        if there and self.accumulate == 1 and self.reductions is None:  # else the reduction leaves them
            self.squares.leave(there)

    def on_device(self, parameter: int) -> torch.Tensor:
        """The flat gradient of a parameter that is on the device: autograd's, in its range, or in its own place."""
        bundle = self.bundles[self.layout.places[parameter].bundle]
        gradient = bundle.gradients
        if parameter in gradient.waiting:
            return gradient.waiting[parameter].reshape(-1)
        if gradient.range is None:
            return self.in_place.view(bundle, parameter)
        return self._ranges.view(gradient.range, parameter)

    def consumed(self, bundle: ManagedBundle) -> None:
        """The bundle's update was issued: what it left on the device can go."""
        self.squares.leave_waiting([bundle])
        bundle.gradients.waiting.clear()
        self._ranges.give_up(bundle, bundle.gradients)
        if bundle.gradients.written:
            self.in_place.let_go(bundle, bundle.gradients)

    def to_slot(self, bundle: ManagedBundle) -> None:
        """The optimizer of a bundle moves to the host while autograd keeps its gradients: put them into the slot."""
        gradient = bundle.gradients
        if not gradient.waiting:
            return
        waiting = dict(gradient.waiting)
        made = TrackedMemory(Extent("autograd", bundle.index, bundle.index + 1))
        self.device.transfers.compute(writes=[made], label=f"adopted gradients of bundle {bundle.index}")
        places = [(stretch, p) for stretch in bundle.stretches for p in stretch.placements if p.parameter in waiting]

        def copy() -> None:
            for stretch, p in places:
                stretch.slot[p.here].copy_(waiting[p.parameter].reshape(-1)[p.piece])

        slots_take_gradients(bundle.segments)
        self.device.log.count("d2h_bytes", sum(p.numel for _, p in places) * self._dtype.itemsize)
        self.device.transfers.issue(
            of_bundle(self.layout, Work.OFFLOAD_ADOPTED, LaneKind.D2H, bundle.index),
            copy,
            reads=[made],
            writes=[stored.slot_memory for stored in bundle.segments],
        ).wait()
        self.squares.leave_waiting([bundle])
        gradient.waiting.clear()
        gradient.to(GradientState.SENT)

    def start_micro_step(self, *, last: bool) -> None:
        self.last_micro_step = last
        for bundle in self.bundles.values():
            if bundle.gradients.written:
                self.in_place.let_go(bundle, bundle.gradients)
            if bundle.gradients.fired or bundle.gradients.state is not GradientState.NONE:
                bundle.gradients.begin_micro_step()

    def finish_step(self) -> None:
        """The update has taken the gradients (or they were thrown away)."""
        for bundle in self.bundles.values():
            gradient = bundle.gradients
            if gradient.range is not None:
                self._ranges.give_up(bundle, gradient)
            if gradient.written:
                self.in_place.let_go(bundle, gradient)
            gradient.end_step()
        self.staying.there.clear()
        self.squares.forget()
        if self.reductions is not None:
            self.reductions.forget()

    def fired(self) -> list[int]:
        """Parameters that have a gradient in this step, in model order."""
        return sorted(p for bundle in self.bundles.values() for p in bundle.gradients.fired_in_step)
