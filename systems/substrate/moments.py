"""The moments of a step: each is recorded for the plan to come, and has what the plan in force wants done at it."""

from __future__ import annotations

from collections.abc import Iterator

from systems.device.device import Device
from systems.planning.plan import OpKind
from systems.planning.trace import ENTER, NO_UNIT, Moment, Phase
from systems.substrate.cursor import Cursor
from systems.substrate.flushes import Flushes
from systems.substrate.following import Following
from systems.substrate.moves.residency import Residency
from systems.substrate.progress import Progress
from systems.substrate.recorder import Recorder
from systems.substrate.step_times import StepTimes


class Moments:
    """Moments is the way through a step's trace: `reach` records each and makes its barrier, its operations come later.

    See Note [Order at a moment] in runtime.py and Note [Departures] there.
    """

    def __init__(
        self,
        cursor: Cursor,
        *,
        times: StepTimes,
        recorder: Recorder,
        progress: Progress,
        residency: Residency,
        device: Device,
        flushes: Flushes,
    ) -> None:
        self._cursor, self._times, self._recorder, self._progress = cursor, times, recorder, progress
        self._residency, self._device, self._flushes = residency, device, flushes

    def begin_step(self) -> None:
        self._cursor.start()
        plan = self._cursor.plan
        unknown = plan is None or plan.provisional or self._times.wanted(plan)
        self._recorder.start(measure=unknown or self._device.measures_always)

    def reach(self, phase: Phase, unit: int = NO_UNIT) -> None:
        moment = Moment(phase, unit, self._progress.micro_step)
        self._recorder.moment(moment)
        if not self._cursor.advance(moment):
            self._device.log.count("fallbacks")
            self._flushes.staying.depart()
        elif self._cursor.at_barrier:
            self._device.transfers.barrier(label=f"barrier at moment {self._cursor.position}")
        if self._cursor.first:
            self.carry_out_plan(first=True)

    def carry_out_plan(self, *, first: bool = False) -> None:
        """What it wants at the moment that was reached last. first: what comes before all else there."""
        residency = self._residency
        for operation in self._cursor.operations(first=first):
            managed = residency.bundles[operation.bundle]
            if operation.kind is OpKind.FETCH:
                residency.fetch(operation.bundle)
            elif operation.kind is OpKind.MOVE and operation.pages:
                residency.pages.move(managed, *operation.pages)
            elif operation.kind is OpKind.MOVE:
                residency.shards.move(operation.bundle)
            elif operation.bundle in self._flushes.staying.there:
                self._flushes.staying.leave(managed)
            elif managed.holds or managed.pinned:
                self._outlasts(operation.bundle)
            elif operation.kind is OpKind.SHRINK and operation.pages:
                residency.pages.leave(managed, operation.pages)
            elif operation.kind is OpKind.SHRINK:
                residency.shards.shrink(operation.bundle)
            else:
                (residency.drop if operation.kind is OpKind.DROP else residency.write_back)(operation.bundle)

    def _outlasts(self, bundle: int) -> None:
        """It is held beyond what the plan gives it."""


class MomentsTogether(Moments):
    """Of several ranks: see Note [Passing] in following.py."""

    _cursor: Following

    def reach(self, phase: Phase, unit: int = NO_UNIT) -> None:
        """See Moments.reach."""
        cursor, residency = self._cursor, self._residency
        self._pass(cursor.passes(Moment(phase, unit, self._progress.micro_step)))
        super().reach(phase, unit)
        if cursor.late and phase in ENTER:
            bundles = residency.layout.bundles_of_unit.get(unit, ())
            cursor.guests.update(index for index in bundles if residency.bundles[index].block is None)

    def end_call(self) -> None:
        """A call of the engine ends, with gradients to come."""
        self._pass(self._cursor.passes_call())

    def _outlasts(self, bundle: int) -> None:
        """See Moments: it goes with its last holder, for on other ranks it is gone, and they may gather it again."""
        self._cursor.guests.add(bundle)

    def _pass(self, moments: Iterator[int]) -> None:
        before = self._cursor.departed
        for position in moments:
            if self._cursor.at_barrier:
                self._device.transfers.barrier(label=f"barrier at moment {position}")
            if self._cursor.first:
                self.carry_out_plan(first=True)
            self._flushes.units_done(())
            self.carry_out_plan()
        if self._cursor.departed and not before:
            self._device.log.count("fallbacks")
