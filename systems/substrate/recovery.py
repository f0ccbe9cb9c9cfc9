"""What an exception leaves behind, Ctrl-C above all, and how an engine goes on from there.

Note [What breaks off]
    Ctrl-C comes between any two calls. A device block has one owner: a bundle, a gradient (its range), a segment (its
    optimizer state). It is taken from the pool before it is owned, and let go of before it is freed. So whatever breaks off
    loses bytes at most, and never gives the same bytes to two. Once nothing is in flight the pool is told who owns what, and
    all else is free again. What a bundle's state is follows from its block and its storage; what of a step is done, from its
    one outcome; and what a slot holds is said before it is written. All here may be done twice: where another Ctrl-C breaks
    it off, the next call does it again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from torch import nn

from systems.device.lanes.ticket import Ticket
from systems.device.memory.pool import Allocation
from systems.recipe.model.parameters import take_gradient
from systems.substrate.bundle.segments import OptimizerState
from systems.substrate.moves.in_place import HOLD
from systems.substrate.runtime import Runtime

STATES_APART = "optimizer states could not be brought home after a step that broke off: initialize anew from a checkpoint"
DROPPED = (
    "a pass without gradients broke off while it made room, so that the step in progress could not be kept: call discard(), "
    "and begin that step anew"
)


class Recovery:
    """dropped: why the step that its caller takes to be in progress is none; None where he knows.

    parameters: in which Ctrl-C may leave a gradient that nobody took.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self._parts = runtime, runtime.parts
        self.dropped: str | None = None
        self.parameters: Sequence[nn.Parameter] = ()

    def check(self) -> None:
        """Before a step begins."""
        if self.dropped is not None:
            raise RuntimeError(self.dropped)

    def interrupted(self) -> None:
        """Ctrl-C, in a call that no call of the engine is around of. Told by each module on the way out of it."""
        (self._leave_step if self._runtime.is_aside else self.abort)()

    def leave_aside(self) -> None:
        """A pass without gradients broke off. A step in progress stays as it is, unless it was being changed."""
        self._runtime.is_aside = False
        self._leave_step()

    def _leave_step(self) -> None:
        runtime, parts = self._runtime, self._parts
        if not runtime.in_step or runtime.planner.halfway:
            self.dropped = DROPPED if runtime.in_step else self.dropped
            self.abort()
            return
        with contextlib.suppress(Exception):  # a lane's, which is told again
            parts.device.drain()
        parts.residency.release_all(but=HOLD)
        self._settle()

    def abort(self) -> None:
        """An exception broke off a step, or something between two. A step that is not done is forgotten: parameters are as
        before it, and the engine can run the next.

        Unless some of its updates had begun: those cannot be taken back, and no further step may be run.
        """
        runtime, parts = self._runtime, self._parts
        runtime.ending.give_up()
        runtime.in_step = runtime.in_backward = runtime.is_aside = False
        with contextlib.suppress(Exception):  # a lane's, which is told again
            parts.device.drain()  # Ctrl-C may have come before an operation that was issued left its ticket
        parts.residency.release_all()
        parts.inputs.forget()
        parts.updates.discard()
        parts.gradients.finish_step()
        for parameter in self.parameters:
            take_gradient(parameter)
        runtime.forget()
        self._settle()
        control = parts.control
        before, control.ruined = control.ruined, control.ruined or STATES_APART
        with contextlib.suppress(Exception):  # then that is what the next step says
            runtime.planner.recover()
            control.ruined = before

    def _settle(self) -> None:
        """See Note [What breaks off]."""
        device = self._parts.device
        device.pool.settle(self.owned(), self._last(), other=device.meter.live_bytes())

    def owned(self) -> list[Allocation]:
        bundles = self._parts.residency.bundles
        blocks = [managed.block for managed in bundles]
        blocks += [managed.gradient.range for managed in bundles if managed.gradient is not None]
        states = [stored.state for stored in self._parts.store.segments]
        blocks += [state.allocation for state in states if isinstance(state, OptimizerState)]
        return [block for block in blocks if block is not None]

    def _last(self) -> Ticket:
        last = self._parts.device.pool.mark()
        with contextlib.suppress(Exception):  # of a lane, which will do nothing any more
            last = self._parts.device.transfers.barrier(label="all that broke off")
        return last
