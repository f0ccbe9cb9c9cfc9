"""Updates that run ahead of the norm: made as if the step were clean, and kept only if it was.

An update that runs ahead has assumed the factor of a step that neither clips nor skips, its parameters' hyperparameters, that
the bundle's gradient is final, and so which parameters have one in this step. Where more of a gradient comes, the update is
withdrawn at once; the rest is compared with what is true at the step's end. Where all holds, the version that it wrote counts
from then on; where not, that version is forgotten, and the update is made, or not, from the other one as if nothing had been:
see Note [Two versions] in bundle/versions.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from systems.device.watch.events import EventLog
from systems.recipe.step import loss_scale
from systems.recipe.step.control import StepControl
from systems.settings import StepOutcome
from systems.substrate.bundle.bundle import ManagedBundle
from systems.substrate.bundle.segments import slots_take_parameters
from systems.substrate.bundle.states import GradientState
from systems.substrate.bundle.versions import SecondVersions
from systems.substrate.moves.updates import Updates

RECENT = 2  # steps by which the next one is judged


@dataclass
class Assumed:
    """By one update. factor: see `loss_scale.multiplier`. fired: parameters that have a gradient. dropped: its job need not
    run, if it has not begun.
    """

    factor: float
    fired: frozenset[int]
    dropped: bool = False


class UpdatesAhead:
    """allowed: bundles whose updates may run ahead, by the plan in force; only those that have two versions do. assumed: by
    bundle, what the updates of the step in progress took for granted.
    """

    def __init__(
        self,
        updates: Updates,
        versions: SecondVersions,
        bundles: Sequence[ManagedBundle],
        control: StepControl,
        log: EventLog,
    ) -> None:
        self._updates, self.versions, self._bundles, self._control, self._log = updates, versions, bundles, control, log
        self.allowed: frozenset[int] = frozenset()
        self.assumed: dict[int, Assumed] = {}
        self._waits = False

    def allow(self, bundles: Collection[int]) -> None:
        self.allowed = frozenset(bundles)

    def begin(self) -> None:
        """A step begins. Where one of the last was clipped this one will be, so nothing runs ahead in it.

        Second versions that went for a while are made again.
        """
        self.assumed = {}
        self.versions.follow()
        self.versions.make(self.allowed)
        self._waits = any(outcome.clip_factor < 1.0 for outcome in self._control.outcomes[-RECENT:])
        if self._waits and self.allowed:
            self._log.count("steps_that_waited")

    def takes(self, bundle: ManagedBundle) -> bool:
        """Its gradient has left, complete, and its update need not wait."""
        if self._waits or bundle.index not in self.allowed or bundle.index not in self.versions.of:
            return False
        return bundle.updated_on_host and bundle.gradients.state is GradientState.SENT

    def issue(self, bundle: ManagedBundle) -> None:
        """The bundle's gradient is complete, and on its way to the slots or in the accumulator."""
        assert bundle.index not in self.assumed, "an update that ran ahead was not withdrawn, and more of its gradient came"
        control, fired = self._control, frozenset(bundle.gradients.fired_in_step)
        control.begin_updates(sorted(fired), for_good=False)
        clean = StepOutcome(control.loop.steps + 1, None, 1.0, control.loop.loss_scale, skipped=False)
        assumed = self.assumed[bundle.index] = Assumed(loss_scale.multiplier(clean), fired)
        self._updates.ahead(bundle, fired, assumed.factor, is_dropped=lambda: assumed.dropped)

    def withdraw(self, index: int) -> None:
        """More comes for the gradient of that bundle, or it was never final."""
        assumed = self.assumed.pop(index, None)
        if assumed is not None:
            assumed.dropped = True

    def drop(self) -> None:
        """The step is not what was assumed, or it is none."""
        for index in list(self.assumed):
            self.withdraw(index)

    def check_hyperparameters(self) -> None:
        """Before the rest is updated: what was read when the first update ran ahead, be it kept or not, no longer holds where
        something changed.
        """
        if self._control.begun and self._control.groups.changed() is not None:
            if self.assumed:
                self._miss()
            self._control.forget_updates()

    def compare(self, fired: Iterable[int]) -> None:
        """Of several ranks: where another parameter of a bundle got a gradient elsewhere, the update is dropped. It is of this
        rank's own shards, so others may keep theirs.

        fired: on any rank.
        """
        everywhere, missed = frozenset(fired), []
        for index, assumed in self.assumed.items():
            if assumed.fired != everywhere.intersection(self._bundles[index].gradients.parameters):
                missed.append(index)
        for index in missed:
            self.withdraw(index)
        if missed:
            self._log.count("steps_that_missed")

    def holding(self, factor: float) -> frozenset[int]:
        """Bundles whose update can be kept. All others' are dropped."""
        if any(assumed.factor != factor for assumed in self.assumed.values()):
            self._miss()
        return frozenset(self.assumed)

    def end(self, kept: Iterable[int] = ()) -> None:
        """The step is done, or given up. kept: bundles whose other version counts now, with values in its slots."""
        self.assumed = {}
        self.versions.follow()
        for index in kept:
            slots_take_parameters(self._bundles[index].segments)

    def release(self) -> None:
        """The host's memory is needed for states that come home: second versions go, and what was written there."""
        self.drop()
        self.versions.release()

    def _miss(self) -> None:
        self._log.count("steps_that_missed")
        self.drop()
