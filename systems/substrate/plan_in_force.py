"""Puts a plan into force: moves optimizer state and bundles to where it wants them at rest, and back home.

What is in force at a moment is one plan or none. Which one it is, is the planner's choice (planner.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from systems.device.device import Device
from systems.device.watch.lane_times import LaneTimes
from systems.planning.layout import Layout
from systems.planning.plan import Plan, Tier
from systems.planning.strategy import Strategy
from systems.recipe.recomputation.recompute import Recomputation
from systems.substrate.bundle.bundle import ManagedBundle
from systems.substrate.cursor import Cursor
from systems.substrate.moves.ahead import UpdatesAhead
from systems.substrate.moves.gradients import Gradients
from systems.substrate.moves.lock_free import paused, settle
from systems.substrate.moves.offloaded_inputs import OffloadedInputs
from systems.substrate.moves.residency import Residency
from systems.substrate.moves.tiers import TierMoves
from systems.substrate.moves.updates import Updates

Moved = TypeVar("Moved")


class PlanInForce:
    """PlanInForce is the plan that the cursor follows, as far as states and bundles at rest are concerned.

    ahead: whose updates need not wait in steps to come.
    halfway: states or gradients are moving, so that what breaks off now breaks off the step.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        layout: Layout,
        device: Device,
        tiers: TierMoves,
        residency: Residency,
        gradients: Gradients,
        updates: Updates,
        ahead: UpdatesAhead,
        inputs: OffloadedInputs,
        recomputation: Recomputation,
        cursor: Cursor,
    ) -> None:
        self._strategy, self._layout, self._device, self._cursor = strategy, layout, device, cursor
        self._tiers, self._residency, self._gradients, self._updates = tiers, residency, gradients, updates
        self.ahead = ahead
        self._inputs, self._recomputation = inputs, recomputation
        self.halfway = False
        self._applied: Plan | None = None  # whose wishes were all carried out, the last that were

    def begin(self) -> None:
        """No plan yet: nothing but what never moves is on the device."""
        self._set_aside()

    def set_switches(self) -> None:
        """Which units this step recomputes, and whose inputs leave: the plan's, or the strategy's without one."""
        plan, strategy, staying = self._cursor.plan, self._strategy, self._gradients.staying
        stays = frozenset() if plan is None else plan.staying
        if stays != staying.allowed:  # a departure has forbidden it
            staying.allow(stays)
        rematerialise = strategy.rematerialised if plan is None or plan.rematerialise is None else plan.rematerialise
        inputs = strategy.offloaded_inputs if plan is None or plan.offload_inputs is None else plan.offload_inputs
        recomputed = rematerialise or frozenset()
        leaving = inputs if rematerialise is None else inputs & rematerialise
        if recomputed != self._recomputation.units:
            self._recomputation.switch(recomputed)
        if leaving != self._inputs.units:
            self._inputs.switch(leaving)

    def moving(self, move: Callable[[], Moved]) -> Moved:
        """move: sends states or gradients off. If it breaks off the step cannot go on."""
        self.halfway = True
        moved = move()
        self.halfway = False
        return moved

    def clear(self) -> None:
        """Leave the device to activations, as far as can be."""
        self._device.log.count("fallbacks")
        self._use(None)
        self._gradients.staying.depart()
        with paused(self._updates.lock_free):
            for bundle in self._layout.bundles:
                self._send_home(bundle.index)
        for index in self._residency.room.evictable():
            self._residency.drop(index)
        self._set_aside()

    def apply(self, plan: Plan | None) -> None:
        """Move states and bundles to where the plan has them at rest. None: the next step runs on demand."""
        residency, device = self._residency, self._device
        settle(self._updates.lock_free)
        self._applied = None
        for index in residency.room.evictable():
            residency.drop(index)
        residency.shards.clear()
        self._use(plan)
        self._gradients.in_place.allow(self._layout.in_place if plan is None else plan.in_place)
        residency.room.limit_to(self._unplanned_bytes if plan is None else self._device.plannable_bytes)
        together = residency.room.leaves is not None
        if plan is None:
            for bundle in self._layout.bundles if together else ():  # on several ranks nothing goes later, for want of room
                self._send_home(bundle.index)
            return
        for bundle in self._layout.bundles:
            if bundle.trainable and {plan.optimizer_tier[s] for s in bundle.segments} == {Tier.HOST}:
                self._send_home(bundle.index)
        if plan.predicted_model_peak_bytes is not None:
            largest = self._layout.largest_movable_bytes
            peaks = plan.predicted_model_peak_bytes, largest, plan.predicted_non_model_peak_bytes
            most = plan.predicted_model_peak_bytes if self._strategy.bounded else None
            residency.room.limit_to(device.prepare(*peaks), most)
        for bundle in self._layout.bundles:
            on_device = bundle.trainable and plan.optimizer_tier[bundle.segments[0]] is Tier.DEVICE
            if bundle.index in plan.sharded:
                residency.shards.settle(bundle.index)
            elif residency.bundles[bundle.index].shard.at_home:
                residency.shards.leave_home(bundle.index, whole=plan.optimizer_tier[bundle.segments[0]] is Tier.DEVICE)
            if on_device and not self._promote(bundle.index):
                if together:
                    raise device.pool.out_of_memory(residency.bundles[bundle.index].nbytes, "what the plan keeps there")
                self._use(None)
                return
        self.ahead.versions.make(plan.ahead)  # behind the states that left the host
        _bring(plan, residency)
        self._applied = plan

    def resume(self) -> None:
        """What the plan has at rest comes back, and nothing else stays."""
        plan, residency = self._cursor.plan, self._residency
        assert plan is not None
        for index in residency.room.evictable():
            if index not in plan.resident_at_start:
                residency.drop(index)
        residency.shards.clear()
        _bring(plan, residency)

    def recover(self) -> None:
        """Something broke off anywhere. A bundle's optimizer state is on the device whole or not at all, and a plan that is
        not in force as it should be is none: the next step is run on demand, and then has its plan again.
        """
        plan = self._cursor.plan
        self.halfway = False
        in_force = plan is not None and self._applied is plan
        for bundle in self._layout.bundles:
            if not bundle.trainable or not bundle.movable:
                continue
            managed = self._residency.bundles[bundle.index]
            there = managed.count_states()
            if managed.shard.at_home and not there:  # the host has the values
                self._residency.shards.forget(bundle.index)
            if there and there < len(bundle.segments):
                self._send_home(bundle.index)
                there = 0
            in_force &= plan is not None and bool(there) == (plan.optimizer_tier[bundle.segments[0]] is Tier.DEVICE)
        if plan is not None and not in_force:
            self._use(None)
            for index in self._residency.room.evictable():
                self._residency.drop(index)
            self._set_aside()

    def demote(self, bundle: ManagedBundle) -> None:
        """Send a bundle's optimizer state back to the host in the middle of a step."""
        with paused(self._updates.lock_free):
            self._states_home(bundle)
        if bundle.gradient is not None:
            self._gradients.to_slot(bundle)

    def _use(self, plan: Plan | None) -> None:
        self._cursor.use(plan)
        self._updates.follow(None if plan is None else plan.signature)
        transfers = self._device.transfers
        transfers.copy_in_one_queue(plan is not None and plan.one_copy_queue)
        if plan is None or not plan.times_lanes:
            transfers.time(None)
        elif transfers.times is None:
            transfers.time(LaneTimes(self._layout, self._device.torch_device))
        self.ahead.allow(frozenset() if plan is None else plan.ahead)
        self._gradients.staying.allow(frozenset() if plan is None else plan.staying)

    @property
    def _unplanned_bytes(self) -> int:
        """What model data may fill while activations are not known: what is there and stays, and a share of the rest."""
        device, share = self._device, self._strategy.warm_up_share
        settled = device.account.pool  # only what is pinned is resident, states that the last plan brought included
        return device.allowance.warm_up_pool(settled, self._layout.movable_bytes, device.plannable_bytes, share)

    def _set_aside(self) -> None:
        """A pool for steps without a plan, nothing but what is pinned being resident."""
        self._residency.room.limit_to(self._unplanned_bytes)
        self._device.prepare(self._unplanned_bytes, self._layout.largest_movable_bytes)

    def _send_home(self, index: int) -> None:
        """A bundle that is on the device for the sake of its optimizer state leaves it with that, if it has a home to go to."""
        bundle = self._residency.bundles[index]
        if not bundle.movable or bundle.gradient is None or bundle.holds or not (bundle.pinned or bundle.shard.at_home):
            return
        if bundle.gradient.waiting:
            return  # its gradient would take the place of its parameters on the host
        self._states_home(bundle)
        self._residency.drop(index)
        self._residency.shards.forget(index)

    def _states_home(self, bundle: ManagedBundle) -> None:
        for stored in bundle.segments:
            if stored.tier is Tier.DEVICE:
                self._tiers.to_home(stored.segment.index)

    def _promote(self, index: int) -> bool:
        """Bring a bundle and its optimizer state to the device for good. Of one that does not fit nothing stays there."""
        self.ahead.versions.bring_home(self._residency.bundles[index])
        if not self._residency.bundles[index].shard.at_home:
            self._residency.fetch(index)
        moved = all(
            self._tiers.to_device(stored.segment.index)
            for stored in self._residency.bundles[index].segments
            if stored.state is not None and stored.tier is not Tier.DEVICE
        )
        if not moved:
            self._send_home(index)
        return moved


def _bring(plan: Plan, residency: Residency) -> None:
    """What it has on the device at a step's start comes."""
    for index in sorted(plan.shards_at_start):
        residency.shards.move(index)
    for run in sorted(plan.pages_at_start):
        residency.pages.move(residency.bundles[residency.layout.bundle_of_segment[run.first]], run)
    for index in sorted(plan.resident_at_start):
        residency.fetch(index)
