"""What an exception leaves behind, Ctrl-C above all, and how an engine goes on from there.

Note [What breaks off]
    Ctrl-C comes between any two calls. A device block has one owner: a bundle, a gradient (its range), a segment (its
    optimizer state). It is taken from the pool before it is owned, and let go of before it is freed. So whatever breaks off
    loses bytes at most, and never gives the same bytes to two. Once nothing is in flight the pool is told who owns what, and
    all else is free again; the host's account is likewise told which mappings there are. What a bundle's state is follows from
    its block and its storage; what of a step is done, from its one outcome; and what a slot holds is said before it is
    written. All here may be done twice: where another Ctrl-C breaks it off, the next call does it again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from torch import nn

from systems.device.device import Device
from systems.device.lanes.ticket import Ticket
from systems.device.memory.account import Account
from systems.device.memory.host import HostMapping
from systems.device.memory.pool import Allocation
from systems.recipe.model.parameters import take_gradient
from systems.recipe.step.control import StepControl
from systems.substrate.bundle.segments import OptimizerState
from systems.substrate.moves.gradients import Gradients
from systems.substrate.moves.in_place import HOLD
from systems.substrate.moves.lock_free import settle
from systems.substrate.moves.offloaded_inputs import OffloadedInputs
from systems.substrate.moves.residency import Residency
from systems.substrate.moves.updates import Updates
from systems.substrate.plan_in_force import PlanInForce
from systems.substrate.progress import Progress
from systems.substrate.runtime import Runtime
from systems.substrate.step_ending import StepEnding

STATES_APART = "optimizer states could not be brought home after a step that broke off: initialize anew from a checkpoint"
DROPPED = (
    "a pass without gradients broke off while it made room, so that the step in progress could not be kept: call discard(), "
    "and begin that step anew"
)


class Recovery:
    """dropped: why the step that its caller takes to be in progress is none; None where he knows.

    parameters: in which Ctrl-C may leave a gradient that nobody took. host_mappings: all that have an owner.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        parameters: Sequence[nn.Parameter],
        progress: Progress,
        in_force: PlanInForce,
        ending: StepEnding,
        control: StepControl,
        device: Device,
        residency: Residency,
        gradients: Gradients,
        updates: Updates,
        inputs: OffloadedInputs,
        host: Account,
        host_mappings: Callable[[], Sequence[HostMapping]],
    ) -> None:
        self._runtime, self._progress, self._in_force = runtime, progress, in_force
        self._ending, self._control = ending, control
        self._device, self._residency = device, residency
        self._gradients, self._updates, self._inputs = gradients, updates, inputs
        self._parameters = parameters
        self._host, self._host_mappings = host, host_mappings
        self.dropped: str | None = None

    def begin_anew(self) -> None:
        """The caller knows."""
        self.dropped = None

    def refuse(self) -> None:
        """Where another step would begin."""
        raise RuntimeError(self.dropped)

    def interrupted(self) -> None:
        """Ctrl-C, in a call that no call of the engine is around of. Told by each module on the way out of it."""
        (self._leave_step if self._progress.aside else self.abort)()

    def leave_aside(self) -> None:
        """A pass without gradients broke off. A step in progress stays as it is, unless it was being changed."""
        self._progress.end_aside()
        self._leave_step()

    def _leave_step(self) -> None:
        in_step = self._progress.in_step
        if not in_step or self._in_force.halfway:
            self.dropped = DROPPED if in_step else self.dropped
            self.abort()
            return
        with contextlib.suppress(Exception):  # a lane's, which is told again
            self._device.drain()
        self._residency.release_all(but=HOLD)
        self._settle()

    def abort(self) -> None:
        """An exception broke off a step, or something between two. A step that is not done is forgotten: parameters are as
        before it, and the engine can run the next.

        Unless some of its updates had begun: those cannot be taken back, and no further step may be run.
        """
        self._ending.give_up()
        self._progress.leave()
        with contextlib.suppress(Exception):  # a lane's, which is told again
            self._device.drain()  # Ctrl-C may have come before an operation that was issued left its ticket
        self._residency.release_all()
        self._inputs.forget()
        self._updates.discard()
        self._gradients.finish_step()
        for parameter in self._parameters:
            take_gradient(parameter)
        self._runtime.forget()
        self._settle()
        with contextlib.suppress(Exception):  # which is told again
            settle(self._updates.lock_free)
        before = self._control.ruined
        self._control.ruin(before or STATES_APART)
        with contextlib.suppress(Exception):  # then that is what the next step says
            self._in_force.recover()
            self._control.ruin(before)

    def _settle(self) -> None:
        """See Note [What breaks off]."""
        device = self._device
        device.pool.settle(self.owned(), self._last(), other=device.meter.live_bytes())
        self._host.settle(pool=sum(mapping.held_bytes for mapping in self._host_mappings()))

    def owned(self) -> list[Allocation]:
        bundles = self._residency.bundles
        blocks = [block for bundle in bundles for block in (bundle.block, bundle.shard.block)]
        blocks += [run.block for bundle in bundles for run in bundle.pages]
        blocks += [bundle.gradient.range for bundle in bundles if bundle.gradient is not None]
        states = [stored.state for bundle in bundles for stored in bundle.segments]
        blocks += [state.allocation for state in states if isinstance(state, OptimizerState)]
        return [block for block in blocks if block is not None]

    def _last(self) -> Ticket:
        last = self._device.pool.mark()
        with contextlib.suppress(Exception):  # of a lane, which will do nothing any more
            last = self._device.transfers.barrier(label="all that broke off")
        return last
