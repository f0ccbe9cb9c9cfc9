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
from systems.substrate.bundle.bundle import ManagedBundle
from systems.substrate.cursor import Cursor
from systems.substrate.planner import Parts, Planner
from systems.substrate.recorder import Recorder
from systems.substrate.step_ending import StepEnding


class Runtime:
    """One optimizer step after another. Hooks report unit events; `accumulate` backward passes make a step."""

    def __init__(self, parts: Parts, strategy: Strategy, accumulate: int) -> None:
        self.parts, self.strategy, self.accumulate = parts, strategy, accumulate
        self.cursor = Cursor()
        self.recorder = Recorder(parts.device, parts.gradients.bytes_in_autograd)
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
        parts.residency.room.demote = lambda: self.planner.moving(self._relieve)
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
            for index in residency.room.evictable():
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
        mine = self._managed(unit)
        for managed in mine:
            self.parts.gradients.enter(managed, unit)
        self.parts.residency.hold(self._bundles(unit), ("backward", unit))
        for managed in mine:
            self.parts.gradients.reserve(managed)

    def backward_exit(self, unit: int) -> None:
        if not self.holds_backward(unit):
            return
        self.parts.residency.release(self._bundles(unit), ("backward", unit))
        self._pending[unit] = max(self._pending.get(unit, 0) - 1, 0)
        mine = self._managed(unit)
        if not self._pending[unit]:
            for managed in mine:
                self.parts.gradients.exit(managed, unit)
        self._moment(Phase.BACKWARD_EXIT, unit)
        trained = [m for m in mine if m.gradient is not None]
        ended = [m for m in trained if not any(self._pending.get(u, 0) for u in m.bundle.units)]
        self.parts.gradients.sum_complete([m for m in ended if m.gradients.complete])
        for managed in ended:
            if managed.gradients.complete:
                self._flush(managed)
            else:
                self.recorder.waits(managed.index, managed.gradients.fired)
        self._carry_out_plan()
        self._spans.end("backward", unit)

    def backward_continues(self, unit: int) -> None:
        """A later call's backward ends where an earlier call's begins: nothing is released between."""
        if self.holds_backward(unit):
            self._pending[unit] = max(self._pending.get(unit, 0) - 1, 0)

    def holds_backward(self, unit: int) -> bool:
        key = ("backward", unit)
        return any(key in managed.holds for managed in self._managed(unit))

    def gradient(self, parameter: int, bundle: int, gradient: torch.Tensor) -> None:
        """Autograd finished a parameter's gradient."""
        if bundle in self.ending.updated:
            raise DivergedError(
                f"a gradient for bundle {bundle} arrived after its update had begun: use `options=dict(nonfinite='skip')`"
            )
        managed = self.parts.residency.bundles[bundle]
        if parameter not in managed.gradients.fired_in_step:
            self.recorder.produced(gradient.nbytes)
        self.parts.gradients.accept(managed, parameter, gradient)

    def end_backward(self) -> None:
        """The backward pass of a micro-batch is over: whatever is still open ends here."""
        for unit in list(self._pending):
            self.backward_exit(unit)
        self._pending.clear()
        self.parts.inputs.settle()
        self._moment(Phase.BACKWARD_END)
        trained = self.parts.gradients.bundles
        for managed in [m for m in trained.values() if m.gradients.open]:
            self.recorder.gives_up(managed.index, managed.gradients.fired)
            self._flush(managed)
        for bundle in sorted(self._sent_early):
            self.recorder.gives_up(bundle, trained[bundle].gradients.fired)
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
        trained = self.parts.gradients.bundles
        if not partial:
            for managed in trained.values():
                managed.gradients.learn()
        self.parts.gradients.finish_step()
        self._carry_out_plan()
        self.in_step = False
        if partial:
            self.planner.resume()
            return
        self.doubtful = False
        moments = tuple(self.recorder.moments)
        expected = {bundle: managed.gradients.expected for bundle, managed in trained.items()}
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
            elif not managed.holds and not managed.pinned:
                (residency.drop if operation.kind is OpKind.DROP else residency.write_back)(operation.bundle)

    def _bundles(self, unit: int) -> tuple[int, ...]:
        return self.parts.layout.bundles_of_unit.get(unit, ())

    def _managed(self, unit: int) -> list[ManagedBundle]:
        bundles = self.parts.residency.bundles
        return [bundles[index] for index in self.parts.layout.bundles_of_unit.get(unit, ())]

    def _flush(self, managed: ManagedBundle) -> None:
        gradients, bundle = self.parts.gradients, managed.index
        gradients.flush(managed)
        self._sent_early.discard(bundle)
        self.recorder.flushed(bundle)
        if gradients.last_micro_step and not managed.pinned and not managed.holds:
            self.parts.residency.drop(bundle)
        if self.ending.early:
            self.ending.update_bundle(managed)

    def _relieve(self) -> bool:
        """Nothing can be evicted and room is needed: send a gradient off early, or optimizer state back to the host."""
        gradients = self.parts.gradients
        for bundle, managed in gradients.bundles.items():
            gradient = managed.gradients
            if gradient.written and not gradients.in_place.in_use(managed):
                gradients.flush(managed)
                self._sent_early.add(bundle)
                return True
            if gradient.range is not None and not managed.holds and not managed.stays_in_autograd:
                gradients.park(managed)
                if gradient.range is None:
                    if gradient.fired:
                        self._sent_early.add(bundle)
                    return True
        for managed in self.parts.residency.bundles:
            if managed.bundle.movable and not managed.holds and managed.pinned:
                self.planner.demote(managed)
                return True
        return False
