"""Inputs of recomputed blocks that wait for their backward in host memory.

A recomputed block keeps nothing for backward but its input, so that is all there is to offload: its hidden state, the first
positional tensor that wants a gradient. Which units do so is the strategy's choice.

Note [The way of an input]
    made      autograd saves the input: a copy into a pinned slot is issued behind compute, and the tensor is kept
    left      at the next unit event compute is ordered behind that copy, and then the tensor is let go. The allocator may
              give its memory to compute that is queued later, which comes after the copy; to nobody else.
    fetched   when a unit's backward begins, its own input and the one that backward needs next get device memory. Compute
              queued earlier may still use that memory, so the copy into it is issued behind compute.
    taken     recomputation asks for it: compute is ordered behind the copy, and the tensor is autograd's
    over      autograd lets go of its handle: the slot serves again, after whoever still reads it
    So a copy never outlives its tensor, and what is on the device is a function of the order of calls alone.
    A reentrant checkpoint saves its input after its forward, so that its copy has less to hide behind.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from systems.device.device import Device
from systems.device.lanes.transfers import TrackedMemory
from systems.device.memory.host import HostSlot, HostSlots
from systems.device.watch.events import Extent
from systems.errors import OutOfMemoryError
from systems.planning.plan import LaneKind
from systems.planning.policy.windows import leaving
from systems.planning.step.operations import LaneOperation, Work
from systems.recipe.model.units import FoundModel

CHECKPOINT = "_gradient_checkpointing_func"  # of transformers' layers: called with what to run, and its arguments


def offloadable(found: FoundModel, units: frozenset[int], recomputed: frozenset[int]) -> frozenset[int]:
    """Those of `units` that are recomputed. recomputed: by the engine; a model may do so itself, as transformers' models do.

    Raises UnsupportedError if none is: inputs are then the least of what they keep.
    """
    return leaving(units, recomputed | {unit for unit in units if _recomputes_itself(found.modules[unit])})


class _Input:
    """One saved input. tensor: its device copy while this module answers for it; memory: that copy's tickets.

    slot: None once it is over. taken: recomputation has had it. edited: in place, while its copy was on the way.
    """

    __slots__ = ("dtype", "edited", "handle", "memory", "nbytes", "shape", "slot", "taken", "tensor", "unit", "version")

    def __init__(self, unit: int, tensor: torch.Tensor, slot: HostSlot, memory: TrackedMemory) -> None:
        self.unit, self.memory, self.version = unit, memory, tensor._version
        self.tensor: torch.Tensor | None = tensor.detach()
        self.shape, self.dtype, self.nbytes = tensor.shape, tensor.dtype, tensor.nbytes
        self.edited = False
        self.slot: HostSlot | None = slot
        self.taken = False
        self.handle: weakref.ref[_Handle] | None = None


class _Handle:
    """What autograd keeps in the tensor's stead."""

    __slots__ = ("__weakref__", "input")

    def __init__(self, kept: _Input) -> None:
        self.input = kept
        kept.handle = weakref.ref(self)


