"""How a step ends: the norm, the decision, and updates that either wait for it or have already begun.

Note [Early updates]
    With UpdateRule.WHEN_REDUCED a bundle is updated as soon as its own gradient is complete, while backward goes on. Nothing
    may then depend on the norm: it is read one step late, and a non-finite gradient ends the run.
"""

from __future__ import annotations

from collections.abc import Callable

from systems.device.watch.labels import labelled
from systems.errors import DivergedError, UnsupportedError
from systems.recipe.step import loss_scale
from systems.recipe.step.control import HALF_UPDATED
from systems.substrate.bundle.bundle import ManagedBundle
from systems.substrate.planner import Parts


class StepEnding:
    """early: see Note [Early updates]. updated: bundles whose update was issued in the step in progress."""

    def __init__(self, parts: Parts, *, early: bool) -> None:
        self.parts, self.early = parts, early
        self.updated: set[int] = set()
        self._steps = 0  # recorded when the step in progress began
        self._unread: tuple[int, Callable[[], dict[int, float]]] | None = None  # and the steps recorded before it

    def begin(self) -> None:
        self.updated, self._steps = set(), self.parts.control.loop.steps

    def give_up(self) -> None:
        """The step in progress broke off. If it is done already (Note [When a step is done]) nothing is lost of it."""
        control = self.parts.control
        self.parts.recomputation.repeats.forget()
        if self.updated and control.ruined is None and (self.early or control.loop.steps == self._steps):
            control.ruined = HALF_UPDATED + (", or use `options=dict(nonfinite='skip')`" if self.early else "")
        control.begun = {}

    def update_bundle(self, managed: ManagedBundle) -> None:
        """The bundle's gradient is complete: update it now."""
        fired = frozenset(managed.gradients.fired)
        self.updated.add(managed.index)  # first: an update that breaks off between two segments has begun
        self.parts.control.begin_updates(sorted(fired))
        self.parts.updates.prepare_bundles([managed], fired)(1.0)
        self.parts.gradients.consumed(managed)

    def update(self) -> None:
        """Issue what is left to update, or discard the step; then it is done."""
        gradients, updates, control = self.parts.gradients, self.parts.updates, self.parts.control
        fired = gradients.fired()
        if gradients.accumulate > 1:
            gradients.squares.leave_accumulated(self.parts.residency.bundles, fired)
        self._drop_stale()
        if self.early:
            self._update_rest(fired)
            return
        read = self._norm()
        control.begin_updates(fired)
        ready = updates.prepare(fired)  # while the device is still busy with backward
        with labelled("norm"):
            outcome = control.decide(read())
        if outcome.skipped:
            self.parts.device.log.count("skipped_steps")
            updates.discard()
        else:
            self.updated.update(self.parts.layout.bundle_of_parameter[p] for p in fired)
            ready(loss_scale.multiplier(outcome))
        control.record(outcome)
        self.updated = set()

    def _update_rest(self, fired: list[int]) -> None:
        """See Note [Early updates]."""
        control, bundle_of = self.parts.control, self.parts.layout.bundle_of_parameter
        self.settle()
        unread = control.loop.steps, self._norm()
        left = [p for p in fired if bundle_of[p] not in self.updated]
        control.begin_updates(left)
        ready = self.parts.updates.prepare(left)
        self.updated.update(bundle_of[p] for p in left)
        ready(1.0)
        updates = control.advanced()
        # one statement that calls nothing: see Note [When a step is done]
        control.updates, control.begun, self.updated, self._unread = updates, {}, set(), unread

    def _norm(self) -> Callable[[], dict[int, float]]:
        """The step's partial sums by parameter; the host waits for them only when they are called for."""
        gradients = self.parts.gradients
        gradients.squares.leave_waiting(gradients.bundles.values())
        partials = list(gradients.squares.partials.values())
        names = [parameter for parameters, _ in partials for parameter in parameters]
        intact = self.parts.poison.intact().double().reshape(1)
        alike = self.parts.recomputation.repeats.take()
        same = [] if alike.same is None else [alike.same]
        read = self.parts.device.partials([*(sums for _, sums in partials), *same, intact])

        def norm() -> dict[int, float]:
            *sums, still_intact = read()
            if not still_intact:
                self.parts.poison.check()
            if same:
                alike.check(sums.pop())
            return dict(zip(names, sums, strict=True))

        return norm

    def settle(self) -> None:
        """Read the norm of the last step that did not wait for it. Raises DivergedError if it is not finite."""
        if self._unread is None:
            return
        (before, read), control = self._unread, self.parts.control
        if control.loop.steps == before:
            with labelled("norm"):
                try:
                    sums = read()
                except UnsupportedError as error:  # see repeats.py
                    control.ruined, self._unread = f"{error}; its gradients are applied already (nonfinite=stop)", None
                    raise
                outcome = control.decide(sums)
            if outcome.skipped:
                control.ruined = (
                    f"step {outcome.step}: a gradient is not finite and was applied already: use "
                    "`options=dict(nonfinite='skip')` to skip such steps exactly"
                )
                self._unread = None
                raise DivergedError(control.ruined)
            control.record_late(outcome)
        self._unread = None

    def _drop_stale(self) -> None:
        """Device copies of parameters that are about to be updated on the host go now, whoever brought them back."""
        for managed in self.parts.gradients.bundles.values():
            if managed.gradients.fired_in_step and not managed.pinned:
                self.parts.residency.drop(managed.index)
