"""Hooks that turn a running model into unit events.

Note [Where a unit's backward begins and ends]
    It begins with the gradient of any tensor of the unit's outputs, except tensors merely passed through (T5 hands its
    position bias from block to block: that hook fires after the unit is done). It ends at the first of: all gradients of its
    parameters have come; the gradient of the unit's first input that requires one; the end of the whole backward pass.
    `register_full_backward_hook` would fire early without grad inputs, and never for keyword-only modules.

    A parameter that is read without wanting a gradient (frozen under an adapter, or detached) may be needed on the way to an
    input after the last gradient has come, or on the way to a unit within. So gradients end a unit only if it has no frozen
    parameter, or neither.

    Autograd runs what was made last first, so the gradient of an input comes after everything the unit did with it, but for
    two cases. A leaf's gradient is accumulated ahead of whatever else is ready: then the unit ends with the graph task,
    which is the checkpoint's own where a reentrant one made the leaf. And where a unit's output goes straight into the same
    unit again, that tensor's gradient ends the later call and begins the earlier one: the unit simply goes on.

    Where an output is a view and its receiver edits it in place, autograd makes its history anew and forgets the hook: so there
    is one on the node that made what it is a view of, too. An output that nobody can see (made by a generator, kept in
    somebody else's list) begins nothing: then a gradient that comes says so, for its weights may have been read too late.

Note [Ends on several ranks]
    There which gradients come decides nothing (Note [The one rule] in ranks/ranks.py): a unit ends with its first input, or
    with the backward pass. The gradient of a tensor that one unit made and another took first ends that one, then begins the
    other, so that the order is the same whatever comes; units that end so travel on the tensor.

    A unit without such an input (embeddings) ends as the backward begins of a unit whose calls had all ended before it was
    called: what it did was made later, and so comes before. Only if it was called once.

Note [Recomputation]
    A checkpointed block runs its forward again inside backward. Then its forward hooks only hold what backward holds anyway.
    Checkpoints inside a unit's `forward` do not fire the unit's hooks again; those around its call do. Both work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd import Variable

from systems.errors import HiddenUseError
from systems.recipe.model.calls import Calls, outer_modules
from systems.recipe.model.foreign_calls import FOREIGN_BACKWARD, STALE_LOSS, refuse_compiled, refuse_transformed
from systems.recipe.model.parameters import refuse_sparse, take_gradient
from systems.recipe.model.unit_tensors import SEEN, TooManyValuesError, base_of, first_of, wanted
from systems.recipe.model.units import ROOT, FoundModel
from systems.substrate.progress import Progress
from systems.substrate.sources import Sources
from systems.substrate.unit_outputs import NOTHING, Given, UnitOutputs

TAKERS = "_offload_takers"  # attribute of a tensor: its version; units that take it as their first input, and made it
NONE: tuple[int, dict[int, bool]] = (-1, {})


class UnitEvents(Protocol):
    """UnitEvents is who is told what the units of a running model do, unit by unit: the runtime, or who only looks on."""

    def forward_enter(self, unit: int) -> None: ...

    def forward_exit(self, unit: int) -> None: ...

    def backward_enter(self, unit: int) -> None:
        """Nothing, while the unit's backward is in progress."""

    def backward_exit(self, unit: int) -> None:
        """Nothing, unless the unit's backward is in progress."""

    def backward_continues(self, unit: int) -> None:
        """A later call's backward ends where an earlier call's begins."""

    def holds_backward(self, unit: int) -> bool: ...

    def gradient(self, parameter: int, bundle: int, gradient: torch.Tensor) -> None: ...


