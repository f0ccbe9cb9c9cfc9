"""When gradients leave the device for their optimizer, and what else can go where room is needed."""

from __future__ import annotations

from collections.abc import Sequence

from systems.substrate.bundle.bundle import ManagedBundle
from systems.substrate.bundle.gradient import LEFT
from systems.substrate.cursor import Cursor
from systems.substrate.following import Following
from systems.substrate.moves.gradients import Gradients
from systems.substrate.moves.residency import Residency
from systems.substrate.plan_in_force import PlanInForce
from systems.substrate.planner import Planner
from systems.substrate.progress import Progress
from systems.substrate.recorder import Recorder
from systems.substrate.step_ending import StepEnding


class Flushes:
    """Flushes is the order in which bundles' gradients leave: as each is complete, with what has come as the backward pass
    ends, and before that for want of room.
    """

    def __init__(
        self,
        gradients: Gradients,
        *,
        residency: Residency,
        recorder: Recorder,
        ending: StepEnding,
        in_force: PlanInForce,
        planner: Planner,
        progress: Progress,
        cursor: Cursor,
    ) -> None:
        self._progress, self._cursor = progress, cursor
        self._gradients, self._residency, self._recorder = gradients, residency, recorder
        self.staying = gradients.staying
        self._ending, self._in_force, self._planner = ending, in_force, planner
        self._sent_early: set[int] = set()  # bundles whose gradient left for want of room before it was complete

    def units_done(self, bundles: Sequence[ManagedBundle]) -> None:
        """No backward that uses these bundles is still to come in this micro-step."""
        trained = [bundle for bundle in bundles if bundle.gradient is not None]
        self._gradients.sum_complete([bundle for bundle in trained if bundle.gradients.complete])
        for bundle in trained:
            if bundle.gradients.complete:
                self._flush(bundle)
            else:
                self._recorder.waits(bundle.index, bundle.gradients.fired)

    def end_backward(self, units: Sequence[int] = ()) -> None:
        """Nothing more comes in this micro-step. units: whose forward was in it."""
        trained = self._gradients.bundles
        for bundle in [each for each in trained.values() if each.gradients.open]:
            self._recorder.gives_up(bundle.index, bundle.gradients.fired)
            self._flush(bundle)
        for index in sorted(self._sent_early):
            self._recorder.gives_up(index, trained[index].gradients.fired)
            self._recorder.flushed(index)
        self._sent_early.clear()

    def forget(self) -> None:
        """The step was given up."""
        self._sent_early.clear()

    def relieve(self) -> bool:
        """See DeviceRoom.ask."""
        return self._in_force.moving(self._send_something)

    def _flush(self, bundle: ManagedBundle) -> None:
        self._gradients.flush(bundle)
        self._sent_early.discard(bundle.index)
        self._recorder.flushed(bundle.index)
        if not self._gradients.last_micro_step:
            return
        if not bundle.pinned and not bundle.holds:
            self._residency.drop(bundle.index)
        self._ending.gradient_left(bundle)

    def _send_something(self) -> bool:
        """Nothing can be evicted and room is needed: send off a gradient that stays, or one early, or optimizer state home."""
        gradients = self._gradients
        if self.staying.there:
            self.staying.leave(next(iter(self.staying.there.values())))
            return True
        for bundle in gradients.bundles.values():
            gradient = bundle.gradients
            if gradient.written and not gradients.in_place.in_use(bundle):
                gradients.flush(bundle)
                self._sent_early.add(bundle.index)
                return True
            if gradient.range is not None and not bundle.holds and not bundle.stays_in_autograd:
                gradients.park(bundle)
                if gradient.range is None:
                    if gradient.fired:
                        self._sent_early.add(bundle.index)
                    return True
        for bundle in self._residency.bundles:
            if bundle.movable and not bundle.holds and bundle.pinned:
                self._planner.demote(bundle)
                return True
        return False


class FlushesTogether(Flushes):
    """Of several ranks. Which gradients came decides nothing, for others may come elsewhere: a bundle is flushed once no
    backward that uses it is still to come, and as the backward pass ends each that a forward of this micro-step has read.
    Under a plan it is not before the plan does so: see Note [Passing] in following.py.
    """

    _cursor: Following

    def units_done(self, bundles: Sequence[ManagedBundle]) -> None:
        """See Flushes.units_done. Of other bundles, those that fall due at this moment."""
        here = self._cursor.flushes()
        due = [bundle for bundle in map(self._residency.bundles.__getitem__, here) if not self._is_used_later(bundle)]
        due += [each for each in bundles if each.index not in here and not self._cursor.flushes_later(each.index)]
        self._flush_all(due)

    def _is_used_later(self, bundle: ManagedBundle) -> bool:
        """By a backward of this micro-step on this rank."""
        pending, outstanding = self._progress.pending, self._cursor.outstanding
        for unit in self._residency.layout.bundles[bundle.index].units:
            if pending.get(unit, 0) and (("backward", unit) in bundle.holds or outstanding.may_come(unit)):
                return True
        return False

    def _flush_all(self, bundles: Sequence[ManagedBundle]) -> None:
        due = [bundle for bundle in bundles if bundle.gradient is not None and bundle.gradient.state not in LEFT]
        self._gradients.sum_complete(due)
        for bundle in due:
            self._flush(bundle)

    def end_backward(self, units: Sequence[int] = ()) -> None:
        """See Flushes.end_backward."""
        of_unit = self._residency.layout.bundles_of_unit
        read = {bundle for unit in units for bundle in of_unit.get(unit, ())}
        self._flush_all([self._residency.bundles[index] for index in sorted(read.union(self._cursor.flushes()))])
