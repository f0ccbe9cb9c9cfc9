"""Gradients written over their own parameters, where the plan says so: no range, 14 bytes a parameter on the device too.

Note [Written in place]
    While a unit's backward runs, its gradients stay in autograd's own buffers. When it ends they are copied into the bundle's
    block, over the parameters they belong to. No use of those is left: autograd hands a gradient over after the last use of
    its parameter. From then on the gradients hold the block, so that nothing evicts it; units whose backward is to come read
    their own parameters in it as before. When the bundle's gradient is complete the block is copied to the host slots and
    freed. Of several ranks it is summed over them where it lies first; and a bundle that rests as a shard, of which the block
    is a copy, keeps this rank's part of the sum, apart from the block if it waits for the norm.

Note [Detours]
    Where it is not that simple, the gradient moves to a range and the block gets its parameters back from the host, or from
    the shards: a unit enters again after its gradients were written, or a bundle is flushed while a unit holds it. Where the
    slot holds a gradient already (a late one, or one sent off early), and with several micro-batches, there is a range from the
    start.
    Detours are counted (`gradient_detours`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from systems.device.memory.pool import Allocation
from systems.substrate.bundle.bundle import ManagedBundle
from systems.substrate.bundle.gradient import FREE, BundleGradient
from systems.substrate.moves.ranges import Ranges
from systems.substrate.moves.reductions import Reductions
from systems.substrate.moves.residency import Residency

HOLD = "gradient"
DETOUR = "detour"


class InPlace:
    """Which parameters of which blocks are gradients now: `written` of each bundle's gradient.

    allowed: bundles that the plan in force lets be written. user: of each parameter in them, the one unit that reads it.
    several: there are micro-batches, and nothing is written in place. together: there are several ranks.
    """

    def __init__(
        self,
        ranges: Ranges,
        residency: Residency,
        allowed: frozenset[int],
        user: Mapping[int, int],
        *,
        several: bool,
        together: bool,
    ) -> None:
        self._ranges, self._residency, self._device = ranges, residency, ranges.device
        self.allowed, self._user, self._several = allowed, user, several
        self._together = together

    def allow(self, bundles: frozenset[int]) -> None:
        """Those of a plan that comes into force, or of the layout where there is none, and that one unit alone reads."""
        self.allowed = bundles

    def takes(self, bundle: ManagedBundle, gradient: BundleGradient) -> bool:
        """True if gradients that come now take their parameters' place. See Note [Detours] for when they do not."""
        free = gradient.range is None and gradient.state in FREE and bundle.block is not None
        return free and bundle.movable and bundle.index in self.allowed and not self._several and not bundle.stays_in_autograd

    def enter(self, bundle: ManagedBundle, unit: int, gradient: BundleGradient) -> None:
        """The unit's backward begins: if its parameters have become gradients, they must come back first. Of several ranks it
        may be another one's that have, where nothing came here.
        """
        if self._together and unit in gradient.exited and self.takes(bundle, gradient):
            self._detour(bundle, gradient)
        gradient.exited.discard(unit)
        if gradient.written and any(self._user[p] == unit for p in gradient.written):
            self._detour(bundle, gradient)

    def exit(self, bundle: ManagedBundle, unit: int, gradient: BundleGradient) -> None:
        """The unit is done with its parameters: of the gradients that wait, its own are written."""
        if self.takes(bundle, gradient):
            gradient.exited.add(unit)
            self._write(bundle, gradient, [p for p in gradient.waiting if self._user[p] == unit])

    def keep(self, bundle: ManagedBundle, parameter: int, value: torch.Tensor, gradient: BundleGradient) -> None:
        """Until the unit's backward ends; a gradient that comes later than that is written at once."""
        if parameter in gradient.written:
            self.view(bundle, parameter).add_(value.reshape(-1))
        elif parameter in gradient.waiting:
            gradient.waiting[parameter].add_(value)
        else:
            gradient.wait(parameter, value)
            if self._user[parameter] in gradient.exited:
                self._write(bundle, gradient, [parameter])

    def assemble(self, bundle: ManagedBundle, gradient: BundleGradient) -> None:
        """Bring what waits in autograd's buffers to the rest: into the block if nothing uses it, else into a range."""
        if not gradient.written and not gradient.waiting:
            return
        if self.takes(bundle, gradient) and not self.in_use(bundle):
            self._write(bundle, gradient, list(gradient.waiting))
        elif gradient.written:
            self._detour(bundle, gradient)
        else:
            self._ranges.open(bundle, gradient)

    def leave(
        self, bundle: ManagedBundle, gradient: BundleGradient, reductions: Reductions | None, *, waits: bool | None = None
    ) -> None:
        """The bundle's block, all gradient now, leaves for the host. waits: of a bundle that rests as a shard, if this rank's
        part of the sum waits for the norm; then that stays, apart, else all of it, until the update lets go of it.
        """
        block, label, shard = self._block(bundle), f"gradient of bundle {bundle.index} ends", None
        if reductions is None:
            self._device.transfers.compute(reads=[block.memory], label=label)
        else:
            reductions.complete(gradient, lambda parameter: self.view(bundle, parameter))
            self._device.transfers.compute(writes=[block.memory], label=label)
            shard = self._ranges.allocate_shard(bundle) if waits else None
            reductions.reduce(bundle, block, shard)
        if shard is not None:
            gradient.keep(shard)
        elif waits is None:
            self._ranges.offload(bundle, block)
        else:
            return
        self.let_go(bundle, gradient)

    def in_use(self, bundle: ManagedBundle) -> bool:
        """True while anything but its own gradients holds the bundle."""
        return any(key != HOLD for key in bundle.holds)

    def view(self, bundle: ManagedBundle, parameter: int) -> torch.Tensor:
        """Where the parameter lies in the bundle's block, flat."""
        return self._ranges.view(self._block(bundle), parameter)

    def _write(self, bundle: ManagedBundle, gradient: BundleGradient, parameters: Sequence[int]) -> None:
        if not parameters:
            return
        block = self._block(bundle)
        label = f"gradients over parameters of bundle {bundle.index}"
        self._device.transfers.compute(writes=[block.memory], label=f"{label} begin")
        gradient.write(parameters)  # before they are: Ctrl-C may come between
        bundle.hold_once(HOLD)
        for parameter in parameters:
            self.view(bundle, parameter).copy_(gradient.waiting.pop(parameter).reshape(-1))
        self._device.transfers.compute(writes=[block.memory], label=f"{label} end")

    def _detour(self, bundle: ManagedBundle, gradient: BundleGradient) -> None:
        """What the block has of gradients goes to a new range, and the parameters come back."""
        block, written = self._block(bundle), sorted(gradient.written)
        bundle.hold_once(DETOUR)  # making room must not send this very bundle off
        try:
            target = self._ranges.allocate(bundle)
            gradient.collect(target)
        finally:
            bundle.release_all(DETOUR)
        self._device.log.count("gradient_detours")
        label = f"gradient of bundle {bundle.index} leaves its block"
        self._device.transfers.compute(reads=[block.memory], writes=[target.memory], label=f"{label} begins")
        for parameter in written:
            self._ranges.view(target, parameter).copy_(self.view(bundle, parameter))
        self._ranges.empty_buffers(gradient, target)
        self._device.transfers.compute(reads=[block.memory], writes=[target.memory], label=f"{label} ends")
        self._residency.refill(bundle, frozenset(written))
        self._forget(bundle, gradient)

    def let_go(self, bundle: ManagedBundle, gradient: BundleGradient) -> None:
        """The gradients in the block have left it, or do not matter."""
        bundle.release_all(HOLD)
        self._residency.drop(bundle.index)
        self._forget(bundle, gradient)  # last: as long as it is there it is not taken for parameters

    def _forget(self, bundle: ManagedBundle, gradient: BundleGradient) -> None:
        """The block has no gradients in it any more."""
        bundle.release_all(HOLD)
        gradient.written.clear()

    def _block(self, bundle: ManagedBundle) -> Allocation:
        assert bundle.block is not None, f"bundle {bundle.index} has a gradient in a block that is not there"
        return bundle.block
