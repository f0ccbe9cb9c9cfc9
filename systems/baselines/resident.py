"""The reference recipe with everything on the device: plain PyTorch parameters and gradients, 16 bytes a parameter in bf16.

This is the oracle of every strategy, so it shares with them only the recipe's arithmetic (loss scale, norm, factor, the
optimizer's kernel) and the memory accounts, none of the machinery that moves bytes. It is itself checked against torch's AdamW.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from pydantic import BaseModel
from torch import nn
from torch.profiler import record_function

from systems.baselines.faces import RESIDENT as FACE
from systems.baselines.resident_state import ResidentState
from systems.device.device import ambient, follow_optimizer
from systems.device.lanes.access import Access
from systems.device.make import make_device
from systems.device.watch.events import EventLog
from systems.device.watch.labels import labelled
from systems.errors import BudgetError, UnsupportedError
from systems.machine.budgets import device_budget
from systems.messages import LEAST_OF_A_BATCH
from systems.optimizers.choice import chosen
from systems.ranks.beginnings import ALONE, FirstValuesAlike, begin_alike
from systems.ranks.expert_exchange import exchange_experts
from systems.ranks.ranks import Ranks, SingleRank
from systems.ranks.side_by_side import side_by_side
from systems.ranks.sums import of_all_experts, summed
from systems.recipe.model.adoption import initial_values, keeping_values, place_beside, refuse_mixed_dtypes
from systems.recipe.model.calls import Calls, Hook, outer_modules
from systems.recipe.model.foreign_calls import FOREIGN_BACKWARD, STALE_LOSS, refuse_compiled
from systems.recipe.model.giving_back import on_the_host, remember_buffers
from systems.recipe.model.inputs import cast_inputs, refuse_wanted_gradients
from systems.recipe.model.parameter_watch import ParameterWatch
from systems.recipe.model.parameters import data_of, has_gradient, refuse_sparse, set_data, take_gradient
from systems.recipe.model.taken import take
from systems.recipe.model.unit_tensors import SeenTensor, TooManyValuesError, too_many, wanted
from systems.recipe.model.units import ROOT, FoundModel, find_units
from systems.recipe.model.uses import said_by
from systems.recipe.recomputation.recompute import apply_recompute, recomputation_in_words
from systems.recipe.recomputation.repeats import Repeats
from systems.recipe.step import loss_scale
from systems.recipe.step.closing import starting
from systems.recipe.step.control import HALF_UPDATED, StepControl
from systems.recipe.step.optimizer_states import states_of
from systems.recipe.step.stepping import NO_LOSS, SteppingEngine
from systems.reports import MemoryReport
from systems.settings import TORCH_DTYPE, Settings
from systems.sizes import format_need, format_size
from systems.system import Engine, System


class ResidentEngine(SteppingEngine):
    """Raises BudgetError when parameters, master weights, moments and gradients alone exceed the device budget.

    On several ranks each has all of the model (of shared experts, its part), and every micro-batch's gradients are summed over
    them.
    """

    system = "resident"

    def __init__(self, model: nn.Module, settings: Settings, ranks: Ranks) -> None:
        started = time.perf_counter()
        self.module, self.settings, self.ranks = model, settings, ranks
        self._together = ranks if ranks.size > 1 else None
        self._access, self.log = Access(), EventLog(keep=settings.log_events)
        self._in_step = self._in_backward = self._updating = False
        self._cleanup, self._fired = contextlib.ExitStack(), set[int]()
        self._micro_step = self._steps = self._steps_begun = 0
        self._cleanup.callback(exchange_experts(model, ranks, self.log.count))
        with keeping_values(model):
            try:
                with side_by_side(ranks, "what an engine is built of"):
                    self._build(find_units(model, TORCH_DTYPE[settings.dtype], compiles=settings.device == "cuda"))
                self._alike.check()
                self._named_by_all = self._alike.names
            except BaseException:
                self._cleanup.close()
                raise
        with starting(self):
            with side_by_side(ranks, "how an engine begins"):
                self._release = take(model)
            if self._states is not None:
                self._states.attach(self._state, self._host_room, ranks)
        self._startup = {"initialize": time.perf_counter() - started}

    def _build(self, found: FoundModel) -> None:
        settings = self.settings
        refuse_mixed_dtypes(found, settings.dtype)
        self._trains = found.trains
        self._repeats = Repeats()
        self._cleanup.callback(apply_recompute(found, settings.recompute, self._repeats))
        for module in {self.module, *found.modules}:
            self._cleanup.callback(module.register_forward_pre_hook(Hook(refuse_compiled)).remove)
        self._calls = Calls(partial(_past_the_engine, self))
        self._cleanup.callback(self._calls.detach)
        self._calls.attach_all([*found.modules, *outer_modules(found)])
        states = _state_bytes(found, settings)
        self.device = make_device(settings, device_budget(settings), self.log)
        self._cleanup.callback(self.device.close)
        optimizer = follow_optimizer(self.device, settings)
        self.control = StepControl(settings, found.index, found.parameters)
        self._states = states_of(settings.optimizer, optimizer, found.index, found.parameters)
        self.outcomes = self.control.outcomes
        self._place(found, settings, TORCH_DTYPE[settings.dtype])
        self._cleanup.callback(_forget_states, self)
        self.device.account.add_pool(states, "model states")
        self._cleanup.callback(self.device.account.add_pool, -states, "close")
        self._cleanup.callback(remember_buffers(self.module, found.carried.values()))
        place_beside(self.module, found, self.device)
        self._names = [p.name for p in found.index.parameters]
        self._shapes = [p.shape for p in found.index.parameters]
        self._groups = [p.group for p in found.index.parameters]
        self._rounded = _Rounded(self.parameters, TORCH_DTYPE[settings.dtype], lambda: self._in_backward)
        self._cleanup.callback(self._rounded.remove)
        self._watch = ParameterWatch(
            self.module, found, self.parameters, partial(_gradients_pending, self), cast=self._rounded.watch
        )
        self._cleanup.callback(self._watch.end)

    def _place(self, found: FoundModel, settings: Settings, dtype: torch.dtype) -> None:
        """Give every parameter its compute copy, and every trainable one its fp32 state, on the device."""
        device = self.device.torch_device
        self._alike = FirstValuesAlike(self.ranks, found.index.parameters, initial_values(found, settings))
        self.parameters: list[nn.Parameter] = []
        self._masters: list[torch.Tensor | None] = []
        self._moments: list[tuple[torch.Tensor, ...] | None] = []
        self._accumulators: list[torch.Tensor | None] = []
        for number, old in enumerate(found.parameters):
            value = torch.empty(old.shape, dtype=torch.float32)
            self._alike.fill(number, value)
            value = value.to(device)
            compute = value.to(dtype) if dtype != torch.float32 else value.clone()
            if old.is_meta:
                parameter = nn.Parameter(compute, requires_grad=old.requires_grad)
                for module, attribute in found.owners[number]:
                    module._parameters[attribute] = parameter
            else:
                set_data(old, compute)
                old.grad, parameter = None, old
            self.parameters.append(parameter)
            flat = value.reshape(-1) if old.requires_grad else None
            self._masters.append(flat)
            names = self.control.groups.chosen.moments
            self._moments.append(None if flat is None else tuple(torch.zeros_like(flat) for _ in names))
            self._accumulators.append(torch.zeros_like(flat) if flat is not None and settings.accumulate > 1 else None)
            self.device.meter.exempt(compute.untyped_storage())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._check_open()
        self.control.check_whole()
        if not self._trains:
            refuse_wanted_gradients((args, kwargs))
        trains = self._trains and torch.is_grad_enabled()
        with (
            self._recovering(None if trains else _nothing),
            self._watch.casts.call(),
            self._calls.of_engine(),
            ambient(),
            torch.set_grad_enabled(trains),
            self.device.metered(),
            record_function("forward"),
        ):
            if self._micro_step == 0 or not trains:
                self._watch.check()
            if trains and not self._in_step:
                self._in_step, self._steps_begun = True, self._steps_begun + 1
            args, kwargs = cast_inputs(args, kwargs, TORCH_DTYPE[self.settings.dtype])
            given = _seen((args, kwargs)) if trains else {}
            made = self.module(*args, **kwargs)
            if trains:
                self._follow(made, given)
            return made

    def _follow(self, made: object, given: Mapping[int, SeenTensor]) -> None:
        """What the model made, and not what it was given and hands back: that has a backward pass of its own."""
        try:
            found = wanted(made)
        except TooManyValuesError:
            raise too_many(f"module {ROOT}", "returns") from None
        for tensor in found:
            if not tensor.is_leaf and not (id(tensor) in given and given[id(tensor)].still(tensor)):
                tensor.register_hook(partial(self._arrived, self._steps_begun))

    def _arrived(self, step: int, gradient: torch.Tensor) -> None:
        """At what a forward pass of that step made: the backward pass has come to this engine's model."""
        if not self._in_backward:
            raise RuntimeError(FOREIGN_BACKWARD)
        if step != self._steps_begun:
            raise RuntimeError(STALE_LOSS)

    @property
    def _passes(self) -> int:
        return self._micro_step

    def backward(self, loss: torch.Tensor) -> None:
        self._check_open()
        if any(has_gradient(p) for p in self.parameters) and self._micro_step == 0:
            raise ValueError("there are gradients already: call engine.backward(loss) instead of loss.backward()")
        if not self._in_step and self._trains:
            raise ValueError(NO_LOSS)
        super().backward(loss)

    def _backward(self, loss: torch.Tensor) -> None:
        scale = self.control.loop.loss_scale
        with self._calls.of_engine(), ambient(), self.device.metered(), record_function("backward"), recomputation_in_words():
            self._in_backward = True
            loss_scale.backward(loss, scale, self.parameters)
        for name, parameter in zip(self._names, self.parameters, strict=True):
            refuse_sparse(parameter, name)
        self._in_backward = False
        self._micro_step += 1
        if self.settings.accumulate > 1:
            for number, gradient in summed(self._rounded.take_all(), self.ranks, self.parameters, self._groups).items():
                accumulator = self._accumulators[number]
                self._fired.add(number)
                assert accumulator is not None
                self.device.kernel.accumulate(accumulator, gradient)

    def _abort(self) -> None:
        control = self.control
        if self._updating and control.loop.steps == self._steps:
            control.ruin(HALF_UPDATED)
        control.forget_updates()
        self._discard()

    def _discard(self) -> None:
        for parameter, accumulator in zip(self.parameters, self._accumulators, strict=True):
            take_gradient(parameter)
            if accumulator is not None:
                accumulator.zero_()
        self._fired.clear()
        self._rounded.forget()
        self._in_step = self._in_backward = self._updating = False
        self._micro_step = 0

    @record_function("step")
    def _finish_step(self) -> None:
        added = {n: each for n, each in enumerate(self._accumulators) if n in self._fired and each is not None}
        gradients = added
        if self.settings.accumulate == 1:
            gradients = summed(self._rounded.take_all(), self.ranks, self.parameters, self._groups)
        kernel = self.device.kernel
        with labelled("norm"):
            alike = self._repeats.take()
            same = [] if alike.same is None else [alike.same]
            values = self.device.partials([kernel.sum_squares_all(list(gradients.values())), *same])()
            if self._together is not None:
                self._together.together("recomputed blocks", lambda: alike.check(values.pop()) if same else None)
            elif same:
                alike.check(values.pop())
            squares = dict(zip(gradients, values, strict=True))
            outcome = self.control.decide(of_all_experts(squares, self.ranks, self._groups))
        if outcome.skipped:
            self.log.count("skipped_steps")
        else:
            self.control.begin_updates(list(gradients))
            tasks = []
            for number, gradient in gradients.items():
                master, moments = self._masters[number], self._moments[number]
                assert master is not None and moments is not None
                out = data_of(self.parameters[number]).reshape(-1)
                ranges = [self.control.update_range(number, 0, master.numel())]
                tasks.append(kernel.task(master, *moments, gradient, out, ranges))
            update, factor = kernel.prepare_all(tasks), loss_scale.multiplier(outcome)
            self._steps, self._updating = self.control.loop.steps, True
            with labelled("update"):
                update(factor)
        self.control.record(outcome)
        self._discard()

    def drain(self) -> None:
        self.device.drain()

    def counters(self) -> dict[str, int]:
        return dict(self.log.totals)

    def memory(self) -> MemoryReport:
        account = self.device.account
        return MemoryReport(
            device_peak_bytes=self.device.meter.peak_bytes(),
            device_budget_bytes=account.budget,
            device_model_peak_bytes=account.pool_peak,
            host_peak_bytes=0,
            host_pinned_bytes=0,
            disk_peak_bytes=0,
        )

    def startup_s(self) -> dict[str, float]:
        return dict(self._startup)

    def _state(self, what: str) -> ResidentState:
        self._settle(what, in_step=self._in_step)
        return ResidentState(
            self.ranks, self.control, self._names, self.parameters, masters=self._masters, moments=self._moments
        )

    @contextmanager
    def masters(self, *, write: bool = False) -> Iterator[dict[str, torch.Tensor]]:
        with side_by_side(self.ranks, "summon"):
            self._settle("summon", in_step=self._in_step, overwrites=write)
        values = {}
        with torch.inference_mode(False):  # what is made within it has no version
            for name, parameter, master in zip(self._names, self.parameters, self._masters, strict=True):
                source = parameter.detach() if master is None else master
                values[name] = source.float().cpu().clone().view(parameter.shape)
        with self._access.writing(write):
            yield values
        if not write:
            return
        of_each = zip(self._names, self.parameters, self._masters, strict=True)
        for number, (name, parameter, master) in enumerate(of_each):
            mine = values[name] if self.ranks.rank < self.ranks.expert_ranks else torch.empty(parameter.shape)
            value = self.ranks.of_first(f"summon(write=True) of parameter {number}", mine, self._groups[number])
            if master is not None:
                master.copy_(value.reshape(-1))
            data_of(parameter).copy_(value)
        self._watch.accept()

    def _give_back(self, *, keep: bool) -> None:
        """Compute copies stay, on the CPU."""
        try:
            self._discard()
            self.drain()
            self.control.check_whole()
            if keep:
                self._watch.undo(partial(_restore, self))
            values = on_the_host([data_of(parameter) for parameter in self.parameters]) if keep else []
        except BaseException:
            self._let_go()
            raise
        if not keep:
            self._let_go()
            return
        try:
            self._cleanup.close()
        finally:
            for parameter, value in zip(self.parameters, values, strict=True):
                set_data(parameter, value)
            self._release()
            self._given = True

    def _let_go(self) -> None:
        self._cleanup.close()
        for parameter in self.parameters:
            set_data(parameter, torch.empty(0, dtype=parameter.dtype))


