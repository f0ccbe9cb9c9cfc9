"""The engine of every managed system: a model, a strategy's layout, and the runtime that carries out its plans."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from systems.device.device import Device, ambient
from systems.device.lanes.access import Access
from systems.device.memory.disk import Disk, disk_lanes
from systems.device.memory.host import HostSlots, host_account
from systems.device.watch.events import EventLog
from systems.errors import UnsupportedError
from systems.messages import in_words
from systems.planning.policy.homes import within_host
from systems.planning.strategy import PlanningContext, Strategy, check_update_rule
from systems.recipe.model.adoption import initial_values, keeping_values, place_beside, refuse_mixed_dtypes
from systems.recipe.model.giving_back import check_room, give, remember_buffers
from systems.recipe.model.inputs import cast_inputs, refuse_training_nothing, refuse_wanted_gradients
from systems.recipe.model.parameter_watch import ParameterWatch
from systems.recipe.model.parameters import MovingParameter
from systems.recipe.model.units import FoundModel, find_units, take
from systems.recipe.recomputation.recompute import recomputation_in_words, recomputed_units, switchable
from systems.recipe.step import loss_scale
from systems.recipe.step.closing import starting
from systems.recipe.step.control import StepControl
from systems.recipe.step.optimizer_states import states_of
from systems.recipe.step.stepping import NO_LOSS
from systems.settings import TORCH_DTYPE, Settings, StepOutcome
from systems.state_dicts import refuse_state_dict
from systems.substrate.batch_shape import batch_shape_of
from systems.substrate.bundle.bundle import ManagedBundle
from systems.substrate.bundle.first_values import FirstValues
from systems.substrate.bundle.poison import Poison
from systems.substrate.bundle.storage import RebindableStorage
from systems.substrate.bundle.store import Store
from systems.substrate.bundle.values import StoredValues
from systems.substrate.handover import adopt_parameters, values_in_slots
from systems.substrate.moves.gradients import Gradients
from systems.substrate.moves.offloaded_inputs import OffloadedInputs, offloadable
from systems.substrate.moves.residency import Residency
from systems.substrate.moves.tiers import TierMoves
from systems.substrate.moves.updates import Updates
from systems.substrate.planner import Parts
from systems.substrate.reads import follow_uses
from systems.substrate.recovery import Recovery
from systems.substrate.reports import ManagedReports
from systems.substrate.runtime import Runtime
from systems.substrate.training_state import ManagedState


class ManagedEngine(ManagedReports):
    """See systems.system.Engine. make_strategy builds the policy once budgets and sizes are known.

    Raises BudgetError or UnsupportedError, with nothing left behind, if the request cannot be met.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        make_strategy: Callable[[PlanningContext], Strategy],
        make_device: Callable[[EventLog], Device],
        host_budget: int,
        disk_budget: int = 0,
    ) -> None:
        started = time.perf_counter()
        self.module, self.settings = model, settings
        self.disk: Disk | None = None
        self._access = Access()
        self._cleanup = contextlib.ExitStack()
        self.log = EventLog(keep=settings.log_events)
        with keeping_values(model):
            try:
                self._build(model, settings, make_strategy, make_device, host_budget, disk_budget)
            except BaseException:
                self._cleanup.close()
                raise
        with starting(self):
            self._release = take(model)
            self._cleanup.callback(refuse_state_dict(model))
            self.parts.store.take_rest()
            if self._states is not None:
                self._states.attach(self._state, self._host_room)
        self.outcomes: list[StepOutcome] = self.parts.control.outcomes
        self._startup = {"initialize": time.perf_counter() - started}

    def _build(
        self,
        model: nn.Module,
        settings: Settings,
        make_strategy: Callable[[PlanningContext], Strategy],
        make_device: Callable[[EventLog], Device],
        host_budget: int,
        disk_budget: int,
    ) -> None:
        dtype = TORCH_DTYPE[settings.dtype]
        found = find_units(model, dtype)
        refuse_mixed_dtypes(found, settings.dtype)
        self._trains = found.trains
        device = make_device(self.log)
        files = self._cleanup.enter_context(contextlib.ExitStack())  # closed once all lanes are at rest
        self._cleanup.callback(device.close)
        context = PlanningContext(
            device_budget=device.plannable_bytes,
            host_budget=host_budget,
            itemsize=dtype.itemsize,
            ranks=settings.ranks,
            accumulate=settings.accumulate,
            seed=settings.seed,
            recompute=settings.recompute,
            allowance=device.allowance,
            device_name=device.name,
            disk_budget=disk_budget,
        )
        self.strategy = make_strategy(context)
        check_update_rule(self.strategy.update_rule, clip=settings.clip, dtype=settings.dtype)
        layout = within_host(self.strategy.layout(found.index).named(found.index), context, self.strategy.update_rule)
        recomputation, undo = switchable(found, self.strategy.rematerialised, settings.recompute)
        self._cleanup.callback(undo)
        recomputed = recomputed_units(found, settings.recompute) | recomputation.units
        offloaded = offloadable(found, self.strategy.offloaded_inputs, recomputed)
        self._cleanup.callback(remember_buffers(model, found.carried.values()))
        place_beside(model, found, device)
        host = host_account(host_budget, self.log)
        if layout.on_disk:
            assert settings.disk is not None
            self.disk = Disk(settings.disk, layout, budget=disk_budget, host=host, log=self.log)
            files.callback(self.disk.close)
            device.meter.exempt(self.disk.buffers[0].parts[0].untyped_storage())
            device.lanes.update(disk_lanes(device.jitter))
        control = self._control = StepControl(settings, found.index, found.parameters)
        self._states = states_of(settings.optimizer, found.index, found.parameters)
        initial = initial_values(found, settings)
        store = Store(
            layout,
            device,
            host,
            dtype,
            accumulate=settings.accumulate,
            disk=self.disk,
        )
        self._cleanup.callback(store.close)
        self.poison = Poison(max(layout.bundle_bytes(b.index) for b in layout.bundles), device.torch_device)
        bundles = [
            ManagedBundle(
                each,
                layout,
                [store.segments[s] for s in each.segments],
                RebindableStorage(layout.bundle_bytes(each.index), device.torch_device, self.poison),
                accumulate=settings.accumulate,
            )
            for each in layout.bundles
        ]
        values = StoredValues(store, bundles)
        first = FirstValues(store, values, [p.shape for p in found.index.parameters], initial)
        for bundle in bundles:
            first.fill(bundle)
        residency = Residency(layout, bundles, values, device, write_back=self.strategy.write_back)
        self._cleanup.callback(residency.close)
        self.parameters = adopt_parameters(found, layout, bundles, dtype)
        user = {p: unit.index for unit in found.index.units for p in unit.parameters}
        tiers = TierMoves(layout, store, bundles, device)
        gradients = Gradients(
            layout, residency, tiers, device, dtype=dtype, accumulate=settings.accumulate, user=user
        )
        self._cleanup.callback(gradients.finish_step)
        updates = Updates(layout, bundles, tiers, gradients, device, control)
        self.input_slots = HostSlots("host-input", host)
        inputs = OffloadedInputs(device, self.input_slots)
        self._cleanup.callback(inputs.close)
        # the mechanism, for tests and tools too
        self.parts = Parts(layout, device, self.poison, store, values, tiers, residency, gradients, updates, control, inputs, recomputation)
        self.index = found.index
        self.runtime = Runtime(self.parts, self.strategy, settings.accumulate)
        self.recovery = Recovery(self.runtime)
        self._cleanup.callback(inputs.attach(found, offloaded))
        self._watch_model(found)

    def _watch_model(self, found: FoundModel) -> None:
        hooks = follow_uses(found, self.runtime, self.recovery, self._cleanup)
        self._calls = hooks.calls
        hooks.watch(self.parameters)
        self.recovery.parameters = self.parameters
        self._watch = self._watching(found)
        self.runtime.casting = self._watch.casts.call
        self._cleanup.callback(self._watch.end)

    def _watching(self, found: FoundModel) -> ParameterWatch:
        return ParameterWatch(
            self.module,
            found,
            self.parameters,
            partial(_gradients_pending, self.runtime),
            MovingParameter,
            readable=self._readable,
            restore=self.poison.restore,
        )

    def _readable(self, parameter: int) -> bool:
        """Its values are on the device, and no gradient is written over them."""
        bundle = self.parts.layout.bundle_of_parameter[parameter]
        managed = self.parts.residency.bundles[bundle]
        return managed.storage.resident and (managed.gradient is None or parameter not in managed.gradient.written)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._check_open()
        runtime, device, dtype = self.runtime, self.parts.device, TORCH_DTYPE[self.settings.dtype]
        self._control.check_whole()
        if not self._trains:
            refuse_wanted_gradients((args, kwargs))
        trains = torch.is_grad_enabled() and self._trains
        recover = None if trains else self.recovery.leave_aside
        with self._recovering(recover), self._watch.casts.call(), self._calls.of_engine():
            if trains:
                first = not runtime.in_step
                if first:
                    self._watch.check()
                runtime.planner.meet(batch_shape_of((args, kwargs)), first=first)
                if first:
                    self.recovery.check()
                    runtime.begin_step()
                with ambient(), device.phases.of("forward"), device.metered(), record_function("forward"):
                    args, kwargs = cast_inputs(args, kwargs, dtype)
                    return self.module(*args, **kwargs)
            self._watch.check()
            runtime.planner.meet_aside(batch_shape_of((args, kwargs)), in_step=runtime.in_step)
            with runtime.aside(), ambient(), torch.no_grad(), device.metered(), record_function("forward (no grad)"):
                args, kwargs = cast_inputs(args, kwargs, dtype)
                return self.module(*args, **kwargs)

    @property
    def _passes(self) -> int:
        return self.runtime.micro_step if self.runtime.in_step else 0

    def backward(self, loss: torch.Tensor) -> None:
        self._check_open()
        refuse_training_nothing(self._trains, "backward")
        if not self.runtime.in_step:
            raise ValueError(NO_LOSS)
        super().backward(loss)

    def _backward(self, loss: torch.Tensor) -> None:
        self.runtime.in_backward = True
        scale, device = self._control.scale, self.parts.device
        with (
            self._calls.of_engine(),
            ambient(),
            device.phases.of("backward"),
            device.metered(),
            record_function("backward"),
            recomputation_in_words(),
        ):
            loss_scale.backward(loss, scale, self.parameters)
            self.runtime.end_backward()

    def _finish_step(self) -> None:
        with self.parts.device.phases.of("norm"), record_function("step"):
            self.runtime.finish_step()

    def _abort(self) -> None:
        self.recovery.abort()

    def _discard(self) -> None:
        self.recovery.dropped = None
        if not self.runtime.in_step:
            return
        if self.runtime.ending.updated:
            raise UnsupportedError(
                "discard: backward has updated weights already (nonfinite=stop): call step(), or use "
                "`options=dict(nonfinite='skip')`"
            )
        self.recovery.abort()
        self.runtime.planner.resume()

    def drain(self) -> None:
        try:
            self.parts.device.drain()
            self.runtime.ending.settle()
        except BaseException as error:
            self._control.told.add(in_words(error))
            raise

    def _state(self, what: str) -> ManagedState:
        self._settle(what, in_step=self.runtime.in_step)
        return ManagedState(self.index, self.parts)

    def _host_room(self) -> int:
        return self.parts.store.host.room

    @contextmanager
    def masters(self, *, write: bool = False) -> Iterator[dict[str, torch.Tensor]]:
        """See Engine.masters."""
        self._settle("summon", in_step=self.runtime.in_step, overwrites=write)
        with torch.inference_mode(False):  # what is made within it has no version
            values = {p.name: self.parts.values.parameter(p.index, p.shape) for p in self.index.parameters}
        with self._access.writing(write):
            yield values
        if write:
            for p in self.index.parameters:
                self.parts.values.overwrite_parameter(p.index, values[p.name])
            self._watch.accept()
            self.drain()

    def _give_back(self, *, keep: bool) -> None:
        """Values stay where they are, in the slots, which are the parameters' own from now on."""
        store = self.parts.store
        try:
            if self.runtime.in_step or self._broken_off:
                self.recovery.abort()
            self.drain()
            self._control.check_whole()
            if keep:
                self._watch.undo(partial(_restore, self))
            pieces = values_in_slots(store, self.parts.residency.bundles, self.parts.values) if keep else []
        except BaseException:
            self._let_go()
            raise
        try:
            self._let_go()
        finally:
            if keep:
                check_room(pieces, store.host.budget - store.slots.nbytes)
                give(self.parameters, pieces, [p.shape for p in self.index.parameters])
                self._release()
                self._given = True

    def _let_go(self) -> None:
        with contextlib.suppress(Exception):
            self.parts.device.drain()
        self.runtime.in_step = self.runtime.in_backward = False
        self.parts.residency.release_all()
        self._cleanup.close()
        assert self.parts.device.account.pool == 0, "device pool not empty after close"


def _restore(engine: ManagedEngine, parameter: int) -> bool:
    """Of a parameter that was edited. A frozen one has its values in the slot, where the edit may have been written back to."""
    described, residency = engine.index.parameters[parameter], engine.parts.residency
    if residency.writes_back and not described.trainable:
        return False
    engine.parts.values.overwrite_parameter(parameter, engine.parts.values.parameter(parameter, described.shape))
    return True


def _gradients_pending(runtime: Runtime, in_place: bool) -> bool:
    """Between a backward pass and the step that uses it, and within one as soon as the engine has taken a gradient."""
    return runtime.in_step and (not in_place if runtime.in_backward else runtime.micro_step > 0)
