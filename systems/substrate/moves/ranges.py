"""The range that gathers a bundle's gradients on the device, each at its parameter's offset."""

from __future__ import annotations

import contextlib

import torch

from systems.device.memory.pool import Allocation
from systems.planning.plan import LaneKind
from systems.planning.step.operations import Work, of_bundle
from systems.substrate.bundle.bundle import ManagedBundle
from systems.substrate.bundle.gradient import BundleGradient
from systems.substrate.bundle.segments import slots_take_gradients
from systems.substrate.moves.residency import Residency


class Ranges:
    """Opens, fills, sends off and frees them."""

    def __init__(self, residency: Residency, dtype: torch.dtype) -> None:
        self.layout, self.device, self._room, self._dtype = residency.layout, residency.device, residency.room, dtype

    def allocate(self, bundle: ManagedBundle) -> Allocation:
        return self._room.allocate(bundle.nbytes, f"gradient of bundle {bundle.index}", compute=True)

    def keep_shard(self, bundle: ManagedBundle, gradient: BundleGradient, shard: Allocation) -> None:
        """Of the range nothing else is needed."""
        block = gradient.keep(shard)
        assert block is not None, "what is reduced in a range was collected there"
        self.device.pool.free(block, f"gradient of bundle {bundle.index}")

    def allocate_shard(self, bundle: ManagedBundle) -> Allocation:
        return self._room.allocate(bundle.shard_nbytes, f"gradient shard of bundle {bundle.index}")

    def open(self, bundle: ManagedBundle, gradient: BundleGradient) -> Allocation:
        """With what is in the slot, if that is part of this gradient, and in autograd's buffers."""
        block = self.allocate(bundle)
        gradient.collect(block)
        if gradient.fired and any(each.slot_holds_gradient for each in bundle.segments):
            stretches = bundle.stretches

            def copy() -> None:
                for stretch in stretches:
                    stretch.on(block).copy_(stretch.slot, non_blocking=True)

            self.device.log.count("h2d_bytes", bundle.nbytes)
            self.device.transfers.issue(
                of_bundle(self.layout, Work.REOPEN, LaneKind.H2D, bundle.index),
                copy,
                reads=[each.slot_memory for each in bundle.segments],
                writes=[block.memory],
            )
        self.device.transfers.compute(writes=[block.memory], label=f"gradient of bundle {bundle.index} begins")
        self.empty_buffers(gradient, block)
        return block

    def bring_zeros(self, bundle: ManagedBundle, gradient: BundleGradient, *, in_place: bool) -> None:
        """Nothing came here, and other ranks may have something. in_place: it is to be written over the parameters."""
        first = gradient.parameters[0]
        if in_place:
            zeros = torch.zeros(self.layout.places[first].numel, dtype=self._dtype, device=self.device.torch_device)
            gradient.wait(first, zeros)
        else:
            block = self.open(bundle, gradient) if gradient.range is None else gradient.range
            self.view(block, first).zero_()
        gradient.fired.add(first)

    def empty_buffers(self, gradient: BundleGradient, block: Allocation) -> None:
        """Copy what waits in autograd's buffers into the range."""
        for parameter, waiting in gradient.waiting.items():
            self.view(block, parameter).copy_(waiting.reshape(-1))
        gradient.waiting.clear()

    def view(self, block: Allocation, parameter: int) -> torch.Tensor:
        """The parameter's place in a block of its bundle, flat."""
        found = block.views.get(parameter)
        if found is not None:
            return found
        place = self.layout.places[parameter]
        return block.make_view(parameter, self._dtype, place.offset, place.numel)

    def offload(self, bundle: ManagedBundle, block: Allocation) -> None:
        """Copy a gradient into the host slots of its parameters."""
        stretches = bundle.stretches

        def copy() -> None:
            for stretch in stretches:
                stretch.slot.copy_(stretch.on(block), non_blocking=True)

        self.device.log.count("d2h_bytes", bundle.shard_nbytes)
        slots_take_gradients(bundle.segments)
        self.device.transfers.issue(
            of_bundle(self.layout, Work.OFFLOAD, LaneKind.D2H, bundle.index),
            copy,
            reads=[block.memory],
            writes=[each.slot_memory for each in bundle.segments],
        )

    def give_up(self, bundle: ManagedBundle, gradient: BundleGradient) -> None:
        """Free a range that compute may have used since its last ticket."""
        if gradient.range is None:
            return
        with contextlib.suppress(Exception):  # of a copy into it that failed: then nothing used it either
            self.device.transfers.compute(writes=[gradient.range.memory], label=f"gradient of bundle {bundle.index} is let go")
        self.free(bundle, gradient)

    def free(self, bundle: ManagedBundle, gradient: BundleGradient) -> None:
        block = gradient.let_go()
        if block is not None:
            self.device.pool.free(block, f"gradient of bundle {bundle.index}")