def _nothing() -> None:
    """A pass without gradients changes nothing of a step."""


def _restore(engine: ResidentEngine, parameter: int) -> bool:
    """Of a parameter that was edited: a frozen one has no master."""
    master, edited = engine._masters[parameter], engine.parameters[parameter]
    if master is not None:
        set_data(edited, master.view(engine._shapes[parameter]).to(edited.dtype))
    return master is not None


def _seen(given: object) -> dict[int, SeenTensor]:
    try:
        return {id(tensor): SeenTensor(tensor) for tensor in wanted(given)}
    except TooManyValuesError:  # then what is passed through is taken for made
        return {}


@contextmanager
def _past_the_engine(engine: ResidentEngine, given: object) -> Iterator[None]:
    with engine._watch.casts.call(), ambient(), engine.device.metered():
        yield


def _gradients_pending(engine: ResidentEngine, there: bool) -> bool:
    """As under a strategy: between a backward pass and the step, and within one as long as a gradient has not come."""
    return not there if engine._in_backward else engine._micro_step > 0


class _Rounded:
    """Gradients of parameters that were read in another dtype, rounded as they come: see the note in casts.py."""

    def __init__(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype, in_backward: Callable[[], bool]) -> None:
        self._parameters, self._dtype, self._in_backward = parameters, dtype, in_backward
        self._handles: dict[int, Any] = {}
        self._found: dict[int, torch.Tensor] = {}

    def watch(self, number: int) -> None:
        if number in self._handles or not self._parameters[number].requires_grad:
            return

        def accept(parameter: torch.Tensor) -> None:
            gradient = take_gradient(parameter) if self._in_backward() else None
            if gradient is None:
                return
            if number in self._found:
                self._found[number].add_(gradient.to(self._dtype))
            else:
                self._found[number] = gradient.to(self._dtype)

        self._handles[number] = self._parameters[number].register_post_accumulate_grad_hook(accept)

    def take(self, number: int) -> torch.Tensor | None:
        """A parameter's gradient, wherever it is."""
        gradient = take_gradient(self._parameters[number])
        return self._found.pop(number) if number in self._found else gradient

    def take_all(self) -> dict[int, torch.Tensor]:
        """By number, flat, those that there are."""
        taken = ((number, self.take(number)) for number in range(len(self._parameters)))
        return {number: gradient.reshape(-1) for number, gradient in taken if gradient is not None}

    def forget(self) -> None:
        self._found.clear()

    def remove(self) -> None:
        for handle in self._handles.values():
            handle.remove()


