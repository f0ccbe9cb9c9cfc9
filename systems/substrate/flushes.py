"""When gradients leave the device for their optimizer, and what else can go where room is needed."""

from __future__ import annotations

from collections.abc import Sequence

from systems.substrate.moves.gradients import Gradients
from systems.substrate.moves.residency import Residency
from systems.substrate.plan_in_force import PlanInForce
from systems.substrate.planner import Planner
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
    ) -> None:
        self._gradients, self._residency, self._recorder = gradients, residency, recorder
        self._ending, self._in_force, self._planner = ending, in_force, planner
        self._sent_early: set[int] = set()  # bundles whose gradient left for want of room before it was complete

    def units_done(self, bundles: Sequence[int]) -> None:
        """No backward that uses these bundles is still to come in this micro-step."""
        gradients = self._gradients
        gradients.sum_complete([bundle for bundle in bundles if gradients.complete(bundle)])
        for bundle in bundles:
            if gradients.complete(bundle):
                self._flush(bundle)
            elif bundle in gradients.bundles:
                self._recorder.waits(bundle, gradients.bundles[bundle].fired)

    def end_backward(self) -> None:
        """Nothing more comes in this micro-step."""
        for bundle in self._gradients.open_bundles():
            self._recorder.gives_up(bundle, self._gradients.bundles[bundle].fired)
            self._flush(bundle)
        for bundle in sorted(self._sent_early):
            self._recorder.gives_up(bundle, self._gradients.bundles[bundle].fired)
            self._recorder.flushed(bundle)
        self._sent_early.clear()

    def forget(self) -> None:
        """The step was given up."""
        self._sent_early.clear()

    def relieve(self) -> bool:
        """See Residency.demote."""
        return self._in_force.moving(self._send_something)

    def _flush(self, bundle: int) -> None:
        gradients, residency = self._gradients, self._residency
        gradients.flush(bundle)
        self._sent_early.discard(bundle)
        self._recorder.flushed(bundle)
        managed = residency.bundles[bundle]
        if gradients.last_micro_step and not residency.pinned(managed) and not managed.holds:
            residency.drop(bundle)
        if self._ending.early:
            self._ending.update_bundle(bundle)

    def _send_something(self) -> bool:
        """Nothing can be evicted and room is needed: send a gradient off early, or optimizer state back to the host."""
        residency, gradients = self._residency, self._gradients
        for bundle, gradient in gradients.bundles.items():
            managed = residency.bundles[bundle]
            if gradients.in_place.written(bundle) and not gradients.in_place.in_use(bundle):
                gradients.flush(bundle)
                self._sent_early.add(bundle)
                return True
            if gradient.range is not None and not managed.holds and not gradients.adopts(bundle):
                gradients.park(bundle)
                if gradient.range is None:
                    if gradient.fired:
                        self._sent_early.add(bundle)
                    return True
        for managed in residency.bundles:
            if managed.bundle.movable and not managed.holds and residency.pinned(managed):
                self._planner.demote(managed.index)
                return True
        return False
