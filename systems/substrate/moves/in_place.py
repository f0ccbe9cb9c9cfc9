"""Gradients written over their own parameters, where the plan says so: no range, 14 bytes a parameter on the device too.

Note [Written in place]
    While a unit's backward runs, its gradients stay in autograd's own buffers. When it ends they are copied into the bundle's
    block, over the parameters they belong to. No use of those is left: autograd hands a gradient over after the last use of
    its parameter. From then on the gradients hold the block, so that nothing evicts it; units whose backward is to come read
    their own parameters in it as before. When the bundle's gradient is complete the block is copied to the host slots and
    freed.

Note [Detours]
    Where it is not that simple, the gradient moves to a range and the block gets its parameters back from the host: a unit
    enters again after its gradients were written, or a bundle is flushed while a unit holds it. Where the slot holds a
    gradient already (a late one, or one sent off early), and with several micro-batches, there is a range from the start.
    Detours are counted (`gradient_detours`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from systems.device.memory.pool import Allocation
from systems.substrate.moves.ranges import BundleGradient, Ranges

HOLD = "gradient"
DETOUR = "detour"


@dataclass
class _Written:
    """parameters: those whose gradient is in the block. exited: units that are done with theirs in this micro-step."""

    parameters: set[int] = field(default_factory=set)
    exited: set[int] = field(default_factory=set)


class InPlace:
    """Which parameters of which blocks are gradients now.

    allowed: bundles that the plan in force lets be written. user: of each parameter in them, the one unit that reads it.
    excluded: asked for reasons why not now (the bundle is updated on the device, or there are several micro-batches).
    """

    def __init__(self, ranges: Ranges, allowed: frozenset[int], user: dict[int, int], excluded: Callable[[int], bool]) -> None:
        self.ranges, self.residency = ranges, ranges.residency
        self.device, self.store = ranges.device, ranges.store
        self.allowed, self._user, self._excluded = allowed, user, excluded
        self._bundles: dict[int, _Written] = {}

    def _of(self, bundle: int) -> _Written:
        return self._bundles.setdefault(bundle, _Written())

    def written(self, bundle: int) -> bool:
        return bundle in self._bundles and bool(self._bundles[bundle].parameters)

    def overwrote(self, bundle: int, parameter: int) -> bool:
        return self.written(bundle) and parameter in self._bundles[bundle].parameters

    def takes(self, bundle: int, gradient: BundleGradient) -> bool:
        """True if gradients that come now take their parameters' place. See Note [Detours] for when they do not."""
        free = gradient.range is None and not gradient.flushed and not gradient.parked
        return free and bundle in self.allowed and self._has_block(bundle) and not self._excluded(bundle)

    def enter(self, bundle: int, unit: int, gradient: BundleGradient) -> None:
        """The unit's backward begins: if its parameters have become gradients, they must come back first."""
        mine = self._of(bundle)
        mine.exited.discard(unit)
        if any(self._user[p] == unit for p in mine.parameters):
            self._detour(bundle, gradient)

    def exit(self, bundle: int, unit: int, gradient: BundleGradient) -> None:
        """The unit is done with its parameters: of the gradients that wait, its own are written."""
        if self.takes(bundle, gradient):
            self._of(bundle).exited.add(unit)
            self._write(bundle, gradient, [p for p in gradient.adopted if self._user[p] == unit])

    def keep(self, bundle: int, parameter: int, value: torch.Tensor, gradient: BundleGradient) -> None:
        """Until the unit's backward ends; a gradient that comes later than that is written at once."""
        if parameter in self._of(bundle).parameters:
            self.view(bundle, parameter).add_(value.reshape(-1))
        elif parameter in gradient.adopted:
            gradient.adopted[parameter].add_(value)
        else:
            gradient.adopted[parameter] = value
            if self._user[parameter] in self._of(bundle).exited:
                self._write(bundle, gradient, [parameter])

    def assemble(self, bundle: int, gradient: BundleGradient) -> None:
        """Bring what waits in autograd's buffers to the rest: into the block if nothing uses it, else into a range."""
        if not self.written(bundle) and not gradient.adopted:
            return
        if self.takes(bundle, gradient) and not self.in_use(bundle):
            self._write(bundle, gradient, list(gradient.adopted))
        elif self.written(bundle):
            self._detour(bundle, gradient)
        else:
            self.ranges.open(bundle, gradient)

    def offload(self, bundle: int) -> None:
        """The bundle's block, all gradient now, leaves for the host."""
        block = self._block(bundle)
        self.device.transfers.compute(reads=[block.memory], label=f"gradient of bundle {bundle} ends")
        self.ranges.offload(bundle, block)
        self._drop(bundle)

    def in_use(self, bundle: int) -> bool:
        """True while anything but its own gradients holds the bundle."""
        return any(key != HOLD for key in self.residency.bundles[bundle].holds)

    def view(self, bundle: int, parameter: int) -> torch.Tensor:
        """Where the parameter lies in the bundle's block, flat."""
        return self.ranges.view(self._block(bundle), parameter)

    def start(self) -> None:
        """A micro-step begins, or a step was given up: blocks that still have gradients in them go."""
        for bundle in [b for b in self._bundles if self.written(b)]:
            self._drop(bundle)
        self._bundles.clear()

    def _write(self, bundle: int, gradient: BundleGradient, parameters: Sequence[int]) -> None:
        if not parameters:
            return
        block = self._block(bundle)
        label = f"gradients over parameters of bundle {bundle}"
        self.device.transfers.compute(writes=[block.memory], label=f"{label} begin")
        self._of(bundle).parameters.update(parameters)  # before they are: Ctrl-C may come between
        self.residency.bundles[bundle].holds[HOLD] = 1
        for parameter in parameters:
            self.view(bundle, parameter).copy_(gradient.adopted.pop(parameter).reshape(-1))
        self.device.transfers.compute(writes=[block.memory], label=f"{label} end")

    def _detour(self, bundle: int, gradient: BundleGradient) -> None:
        """What the block has of gradients goes to a new range, and the parameters come back."""
        block, written = self._block(bundle), sorted(self._of(bundle).parameters)
        holds = self.residency.bundles[bundle].holds
        holds[DETOUR] = 1  # making room must not send this very bundle off
        try:
            target = gradient.range = self.ranges.allocate(bundle)
        finally:
            del holds[DETOUR]
        self.device.log.count("gradient_detours")
        label = f"gradient of bundle {bundle} leaves its block"
        self.device.transfers.compute(reads=[block.memory], writes=[target.memory], label=f"{label} begins")
        for parameter in written:
            self.ranges.view(target, parameter).copy_(self.view(bundle, parameter))
        self.ranges.empty_buffers(gradient)
        self.device.transfers.compute(reads=[block.memory], writes=[target.memory], label=f"{label} ends")
        self.residency.refill(bundle, frozenset(written))
        self._forget(bundle)

    def _drop(self, bundle: int) -> None:
        """The gradients in the block have left it, or do not matter."""
        self.residency.bundles[bundle].holds.pop(HOLD, None)
        self.residency.drop(bundle)
        self._forget(bundle)  # last: as long as it is there it is not taken for parameters

    def _forget(self, bundle: int) -> None:
        """The block has no gradients in it any more."""
        self.residency.bundles[bundle].holds.pop(HOLD, None)
        self._of(bundle).parameters.clear()

    def _has_block(self, bundle: int) -> bool:
        return self.residency.bundles[bundle].block is not None

    def _block(self, bundle: int) -> Allocation:
        block = self.residency.bundles[bundle].block
        assert block is not None, f"bundle {bundle} has a gradient in a block that is not there"
        return block
