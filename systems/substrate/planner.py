"""Keeps the plans made so far and puts one into force: moves optimizer state and bundles to where it wants them at rest.

Steps are told apart by their moments. A kind of step seen for the first time, or one that ran into its budget, is planned
from what was measured; a kind seen before gets its plan back.

Note [Larger steps]
    A plan leaves activations the room that they had when the step was measured. Where a larger batch comes, the emulated
    device evicts for its activations one by one; CUDA's allocator asks nobody, and what it has not it refuses. So
    there a plan stands for steps of the shapes that it was measured at, pass by pass; a larger one begins with everything sent
    home that can go, is measured, and is planned together with what is known of the others. This ends: maxima only grow.
    A larger pass without gradients (an evaluation) begins in the same way and teaches nothing: the plan rests until the
    next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TypeVar

from systems.device.device import Device
from systems.errors import BudgetError
from systems.planning.layout import Layout
from systems.planning.plan import Plan, Tier
from systems.planning.strategy import Strategy
from systems.planning.trace import Moment, Trace
from systems.substrate.batch_shape import BatchShape
from systems.substrate.bundle.store import Store
from systems.substrate.cursor import Cursor
from systems.substrate.moves.gradients import Gradients
from systems.substrate.moves.residency import Residency
from systems.substrate.moves.updates import Updates
from systems.substrate.recorder import merged

Moved = TypeVar("Moved")


class Planner:
    """plans: the moments of a step to what was measured of it and its plan, None where no plan fits the budget.

    shapes: by moments, of the steps that were measured, one for each of a step's passes.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        layout: Layout,
        device: Device,
        store: Store,
        residency: Residency,
        gradients: Gradients,
        updates: Updates,
        cursor: Cursor,
    ) -> None:
        self._strategy, self._layout, self._device, self._cursor = strategy, layout, device, cursor
        self._store, self._residency, self._gradients, self._updates = store, residency, gradients, updates
        self.plans: dict[tuple[Moment, ...], tuple[Trace, Plan | None]] = {}
        self.shapes: dict[tuple[Moment, ...], tuple[BatchShape, ...]] = {}
        self._met: tuple[BatchShape, ...] = ()  # in this step
        self._replan = False
        self.halfway = False  # states or gradients are moving
        self._moments_change = False  # of steps like the one in progress
        self._applied: Plan | None = None  # whose wishes were all carried out, the last that were
        self._resting: Plan | None = None  # since a pass without gradients
        self._eviction = strategy.eviction(layout, None)
        for bundle in layout.bundles:
            if not bundle.movable:
                self._promote(bundle.index)
        self._set_aside()

    def choose(self, candidates: Sequence[int]) -> int:
        """The bundle that makes room."""
        return self._eviction.choose(candidates, max(self._cursor.position, 0))

    @property
    def _unplanned_bytes(self) -> int:
        """What model data may fill while activations are not known: what is there and stays, and a share of the rest."""
        device, share = self._device, self._strategy.warm_up_share
        settled = device.account.pool  # only what is pinned is resident, states that the last plan brought included
        return device.allowance.warm_up_pool(settled, self._layout.movable_bytes, device.plannable_bytes, share)

    def _set_aside(self) -> None:
        """A pool for steps without a plan, nothing but what is pinned being resident."""
        self._residency.limit = self._unplanned_bytes
        self._device.prepare(self._unplanned_bytes, self._layout.largest_movable_bytes)

    def meet(self, shape: BatchShape, *, first: bool) -> None:
        """A forward pass begins, the first of a step or a later one. See Note [Larger steps]."""
        number = 0 if first else len(self._met)
        self._met = (*self._met[:number], shape)
        if first and self._resting is not None:
            self._apply(self._resting)
        if self._is_too_large(shape, number):
            self._replan = True
            self._clear()

    def meet_aside(self, shape: BatchShape, *, in_step: bool) -> None:
        """A pass without gradients begins, within a step or between two. See Note [Larger steps]."""
        if self._is_too_large(shape):
            self._resting = None if in_step else self._cursor.plan
            self.moving(self._clear)

    def _is_too_large(self, shape: BatchShape, number: int | None = None) -> bool:
        """number: of the step's pass, for which alone the plan leaves the room that it had; None for a pass of no step."""
        plan = self._cursor.plan
        if plan is None or self._device.evicts_for_activations:
            return False
        known = self.shapes[plan.signature]
        if number is None:
            return not any(shape.within(each) for each in known)
        return number >= len(known) or not shape.within(known[number])

    def moving(self, move: Callable[[], Moved]) -> Moved:
        """move: sends states or gradients off. If it breaks off the step cannot go on."""
        self.halfway = True
        moved = move()
        self.halfway = False
        return moved

    def _clear(self) -> None:
        """Leave the device to activations, as far as can be."""
        self._device.log.count("fallbacks")
        self._use(None)
        for bundle in self._layout.bundles:
            self._send_home(bundle.index)
        for index in self._residency.evictable():
            self._residency.drop(index)
        self._set_aside()

    def learn(self, moments: tuple[Moment, ...], trace: Trace | None) -> None:
        """Have a plan for steps like the one that just ended, and use it for the next.

        trace: None if the step was not measured; if it needs to be, the next one will, on demand.
        """
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
        except BudgetError as error:
            if error.final:
                raise
            plan = None  # the step itself went through on demand, so the next one will too
            self._device.log.count("unplanned_steps")
        self.plans[trace.signature] = (trace, plan)
        self._eviction = self._strategy.eviction(self._layout, trace)
        self._apply(plan)

    def resume(self) -> None:
        """A step ended that teaches nothing: what the plan in force has at rest comes back, and nothing else stays."""
        plan, residency = self._cursor.plan, self._residency
        if plan is None:
            return
        if self._replan:  # by the next whole step
            self._apply(None)
            return
        for index in residency.evictable():
            if index not in plan.resident_at_start:
                residency.drop(index)
        for index in sorted(plan.resident_at_start):
            residency.fetch(index)

    def recover(self) -> None:
        """Something broke off anywhere. A bundle's optimizer state is on the device whole or not at all, and a plan that is
        not in force as it should be is none: the next step is run on demand, and then has its plan again.
        """
        store, plan = self._store, self._cursor.plan
        self.halfway = False
        in_force = plan is not None and self._applied is plan
        for bundle in self._layout.bundles:
            if not bundle.trainable or not bundle.movable:
                continue
            there = store.count_on_device(bundle.index)
            if there and there < len(bundle.segments):
                self._send_home(bundle.index)
                there = 0
            in_force &= plan is not None and bool(there) == (plan.optimizer_tier[bundle.segments[0]] is Tier.DEVICE)
        if plan is not None and not in_force:
            self._use(None)
            for index in self._residency.evictable():
                self._residency.drop(index)
            self._set_aside()

    def _apply(self, plan: Plan | None) -> None:
        residency, device = self._residency, self._device
        self._resting = self._applied = None
        for index in residency.evictable():
            residency.drop(index)
        self._use(plan)
        self._gradients.in_place.allowed = self._layout.in_place if plan is None else plan.in_place
        residency.limit = self._unplanned_bytes if plan is None else self._device.plannable_bytes
        if plan is None:
            return
        for bundle in self._layout.bundles:
            if bundle.trainable and {plan.optimizer_tier[s] for s in bundle.segments} == {Tier.HOST}:
                self._send_home(bundle.index)
        if plan.predicted_model_peak_bytes is not None:
            largest = self._layout.largest_movable_bytes
            peaks = plan.predicted_model_peak_bytes, largest, plan.predicted_non_model_peak_bytes
            residency.limit = device.prepare(*peaks)
        for bundle in self._layout.bundles:
            on_device = bundle.trainable and plan.optimizer_tier[bundle.segments[0]] is Tier.DEVICE
            if on_device and not self._promote(bundle.index):
                self._use(None)
                return
        for index in sorted(plan.resident_at_start):
            residency.fetch(index)
        self._applied = plan

    def uses_changed(self, *, moments: bool) -> None:
        """Units read more than the plans know. moments: a step like this one will have others the next time."""
        self.plans.clear()
        self._resting, self._moments_change = None, self._moments_change or moments
        if self._cursor.plan is not None:
            self._replan, self._cursor.following = True, False
            self._device.log.count("fallbacks")

    def _use(self, plan: Plan | None) -> None:
        self._cursor.use(plan)
        self._updates.follow(None if plan is None else plan.signature)

    def demote(self, bundle: int) -> None:
        """Send a bundle's optimizer state back to the host in the middle of a step; the step is planned anew after."""
        self._replan, self._cursor.following = True, False
        self._device.log.count("demotions")
        self._state_to_host(bundle)
        if bundle in self._gradients.bundles:
            self._gradients.to_slot(bundle)

    def _send_home(self, bundle: int) -> None:
        """A bundle that is on the device for the sake of its optimizer state leaves it with that, if it has a home to go to."""
        residency = self._residency
        managed = residency.bundles[bundle]
        if not managed.bundle.movable or not managed.bundle.trainable or managed.holds or not residency.pinned(managed):
            return
        if self._gradients.bundles[bundle].adopted:
            return  # its gradient would take the place of its parameters on the host
        self._state_to_host(bundle)
        residency.drop(bundle)

    def _state_to_host(self, bundle: int) -> None:
        store = self._store
        for s in self._layout.bundles[bundle].segments:
            if store.segments[s].tier is Tier.DEVICE:
                store.state_to_host(s)

    def _promote(self, bundle: int) -> bool:
        """Bring a bundle and its optimizer state to the device for good. Of one that does not fit nothing stays there."""
        residency, store = self._residency, self._store
        residency.fetch(bundle)
        moved = all(
            store.state_to_device(s)
            for s in self._layout.bundles[bundle].segments
            if store.segments[s].state is not None and store.segments[s].tier is not Tier.DEVICE
        )
        if not moved:
            self._send_home(bundle)
        return moved
