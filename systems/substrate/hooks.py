"""Hooks that turn a running model into unit events.

Note [Where a unit's backward begins and ends]
    It begins with the gradient of any tensor of the unit's outputs, except tensors merely passed through (T5 hands its
    position bias from block to block: that hook fires after the unit is done). It ends at the first of: all gradients of its
    parameters have come; the gradient of the unit's first input that requires one; the end of the whole backward pass.
    `register_full_backward_hook` would fire early without grad inputs, and never for keyword-only modules.

    A parameter that is read without wanting a gradient (frozen under an adapter, or detached) may be needed on the way to an
    input after the last gradient has come. So gradients end a unit only if it has no frozen parameter or no such input.

    Autograd runs what was made last first, so the gradient of an input comes after everything the unit did with it, but for
    two cases. A leaf's gradient is accumulated ahead of whatever else is ready: then the unit ends with the graph task,
    which is the checkpoint's own where a reentrant one made the leaf. And where a unit's output goes straight into the same
    unit again, that tensor's gradient ends the later call and begins the earlier one: the unit simply goes on.

Note [Recomputation]
    A checkpointed block runs its forward again inside backward. Then its forward hooks only hold what backward holds anyway.
    Checkpoints inside a unit's `forward` do not fire the unit's hooks again; those around its `__call__` do. Both work.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from systems.planning.layout import Layout
from systems.substrate.calls import FOREIGN_BACKWARD, refuse_compiled
from systems.substrate.parameters import take_gradient
from systems.substrate.runtime import Runtime
from systems.substrate.units import FoundModel

MAX_DEPTH = 4


def tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Tensors inside nested containers, dataclasses and plain objects, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < MAX_DEPTH:
        if isinstance(value, Mapping):
            children: Any = value.values()
        elif isinstance(value, (list, tuple, set)):
            children = value
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            children = [getattr(value, f.name) for f in dataclasses.fields(value)]
        elif hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)) and not callable(value):
            children = vars(value).values()
        else:
            return
        for child in children:
            yield from tensors_in(child, depth + 1)


class _Seen:
    """A tensor as it is now: `still` is False once it was edited in place, for then its gradient is another."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version = weakref.ref(tensor), tensor._version

    def still(self, tensor: torch.Tensor) -> bool:
        return self.tensor() is tensor and self.version == tensor._version