class OffloadedInputs:
    """units: whose inputs leave from now on; a part of what `attach` was given.

    All calls come from the thread that runs the step.
    """

    def __init__(self, device: Device, slots: HostSlots) -> None:
        self._device, self._slots = device, slots
        self.units: frozenset[int] = frozenset()
        self._attached: frozenset[int] = frozenset()
        self._names: dict[int, str] = {}
        self._stack: list[_Input] = []  # in the order of forward
        self._leaving: list[_Input] = []
        self._numbers = itertools.count()
        self._prefetches = True
        self._active: Callable[[], bool] = lambda: False
        self._left: Callable[[int, int], None] = lambda unit, nbytes: None

    def switch(self, units: frozenset[int]) -> None:
        """Whose inputs leave from now on."""
        self.units = units

    # ---- hooks

    def attach(
        self, found: FoundModel, units: frozenset[int], *, active: Callable[[], bool], left: Callable[[int, int], None]
    ) -> Callable[[], None]:
        """Wrap the forwards of `units`, as `offloadable` gives them; returns what undoes it.

        active: whether a forward belongs to the step. left: told of each input that leaves, by its unit, with its bytes.
        """
        self._attached, self._active, self._left = units, active, left
        self._names = {unit: found.index.units[unit].name for unit in units}
        undo = [self._wrap(unit, found.modules[unit]) for unit in sorted(units)]

        def detach() -> None:
            for each in undo:
                each()

        return detach

    def _wrap(self, unit: int, module: nn.Module) -> Callable[[], None]:
        """Around what saves the input: the model's own way to recompute, which may lie outside of `forward`, or `forward`."""
        name = CHECKPOINT if _recomputes_itself(module) and CHECKPOINT in vars(module) else "forward"
        before, inner = module.__dict__.get(name), getattr(module, name)

        @functools.wraps(inner)
        def saving_input(*args: Any, **kwargs: Any) -> Any:
            hidden = _hidden_state(args, self._device.torch_device) if self._takes(unit) else None
            if hidden is None:
                return inner(*args, **kwargs)
            saving = _Saving(self, unit, hidden)
            del hidden
            with saved_tensors_hooks(saving.pack, saving.unpack), saving:
                return inner(*args, **kwargs)

        setattr(module, name, saving_input)

        def undo() -> None:
            module.__dict__.pop(name, None)
            if before is not None:
                setattr(module, name, before)

        return undo

    def _takes(self, unit: int) -> bool:
        """Inside another's hooks (a checkpoint around several units) nothing is touched: its own bookkeeping counts saves."""
        if unit not in self.units or not torch.is_grad_enabled() or not self._active():
            return False
        return torch._C._autograd._top_saved_tensors_default_hooks(True) is None

    # ---- the way of an input, see the note

    def make(self, unit: int, tensor: torch.Tensor) -> _Handle:
        """Raises BudgetError if the host has no room for it."""
        self.settle()
        slot = self._slots.take(tensor.nbytes, expected=max(len(self.units & self._attached) - len(self._stack), 1))
        kept = _Input(unit, tensor, slot, self._fresh_memory())
        transfers = self._device.transfers
        transfers.compute(writes=[kept.memory], label=f"input of unit {unit} is made")

        def copy() -> None:
            assert kept.tensor is not None
            slot.view(kept.dtype, kept.shape).copy_(kept.tensor, non_blocking=True)

        for what in ("d2h_bytes", "activation_offload_bytes"):
            self._device.log.count(what, kept.nbytes)
        transfers.issue(
            LaneOperation(Work.OFFLOAD_INPUT, LaneKind.D2H, self._names[unit]), copy, reads=[kept.memory], writes=[slot.memory]
        )
        self._left(unit, kept.nbytes)
        self._leaving.append(kept)
        self._stack.append(kept)
        return _Handle(kept)

    def settle(self) -> None:
        """Let go of what has left the device, and of slots that nobody will ask for."""
        while self._leaving:
            kept = self._leaving.pop(0)
            kept.edited = kept.tensor is not None and kept.tensor._version != kept.version
            self._let_go(kept)
        if not self._stack:
            return
        for kept in [k for k in self._stack if k.handle is None or k.handle() is None]:
            self._let_go(kept)
            self._end(kept)

    def begin_backward(self, unit: int) -> None:
        """A unit's backward begins: have its input come, and the one that will be needed after it."""
        if not self._stack:
            return
        self.settle()
        waiting = [kept for kept in self._stack if not kept.taken]
        own = max((number for number, kept in enumerate(waiting) if kept.unit == unit), default=len(waiting))
        for kept in reversed(waiting[max(own - 1, 0) : own + 1]):
            if self._prefetches:
                try:
                    self._fetch(kept)
                except (OutOfMemoryError, torch.OutOfMemoryError):  # the device holds one at a time, then
                    self._prefetches = False
                    self._device.log.count("activation_prefetches_refused")

    def take(self, handle: _Handle) -> torch.Tensor:
        """Recomputation asks for an input."""
        self.settle()
        kept = handle.input
        if kept.slot is None:
            raise RuntimeError(f"the input of unit {kept.unit} is gone with its step: run the forward pass again")
        if kept.edited:
            raise RuntimeError(f"the input of unit {kept.unit} was edited in place: recomputation would not start from it")
        self._fetch(kept)
        self._device.transfers.order_compute(reads=[kept.memory], label=f"input of unit {kept.unit}")
        tensor, kept.tensor, kept.taken = kept.tensor, None, True
        assert tensor is not None
        return tensor

    def _fetch(self, kept: _Input) -> None:
        """Nothing if it is on its way. OutOfMemoryError if the device has no room for it."""
        slot = kept.slot
        if kept.tensor is not None or slot is None:
            return
        tensor = torch.empty(kept.shape, dtype=kept.dtype, device=self._device.torch_device)
        kept.memory = self._fresh_memory()
        transfers = self._device.transfers
        transfers.compute(writes=[kept.memory], label=f"room for input of unit {kept.unit}")
        kept.tensor = tensor

        def copy() -> None:
            assert kept.tensor is not None
            kept.tensor.copy_(slot.view(kept.dtype, kept.shape), non_blocking=True)

        for what in ("h2d_bytes", "activation_offload_bytes"):
            self._device.log.count(what, kept.nbytes)
        fetch = LaneOperation(Work.FETCH_INPUT, LaneKind.H2D, self._names[kept.unit])
        transfers.issue(fetch, copy, reads=[slot.memory], writes=[kept.memory])

    def _let_go(self, kept: _Input) -> None:
        """Whoever gets the memory next is compute that comes after the copy."""
        if kept.tensor is not None:
            self._device.transfers.compute(writes=[kept.memory], label=f"input of unit {kept.unit} leaves")
            kept.tensor = None

    def _end(self, kept: _Input) -> None:
        self._stack.remove(kept)
        slot, kept.slot = kept.slot, None
        if slot is not None:
            self._slots.give(slot)

    def forget(self) -> None:
        """The step was given up: no handle that is still around gives its input any more."""
        self._leaving.clear()
        for kept in list(self._stack):
            with contextlib.suppress(Exception):  # of a copy that failed: then nobody reads or writes the tensor either
                self._let_go(kept)
            kept.tensor = None
            self._end(kept)
        self._slots.give_all()

    def close(self) -> None:
        self.forget()
        self._slots.close()

    def _fresh_memory(self) -> TrackedMemory:
        """Every device copy has a range of its own: the allocator's addresses are not this module's to know."""
        number = next(self._numbers)
        return TrackedMemory(Extent("inputs", number, number + 1))


