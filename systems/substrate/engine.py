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

from systems.device.device import Device, abandon_link, ambient
from systems.device.lanes.access import Access
from systems.device.watch.events import EventLog
from systems.errors import UnsupportedError
from systems.machine.budgets import Budgets
from systems.machine.limits import free_host_memory
from systems.messages import in_words
from systems.planning.strategy import PlanningContext, Strategy
from systems.ranks.expert_exchange import exchange_experts
from systems.ranks.ranks import Ranks
from systems.ranks.side_by_side import side_by_side
from systems.recipe.model.adoption import keeping_values
from systems.recipe.model.giving_back import check_room, give
from systems.recipe.model.inputs import cast_inputs, refuse_training_nothing, refuse_wanted_gradients
from systems.recipe.model.taken import take
from systems.recipe.recomputation.recompute import recomputation_in_words
from systems.recipe.step import loss_scale
from systems.recipe.step.closing import starting
from systems.recipe.step.stepping import NO_LOSS
from systems.settings import TORCH_DTYPE, Settings, StepOutcome
from systems.state_dicts import refuse_state_dict
from systems.substrate.assembly import Assembly
from systems.substrate.batch_shape import batch_shape_of
from systems.substrate.handover import values_in_slots
from systems.substrate.moments import MomentsTogether
from systems.substrate.moves.lock_free import settle
from systems.substrate.reports import ManagedReports
from systems.substrate.training_state import ManagedState

RANK_BROKE_OFF = (
    "the last step broke off on this rank, and others may be anywhere in theirs: end all ranks, and initialize anew from a "
    "checkpoint"
)