def _first(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The input whose gradient ends a unit's backward: one that something computed, if there is one."""
    return next((t for t in inputs if not t.is_leaf), inputs[0])


def _made(value: Any, inputs: Sequence[_Seen]) -> list[torch.Tensor]:
    """Tensors of a unit's that want a gradient and were not merely passed through."""
    wanted = (t for t in tensors_in(value) if t.requires_grad and not isinstance(t, nn.Parameter))
    return [t for t in wanted if not any(x.still(t) for x in inputs)]


_INTERNAL = frozenset(vars(nn.Module()))


def _places_kept(module: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Attributes of a unit that hold tensors which want a gradient: a block may leave a loss of its own on itself."""
    return [
        (vars(part), name)
        for part in module.modules()
        for name, value in vars(part).items()
        if name not in _INTERNAL
        and isinstance(value, torch.Tensor | list | tuple | dict)
        and any(t.requires_grad and not isinstance(t, nn.Parameter) for t in tensors_in(value))
    ]


class UnitHooks:
    """Installs the hooks on construction; `remove` takes them off again."""

    def __init__(self, found: FoundModel, runtime: Runtime, layout: Layout) -> None:
        self._runtime, self._layout = runtime, layout
        self._inputs: dict[int, list[_Seen]] = {}  # of the call in progress
        self._outputs: dict[int, list[_Seen]] = {}  # of the last call
        self._waiting = [{p for p in unit.parameters if found.index.parameters[p].trainable} for unit in found.index.units]
        self._missing = [set(parameters) for parameters in self._waiting]
        self._frozen = [len(mine) < len(u.parameters) for mine, u in zip(self._waiting, found.index.units, strict=True)]
        self._passes_on: set[int] = set()  # units with frozen parameters that hand a gradient on to an input
        self._kept: dict[int, list[tuple[dict[str, Any], str]]] = {}  # per unit, found at its first call
        self._handles: list[Any] = []
        users: dict[int, list[int]] = {}
        for unit, module in zip(found.index.units, found.modules, strict=True):
            self._handles.append(
                module.register_forward_pre_hook(self._before_forward(unit.index), with_kwargs=True, prepend=True)
            )
            self._handles.append(
                module.register_forward_hook(self._after_forward(unit.index), with_kwargs=True, always_call=True)
            )
            for p in unit.parameters:
                users.setdefault(p, []).append(unit.index)
        self._users = users

    def watch(self, parameters: tuple[nn.Parameter, ...]) -> None:
        """Hook the gradients of the model's (final) parameter objects."""
        for number, parameter in enumerate(parameters):
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._take_gradient(number)))

    def _before_forward(self, unit: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            runtime = self._runtime
            refuse_compiled(module)
            if runtime.in_backward:
                self._enter_backward(unit)
            else:
                runtime.forward_enter(unit)
            if not torch.is_grad_enabled():
                return
            inputs = [t for t in tensors_in((args, kwargs)) if t.requires_grad and not isinstance(t, nn.Parameter)]
            self._inputs[unit] = [_Seen(t) for t in inputs]
            if inputs:
                self._end_backward_with(unit, _first(inputs))
                if self._frozen[unit]:
                    self._passes_on.add(unit)

        return hook

    def _end_backward_with(self, unit: int, tensor: torch.Tensor) -> None:
        """See Note [Where a unit's backward begins and ends]."""
        runtime = self._runtime

        def end(gradient: torch.Tensor) -> None:
            runtime.backward_exit(unit)

        def end_later(gradient: torch.Tensor) -> None:
            Variable._execution_engine.queue_callback(lambda: runtime.backward_exit(unit))

        def go_on(gradient: torch.Tensor) -> None:
            runtime.backward_continues(unit)

        if any(seen.still(tensor) for seen in self._outputs.get(unit, ())):
            tensor.register_hook(go_on)
        else:
            tensor.register_hook(end_later if tensor.is_leaf else end)

    def _after_forward(self, unit: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            runtime = self._runtime
            inputs = self._inputs.pop(unit, [])
            if torch.is_grad_enabled():
                made = _made(output, inputs) or _made((args, kwargs), inputs)  # returned, or left in what it was given
                if unit not in self._kept:
                    self._kept[unit] = _places_kept(module)
                if self._kept[unit]:
                    made += _made([held.get(name) for held, name in self._kept[unit]], inputs)
                for tensor in made:
                    tensor.register_hook(lambda gradient: self._enter_backward(unit))
                self._outputs[unit] = [_Seen(t) for t in made]
            if not runtime.in_backward:
                runtime.forward_exit(unit)

        return hook

    def _enter_backward(self, unit: int) -> None:
        runtime = self._runtime
        if not runtime.in_backward:
            raise RuntimeError(FOREIGN_BACKWARD)
        if not runtime.holds_backward(unit):
            self._missing[unit] = set(self._waiting[unit])
        runtime.backward_enter(unit)

    def _take_gradient(self, number: int) -> Any:
        bundle = self._layout.bundle_of_parameter[number]
        users = self._users[number]

        def hook(parameter: torch.Tensor) -> None:
            gradient = take_gradient(parameter)
            if gradient is None:
                return
            if not self._runtime.in_backward:
                raise RuntimeError("call engine.backward(loss) instead of loss.backward()")
            self._runtime.gradient(number, bundle, gradient.detach())
            del gradient
            for unit in users:
                missing = self._missing[unit]
                missing.discard(number)
                if not missing and unit not in self._passes_on and self._runtime.holds_backward(unit):
                    self._runtime.backward_exit(unit)

        return hook

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
