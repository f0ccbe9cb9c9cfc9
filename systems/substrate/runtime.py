"""The runtime: carries out any plan, and gets along without one. It alone decides when mechanism acts; policy is data.

Note [Order at a moment]
    enter   the moment; the unit's input, if it waits on the host; operations of the plan; holds (fetching what is absent);
            gradient ranges
    exit    releases, and gradients in place; the moment; flushes of complete gradients; operations of the plan
    Where this says "the moment" it is recorded for the next plan, the device's lanes wait for each other if the plan in
    force has a barrier at it, and operations of the plan that come first there are carried out. So at an enter a barrier
    comes before all that is done there; at an exit it comes behind what ends the unit's own use of its bundles. As a
    backward pass ends, units that are still open exit before its moment; what a step's end does comes behind its own.
The timeline and the validator replay this order (Note [What happens at a moment] in planning/step/schedule.py).

Note [Departures]
    A step that leaves the trace is counted as a fallback and finishes on demand: what is needed is fetched when it is
    needed, and room is made by evicting. The step was recorded all the same, so the next like it has a plan. Several ranks
    leave it together or not at all: see Note [Passing] in following.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from systems.device.device import Device
from systems.device.watch.labels import UnitSpans
from systems.planning.layout import Layout
from systems.planning.plan import pages_bytes
from systems.planning.trace import Phase
from systems.recipe.recomputation.recompute import Recomputation
from systems.substrate.bundle.bundle import ManagedBundle
from systems.substrate.cursor import Cursor
from systems.substrate.flushes import Flushes
from systems.substrate.moments import Moments
from systems.substrate.moves.gradients import Gradients
from systems.substrate.moves.offloaded_inputs import OffloadedInputs
from systems.substrate.moves.residency import Residency
from systems.substrate.plan_in_force import PlanInForce
from systems.substrate.planner import Planner
from systems.substrate.progress import Progress
from systems.substrate.recorder import Recorder
from systems.substrate.step_ending import StepEnding


class Runtime:
    """One optimizer step after another. Hooks report unit events; `accumulate` backward passes make a step."""

    def __init__(
        self,
        progress: Progress,
        *,
        layout: Layout,
        device: Device,
        residency: Residency,
        gradients: Gradients,
        inputs: OffloadedInputs,
        recomputation: Recomputation,
        recorder: Recorder,
        cursor: Cursor,
        moments: Moments,
        in_force: PlanInForce,
        planner: Planner,
        flushes: Flushes,
        ending: StepEnding,
    ) -> None:
        self._progress, self._layout, self._device = progress, layout, device
        self._residency, self._gradients, self._inputs, self._recomputation = residency, gradients, inputs, recomputation
        self._recorder, self._cursor, self._moments, self._in_force = recorder, cursor, moments, in_force
        self._planner, self._flushes, self._ending = planner, flushes, ending
        self._spans = UnitSpans(layout.unit_name)
        self._pending = progress.pending

    # ---- unit events, from the hooks

    def forward_enter(self, unit: int) -> None:
        self._spans.begin("forward", unit)
        if self._progress.is_observed():
            self._inputs.settle()
            self._moments.reach(Phase.FORWARD_ENTER, unit)
            self._moments.carry_out_plan()
        self._residency.hold(self._layout.bundles_of_unit.get(unit, ()), ("forward", unit))

    def forward_exit(self, unit: int) -> None:
        self._residency.release(self._layout.bundles_of_unit.get(unit, ()), ("forward", unit))
        if self._progress.is_observed():
            self._pending[unit] = self._pending.get(unit, 0) + 1
            self._moments.reach(Phase.FORWARD_EXIT, unit)
            self._moments.carry_out_plan()
        self._spans.end("forward", unit)

    def backward_enter(self, unit: int) -> None:
        """Idempotent while the unit's backward is in progress."""
        if self.holds_backward(unit):
            return
        self._spans.begin("backward", unit)
        self._moments.reach(Phase.BACKWARD_ENTER, unit)
        self._inputs.begin_backward(unit)
        self._moments.carry_out_plan()
        bundles = self._managed(unit)
        for bundle in bundles:
            self._gradients.enter(bundle, unit)
        self._residency.hold(self._layout.bundles_of_unit.get(unit, ()), ("backward", unit))
        for bundle in bundles:
            self._gradients.reserve(bundle)

    def backward_exit(self, unit: int) -> None:
        if not self.holds_backward(unit):
            return
        bundles = self._managed(unit)
        self._residency.release(self._layout.bundles_of_unit.get(unit, ()), ("backward", unit))
        self._pending[unit] = max(self._pending.get(unit, 0) - 1, 0)
        if not self._pending[unit]:
            for bundle in bundles:
                self._gradients.exit(bundle, unit)
        self._moments.reach(Phase.BACKWARD_EXIT, unit)
        users = self._layout.bundles  # as they are known by now: see Layout.add_user
        self._flushes.units_done([b for b in bundles if not any(self._pending.get(u, 0) for u in users[b.index].units)])
        self._moments.carry_out_plan()
        self._spans.end("backward", unit)

    def backward_continues(self, unit: int) -> None:
        """A later call's backward ends where an earlier call's begins: nothing is released between."""
        if self.holds_backward(unit):
            self._pending[unit] = max(self._pending.get(unit, 0) - 1, 0)

    def holds_backward(self, unit: int) -> bool:
        key = ("backward", unit)
        return any(key in bundle.holds for bundle in self._managed(unit))

    def gradient(self, parameter: int, bundle: int, gradient: torch.Tensor) -> None:
        """Autograd finished a parameter's gradient."""
        if bundle in self._ending.updated or bundle in self._ending.ahead.assumed:
            self._ending.gradient_comes(bundle)
        managed = self._residency.bundles[bundle]
        if parameter not in managed.gradients.fired_in_step:
            self._recorder.produced(gradient.nbytes)
        self._gradients.accept(managed, parameter, gradient)

    def _managed(self, unit: int) -> list[ManagedBundle]:
        bundles = self._residency.bundles
        return [bundles[index] for index in self._layout.bundles_of_unit.get(unit, ())]

    # ---- passes and steps, from the engine

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A pass without gradients (evaluation): leaves residency as it found it and is no part of the step's trace.

        On several ranks what can leave makes room first, as none is made later.
        """
        residency, several = self._residency, self._residency.room.leaves is not None
        before, pages = residency.resident(), [(m, each.run) for m in residency.bundles for each in m.pages]
        try:
            self._progress.begin_aside()
            for index in residency.room.evictable() if several else ():
                residency.drop(index)
            yield
        finally:
            self._progress.end_aside()
            for index in residency.room.evictable():
                if index not in before:
                    residency.drop(index, keep_shard=True)
            for index in sorted(before - residency.resident()):
                if several or self._layout.bundle_bytes(index) <= self._device.account.room:
                    residency.fetch(index)
            for managed, run in pages:
                if pages_bytes(self._layout, run) <= self._device.account.room:
                    residency.pages.move(managed, run)

    def begin_step(self) -> None:
        self._ending.begin()
        self._progress.begin_step()
        self._pending.clear()
        self._gradients.start_micro_step(last=self._progress.accumulate == 1)
        self._in_force.set_switches()
        self._moments.begin_step()
        self._moments.reach(Phase.STEP_BEGIN)
        self._moments.carry_out_plan()

    def end_backward(self) -> None:
        """The backward pass of a micro-batch is over: whatever is still open ends here."""
        units = list(self._pending)
        for unit in units:
            self.backward_exit(unit)
        self._pending.clear()
        self._inputs.settle()
        self._moments.reach(Phase.BACKWARD_END)
        self._flushes.end_backward(units)
        self._moments.carry_out_plan()
        self._spans.end_all()
        progress = self._progress
        progress.end_backward()
        if progress.micro_step < progress.accumulate:
            self._gradients.start_micro_step(last=progress.micro_step == progress.accumulate - 1)

    def finish_step(self) -> None:
        """Norm, decision, updates, and the way to the next step. Called once after the backward passes of a step.

        Fewer of them than `accumulate` make a step that is none of the plan's: it teaches nothing, and the plan stays.
        """
        progress = self._progress
        partial = progress.micro_step < progress.accumulate
        self._inputs.settle()
        if partial:
            self._cursor.leave()
        self._moments.reach(Phase.STEP_END)
        self._ending.update()
        trained = self._gradients.bundles
        if not partial:
            for bundle in trained.values():
                if bundle.gradients.fired_in_step != bundle.gradients.expected:
                    bundle.gradients.learn()
        self._gradients.finish_step()
        self._moments.carry_out_plan()
        progress.end_step()
        if partial:
            self._planner.resume()
            return
        progress.trust()
        moments = tuple(self._recorder.moments)
        expected = {index: bundle.gradients.expected for index, bundle in trained.items()}
        trace = self._recorder.finish(expected, self._recomputation, self._inputs.units)
        self._planner.learn(moments, trace)

    def forget(self) -> None:
        """The step was given up: nothing of what was under way in it will end."""
        self._spans.end_all()
        self._pending.clear()
        self._flushes.forget()
        self._cursor.leave()