class UnitHooks:
    """Installs the hooks on construction; `remove` takes them off again.

    events: told of what is seen. bundle_of: a parameter's bundle. by_gradients: units may end with their gradients; on several
    ranks they do not.
    A unit with no parameters (the root of a model that owns none) has no events, until it is found to read some.
    """

    def __init__(
        self,
        found: FoundModel,
        events: UnitEvents,
        *,
        progress: Progress,
        calls: Calls,
        bundle_of: Callable[[int], int],
        by_gradients: bool = True,
    ) -> None:
        self._events, self._progress, self.calls, self._bundle_of = events, progress, calls, bundle_of
        self._by_gradients, self._sources = by_gradients, None if by_gradients else Sources()
        units, self._index = found.index.units, found.index
        self._outputs = UnitOutputs(found.index)
        self._trainable = [parameter.trainable for parameter in found.index.parameters]
        self._waiting = [{p for p in unit.parameters if self._trainable[p]} for unit in units]
        self._missing = [set(parameters) for parameters in self._waiting]
        self._frozen = [len(mine) < len(u.parameters) for mine, u in zip(self._waiting, units, strict=True)]
        self._passes_on: set[int] = set()  # units with frozen parameters that hand a gradient on to an input
        self._to_the_end: set[int] = set()  # units whose gradients may come again and again
        self._began: set[int] = set()  # units whose backward has, in this pass
        self._active = [bool(unit.parameters) for unit in units]
        self._handles: list[Any] = []
        self.users: dict[int, list[int]] = {}
        mine = {id(module) for module in found.modules}
        self._encloses = [sum(id(part) in mine for part in module.modules()) > 1 for module in found.modules]
        for unit, module in zip(units, found.modules, strict=True):
            calls.attach(module, unit.index, self._before_forward(unit.index), self._after_forward(unit.index))
            for p in unit.parameters:
                self.users.setdefault(p, []).append(unit.index)
        root = next(unit.index for unit in units if unit.name == ROOT)
        for module in outer_modules(found):  # each may read what its children own, as the root may
            calls.attach(module, root, self._before_forward(root), self._after_forward(root), stands_in=True)

    def watch(self, parameters: tuple[nn.Parameter, ...]) -> None:
        """Hook the gradients of the model's (final) parameter objects."""
        for number, parameter in enumerate(parameters):
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._take_gradient(number)))

    def add_use(self, unit: int, parameter: int) -> None:
        """The unit, whose forward is in progress, reads a parameter that is not its own. See reads.py."""
        self.users[parameter].append(unit)
        if (
            self._encloses[unit] and not torch.is_grad_enabled()
        ):  # a reentrant checkpoint, of which there may be many, or might be
            self._to_the_end.add(unit)
        if self._trainable[parameter]:
            self._waiting[unit].add(parameter)
        else:
            self._frozen[unit] = True
            if any(call.unit == unit and call.given is not None and call.given.inputs for call in self.calls.open):
                self._passes_on.add(unit)
        if not self._active[unit]:
            self._active[unit] = True
            self._events.forward_enter(unit)

    def is_active(self, unit: int) -> bool:
        return self._active[unit]

    def at_work(self, parameter: int) -> bool:
        """True while a unit that is known to read the parameter is in its forward or its backward."""
        users = self.users[parameter]
        if any(call.unit in users for call in self.calls.open):
            return True
        return self._progress.in_backward and any(map(self._events.holds_backward, users))

    def _before_forward(self, unit: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            refuse_compiled(module)
            refuse_transformed()
            if self._progress.in_backward:
                self._enter_backward(unit)
            else:
                self._began.clear()
                if self._active[unit]:
                    self._events.forward_enter(unit)
            if not torch.is_grad_enabled():
                return
            sources = None if self._progress.in_backward or self._progress.aside else self._sources
            if sources is not None:
                sources.begin(unit, (self._progress.steps_begun, self._progress.micro_step))
            try:
                inputs = wanted((args, kwargs))
                if sources is not None and not inputs:
                    sources.takes_nothing(unit)
            except TooManyValuesError:  # then what it passes through is taken for its own, and is held the longer
                inputs = []
            self.calls.open[-1].given = Given(inputs)
            if inputs:
                self._end_backward_with(unit, first_of(inputs))
                if self._frozen[unit]:
                    self._passes_on.add(unit)

        return hook

    def _end_backward_with(self, unit: int, tensor: torch.Tensor) -> None:
        """See Note [Where a unit's backward begins and ends]."""
        events = self._events

        def end(gradient: torch.Tensor) -> None:
            events.backward_exit(unit)

        def end_later(gradient: torch.Tensor) -> None:
            Variable._execution_engine.queue_callback(lambda: events.backward_exit(unit))

        def go_on(gradient: torch.Tensor) -> None:
            events.backward_continues(unit)

        again = any(seen.still(tensor) for seen in self._outputs.last.get(unit, ()))
        version, takers = getattr(tensor, TAKERS, NONE)
        if version == tensor._version:
            takers.setdefault(unit, again)  # once: its recomputation takes the same tensor
        elif again:
            tensor.register_hook(go_on)
        else:
            tensor.register_hook(end_later if tensor.is_leaf else end)

    def _after_forward(self, unit: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given = self.calls.open[-1].given or NOTHING
            if not self._active[unit]:
                return
            try:
                if torch.is_grad_enabled():
                    self._begin_backward_with(unit, self._outputs.of_call(unit, module, given, (output, args, kwargs)), given)
            finally:
                if not self._progress.in_backward:
                    self._events.forward_exit(unit)
                    if self._sources is not None:
                        self._sources.end(unit)

        return hook

    def _begin_backward_with(self, unit: int, made: Sequence[torch.Tensor], given: Given) -> None:
        outside, step = self._progress.aside, self._progress.steps_begun

        def begin(gradient: Any) -> None:
            if outside:
                raise RuntimeError(
                    "this loss was made by calling the model itself: call the engine instead, loss = engine(...), and then "
                    "engine.backward(loss)"
                )
            if step != self._progress.steps_begun:
                raise RuntimeError(STALE_LOSS)
            self._enter_backward(unit)

        nodes: list[Any] = []
        for tensor in made:
            tensor.register_hook(begin if self._by_gradients else self._ending_first(tensor, begin))
            base = base_of(tensor)
            node = None if base is None else base.grad_fn
            if node is not None and node._sequence_nr() >= given.since and not any(node is other for other in nodes):
                nodes.append(node)
        for node in nodes:
            node.register_prehook(begin)

    def _ending_first(self, tensor: torch.Tensor, begin: Callable[[Any], None]) -> Callable[[Any], None]:
        """See Note [Ends on several ranks]."""
        version, takers = getattr(tensor, TAKERS, NONE)
        if version != tensor._version:  # else a unit within this one made it
            takers = {}
            setattr(tensor, TAKERS, (tensor._version, takers))

        def end_and_begin(gradient: Any) -> None:
            for unit, again in takers.items():
                (self._events.backward_continues if again else self._events.backward_exit)(unit)
            begin(gradient)

        return end_and_begin

    def _enter_backward(self, unit: int) -> None:
        if not self._progress.in_backward:
            raise RuntimeError(FOREIGN_BACKWARD)
        if not self._active[unit]:
            return
        if not self._events.holds_backward(unit):
            for source in () if self._sources is None else self._sources.before(unit):
                self._events.backward_exit(source)
            self._missing[unit] = set(self._waiting[unit])
            self._began.add(unit)
            self._events.backward_enter(unit)

    def _take_gradient(self, number: int) -> Any:
        bundle = self._bundle_of(number)
        users, name = self.users[number], self._index.parameters[number].name

        def hook(parameter: torch.Tensor) -> None:
            refuse_sparse(parameter, name)
            gradient = take_gradient(parameter)
            if gradient is None:
                return
            if not self._progress.in_backward:
                raise RuntimeError("call engine.backward(loss) instead of loss.backward()")
            if self._began.isdisjoint(users):
                self._progress.doubt()
                raise self._unseen(number)
            self._events.gradient(number, bundle, gradient.detach())
            del gradient
            for unit in users if self._by_gradients else ():
                missing = self._missing[unit]
                missing.discard(number)
                if not missing and not self._outlasts(unit) and self._events.holds_backward(unit):
                    self._events.backward_exit(unit)

        return hook

    def _outlasts(self, unit: int) -> bool:
        """A parameter of the unit's may be needed after the last gradient has come."""
        return unit in self._passes_on or unit in self._to_the_end or (self._frozen[unit] and self._encloses[unit])

    def _unseen(self, number: int) -> HiddenUseError:
        name = self._index.parameters[number].name
        module = self._index.units[self.users[number][0]].name
        return HiddenUseError(
            f"parameter {name} has a gradient, and no module that is known to read it was seen in this backward pass: what "
            f"module {module} makes hides from the engine (a generator or a function that makes it later, somebody else's "
            f"list): {SEEN}; or another module reads the parameter and the first step did not show it"
        )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.calls.detach()
