"""The mechanism of an engine: what is made, in which order, from what, and who undoes it.

What has to be undone is handed to `cleanup` in the step that did it, so that closing, or a start that breaks off, undoes it
in the opposite order.

    what                                     made from                                   undone by
 1  found: units and parameters              the model                                   -
 2  device: lanes, pool, kernels             `make_device`, a log                        device.close, then the disk's (6)
 3  strategy and layout                      budgets, found                              -
 4  recomputation, and units whose           found, strategy                             blocks run their own forward again
    inputs may leave
 5  buffers beside the weights               found, device                               they go back where they came from
 6  host and disk: accounts, files           budgets, layout                             disk.close, after the device's
 7  control: the step's decision; moments    settings, found                             -
    that the user's optimizer shows
 8  store: slots and optimizer states        layout, device, host, disk, ranks           store.close
 9  poison; bundles; residency; blocks of    layout, store, device, found                residency.close, then the bundles'
    what never moves; first values
10  parameters: views of the bundles         found, bundles                              given back by the engine
11  moves between tiers, gradients, and the  store, bundles, residency, control          lock_free.close, versions.close,
    updates they end in; second versions                                                 gradients.finish_step
12  inputs that wait on the host             device, host                                inputs.close
13  what ranks agree on; progress, cursor,   ranks, strategy, store, gradients, updates  -
    plan in force, planner
14  recorder, moments; how a step ends       cursor, gradients, control, updates         -
15  flushes, and the runtime itself          all of these                                -
16  what asks upwards: who wants room, and   planner, flushes, ahead, progress, recorder -
    inputs, whether they are the step's
17  recovery                                 all of these                                -
18  the model's blocks leave their inputs    inputs, found                               blocks are as before
19  calls of modules                         runtime, recovery                           calls.detach
20  unit events, and who reads what          runtime, calls, parameters                  hooks.remove
21  watch: edits past the engine, and the    the model, parameters                       watch.end
    casts of modules called past it
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from torch import nn

from systems.device.device import Device, follow_optimizer, join_ranks
from systems.device.memory.disk import Disk, disk_lanes
from systems.device.memory.host import HostMapping, HostSlots, host_account
from systems.device.watch.events import EventLog
from systems.machine.budgets import Budgets
from systems.planning.plan import UpdateRule
from systems.planning.policy.homes import within_host
from systems.planning.strategy import PlanningContext, Strategy, check_update_rule
from systems.ranks.beginnings import FirstValuesAlike
from systems.ranks.ranks import Ranks
from systems.ranks.side_by_side import side_by_side
from systems.recipe.model.adoption import initial_values, place_beside, refuse_mixed_dtypes
from systems.recipe.model.calls import Calls
from systems.recipe.model.giving_back import remember_buffers
from systems.recipe.model.parameter_watch import ParameterWatch
from systems.recipe.model.parameters import MovingParameter
from systems.recipe.model.units import find_units
from systems.recipe.recomputation.recompute import recomputed_units, switchable
from systems.recipe.step.control import StepControl
from systems.recipe.step.optimizer_states import states_of
from systems.settings import TORCH_DTYPE, Settings
from systems.substrate.agreement import Agreement, lay_out_alike
from systems.substrate.bundle.bundle import ManagedBundle, shows
from systems.substrate.bundle.first_values import FirstValues
from systems.substrate.bundle.poison import Poison
from systems.substrate.bundle.storage import RebindableStorage
from systems.substrate.bundle.store import Store
from systems.substrate.bundle.values import StoredValues
from systems.substrate.bundle.versions import SecondVersions
from systems.substrate.cursor import Cursor
from systems.substrate.flushes import Flushes, FlushesTogether
from systems.substrate.following import Following
from systems.substrate.handover import adopt_parameters
from systems.substrate.hooks import UnitHooks
from systems.substrate.moments import Moments, MomentsTogether
from systems.substrate.moves.ahead import UpdatesAhead
from systems.substrate.moves.gradients import Gradients
from systems.substrate.moves.lock_free import LockFree
from systems.substrate.moves.offloaded_inputs import OffloadedInputs, offloadable
from systems.substrate.moves.residency import Residency
from systems.substrate.moves.tiers import TierMoves
from systems.substrate.moves.updates import Updates
from systems.substrate.past_engine import CallsPastEngine
from systems.substrate.plan_in_force import PlanInForce
from systems.substrate.planner import Planner
from systems.substrate.progress import Progress
from systems.substrate.reads import Reads
from systems.substrate.recorder import Recorder
from systems.substrate.recovery import Recovery
from systems.substrate.runtime import Runtime
from systems.substrate.step_ending import StepEnding
from systems.substrate.step_times import StepTimes


class Assembly:
    """Assembly is the mechanism of one engine as it is made, each object under the name that it has in the engine.

    Raises BudgetError or UnsupportedError if the request cannot be met, be it on one of several ranks; then `cleanup` undoes
    what was done.
    """

    lock_free: LockFree | None = None

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        *,
        make_strategy: Callable[[PlanningContext], Strategy],
        make_device: Callable[[EventLog], Device],
        budgets: Budgets,
        log: EventLog,
        cleanup: ExitStack,
        ranks: Ranks,
    ) -> None:
        self._ranks = ranks
        self._model, self._settings, self._budgets, self._log, self._cleanup = model, settings, budgets, log, cleanup
        self._dtype = TORCH_DTYPE[settings.dtype]
        with side_by_side(ranks, "what an engine is built of"):
            self._cut_model(make_strategy, make_device)
            self._lay_out_memory()
        self._begin_alike()
        with side_by_side(ranks, "how an engine is built"):
            self.parameters = adopt_parameters(self.found, self.layout, self.bundles, self._dtype)
            self._make_moves()
            self._make_plans()
            self._make_steps()
            self._connect()
            self._follow_model()

    def _cut_model(
        self, make_strategy: Callable[[PlanningContext], Strategy], make_device: Callable[[EventLog], Device]
    ) -> None:
        """Steps 1 to 5."""
        settings, cleanup = self._settings, self._cleanup
        self.found = found = find_units(self._model, self._dtype, compiles=settings.device == "cuda")
        refuse_mixed_dtypes(found, settings.dtype)
        self.device = make_device(self._log)
        self._files = cleanup.enter_context(ExitStack())  # closed once all lanes are at rest
        cleanup.callback(self.device.close)
        if self._ranks.size > 1:
            join_ranks(self.device, self._ranks)
        self._context = context = self._told(follow_optimizer(self.device, settings).moments)
        self.strategy = strategy = make_strategy(context)
        check_update_rule(strategy.update_rule, to_wait=strategy.to_wait, clip=settings.clip, dtype=settings.dtype)
        self.layout = within_host(strategy.layout(found.index).named(found.index), context, strategy.update_rule)
        self.recomputation, undo = switchable(found, strategy.rematerialised, settings.recompute)
        cleanup.callback(undo)
        recomputed = recomputed_units(found, settings.recompute) | self.recomputation.units
        self._offloaded = offloadable(found, strategy.offloaded_inputs, recomputed)
        cleanup.callback(remember_buffers(self._model, found.carried.values()))
        place_beside(self._model, found, self.device)

    def _told(self, moments: tuple[str, ...]) -> PlanningContext:
        """What the strategy may know of this run."""
        settings, device = self._settings, self.device
        return PlanningContext(
            device_budget=device.plannable_bytes,
            host_budget=self._budgets.host,
            itemsize=self._dtype.itemsize,
            ranks=settings.ranks,
            accumulate=settings.accumulate,
            seed=settings.seed,
            recompute=settings.recompute,
            allowance=device.allowance,
            device_name=device.name,
            disk_budget=self._budgets.disk,
            moments=moments,
            expert_ranks=settings.expert_ranks,
        )

    def _lay_out_memory(self) -> None:
        """Steps 6 to 9."""
        found, layout, device, settings, ranks = self.found, self.layout, self.device, self._settings, self._ranks
        self.host = host_account(self._budgets.host, self._log)
        self.disk = self._make_disk() if layout.on_disk else None
        self.control = StepControl(settings, found.index, found.parameters, self.strategy.to_wait)
        self.states = states_of(settings.optimizer, self.control.groups.chosen, found.index, found.parameters)
        self.alike = FirstValuesAlike(ranks, found.index.parameters, initial_values(found, settings))
        adds = settings.accumulate
        self.store = Store(layout, device, self.host, self._dtype, accumulate=adds, disk=self.disk, ranks=ranks)
        self._cleanup.callback(self.store.close)
        self.poison = Poison(max(layout.bundle_bytes(b.index) for b in layout.bundles), device.torch_device)
        self.bundles = self._make_bundles()
        for bundle in self.bundles:
            self._cleanup.callback(bundle.close)
        self.values = StoredValues(self.store, self.bundles)
        self.residency = Residency(layout, self.bundles, self.store, device, write_back=self.strategy.write_back)
        self._cleanup.callback(self.residency.close)
        first = FirstValues(self.store, [p.shape for p in found.index.parameters], self.alike.fill)
        for bundle in self.bundles:
            if not bundle.movable:
                self.residency.settle(bundle)
            first.fill(bundle)

    def _begin_alike(self) -> None:
        """The first that ranks do together, once each of them has all that it takes."""
        lay_out_alike(self._ranks, self._context, self.layout)
        for bundle in self.bundles if self._ranks.size > 1 else ():
            if not bundle.movable and bundle.scattered:
                self.residency.gather(bundle)
        self.alike.check()

    def _make_bundles(self) -> list[ManagedBundle]:
        layout, segments, device = self.layout, self.store.segments, self.device.torch_device
        return [
            ManagedBundle(
                bundle,
                layout,
                [segments[s] for s in bundle.segments],
                RebindableStorage(layout.bundle_bytes(bundle.index), device, self.poison),
                accumulate=self._settings.accumulate,
            )
            for bundle in layout.bundles
        ]

    def _make_disk(self) -> Disk:
        assert self._settings.disk is not None
        disk = Disk(self._settings, self.layout, budget=self._budgets.disk, host=self.host, log=self._log)
        self._files.callback(disk.close)
        self.device.meter.exempt(disk.buffers[0].parts[0].untyped_storage())
        self.device.lanes.update(disk_lanes(self.device.jitter))
        return disk

    def _make_moves(self) -> None:
        """Steps 11 and 12."""
        layout, device, dtype, accumulate = self.layout, self.device, self._dtype, self._settings.accumulate
        early = self.strategy.update_rule is UpdateRule.WHEN_REDUCED
        user = {p: unit.index for unit in self.found.index.units for p in unit.parameters}
        self.tiers = TierMoves(layout, self.store, self.bundles, device)
        self.gradients = Gradients(
            layout, self.residency, self.tiers, device, dtype, accumulate=accumulate, user=user, ranks=self._ranks, early=early
        )
        self._cleanup.callback(self.gradients.finish_step)
        self.versions = SecondVersions(self.store, self.bundles, device, self.control)
        self._cleanup.callback(self.versions.close)
        gather = self.residency.gather if self._ranks.size > 1 else None
        if (most := self.strategy.max_staleness) is not None:
            self.lock_free = LockFree(layout, self.bundles, self.residency, self.store, self.control, most)
            self._cleanup.callback(self.lock_free.close)
        made = layout, self.bundles, self.tiers, self.gradients, device, self.control, self.versions, gather, self.lock_free
        self.updates = Updates(*made)
        self.ahead = UpdatesAhead(self.updates, self.versions, self.bundles, self.control, self._log)
        self.input_slots = HostSlots("host-input", self.host)
        self.inputs = OffloadedInputs(device, self.input_slots)
        self._cleanup.callback(self.inputs.close)

    def _make_plans(self) -> None:
        """Step 13."""
        strategy, layout, device = self.strategy, self.layout, self.device
        self._agreement, self._times = Agreement(self._ranks, layout, strategy.to_wait), StepTimes()
        self.progress, self.cursor = Progress(self._settings.accumulate), Following() if self._ranks.size > 1 else Cursor()
        self.in_force = PlanInForce(
            strategy,
            layout=layout,
            device=device,
            tiers=self.tiers,
            residency=self.residency,
            gradients=self.gradients,
            updates=self.updates,
            ahead=self.ahead,
            inputs=self.inputs,
            recomputation=self.recomputation,
            cursor=self.cursor,
        )
        self.planner = Planner(
            strategy,
            layout=layout,
            context=self._context,
            device=device,
            cursor=self.cursor,
            times=self._times,
            in_force=self.in_force,
            agreement=self._agreement,
        )
        self.in_force.begin()

    def _make_steps(self) -> None:
        """Steps 14 and 15."""
        device, residency, gradients, recomputation = self.device, self.residency, self.gradients, self.recomputation
        self.recorder = Recorder(device, gradients.bytes_in_autograd)
        self.ending = StepEnding(
            self.control,
            layout=self.layout,
            device=device,
            poison=self.poison,
            residency=residency,
            gradients=gradients,
            updates=self.updates,
            ahead=self.ahead,
            recomputation=recomputation,
            early=self.strategy.update_rule is UpdateRule.WHEN_REDUCED,
            agreement=self._agreement,
        )
        self.flushes = (Flushes if self._ranks.size == 1 else FlushesTogether)(
            gradients,
            residency=residency,
            recorder=self.recorder,
            ending=self.ending,
            in_force=self.in_force,
            planner=self.planner,
            progress=self.progress,
            cursor=self.cursor,
        )
        self.moments = (Moments if self._ranks.size == 1 else MomentsTogether)(
            self.cursor,
            times=self._times,
            recorder=self.recorder,
            progress=self.progress,
            residency=residency,
            device=device,
            flushes=self.flushes,
        )
        self.runtime = Runtime(
            self.progress,
            layout=self.layout,
            device=device,
            residency=residency,
            gradients=gradients,
            inputs=self.inputs,
            recomputation=recomputation,
            recorder=self.recorder,
            cursor=self.cursor,
            moments=self.moments,
            in_force=self.in_force,
            planner=self.planner,
            flushes=self.flushes,
            ending=self.ending,
        )

    def _connect(self) -> None:
        """Steps 16 and 17."""
        self.tiers.ask(room_on_host=self.ahead.release)
        self.input_slots.ask(room=self.ahead.release)
        self.residency.room.ask(choose=self.planner.choose, relieve=self.flushes.relieve)
        if isinstance(cursor := self.cursor, Following):
            self.residency.room.let_go(lambda bundle: self.progress.aside or cursor.leaves(bundle))
            cursor.ask(self.planner.plans)
        store, versions, slots, disk, behind = self.store, self.versions, self.input_slots, self.disk, self.lock_free

        def host_mappings() -> list[HostMapping]:
            more = [*([] if disk is None else disk.mappings), *([] if behind is None else behind.mappings)]
            return [*store.mappings, *versions.mappings, *slots.mappings, *more]

        self.recovery = Recovery(
            self.runtime,
            parameters=self.parameters,
            progress=self.progress,
            in_force=self.in_force,
            ending=self.ending,
            control=self.control,
            device=self.device,
            residency=self.residency,
            gradients=self.gradients,
            updates=self.updates,
            inputs=self.inputs,
            host=self.host,
            host_mappings=host_mappings,
        )

    def _follow_model(self) -> None:
        """Steps 18 to 21."""
        found, device, residency, progress = self.found, self.device, self.residency, self.progress
        detach = self.inputs.attach(found, self._offloaded, active=progress.is_observed, left=self.recorder.input_left)
        self._cleanup.callback(detach)
        past = CallsPastEngine(self.runtime, progress=progress, planner=self.planner, device=device)
        self.calls = Calls(past.around, self.recovery.interrupted)
        self._cleanup.callback(self.calls.detach)
        bundle_of, alone = self.layout.bundle_of_parameter.__getitem__, self._ranks.size == 1
        hooks = UnitHooks(found, self.runtime, progress=progress, calls=self.calls, bundle_of=bundle_of, by_gradients=alone)
        self._cleanup.callback(hooks.remove)
        reads = Reads(
            found,
            layout=self.layout,
            residency=residency,
            gradients=self.gradients,
            cursor=self.cursor,
            planner=self.planner,
            progress=progress,
            hooks=hooks,
            agreement=self._agreement,
        )
        for bundle in self.bundles:
            device.meter.exempt(bundle.storage.untyped)
        device.guard(residency.room.make, reads.check, reads.watches)
        hooks.watch(self.parameters)
        self.watch = ParameterWatch(
            self._model,
            found,
            self.parameters,
            progress.gradients_pending,
            MovingParameter,
            readable=lambda parameter: shows(self.bundles[bundle_of(parameter)], parameter),
            restore=self.poison.restore,
        )
        past.let_cast(self.watch.casts.call)
        self._cleanup.callback(self.watch.end)
