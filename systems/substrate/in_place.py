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

from systems.planning.layout import Placement
from systems.substrate.residency import Residency
from systems.substrate.tiers import Allocation

Place = tuple[int, int, Placement]  # bundle, element in it, placement
HOLD = "gradient"
DETOUR = "detour"


@dataclass
class WrittenGradient:
    """parameters: those whose gradient is in the block. exited: units that are done with theirs in this micro-step."""

    parameters: set[int] = field(default_factory=set)
    exited: set[int] = field(default_factory=set)


class InPlace:
    """Which parameters of which blocks are gradients now.

    allowed: bundles that the plan in force lets be written. user: of each parameter in them, the one unit that reads it.
    """

    def __init__(
        self, residency: Residency, places: dict[int, Place], allowed: frozenset[int], user: dict[int, int]
    ) -> None:
        self.residency, self.store, self.device = residency, residency.store, residency.device
        self._places, self._user = places, user
        self.allowed = allowed
        self._bundles: dict[int, WrittenGradient] = {}

    def of(self, bundle: int) -> WrittenGradient:
        return self._bundles.setdefault(bundle, WrittenGradient())

    def written(self, bundle: int) -> bool:
        return bundle in self._bundles and bool(self._bundles[bundle].parameters)

    def possible(self, bundle: int) -> bool:
        """True if a gradient that comes now can go into the block."""
        return bundle in self.allowed and self.residency.bundles[bundle].block is not None

    def enter(self, bundle: int, unit: int) -> bool:
        """The unit's backward begins. False if some of its parameters are gradients: a detour must bring them back."""
        self.of(bundle).exited.discard(unit)
        return not any(self._user[p] == unit for p in self.of(bundle).parameters)

    def exit(self, bundle: int, unit: int, waiting: dict[int, torch.Tensor]) -> None:
        """The unit is done with its parameters: of the gradients that wait, its own are written."""
        self.of(bundle).exited.add(unit)
        self.write(bundle, waiting, [p for p in waiting if self._user[p] == unit])

    def done_with(self, bundle: int, parameter: int) -> bool:
        return self._user[parameter] in self.of(bundle).exited

    def in_use(self, bundle: int) -> bool:
        """True while anything but its own gradients holds the bundle."""
        return any(key != HOLD for key in self.residency.bundles[bundle].holds)

    def view(self, parameter: int) -> torch.Tensor:
        """Where the parameter lies in the bundle's block, flat."""
        bundle, offset, place = self._places[parameter]
        return self._block(bundle).view(self.store.dtype, offset, place.numel)

    def write(self, bundle: int, waiting: dict[int, torch.Tensor], parameters: Sequence[int]) -> None:
        """Copy the gradients of these parameters over them, out of `waiting`. The block is there."""
        if not parameters:
            return
        block, mine = self._block(bundle), self.of(bundle)
        self.device.transfers.compute(writes=[block.memory], label=f"gradients over parameters of bundle {bundle} begin")
        for parameter in parameters:
            self.view(parameter).copy_(waiting.pop(parameter).reshape(-1))
        self.device.transfers.compute(writes=[block.memory], label=f"gradients over parameters of bundle {bundle} end")
        mine.parameters.update(parameters)
        self.residency.bundles[bundle].holds[HOLD] = 1
        self._mark(bundle)

    def move(self, bundle: int, allocate: Callable[[], Allocation]) -> Allocation:
        """A detour: what the block has of gradients goes to a new range, and the parameters come back."""
        block, mine = self._block(bundle), self.of(bundle)
        holds = self.residency.bundles[bundle].holds
        holds[DETOUR] = 1  # making room must not send this very bundle off
        try:
            target = allocate()
        finally:
            del holds[DETOUR]
        self.device.log.count("gradient_detours")
        label = f"gradient of bundle {bundle} leaves its block"
        self.device.transfers.compute(reads=[block.memory], writes=[target.memory], label=f"{label} begins")
        for parameter in sorted(mine.parameters):
            _, offset, place = self._places[parameter]
            target.view(self.store.dtype, offset, place.numel).copy_(self.view(parameter))
        self.device.transfers.compute(reads=[block.memory], writes=[target.memory], label=f"{label} ends")
        self.residency.refill(bundle, [self._places[p] for p in sorted(mine.parameters)])
        self.forget(bundle)
        return target

    def forget(self, bundle: int) -> None:
        """The block has no gradients in it any more, or none that matter."""
        if bundle in self._bundles:
            self._bundles[bundle].parameters.clear()
            self.residency.bundles[bundle].holds.pop(HOLD, None)
            self._mark(bundle)

    def start(self) -> None:
        """A micro-step begins, or a step was given up: blocks that still have gradients in them go."""
        for bundle in [b for b in self._bundles if self.written(b)]:
            self.forget(bundle)
            self.residency.drop(bundle)
        self._bundles.clear()

    def _block(self, bundle: int) -> Allocation:
        block = self.residency.bundles[bundle].block
        assert block is not None, f"bundle {bundle} has a gradient in a block that is not there"
        return block

    def _mark(self, bundle: int) -> None:
        """Bytes of the bundle's storage that no unit may read now; see Device.guard."""
        size = self.store.dtype.itemsize
        places = [self._places[p] for p in self.of(bundle).parameters]
        spans = [(offset * size, (offset + place.numel) * size) for _, offset, place in places]
        if spans:
            self.residency.overwritten[bundle] = spans
        else:
            self.residency.overwritten.pop(bundle, None)
