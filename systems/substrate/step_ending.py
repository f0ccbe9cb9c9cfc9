"""How a step ends: the norm, the decision, and updates that either wait for it or have already begun.

Note [Early updates]
    With UpdateRule.WHEN_REDUCED a bundle is updated as soon as its own gradient is complete, while backward goes on: the last
    micro-batch's, where there are several. Nothing may then depend on the norm: it is read one step late, and a non-finite
    gradient ends the run.

With UpdateRule.AFTER_NORM updates wait for the norm, but for those that run ahead of it and can be taken back: moves/ahead.py.
"""

from __future__ import annotations

from collections.abc import Callable

from systems.device.device import Device
from systems.device.watch.labels import labelled
from systems.errors import DivergedError, UnsupportedError
from systems.planning.layout import Layout
from systems.recipe.recomputation.recompute import Recomputation
from systems.recipe.step import loss_scale
from systems.recipe.step.control import HALF_UPDATED, StepControl
from systems.substrate.agreement import Agreement
from systems.substrate.bundle.bundle import ManagedBundle
from systems.substrate.bundle.poison import Poison
from systems.substrate.moves.ahead import UpdatesAhead
from systems.substrate.moves.gradients import Gradients
from systems.substrate.moves.residency import Residency
from systems.substrate.moves.updates import Updates