def _forget_states(engine: ResidentEngine) -> None:
    engine._masters, engine._moments, engine._accumulators = [], [], []
    for parameter in engine.parameters:
        take_gradient(parameter)


def _state_bytes(found: FoundModel, settings: Settings) -> int:
    """Of parameters, master weights, moments and accumulators. BudgetError if those and gradients exceed the budget."""
    itemsize, have = TORCH_DTYPE[settings.dtype].itemsize, device_budget(settings)
    numel, trainable = found.index.numel(), found.index.numel(trainable_only=True)
    states = numel * itemsize + trainable * 4 * (1 + len(chosen(settings).moments) + (settings.accumulate > 1))
    need = states + trainable * itemsize
    if need > have:
        raise BudgetError(
            f"resident needs {format_need(need, have)} of device memory for model states, {format_size(have)} are there: "
            f"activations come on top: raise `device_memory` well above this ({LEAST_OF_A_BATCH}), take a smaller model, or a "
            "system that offloads",
            tier="device",
            need=need,
            have=have,
        )
    return states


class Resident(System):
    """See the module's docstring."""

    name, summary, abilities = FACE.name, FACE.summary, FACE.abilities
    Options: type[BaseModel] = FACE.Options

    def look_for_room(self, model: nn.Module, settings: Settings, options: BaseModel) -> Settings:
        """The settings. Raises BudgetError where model states alone exceed the device."""
        _state_bytes(find_units(model, TORCH_DTYPE[settings.dtype]), settings)
        return settings

    def initialize(self, model: nn.Module, settings: Settings, options: BaseModel, *, ranks: Ranks | None = None) -> Engine:
        """ranks: this one and the others; all of them initialize, step and close alike."""
        if ranks is None and settings.ranks != 1:
            raise UnsupportedError(ALONE.format(settings.ranks))
        mine = SingleRank() if ranks is None else ranks
        more = {"system": self.name, "uses": said_by(model), "optimizer": chosen(settings).described}
        begin_alike(mine, settings, options, model, **more)
        return ResidentEngine(model, settings, mine)


SYSTEM = Resident()
