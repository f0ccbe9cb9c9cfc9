"""The runtime: carries out any plan, and gets along without one. It alone decides when mechanism acts; policy is data.

Note [Order at a moment]
    enter   operations of the plan, then holds (fetching what is absent), then gradient ranges
    exit    releases, then flushes of complete gradients, then operations of the plan
The timeline and the validator replay exactly this order (planning/schedule.py).

Note [Departures]
    A step that leaves the trace is counted as a fallback and finishes on demand: what is needed is fetched when it is
    needed, and room is made by evicting. The step was recorded all the same, so the next like it has a plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from systems.errors import BudgetError, DivergedError
from systems.planning.layout import Layout
from systems.planning.plan import OpKind, Plan, Tier, UpdateRule
from systems.planning.strategy import Strategy
from systems.planning.trace import NO_UNIT, Moment, Phase, Trace
from systems.substrate.device import Device
from systems.substrate.gradients import Gradients
from systems.substrate.recipe import StepControl
from systems.substrate.recorder import Cursor, Recorder, merged
from systems.substrate.residency import Residency
from systems.substrate.store import Store
from systems.substrate.updates import Updates
from systems.system import StepOutcome


@dataclass
class Parts:
    """The mechanism a runtime directs."""

    layout: Layout
    device: Device
    store: Store
    residency: Residency
    gradients: Gradients
    updates: Updates
    control: StepControl


class Runtime:
    """One optimizer step after another. Hooks report unit events; `accumulate` backward passes make a step."""

    def __init__(self, parts: Parts, strategy: Strategy, accumulate: int) -> None:
        self.parts, self.strategy, self.accumulate = parts, strategy, accumulate
        self.cursor, self.recorder = Cursor(), Recorder(parts.device)
        self.plans: dict[tuple[Moment, ...], tuple[Trace, Plan | None]] = {}
        self.in_step = self.in_backward = False
        self._aside = False
        self.micro_step = 0
        self._pending: dict[int, int] = {}  # unit to forward calls whose backward has not ended
        self._updated: set[int] = set()  # segments updated during this backward (UpdateRule.WHEN_REDUCED)
        self._replan = False
        self._eviction = strategy.eviction(parts.layout, None)
        parts.residency.choose = lambda candidates: self._eviction.choose(candidates, max(self.cursor.position, 0))
        parts.residency.demote = self._relieve
        for bundle in parts.layout.bundles:
            if not bundle.movable:
                self._promote(bundle.index)

    # ---- unit events, from the hooks

    @property
    def _observing(self) -> bool:
        """Forward events now belong to the step: not to a pass without gradients, nor to recomputation."""
        return self.in_step and not self.in_backward and not self._aside

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A pass without gradients (evaluation): leaves residency as it found it and is no part of the step's trace."""
        before = self.parts.residency.resident()
        self._aside = True
        try:
            yield
        finally:
            self._aside = False
            residency = self.parts.residency
            for index in residency.evictable():
                if index not in before:
                    residency.drop(index)
            for index in sorted(before - residency.resident()):
                if self.parts.layout.bundle_bytes(index) <= self.parts.device.account.room:
                    residency.fetch(index)

    def begin_step(self) -> None:
        self.in_step, self.micro_step = True, 0
        self._replan = False
        self._pending.clear()
        self._updated.clear()
        self.parts.gradients.start_micro_step(last=self.accumulate == 1)
        self.cursor.start()
        self.recorder.start()
        self._moment(Phase.STEP_BEGIN)
        self._carry_out_plan()

    def forward_enter(self, unit: int) -> None:
        if self._observing:
            self._moment(Phase.FORWARD_ENTER, unit)
            self._carry_out_plan()
        self._hold(unit, ("forward", unit))

    def forward_exit(self, unit: int) -> None:
        self._release(unit, ("forward", unit))
        if self._observing:
            self._pending[unit] = self._pending.get(unit, 0) + 1
            self._moment(Phase.FORWARD_EXIT, unit)
            self._carry_out_plan()

    def backward_enter(self, unit: int) -> None:
        """Idempotent while the unit's backward is in progress."""
        if self.holds_backward(unit):
            return
        self._moment(Phase.BACKWARD_ENTER, unit)
        self._carry_out_plan()
        self._hold(unit, ("backward", unit))
        for bundle in self.parts.layout.bundles_of_unit.get(unit, ()):
            self.parts.gradients.reserve(bundle)

    def backward_exit(self, unit: int) -> None:
        if not self.holds_backward(unit):
            return
        self._release(unit, ("backward", unit))
        self._pending[unit] = max(self._pending.get(unit, 0) - 1, 0)
        self._moment(Phase.BACKWARD_EXIT, unit)
        for bundle in self.parts.layout.bundles_of_unit.get(unit, ()):
            users = self.parts.layout.bundles[bundle].units
            if not any(self._pending.get(u, 0) for u in users) and self.parts.gradients.complete(bundle):
                self._flush(bundle)
        self._carry_out_plan()

    def holds_backward(self, unit: int) -> bool:
        key = ("backward", unit)
        bundles = self.parts.layout.bundles_of_unit.get(unit, ())
        return any(key in self.parts.residency.bundles[b].holds for b in bundles)

    def gradient(self, parameter: int, bundle: int, gradient: torch.Tensor) -> None:
        """Autograd finished a parameter's gradient."""
        if self._updated and any(s in self._updated for s in self.parts.layout.bundles[bundle].segments):
            raise DivergedError(
                f"a gradient for bundle {bundle} arrived after its update had begun: use --option nonfinite=skip"
            )
        gradients = self.parts.gradients
        if parameter not in gradients.bundles[bundle].fired_in_step:
            self.recorder.produced(gradient.nbytes, adopted=gradients.adopts(bundle))
        gradients.accept(parameter, gradient)

    def end_backward(self) -> None:
        """The backward pass of a micro-batch is over: whatever is still open ends here."""
        for unit in list(self._pending):
            self.backward_exit(unit)
        self._pending.clear()
        self._moment(Phase.BACKWARD_END)
        self.parts.gradients.each_open(self._flush)
        self._carry_out_plan()
        self.in_backward = False
        self.micro_step += 1
        if self.micro_step < self.accumulate:
            self.parts.gradients.start_micro_step(last=self.micro_step == self.accumulate - 1)

    # ---- the end of a step

    def finish_step(self) -> StepOutcome:
        """Norm, decision, updates, and the way to the next step. Called once after `accumulate` backward passes."""
        gradients, updates, control = self.parts.gradients, self.parts.updates, self.parts.control
        fired = gradients.fired()
        self._moment(Phase.STEP_END)
        if self.accumulate > 1:
            updates.norm_of_accumulated(fired)
        names = list(gradients.partials)
        values = self.parts.device.read_partials([gradients.partials[p] for p in names])
        outcome = control.decide(dict(zip(names, values, strict=True)))
        if outcome.skipped and self._updated:
            raise DivergedError(
                f"step {outcome.step}: a gradient is not finite and earlier segments were updated already: use "
                "--option nonfinite=skip to skip such steps exactly"
            )
        for managed in self.parts.residency.bundles:
            if not self.parts.residency.pinned(managed) and managed.index in gradients.bundles:
                if gradients.bundles[managed.index].fired_in_step:
                    self.parts.residency.drop(managed.index)
        if outcome.skipped:
            self.parts.device.log.count("skipped_steps")
            updates.discard()
        else:
            left = [p for p in fired if self._segment_of(p) not in self._updated]
            control.begin_updates(left)
            updates.run(left, control.multiplier(outcome))
        gradients.learn()
        gradients.finish_step()
        self._carry_out_plan()
        self.in_step = False
        trace = self.recorder.finish()
        control.record(outcome)
        self._learn(trace)
        return outcome

    def abort(self) -> None:
        """An exception broke the step: forget it. Parameters are as before it; the engine can run the next step."""
        self.in_step = self.in_backward = False
        self.parts.residency.release_all()
        self.parts.updates.discard()
        self.parts.gradients.finish_step()
        self._pending.clear()
        self.cursor.following = False

    # ---- mechanism

    def _moment(self, phase: Phase, unit: int = NO_UNIT) -> None:
        moment = Moment(phase, unit, self.micro_step)
        self.recorder.moment(moment)
        if not self.cursor.advance(moment):
            self.parts.device.log.count("fallbacks")

    def _carry_out_plan(self) -> None:
        residency = self.parts.residency
        for operation in self.cursor.operations():
            managed = residency.bundles[operation.bundle]
            if operation.kind is OpKind.FETCH:
                residency.fetch(operation.bundle)
            elif not managed.holds and not residency.pinned(managed):
                (residency.drop if operation.kind is OpKind.DROP else residency.write_back)(operation.bundle)

    def _hold(self, unit: int, key: object) -> None:
        for bundle in self.parts.layout.bundles_of_unit.get(unit, ()):
            self.parts.residency.hold(bundle, key)

    def _release(self, unit: int, key: object) -> None:
        for bundle in self.parts.layout.bundles_of_unit.get(unit, ()):
            self.parts.residency.release(bundle, key)

    def _segment_of(self, parameter: int) -> int:
        bundle = self.parts.layout.bundles[self.parts.gradients.bundle_of(parameter)]
        for s in bundle.segments:
            if any(p.parameter == parameter for p in self.parts.layout.segments[s].placements):
                return s
        raise AssertionError(parameter)

    def _flush(self, bundle: int) -> None:
        gradients, residency = self.parts.gradients, self.parts.residency
        gradients.flush(bundle)
        self.recorder.flushed(bundle)
        managed = residency.bundles[bundle]
        if gradients.last_micro_step and not residency.pinned(managed) and not managed.holds:
            residency.drop(bundle)
        if self.strategy.update_rule is UpdateRule.WHEN_REDUCED and self.accumulate == 1:
            fired = frozenset(gradients.bundles[bundle].fired)
            self.parts.control.begin_updates(sorted(fired))
            for s in managed.bundle.segments:
                self.parts.updates.run_segment(s, fired, 1.0 / self.parts.control.scaler.scale)
                self._updated.add(s)

    def _relieve(self) -> bool:
        """Nothing can be evicted and room is needed: send a gradient off early, or optimizer state back to the host."""
        residency, gradients = self.parts.residency, self.parts.gradients
        for bundle, gradient in gradients.bundles.items():
            managed = residency.bundles[bundle]
            if gradient.range is not None and not managed.holds and not gradients.adopts(bundle):
                gradients.flush(bundle)
                if gradient.range is None:
                    return True
        for managed in residency.bundles:
            if managed.bundle.movable and not managed.holds and residency.pinned(managed):
                self._demote(managed.index)
                return True
        return False

    def _demote(self, bundle: int) -> None:
        self._replan, self.cursor.following = True, False
        self.parts.device.log.count("demotions")
        for s in self.parts.layout.bundles[bundle].segments:
            self.parts.store.state_to_host(s)
        if bundle in self.parts.gradients.bundles:
            self.parts.gradients.to_slot(bundle)

    def _promote(self, bundle: int) -> bool:
        """Bring a bundle and its optimizer state to the device for good."""
        residency, store = self.parts.residency, self.parts.store
        residency.fetch(bundle)
        return all(
            store.state_to_device(s)
            for s in self.parts.layout.bundles[bundle].segments
            if store.segments[s].state is not None and store.segments[s].tier is Tier.HOST
        )

    # ---- planning

    def _learn(self, trace: Trace) -> None:
        """Have a plan for steps like the one that just ended, and use it for the next."""
        known = self.plans.get(trace.signature)
        old = self.cursor.plan
        if known is not None and not self._replan:
            if old is None or old.signature != trace.signature:
                self._apply(known[1])
            return
        if known is not None:
            trace = merged(known[0], trace)
        if self.plans:
            self.parts.device.log.count("retraces")
        try:
            plan = self.strategy.plan(self.parts.layout, trace)
        except BudgetError:
            plan = None  # the step itself went through on demand, so the next one will too
            self.parts.device.log.count("unplanned_steps")
        self.plans[trace.signature] = (trace, plan)
        self._eviction = self.strategy.eviction(self.parts.layout, trace)
        self._apply(plan)

    def _apply(self, plan: Plan | None) -> None:
        residency, store = self.parts.residency, self.parts.store
        for index in residency.evictable():
            residency.drop(index)
        self.parts.device.pool.trim()
        self.cursor.use(plan)
        residency.limit = self.parts.device.warm_up_pool_bytes if plan is None else self.parts.device.plannable_bytes
        if plan is None:
            return
        for bundle in self.parts.layout.bundles:
            tiers = {plan.optimizer_tier[s] for s in bundle.segments}
            managed = residency.bundles[bundle.index]
            if bundle.movable and bundle.trainable and residency.pinned(managed) and tiers == {Tier.HOST}:
                for s in bundle.segments:
                    store.state_to_host(s)
                residency.drop(bundle.index)
        for bundle in self.parts.layout.bundles:
            if bundle.trainable and plan.optimizer_tier[bundle.segments[0]] is Tier.DEVICE:
                if not self._promote(bundle.index):
                    self.cursor.use(None)
                    return
        for index in sorted(plan.resident_at_start):
            residency.fetch(index)

