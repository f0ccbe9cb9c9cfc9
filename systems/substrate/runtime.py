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

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from systems.device.watch.labels import UnitSpans
from systems.errors import DivergedError
from systems.planning.plan import OpKind, UpdateRule
from systems.planning.strategy import Strategy
from systems.planning.trace import NO_UNIT, Moment, Phase
from systems.substrate.cursor import Cursor
from systems.substrate.planner import Parts, Planner
from systems.substrate.recorder import Recorder
from systems.substrate.step_ending import StepEnding


class Runtime:
    """One optimizer step after another. Hooks report unit events; `accumulate` backward passes make a step."""

    def __init__(self, parts: Parts, strategy: Strategy, accumulate: int) -> None:
        self.parts, self.strategy, self.accumulate = parts, strategy, accumulate
        self.cursor = Cursor()
        self.recorder = Recorder(parts.device, parts.gradients.adopted_bytes)
        self._spans = UnitSpans(parts.layout.unit_name)
        self.in_step = self.in_backward = False
        self.is_aside = False
        self.doubtful = False  # a gradient came that nobody was seen to have read the parameter for
        self.casting: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext  # Casts.call
        self.micro_step = 0
        self.steps_begun = 0  # a loss is of the step in which its forward ran
        self._pending: dict[int, int] = {}  # unit to forward calls whose backward has not ended
        self._sent_early: set[int] = set()  # bundles whose gradient left for want of room before it was complete
        self.ending = StepEnding(parts, early=strategy.update_rule is UpdateRule.WHEN_REDUCED and accumulate == 1)
        self.planner = Planner(parts, strategy, self.cursor)
        parts.residency.demote = lambda: self.planner.moving(self._relieve)
        parts.inputs.active, parts.inputs.left = lambda: self._observing, self.recorder.input_left

    # ---- unit events, from the hooks

    @property
    def _observing(self) -> bool:
        """Forward events now belong to the step: not to a pass without gradients, nor to recomputation."""
        return self.in_step and not self.in_backward and not self.is_aside

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A pass without gradients (evaluation): leaves residency as it found it and is no part of the step's trace."""
        before = self.parts.residency.resident()
        self.is_aside = True
        try:
            yield
        finally:
            self.is_aside = False
            residency = self.parts.residency
            for index in residency.evictable():
                if index not in before:
                    residency.drop(index)
            for index in sorted(before - residency.resident()):
                if self.parts.layout.bundle_bytes(index) <= self.parts.device.account.room:
                    residency.fetch(index)

    def begin_step(self) -> None:
        self.ending.begin()
        self.in_step, self.micro_step, self.steps_begun = True, 0, self.steps_begun + 1
        self._pending.clear()
        self.parts.gradients.start_micro_step(last=self.accumulate == 1)
        self._set_switches()
        self.cursor.start()
        plan = self.cursor.plan
        self.recorder.start(measure=plan is None or plan.provisional or self.parts.device.measures_always)
        self._moment(Phase.STEP_BEGIN)
        self._carry_out_plan()

    def _set_switches(self) -> None:
        """Which units this step recomputes, and whose inputs leave: the plan's, or the strategy's without one."""
        plan, strategy = self.cursor.plan, self.strategy
        rematerialise = strategy.rematerialised if plan is None or plan.rematerialise is None else plan.rematerialise
        inputs = strategy.offloaded_inputs if plan is None or plan.offload_inputs is None else plan.offload_inputs
        self.parts.recomputation.units = rematerialise or frozenset()
        self.parts.inputs.units = inputs if rematerialise is None else inputs & rematerialise

    def forward_enter(self, unit: int) -> None:
        self._spans.begin("forward", unit)
        if self._observing:
            self.parts.inputs.settle()
            self._moment(Phase.FORWARD_ENTER, unit)
            self._carry_out_plan()
        self.parts.residency.hold(self._bundles(unit), ("forward", unit))

    def forward_exit(self, unit: int) -> None:
        self.parts.residency.release(self._bundles(unit), ("forward", unit))
        if self._observing:
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
        self.parts.inputs.begin_backward(unit)
        self._carry_out_plan()
        for bundle in self._bundles(unit):
            self.parts.gradients.enter(bundle, unit)
        self.parts.residency.hold(self._bundles(unit), ("backward", unit))
        for bundle in self._bundles(unit):
            self.parts.gradients.reserve(bundle)

    def backward_exit(self, unit: int) -> None:
        if not self.holds_backward(unit):
            return
        self.parts.residency.release(self._bundles(unit), ("backward", unit))
        self._pending[unit] = max(self._pending.get(unit, 0) - 1, 0)
        if not self._pending[unit]:
            for bundle in self._bundles(unit):
                self.parts.gradients.exit(bundle, unit)
        self._moment(Phase.BACKWARD_EXIT, unit)
        gradients, users = self.parts.gradients, self.parts.layout.bundles
        ended = [b for b in self._bundles(unit) if not any(self._pending.get(u, 0) for u in users[b].units)]
        gradients.sum_complete([bundle for bundle in ended if gradients.complete(bundle)])
        for bundle in ended:
            if gradients.complete(bundle):
                self._flush(bundle)
            elif bundle in gradients.bundles:
                self.recorder.waits(bundle, gradients.bundles[bundle].fired)
        self._carry_out_plan()
        self._spans.end("backward", unit)

    def backward_continues(self, unit: int) -> None:
        """A later call's backward ends where an earlier call's begins: nothing is released between."""
        if self.holds_backward(unit):
            self._pending[unit] = max(self._pending.get(unit, 0) - 1, 0)

    def holds_backward(self, unit: int) -> bool:
        key = ("backward", unit)
        bundles = self._bundles(unit)
        return any(key in self.parts.residency.bundles[b].holds for b in bundles)

    def gradient(self, parameter: int, bundle: int, gradient: torch.Tensor) -> None:
        """Autograd finished a parameter's gradient."""
        if bundle in self.ending.updated:
            raise DivergedError(
                f"a gradient for bundle {bundle} arrived after its update had begun: use `options=dict(nonfinite='skip')`"
            )
        gradients = self.parts.gradients
        if parameter not in gradients.bundles[bundle].fired_in_step:
            self.recorder.produced(gradient.nbytes)
        gradients.accept(parameter, gradient)

    def end_backward(self) -> None:
        """The backward pass of a micro-batch is over: whatever is still open ends here."""
        for unit in list(self._pending):
            self.backward_exit(unit)
        self._pending.clear()
        self.parts.inputs.settle()
        self._moment(Phase.BACKWARD_END)
        for bundle in self.parts.gradients.open_bundles():
            self.recorder.gives_up(bundle, self.parts.gradients.bundles[bundle].fired)
            self._flush(bundle)
        for bundle in sorted(self._sent_early):
            self.recorder.gives_up(bundle, self.parts.gradients.bundles[bundle].fired)
            self.recorder.flushed(bundle)
        self._sent_early.clear()
        self._carry_out_plan()
        self._spans.end_all()
        self.in_backward = False
        self.micro_step += 1
        if self.micro_step < self.accumulate:
            self.parts.gradients.start_micro_step(last=self.micro_step == self.accumulate - 1)

    # ---- the end of a step

    def finish_step(self) -> None:
        """Norm, decision, updates, and the way to the next step. Called once after the backward passes of a step.

        Fewer of them than `accumulate` make a step that is none of the plan's: it teaches nothing, and the plan stays.
        """
        partial = self.micro_step < self.accumulate
        self.parts.inputs.settle()
        if partial:
            self.cursor.following = False
        self._moment(Phase.STEP_END)
        self.ending.update()
        if not partial:
            self.parts.gradients.learn()
        self.parts.gradients.finish_step()
        self._carry_out_plan()
        self.in_step = False
        if partial:
            self.planner.resume()
            return
        self.doubtful = False
        moments = tuple(self.recorder.moments)
        expected = {b: g.expected for b, g in self.parts.gradients.bundles.items()}
        trace = self.recorder.finish(expected, self.parts.recomputation, self.parts.inputs.units)
        self.planner.learn(moments, trace)

    def forget(self) -> None:
        """The step was given up: nothing of what was under way in it will end."""
        self._spans.end_all()
        self._pending.clear()
        self._sent_early.clear()
        self.cursor.following = False

    # ---- mechanism

    def _moment(self, phase: Phase, unit: int = NO_UNIT) -> None:
        moment = Moment(phase, unit, self.micro_step)
        self.recorder.moment(moment)
        if not self.cursor.advance(moment):
            self.parts.device.log.count("fallbacks")
        elif self.cursor.at_barrier:
            self.parts.device.transfers.barrier(label=f"barrier at moment {self.cursor.position}")

    def _carry_out_plan(self) -> None:
        residency = self.parts.residency
        for operation in self.cursor.operations():
            managed = residency.bundles[operation.bundle]
            if operation.kind is OpKind.FETCH:
                residency.fetch(operation.bundle)
            elif not managed.holds and not residency.pinned(managed):
                (residency.drop if operation.kind is OpKind.DROP else residency.write_back)(operation.bundle)

    def _bundles(self, unit: int) -> tuple[int, ...]:
        return self.parts.layout.bundles_of_unit.get(unit, ())

    def _flush(self, bundle: int) -> None:
        gradients, residency = self.parts.gradients, self.parts.residency
        gradients.flush(bundle)
        self._sent_early.discard(bundle)
        self.recorder.flushed(bundle)
        managed = residency.bundles[bundle]
        if gradients.last_micro_step and not residency.pinned(managed) and not managed.holds:
            residency.drop(bundle)
        if self.ending.early:
            self.ending.update_bundle(bundle)

    def _relieve(self) -> bool:
        """Nothing can be evicted and room is needed: send a gradient off early, or optimizer state back to the host."""
        residency, gradients = self.parts.residency, self.parts.gradients
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
                self.planner.demote(managed.index)
                return True
        return False
