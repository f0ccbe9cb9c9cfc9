"""Keeps the plans made so far and chooses the one to be in force; plan_in_force.py carries out what it has at rest.

Steps are told apart by their moments. A kind of step seen for the first time, or one that ran into its budget, is planned
from what was measured; a kind seen before gets its plan back.

Note [Larger steps]
    A plan leaves activations the room that they had when the step was measured. Where a larger batch comes, the emulated
    device evicts for its activations one by one; CUDA's allocator asks nobody, and what it has not it refuses. So
    there a plan stands for steps of the shapes that it was measured at, pass by pass; a larger one begins with everything sent
    home that can go, is measured, and is planned together with what is known of the others. This ends: maxima only grow.
    A larger pass without gradients (an evaluation) begins in the same way and teaches nothing: the plan rests until the
    next step. Several ranks never evict for activations, and so do the same on any device; a pass is as large there as the
    largest of all ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

from systems.device.device import Device
from systems.errors import BudgetError
from systems.planning.layout import Layout
from systems.planning.plan import Plan
from systems.planning.policy.ahead import AheadChoice
from systems.planning.strategy import UNLIMITED, PlanningContext, Strategy
from systems.planning.trace import Moment, Trace
from systems.sizes import format_size
from systems.substrate.agreement import Agreement
from systems.substrate.batch_shape import BatchShape
from systems.substrate.bundle.bundle import ManagedBundle
from systems.substrate.cursor import Cursor
from systems.substrate.plan_in_force import PlanInForce
from systems.substrate.recorder import merged
from systems.substrate.step_times import StepTimes


class Planner:
    """Planner is what is known of the steps so far.

    plans: the moments of a step to what was measured of it and its plan, None where no plan fits the budget.
    shapes: by moments, of the steps that were measured, one for each of a step's passes.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        layout: Layout,
        context: PlanningContext,
        device: Device,
        cursor: Cursor,
        times: StepTimes,
        in_force: PlanInForce,
        agreement: Agreement,
    ) -> None:
        self._agreement = agreement
        self._strategy, self._layout, self._context, self._device, self._cursor = strategy, layout, context, device, cursor
        self._times, self._in_force = times, in_force
        self.plans: dict[tuple[Moment, ...], tuple[Trace, Plan | None]] = {}
        self.shapes: dict[tuple[Moment, ...], tuple[BatchShape, ...]] = {}
        self._met: tuple[BatchShape, ...] = ()  # in this step
        self._replan = self._told = False
        self._moments_change = False  # of steps like the one in progress
        self._resting: Plan | None = None  # since a pass without gradients
        self._eviction = strategy.eviction(layout, None)

    def choose(self, candidates: Sequence[int]) -> int:
        """The bundle that makes room."""
        return self._eviction.choose(candidates, max(self._cursor.position, 0))

    def meet(self, shape: BatchShape, *, first: bool) -> None:
        """A forward pass begins, the first of a step or a later one. See Note [Larger steps]."""
        if not self._agreement.alone:
            shape = self._agreement.largest(shape)
        number = 0 if first else len(self._met)
        self._met = (*self._met[:number], shape)
        if first and self._resting is not None:
            self._apply(self._resting)
        if self._is_too_large(shape, number):
            self._replan = True
            self._in_force.clear()

    def meet_aside(self, shape: BatchShape, *, in_step: bool) -> None:
        """A pass without gradients begins, within a step or between two. See Note [Larger steps]."""
        if not self._agreement.alone:
            shape = self._agreement.largest(shape)
        if self._is_too_large(shape):
            self._resting = None if in_step else self._cursor.plan
            self._in_force.moving(self._in_force.clear)

    def _is_too_large(self, shape: BatchShape, number: int | None = None) -> bool:
        """number: of the step's pass, for which alone the plan leaves the room that it had; None for a pass of no step."""
        plan = self._cursor.plan
        if plan is None or (self._device.evicts_for_activations and self._agreement.alone):
            return False
        known = self.shapes[plan.signature]
        if number is None:
            return not any(shape.within(each) for each in known)
        return number >= len(known) or not shape.within(known[number])

    def learn(self, moments: tuple[Moment, ...], trace: Trace | None) -> None:
        """Have a plan for steps like the one that just ended, and use it for the next.

        trace: None if the step was not measured; if it needs to be, the next one will, on demand.
        """
        if not self._agreement.alone:
            cursor = self._cursor
            measured = None if cursor.departed else trace  # it was flushed as the plan wants it
            alike, trace = self._agreement.trace(moments, measured, followed=cursor.following)
            if not alike or (cursor.departed and not cursor.strayed):  # see Note [Passing] in following.py
                self._device.log.count("departures")
                self.resume()
                return
        known = self.plans.get(moments)
        replan, self._replan = self._replan, False
        old = self._cursor.plan
        if old is None or old.provisional:
            self._device.log.count("steps_without_plan")
        if self._moments_change:
            self._moments_change = False
            self._apply(None)
            return
        again = old is not None and old.provisional and old.signature == moments and trace is not None
        if known is not None and not replan and not again:
            if old is None or old.signature != moments:
                self._apply(known[1])
            elif trace is not None and self._cursor.following:
                self._time(old, trace)
            return
        if trace is None:
            self._replan = replan  # by the next one: the plan that is known is no plan for it
            self._apply(None)
            return
        if known is not None and not again:
            trace = merged(known[0], trace)
        passes = zip_longest(self._met, self.shapes.get(moments, ()), fillvalue=BatchShape())
        self.shapes[moments] = tuple(shape.join(known) for shape, known in passes)
        if self.plans and not again:
            self._device.log.count("retraces")
        try:
            plan = self._strategy.plan(self._layout, trace)
            choice = self._what_runs_ahead(plan, trace)
            if choice.eligible and choice.profile is not None and self._context.hardware is None:
                self._times.want(plan)
            else:
                plan = self._chosen(choice)
        except BudgetError as error:
            if error.final:
                raise
            plan = None  # the step itself went through on demand, so the next one will too
            self._device.log.count("unplanned_steps")
        self.plans[trace.signature] = (trace, plan)
        self._eviction = self._strategy.eviction(self._layout, trace)
        self._apply(plan)

    def _what_runs_ahead(self, plan: Plan, trace: Trace) -> AheadChoice:
        strategy = self._strategy
        allowed = self._in_force.ahead.versions.made if strategy.runs_ahead else frozenset()
        if not self._agreement.alone:
            allowed = self._agreement.allowed(allowed)
        return AheadChoice(plan, self._layout, trace, self._context, strategy.offloaded_inputs, allowed)

    def _chosen(self, choice: AheadChoice) -> Plan:
        """Says once where the host has no room for any of what would run ahead."""
        plan = choice.made()
        if not plan.ahead and not self._told and choice.wants_memory:
            self._told = True
            size = format_size(choice.nbytes(choice.within(UNLIMITED)))
            warnings.warn(
                f"updates wait for the norm of all gradients: {size} of host memory beside what the model takes would let them "
                "run ahead of it: raise `host_memory`",
                RuntimeWarning,
                stacklevel=2,
            )
        return plan

    def _time(self, plan: Plan, trace: Trace) -> None:
        """Of a step under the plan. Once its times are known, so is what runs ahead."""
        seconds = self._times.add(plan, trace.compute_time_s)
        if seconds is None:
            return
        timed = replace(self.plans[plan.signature][0], compute_time_s=seconds)
        chosen = self._chosen(self._what_runs_ahead(plan, timed))
        self.plans[plan.signature] = (timed, chosen)
        if chosen.ahead:
            self._apply(chosen)

    def resume(self) -> None:
        """A step ended that teaches nothing: what the plan in force has at rest comes back, and nothing else stays."""
        if self._cursor.plan is None:
            return
        if self._replan:  # by the next whole step
            self._apply(None)
            return
        self._in_force.resume()

    def _apply(self, plan: Plan | None) -> None:
        self._resting = None
        self._in_force.apply(plan)

    def uses_changed(self, *, moments: bool) -> None:
        """Units read more than the plans know. moments: a step like this one will have others the next time."""
        self.plans.clear()
        self._times.forget()
        self._resting, self._moments_change = None, self._moments_change or moments
        if self._cursor.plan is not None:
            self._replan = True
            self._cursor.leave()
            self._device.log.count("fallbacks")

    def demote(self, bundle: ManagedBundle) -> None:
        """Send a bundle's optimizer state back to the host in the middle of a step; the step is planned anew after."""
        self._replan = True
        self._cursor.leave()
        self._device.log.count("demotions")
        self._in_force.demote(bundle)