class StepEnding:
    """early: see Note [Early updates]. updated: bundles whose update was issued in the step in progress.
    ahead: updates of other bundles that can be taken back.
    """

    def __init__(
        self,
        control: StepControl,
        *,
        layout: Layout,
        device: Device,
        poison: Poison,
        residency: Residency,
        gradients: Gradients,
        updates: Updates,
        ahead: UpdatesAhead,
        recomputation: Recomputation,
        early: bool,
        agreement: Agreement,
    ) -> None:
        self._agreement = agreement
        self._control, self._layout, self._device, self._poison = control, layout, device, poison
        self._residency, self._gradients, self._updates, self.ahead = residency, gradients, updates, ahead
        self._recomputation, self.early = recomputation, early
        self.updated: set[int] = set()
        self._steps = 0  # recorded when the step in progress began
        self._unread: tuple[int, Callable[[], dict[int, float]]] | None = None  # and the steps recorded before it

    def begin(self) -> None:
        self.updated, self._steps = set(), self._control.loop.steps
        if self._updates.lock_free is not None:
            self._updates.lock_free.begin()
        self.ahead.begin()

    def give_up(self) -> None:
        """The step in progress broke off. If it is done already (Note [When a step is done]) nothing is lost of it."""
        control = self._control
        self._recomputation.repeats.forget()
        if control.loop.steps == self._steps:
            self.ahead.drop()  # else what ran ahead counts, be it still to run
        self.ahead.end()
        if self.updated and control.ruined is None and (self.early or control.loop.steps == self._steps):
            control.ruin(HALF_UPDATED + (f", or use {control.to_wait}" if self.early else ""))
        control.forget_updates()

    def gradient_left(self, bundle: ManagedBundle) -> None:
        """Complete, in the last micro-batch. It is updated now if its update need not wait."""
        if not self._agreement.alone and bundle.gradients.fired_in_step != bundle.gradients.expected:
            return  # what other ranks have got is heard first
        if self.early:
            self._update_bundle(bundle)
        elif self.ahead.takes(bundle):
            self.ahead.issue(bundle)

    def gradient_comes(self, bundle: int) -> None:
        """Of a parameter of that bundle. DivergedError if the update was made without it."""
        if bundle in self.updated:
            why = f"a gradient for bundle {bundle} arrived after its update had begun"
            raise DivergedError(f"{why}: use {self._control.to_wait}")
        self.ahead.withdraw(bundle)

    def _update_bundle(self, bundle: ManagedBundle) -> None:
        fired = frozenset(bundle.gradients.fired_in_step)
        self.updated.add(bundle.index)  # first: an update that breaks off between two segments has begun
        self._control.begin_updates(sorted(fired))
        self._updates.prepare_bundles([bundle], fired)(1.0)
        self._gradients.consumed(bundle)

    def update(self) -> None:
        """Issue what is left to update, or discard the step; then it is done."""
        gradients, updates, control = self._gradients, self._updates, self._control
        fired, reduced = gradients.fired(), frozenset[int]()
        if gradients.reductions is not None:
            fired = self._agreement.fired(fired, gradients.reductions.issued, frozenset(self.updated))
            gradients.reductions.tell_fired(fired, gradients.bundles)
            reduced = frozenset(gradients.reductions.issued)
            self.ahead.compare(fired)
        if gradients.accumulate > 1:
            self._sum_the_rest()
        if gradients.staying.there:
            gradients.staying.leave_all(updates.order)
        self._drop_stale()
        if self.early:
            self._update_rest(fired, reduced)
            return
        read = self._norm()
        self.ahead.check_hyperparameters()
        control.begin_updates(fired)
        ready = updates.prepare(fired, reduced)  # while the device is still busy with backward
        with labelled("norm"):
            outcome = control.decide(read())
        if outcome.skipped:
            self._device.log.count("skipped_steps")
            self.ahead.drop()
            updates.discard()
            control.record(outcome)
            return
        factor = loss_scale.multiplier(outcome)
        kept = self.ahead.holding(factor)
        self.updated.update({self._layout.bundle_of_parameter[p] for p in fired} - kept)
        ready(factor, kept)
        if reduced:
            updates.gather(reduced)
        control.record(outcome, exchanged=kept)
        self.ahead.end(kept)
        self.updated = set()

    def _update_rest(self, fired: list[int], reduced: frozenset[int]) -> None:
        """See Note [Early updates]. reduced: bundles summed over several ranks."""
        control, bundle_of = self._control, self._layout.bundle_of_parameter
        self.settle()
        read = self._norm()
        if not self._agreement.alone:  # ranks hear of each other here, as one may call `settle` alone
            sums = read()
            read = lambda: sums  # noqa: E731
        unread = control.loop.steps, read
        left = [p for p in fired if bundle_of[p] not in self.updated]
        control.begin_updates(left)
        ready = self._updates.prepare(left, reduced - self.updated)
        self.updated.update(bundle_of[p] for p in left)
        ready(1.0)
        if reduced:
            self._updates.gather(reduced)
        updates = control.advanced()
        # one statement that calls nothing: see Note [When a step is done]
        control.updates, control.begun, self.updated, self._unread = updates, {}, set(), unread

    def _norm(self) -> Callable[[], dict[int, float]]:
        """The step's partial sums by parameter; the host waits for them only when they are called for."""
        squares = self._gradients.squares
        squares.leave_waiting(self._gradients.bundles.values())
        intact = self._poison.intact().double().reshape(1)
        alike = self._recomputation.repeats.take()
        same = [] if alike.same is None else [alike.same]
        read = squares.reader(*same, intact)

        def norm() -> dict[int, float]:
            sums, (*same_bits, still_intact) = read()
            if not still_intact:
                self._poison.check()
            if same_bits:
                alike.check(same_bits.pop())
            return sums

        return norm if self._agreement.alone else lambda: self._agreement.sums(norm)

    def _sum_the_rest(self) -> None:
        """Of accumulators that the last micro-batch added nothing to."""
        for bundle in self._gradients.bundles.values():
            if bundle.gradients.fired_in_step and not bundle.gradients.summed:
                self._gradients.squares.leave_accumulated(bundle)

    def settle(self) -> None:
        """Read the norm of the last step that did not wait for it. Raises DivergedError if it is not finite."""
        if self._unread is None:
            return
        (before, read), control = self._unread, self._control
        if control.loop.steps == before:
            with labelled("norm"):
                try:
                    sums = read()
                except UnsupportedError as error:  # see repeats.py
                    control.ruin(f"{error}; its gradients are applied already (nonfinite=stop)")
                    self._unread = None
                    raise
                outcome = control.decide(sums)
            if outcome.skipped:
                ruined = (
                    f"step {outcome.step}: a gradient is not finite and was applied already: use {control.to_wait} to skip "
                    "such steps exactly"
                )
                control.ruin(ruined)
                self._unread = None
                raise DivergedError(ruined)
            control.record_late(outcome)
        self._unread = None

    def _drop_stale(self) -> None:
        """Device copies of parameters that are about to be updated on the host go now, whoever brought them back."""
        for bundle in self._gradients.bundles.values():
            if bundle.gradients.fired_in_step and not bundle.pinned and not bundle.gradients.written:
                self._residency.drop(bundle.index)
