"""The runtime: carries out any plan, and gets along without one. It alone decides when mechanism acts; policy is data.

Note [Order at a moment]
    first   a barrier of the plan
    enter   operations of the plan, then holds (fetching what is absent), then gradient ranges
    exit    releases, then flushes of complete gradients, then operations of the plan
The timeline and the validator replay exactly this order (planning/step/schedule.py).

Note [Departures]
    A step that leaves the trace is counted as a fallback and finishes on demand: what is needed is fetched when it is
    needed, and room is made by evicting. The step was recorded all the same, so the next like it has a plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from systems.device.device import Device
from systems.device.watch.labels import UnitSpans
from systems.errors import DivergedError
from systems.planning.layout import Layout
from systems.planning.plan import OpKind
from systems.planning.strategy import Strategy
from systems.planning.trace import NO_UNIT, Moment, Phase
from systems.recipe.recomputation.recompute import Recomputation
from systems.substrate.cursor import Cursor
from systems.substrate.moves.gradients import Gradients
from systems.substrate.moves.offloaded_inputs import OffloadedInputs
from systems.substrate.moves.residency import Residency
from systems.substrate.planner import Planner
from systems.substrate.recorder import Recorder
from systems.substrate.step_ending import StepEnding


class Runtime:
    """One optimizer step after another. Hooks report unit events; `accumulate` backward passes make a step."""

    def __init__(
        self,
        strategy: Strategy,
        *,
        accumulate: int,
        layout: Layout,
        device: Device,
        residency: Residency,
        gradients: Gradients,
        inputs: OffloadedInputs,
        recomputation: Recomputation,
        cursor: Cursor,
        recorder: Recorder,
        planner: Planner,
        ending: StepEnding,
    ) -> None:
        self._strategy, self.accumulate, self._layout, self._device = strategy, accumulate, layout, device
        self._residency, self._gradients, self._inputs, self._recomputation = residency, gradients, inputs, recomputation
        self._cursor, self._recorder, self._planner, self._ending = cursor, recorder, planner, ending
        self._spans = UnitSpans(layout.unit_name)
        self.in_step = self.in_backward = False
        self.is_aside = False
        self.doubtful = False  # a gradient came that nobody was seen to have read the parameter for
        self.micro_step = 0
        self.steps_begun = 0  # a loss is of the step in which its forward ran
        self._pending: dict[int, int] = {}  # unit to forward calls whose backward has not ended
        self._sent_early: set[int] = set()  # bundles whose gradient left for want of room before it was complete

    # ---- unit events, from the hooks

    def is_observing(self) -> bool:
        """Forward events now belong to the step: not to a pass without gradients, nor to recomputation."""
        return self.in_step and not self.in_backward and not self.is_aside

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A pass without gradients (evaluation): leaves residency as it found it and is no part of the step's trace."""
        before = self._residency.resident()
        self.is_aside = True
        try:
            yield
        finally:
            self.is_aside = False
            residency = self._residency
            for index in residency.evictable():
                if index not in before:
                    residency.drop(index)
            for index in sorted(before - residency.resident()):
                if self._layout.bundle_bytes(index) <= self._device.account.room:
                    residency.fetch(index)

    def begin_step(self) -> None:
        self._ending.begin()
        self.in_step, self.micro_step, self.steps_begun = True, 0, self.steps_begun + 1
        self._pending.clear()
        self._gradients.start_micro_step(last=self.accumulate == 1)
        self._set_switches()
        self._cursor.start()
        plan = self._cursor.plan
        self._recorder.start(measure=plan is None or plan.provisional or self._device.measures_always)
        self._moment(Phase.STEP_BEGIN)
        self._carry_out_plan()

    def _set_switches(self) -> None:
        """Which units this step recomputes, and whose inputs leave: the plan's, or the strategy's without one."""
        plan, strategy = self._cursor.plan, self._strategy
        rematerialise = strategy.rematerialised if plan is None or plan.rematerialise is None else plan.rematerialise
        inputs = strategy.offloaded_inputs if plan is None or plan.offload_inputs is None else plan.offload_inputs
        self._recomputation.units = rematerialise or frozenset()
        self._inputs.units = inputs if rematerialise is None else inputs & rematerialise

    def forward_enter(self, unit: int) -> None:
        self._spans.begin("forward", unit)
        if self.is_observing():
            self._inputs.settle()
            self._moment(Phase.FORWARD_ENTER, unit)
            self._carry_out_plan()
        self._residency.hold(self._bundles(unit), ("forward", unit))

    def forward_exit(self, unit: int) -> None:
        self._residency.release(self._bundles(unit), ("forward", unit))
        if self.is_observing():
            self._pending[unit] = self._pending.get(unit, 0) + 1
            self._moment(Phase.FORWARD_EXIT, unit)
            self._carry_out_plan()
        self._spans.end("forward", unit)

    def backward_enter(self, unit: int) -> None:
        """Idempotent while the unit's backward is in progress."""
        if self.holds_backward(unit):
            return
        self._spans.begin("backward", unit)
        self._moment(Phase.BACKWARD_ENTER, unit)
        self._inputs.begin_backward(unit)
        self._carry_out_plan()
        for bundle in self._bundles(unit):
            self._gradients.enter(bundle, unit)
        self._residency.hold(self._bundles(unit), ("backward", unit))
        for bundle in self._bundles(unit):
            self._gradients.reserve(bundle)

    def backward_exit(self, unit: int) -> None:
        if not self.holds_backward(unit):
            return
        self._residency.release(self._bundles(unit), ("backward", unit))
        self._pending[unit] = max(self._pending.get(unit, 0) - 1, 0)
        if not self._pending[unit]:
            for bundle in self._bundles(unit):
                self._gradients.exit(bundle, unit)
        self._moment(Phase.BACKWARD_EXIT, unit)
        gradients, users = self._gradients, self._layout.bundles
        ended = [b for b in self._bundles(unit) if not any(self._pending.get(u, 0) for u in users[b].units)]
        gradients.sum_complete([bundle for bundle in ended if gradients.complete(bundle)])
        for bundle in ended:
            if gradients.complete(bundle):
                self._flush(bundle)
            elif bundle in gradients.bundles:
                self._recorder.waits(bundle, gradients.bundles[bundle].fired)
        self._carry_out_plan()
        self._spans.end("backward", unit)

    def backward_continues(self, unit: int) -> None:
        """A later call's backward ends where an earlier call's begins: nothing is released between."""
        if self.holds_backward(unit):
            self._pending[unit] = max(self._pending.get(unit, 0) - 1, 0)

    def holds_backward(self, unit: int) -> bool:
        key = ("backward", unit)
        bundles = self._bundles(unit)
        return any(key in self._residency.bundles[b].holds for b in bundles)

    def gradient(self, parameter: int, bundle: int, gradient: torch.Tensor) -> None:
        """Autograd finished a parameter's gradient."""
        if bundle in self._ending.updated:
            raise DivergedError(
                f"a gradient for bundle {bundle} arrived after its update had begun: use `options=dict(nonfinite='skip')`"
            )
        gradients = self._gradients
        if parameter not in gradients.bundles[bundle].fired_in_step:
            self._recorder.produced(gradient.nbytes)
        gradients.accept(parameter, gradient)

    def end_backward(self) -> None:
        """The backward pass of a micro-batch is over: whatever is still open ends here."""
        for unit in list(self._pending):
            self.backward_exit(unit)
        self._pending.clear()
        self._inputs.settle()
        self._moment(Phase.BACKWARD_END)
        for bundle in self._gradients.open_bundles():
            self._recorder.gives_up(bundle, self._gradients.bundles[bundle].fired)
            self._flush(bundle)
        for bundle in sorted(self._sent_early):
            self._recorder.gives_up(bundle, self._gradients.bundles[bundle].fired)
            self._recorder.flushed(bundle)
        self._sent_early.clear()
        self._carry_out_plan()
        self._spans.end_all()
        self.in_backward = False
        self.micro_step += 1
        if self.micro_step < self.accumulate:
            self._gradients.start_micro_step(last=self.micro_step == self.accumulate - 1)

    # ---- the end of a step

    def finish_step(self) -> None:
        """Norm, decision, updates, and the way to the next step. Called once after the backward passes of a step.

        Fewer of them than `accumulate` make a step that is none of the plan's: it teaches nothing, and the plan stays.
        """
        partial = self.micro_step < self.accumulate
        self._inputs.settle()
        if partial:
            self._cursor.following = False
        self._moment(Phase.STEP_END)
        self._ending.update()
        if not partial:
            self._gradients.learn()
        self._gradients.finish_step()
        self._carry_out_plan()
        self.in_step = False
        if partial:
            self._planner.resume()
            return
        self.doubtful = False
        moments = tuple(self._recorder.moments)
        expected = {b: g.expected for b, g in self._gradients.bundles.items()}
        trace = self._recorder.finish(expected, self._recomputation, self._inputs.units)
        self._planner.learn(moments, trace)

    def forget(self) -> None:
        """The step was given up: nothing of what was under way in it will end."""
        self._spans.end_all()
        self._pending.clear()
        self._sent_early.clear()
        self._cursor.following = False

    # ---- mechanism

    def _moment(self, phase: Phase, unit: int = NO_UNIT) -> None:
        moment = Moment(phase, unit, self.micro_step)
        self._recorder.moment(moment)
        if not self._cursor.advance(moment):
            self._device.log.count("fallbacks")
        elif self._cursor.at_barrier:
            self._device.transfers.barrier(label=f"barrier at moment {self._cursor.position}")

    def _carry_out_plan(self) -> None:
        residency = self._residency
        for operation in self._cursor.operations():
            managed = residency.bundles[operation.bundle]
            if operation.kind is OpKind.FETCH:
                residency.fetch(operation.bundle)
            elif not managed.holds and not residency.pinned(managed):
                (residency.drop if operation.kind is OpKind.DROP else residency.write_back)(operation.bundle)

    def _bundles(self, unit: int) -> tuple[int, ...]:
        return self._layout.bundles_of_unit.get(unit, ())

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

    def relieve(self) -> bool:
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