class _Saving:
    """The hooks around one call of a unit. They outlive the call, so the tensor they look for is forgotten at its end."""

    def __init__(self, inputs: OffloadedInputs, unit: int, hidden: torch.Tensor) -> None:
        self._inputs, self._unit = inputs, unit
        self._hidden: torch.Tensor | None = hidden
        self._handle: _Handle | None = None

    def pack(self, tensor: torch.Tensor) -> object:
        if tensor is not self._hidden:
            return tensor.detach()  # not the tensor itself: saved by what made it, it would keep itself alive
        if self._handle is None:
            self._handle = self._inputs.make(self._unit, tensor)
        return self._handle

    def unpack(self, saved: Any) -> torch.Tensor:
        return self._inputs.take(saved) if isinstance(saved, _Handle) else saved

    def __enter__(self) -> None:
        return

    def __exit__(self, *exc: object) -> None:
        self._hidden = self._handle = None


def _hidden_state(args: tuple[Any, ...], device: torch.device) -> torch.Tensor | None:
    """The first positional tensor that wants a gradient, if it is a plain one on the device that owns all of its storage.

    Not a leaf: whoever made that holds it, so that nothing would leave the device.
    """
    first = next((a for a in args if isinstance(a, torch.Tensor) and a.requires_grad), None)
    if first is None or type(first) is not torch.Tensor or first.is_leaf or first.device != device:
        return None
    if first.layout != torch.strided or not first.is_contiguous():
        return None
    return first if 0 < first.nbytes == first.untyped_storage().nbytes() else None


def _recomputes_itself(module: nn.Module) -> bool:
    return bool(getattr(module, "gradient_checkpointing", False))
