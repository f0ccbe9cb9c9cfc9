"""A bundle's gradient: which parameters' have come, and where they are.

Note [Life of a gradient]
    Autograd's post-accumulate hook hands a parameter's gradient over. It is added into the bundle's range on the device
    (COLLECTING); where the bundle is updated on the device anyway it stays the tensor that autograd made (IN_AUTOGRAD); and
    where the plan says so it is written over its parameters (IN_PLACE, see Note [Written in place] in in_place.py).
    Once every gradient expected of the bundle is there it is flushed: a sum of squares a parameter is left for the norm, and
    the range is copied into the host slots of its own parameters (Note [The slot] in store.py) and freed (SENT). With several
    micro-batches the slots' content is then added to the fp32 accumulator and the parameters are restored. What autograd
    keeps for the device's own update stays where it is (KEPT), and so is summed all at once when the norm is wanted.
    A gradient in place that the plan has stay is kept likewise, until it is sent (Note [Gradients that stay] in staying.py).
    Of several ranks this rank's part of their sum alone is kept until the norm is known, in a smaller range.
    Where room was needed before the gradient was complete the range lies in the slots, and nothing was added yet (PARKED).
    A gradient that arrives after its bundle was flushed or parked reopens the range with what is in the slots, so that a
    parameter whose gradient fires twice has both summed in the compute dtype, as autograd would.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from systems.device.memory.pool import Allocation
from systems.substrate.bundle import states
from systems.substrate.bundle.states import GRADIENT_MOVES, GradientState

LEFT = (GradientState.KEPT, GradientState.SENT)
FREE = (GradientState.NONE, GradientState.IN_AUTOGRAD, GradientState.IN_PLACE)


class BundleGradient:
    """expected: parameters whose gradients make it complete. fired: those that came in this micro-step.

    waiting: gradients in autograd's own buffers. written: parameters whose gradient is in the bundle's block. exited: units
    that are done with theirs in this micro-step. summed: its sums of squares are left already, ahead of its flush. reduced: the
    range has the sum over ranks, and waits for the update; it may be a shard's by then, with this rank's part alone. stays: the
    range is the bundle's own block, and the gradient is for the host.
    """

    def __init__(self, parameters: tuple[int, ...]) -> None:
        self.parameters, self.expected = parameters, frozenset(parameters)
        self.state = GradientState.NONE
        self.range: Allocation | None = None
        self.waiting: dict[int, torch.Tensor] = {}
        self.written: set[int] = set()
        self.exited: set[int] = set()
        self.fired: set[int] = set()
        self.fired_in_step: set[int] = set()
        self.summed = self.reduced = self.stays = False

    @property
    def open(self) -> bool:
        """There are gradients that no flush has taken yet."""
        if self.range is not None or self.state is GradientState.PARKED:
            return not self.reduced and not self.stays
        return bool(self.fired) and self.state not in LEFT

    @property
    def complete(self) -> bool:
        """All that is expected of it is there and open."""
        return self.fired >= self.expected and self.open

    def to(self, state: GradientState) -> None:
        if states.CHECKED:
            self._check(state)
        self.state = state

    def _check(self, state: GradientState) -> None:
        if state is not self.state:
            states.check(GRADIENT_MOVES, self.state, state)

    def sum_ahead(self) -> None:
        """Its sums of squares are left before it is flushed."""
        self.summed = True

    def wait(self, parameter: int, value: torch.Tensor) -> None:
        """In autograd's buffer."""
        self.waiting[parameter] = value
        if self.state is GradientState.NONE:
            self.state = GradientState.IN_AUTOGRAD

    def write(self, parameters: Iterable[int]) -> None:
        """Over these parameters, in the bundle's block."""
        if states.CHECKED:
            self._check(GradientState.IN_PLACE)
        self.written.update(parameters)
        self.state = GradientState.IN_PLACE

    def collect(self, block: Allocation) -> None:
        """In this range from now on."""
        if states.CHECKED:
            self._check(GradientState.COLLECTING)
        self.range, self.state = block, GradientState.COLLECTING

    def keep(self, shard: Allocation) -> Allocation | None:
        """This rank's part of the sum over ranks, which is on its way there, or all of it in what was the bundle's block. The
        range that it comes out of is the caller's to free; None if that is the bundle's block.
        """
        block, self.range = self.range, shard
        return block

    def let_go(self) -> Allocation | None:
        """Of the range, which is the caller's to free."""
        block, self.range, self.reduced, self.stays = self.range, None, False, False
        return block

    def leave(self, state: GradientState, *, reduced: bool = False, stays: bool = False) -> None:
        """A flush took it. Sums that were left ahead are its own now."""
        if states.CHECKED:
            self._check(state)
        self.summed, self.state, self.reduced, self.stays = False, state, reduced, stays

    def begin_micro_step(self) -> None:
        self.fired.clear()
        self.exited.clear()
        self.state = GradientState.NONE

    def learn(self) -> None:
        """It expects next time what it got this time (all of it, if it got nothing)."""
        if self.fired_in_step:
            self.expected = frozenset(self.fired_in_step)

    def end_step(self) -> None:
        """Nothing of it is needed any more; its range was freed."""
        self.waiting.clear()
        self.exited.clear()
        self.fired.clear()
        self.fired_in_step.clear()
        self.state, self.summed = GradientState.NONE, False