class ManagedEngine(ManagedReports):
    """See systems.system.Engine. make_strategy builds the policy once budgets and sizes are known.

    Its mechanism is made by systems.substrate.assembly, whose docstring says what each part is made of.
    Raises BudgetError or UnsupportedError, with nothing left behind, if the request cannot be met.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        make_strategy: Callable[[PlanningContext], Strategy],
        make_device: Callable[[EventLog], Device],
        budgets: Budgets,
        ranks: Ranks,
    ) -> None:
        started = time.perf_counter()
        self.module, self.settings, self.ranks = model, settings, ranks
        self._together = ranks if ranks.size > 1 else None
        self._access = Access()
        self._cleanup = contextlib.ExitStack()
        self.log = EventLog(keep=settings.log_events)
        self._cleanup.callback(exchange_experts(model, ranks, self.log.count))
        with keeping_values(model):
            try:
                self._have(
                    Assembly(
                        model,
                        settings,
                        make_strategy=make_strategy,
                        make_device=make_device,
                        budgets=budgets,
                        log=self.log,
                        cleanup=self._cleanup,
                        ranks=ranks,
                    )
                )
            except BaseException:
                self._cleanup.close()
                raise
        with starting(self):
            with side_by_side(ranks, "how an engine begins"):
                self._release = take(model)
                self._cleanup.callback(refuse_state_dict(model))
                self.store.take_rest()
            if self._states is not None:
                self._states.attach(self._state, partial(_host_room, self), ranks)
        self.outcomes: list[StepOutcome] = self.control.outcomes
        self._startup = {"initialize": time.perf_counter() - started}

    def _have(self, made: Assembly) -> None:
        self.index, self._trains, self.parameters = made.found.index, made.found.trains, made.parameters
        self._groups, self._named_by_all = [p.group for p in made.found.index.parameters], made.alike.names
        self.strategy, self.layout, self.device, self.disk = made.strategy, made.layout, made.device, made.disk
        self.system = made.strategy.name
        self.store, self.values, self.tiers, self.poison = made.store, made.values, made.tiers, made.poison
        self.bundles, self.residency, self.gradients = made.bundles, made.residency, made.gradients
        self.control, self.updates, self._states = made.control, made.updates, made.states
        self.lock_free = made.lock_free
        self.versions, self.ahead = made.versions, made.ahead
        self.inputs, self.input_slots = made.inputs, made.input_slots
        self.progress, self.cursor, self.in_force, self.planner = made.progress, made.cursor, made.in_force, made.planner
        self.flushes, self.ending, self.runtime, self.recovery = made.flushes, made.ending, made.runtime, made.recovery
        self.moments = made.moments
        self._calls, self._watch = made.calls, made.watch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._check_open()
        runtime, device, dtype = self.runtime, self.device, TORCH_DTYPE[self.settings.dtype]
        self.control.check_whole()
        if not self._trains:
            refuse_wanted_gradients((args, kwargs))
        trains = torch.is_grad_enabled() and self._trains
        recover = None if trains or self._together is not None else self.recovery.leave_aside
        with self._recovering(recover), self._watch.casts.call(), self._calls.of_engine():
            if trains:
                first = not self.progress.in_step
                if first:
                    self._watch.check()
                self.planner.meet(batch_shape_of((args, kwargs)), first=first)
                if first:
                    if self.recovery.dropped is not None:
                        self.recovery.refuse()
                    runtime.begin_step()
                with ambient(), device.phases.of("forward"), device.metered(), record_function("forward"):
                    args, kwargs = cast_inputs(args, kwargs, dtype)
                    output = self.module(*args, **kwargs)
                    if isinstance(self.moments, MomentsTogether):
                        self.moments.end_call()
                    return output
            self._watch.check()
            if not self.progress.in_step:
                settle(self.lock_free)
            self.planner.meet_aside(batch_shape_of((args, kwargs)), in_step=self.progress.in_step)
            with runtime.aside(), ambient(), torch.no_grad(), device.metered(), record_function("forward (no grad)"):
                args, kwargs = cast_inputs(args, kwargs, dtype)
                return self.module(*args, **kwargs)

    @property
    def _passes(self) -> int:
        return self.progress.micro_step if self.progress.in_step else 0

    def backward(self, loss: torch.Tensor) -> None:
        self._check_open()
        refuse_training_nothing(self._trains, "backward")
        if not self.progress.in_step:
            raise ValueError(NO_LOSS)
        super().backward(loss)

    def _backward(self, loss: torch.Tensor) -> None:
        self.progress.begin_backward()
        scale, device = self.control.loop.loss_scale, self.device
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
        with self.device.phases.of("norm"), record_function("step"):
            self.runtime.finish_step()

    def _abort(self) -> None:
        abandon_link(self.device)
        self.recovery.abort()
        if self._together is not None:
            self.control.ruin(self.control.ruined or RANK_BROKE_OFF)

    def _discard(self) -> None:
        self.recovery.begin_anew()
        if not self.progress.in_step:
            return
        if self.ending.updated:
            raise UnsupportedError(
                f"discard: backward has updated weights already (nonfinite=stop): call step(), or use {self.control.to_wait}"
            )
        self.recovery.abort()
        self.planner.resume()

    def drain(self) -> None:
        try:
            if not self.progress.in_step:
                settle(self.lock_free)
            self.device.drain()
            self.ending.settle()
        except BaseException as error:
            self.control.told.add(in_words(error))
            raise

    def _state(self, what: str) -> ManagedState:
        self._settle(what, in_step=self.progress.in_step)
        return ManagedState(self.index, values=self.values, control=self.control)

    def make_host_room(self, nbytes: int) -> None:
        free = free_host_memory()
        if free is not None and nbytes > free and not self.progress.in_step:
            with self._recovering():
                self.ahead.release()

    @contextmanager
    def masters(self, *, write: bool = False) -> Iterator[dict[str, torch.Tensor]]:
        """See Engine.masters."""
        with side_by_side(self.ranks, "summon"):
            self._settle("summon", in_step=self.progress.in_step, overwrites=write)
        self.make_host_room(4 * self.index.numel())
        with torch.inference_mode(False):  # what is made within it has no version
            values = {p.name: self.values.parameter(p.index, p.shape) for p in self.index.parameters}
        with self._access.writing(write):
            yield values
        if write:
            for p in self.index.parameters:
                mine = values[p.name] if self.ranks.rank < self.ranks.expert_ranks else torch.empty(p.shape)
                edited = self.ranks.of_first(f"summon(write=True) of parameter {p.index}", mine, p.group)
                self.values.overwrite_parameter(p.index, edited)
            self._watch.accept()
            self.drain()

    def _give_back(self, *, keep: bool) -> None:
        """Values stay where they are, in the slots, which are the parameters' own from now on. What has no slot is copied off
        the device, into memory that nothing else of the engine's needs any more.
        """
        store = self.store
        try:
            with side_by_side(self.ranks, "close") if keep else contextlib.nullcontext():
                if self.progress.in_step or self._begun_in is not None:
                    self.recovery.abort()
                self.drain()
                self.control.check_whole()
                if keep:
                    self._watch.undo(partial(_restore, self))
                    self.versions.release()
                    self.inputs.close()
            pieces = values_in_slots(store, self.bundles, self.values) if keep else []
        except BaseException:
            self._let_go()
            raise
        try:
            self._let_go()
        finally:
            if keep:
                check_room(pieces, store.host.budget - store.slot_bytes)
                give(self.parameters, pieces, [p.shape for p in self.index.parameters])
                self._release()
                self._given = True

    def _let_go(self) -> None:
        abandon_link(self.device)
        with contextlib.suppress(Exception):
            self.device.drain()
        self.progress.leave()
        self.residency.release_all()
        self._cleanup.close()
        assert self.device.account.pool == 0, "device pool not empty after close"


def _restore(engine: ManagedEngine, parameter: int) -> bool:
    """Of a parameter that was edited. A frozen one has its values in the slot, where the edit may have been written back to, or
    on the device, where it was made.
    """
    described, bundle = engine.index.parameters[parameter], engine.values.bundle_of(parameter)
    edited_alone = engine.residency.writes_back or (not bundle.movable and bundle.storage.resident)
    if edited_alone and not described.trainable:
        return False
    engine.values.restore(parameter)
    return True


def _host_room(engine: ManagedEngine, wanted: int) -> int:
    """Bytes of host memory that are left of the budget; so many had better be."""
    if wanted > engine.store.host.room:
        with engine._recovering():
            engine.ahead.release()
    return engine.store.host.room
