"""Gradients that stay on the device until the update, where their parameters were: Plan.staying.

Note [Gradients that stay]
    When such a gradient is complete the bundle's block is its range: the bundle has none any more, as if it had been dropped,
    so that who needs its parameters fetches them, and slots have them until the gradient takes their place. It leaves where
    the plan evicts it, for want of room, before a late gradient of the same bundle is taken, once the step has departed from
    its plan, and at the step's end, before the norm.
"""

from __future__ import annotations

from collections.abc import Iterable

from systems.substrate.bundle.bundle import ManagedBundle
from systems.substrate.bundle.states import GradientState
from systems.substrate.moves.in_place import HOLD
from systems.substrate.moves.ranges import Ranges


class StayingGradients:
    """there: bundles whose gradient stays now. allowed: those that the plan in force has stay, while it is followed."""

    def __init__(self, ranges: Ranges) -> None:
        self._ranges = ranges
        self.allowed: frozenset[int] = frozenset()
        self.there: dict[int, ManagedBundle] = {}

    def allow(self, bundles: frozenset[int]) -> None:
        """Those of a plan that comes into force, or is followed again."""
        self.allowed = bundles

    def depart(self) -> None:
        """No plan says any more when they leave: they do now, and nothing stays in the rest of the step."""
        self.allowed = frozenset()
        self.leave_all(list(self.there.values()))

    def stay(self, bundle: ManagedBundle) -> None:
        """It is complete, and all of it is in the bundle's block."""
        block, gradient = bundle.block, bundle.gradients
        assert block is not None, f"bundle {bundle.index} has a gradient in a block that is not there"
        label = f"gradient of bundle {bundle.index} ends"
        self._ranges.device.transfers.compute(reads=[block.memory], label=label)
        bundle.release_all(HOLD)
        self.there[bundle.index] = bundle
        bundle.leave()
        gradient.keep(block)
        gradient.leave(GradientState.KEPT, stays=True)
        gradient.written.clear()

    def leave(self, bundle: ManagedBundle) -> None:
        """For the host's slots, which it takes from now on."""
        gradient = bundle.gradients
        assert gradient.range is not None, "a gradient that stays has the bundle's block"
        self._ranges.offload(bundle, gradient.range)
        self._ranges.free(bundle, gradient)
        gradient.to(GradientState.SENT)
        del self.there[bundle.index]

    def leave_all(self, order: Iterable[ManagedBundle]) -> None:
        """Those of these that stay."""
        for bundle in order:
            if bundle.index in self.there:
                self.leave(bundle)
