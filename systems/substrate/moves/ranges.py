"""Where gradients of a bundle are: what has come of them, and the range that gathers them on the device.

A range lies like the bundle's parameters, each gradient at its parameter's offset.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from systems.device.memory.pool import Allocation
from systems.planning.plan import LaneKind
from systems.planning.step.operations import Work, of_bundle
from systems.substrate.bundle.segments import Run
from systems.substrate.moves.residency import Residency


@dataclass
class BundleGradient:
    """expected: parameters whose gradients make it complete. fired: those that came in this micro-step.

    adopted: gradients in autograd's own buffers.
    """

    parameters: tuple[int, ...]
    expected: frozenset[int]
    range: Allocation | None = None
    adopted: dict[int, torch.Tensor] = field(default_factory=dict)
    fired: set[int] = field(default_factory=set)
    fired_in_step: set[int] = field(default_factory=set)
    flushed: bool = False
    parked: bool = False

    @property
    def open(self) -> bool:
        """There are gradients that no flush has taken yet."""
        return self.range is not None or self.parked or (bool(self.fired) and not self.flushed)


class Ranges:
    """Opens, fills, sends off and frees them."""

    def __init__(self, residency: Residency) -> None:
        self.residency, self.layout, self.store = residency, residency.layout, residency.store
        self.device = residency.device

    def allocate(self, bundle: int) -> Allocation:
        return self.residency.allocate(self.layout.bundle_bytes(bundle), f"gradient of bundle {bundle}", compute=True)

    def open(self, bundle: int, gradient: BundleGradient) -> Allocation:
        """With what is in the slot, if that is part of this gradient, and in autograd's buffers."""
        block = gradient.range = self.allocate(bundle)
        segments = [self.store.segments[s] for s in self.layout.bundles[bundle].segments]
        if gradient.fired and any(s.slot_holds_gradient for s in segments):

            def copy(runs: Sequence[Run] = self.store.runs(bundle)) -> None:
                for run in runs:
                    run.on(block).copy_(run.slot, non_blocking=True)

            self.device.log.count("h2d_bytes", self.layout.bundle_bytes(bundle))
            self.device.transfers.issue(
                of_bundle(self.layout, Work.REOPEN, LaneKind.H2D, bundle),
                copy,
                reads=[s.slot_memory for s in segments],
                writes=[block.memory],
            )
        self.device.transfers.compute(writes=[block.memory], label=f"gradient of bundle {bundle} begins")
        gradient.flushed = gradient.parked = False
        self.empty_buffers(gradient)
        return block

    def empty_buffers(self, gradient: BundleGradient) -> None:
        """Copy what waits in autograd's buffers into the range."""
        assert gradient.range is not None
        for parameter, waiting in gradient.adopted.items():
            self.view(gradient.range, parameter).copy_(waiting.reshape(-1))
        gradient.adopted.clear()

    def view(self, block: Allocation, parameter: int) -> torch.Tensor:
        """The parameter's place in a block of its bundle, flat."""
        found = block.views.get(parameter)
        if found is None:
            place = self.layout.places[parameter]
            found = block.views[parameter] = block.view(self.store.dtype, place.offset, place.numel)
        return found

    def offload(self, bundle: int, block: Allocation) -> None:
        """Copy a gradient into the host slots of its parameters."""
        segments = [self.store.segments[s] for s in self.layout.bundles[bundle].segments]

        def copy(runs: Sequence[Run] = self.store.runs(bundle)) -> None:
            for run in runs:
                run.slot.copy_(run.on(block), non_blocking=True)

        self.device.log.count("d2h_bytes", self.layout.bundle_bytes(bundle))
        for stored in segments:
            stored.slot_holds_gradient = True  # even if Ctrl-C breaks off what follows: then they are restored
        self.device.transfers.issue(
            of_bundle(self.layout, Work.OFFLOAD, LaneKind.D2H, bundle),
            copy,
            reads=[block.memory],
            writes=[s.slot_memory for s in segments],
        )

    def give_up(self, bundle: int, gradient: BundleGradient) -> None:
        """Free a range that compute may have used since its last ticket."""
        if gradient.range is not None:
            with contextlib.suppress(Exception):  # of a copy into it that failed: then nothing used it either
                self.device.transfers.compute(writes=[gradient.range.memory], label=f"gradient of bundle {bundle} is let go")
        self.free(bundle, gradient)

    def free(self, bundle: int, gradient: BundleGradient) -> None:
        block, gradient.range = gradient.range, None
        if block is not None:
            self.device.pool.free(block, f"gradient of bundle {bundle}")
