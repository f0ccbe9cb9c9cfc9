"""Observes one micro-step of a model on the meta device: order of events, memory, FLOPs and bytes; no weight, no arithmetic.

The model's own forward, loss and backward run there, recomputation included, under the hooks that the runtime uses. So what
is observed is the step as it will be, but for what a real kernel takes and frees inside one operation. Fused attention is
stood in for by an operation that keeps what a fused kernel keeps: its inputs, its output and a normalizer a row, and no
buffer of queries by keys.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from systems.errors import UnsupportedError
from systems.messages import one_line
from systems.planning.clock.work import Interval, MicroStepWork
from systems.planning.layout import ModelIndex
from systems.planning.trace import NO_UNIT, Phase
from systems.prediction.attention import FusedAttention
from systems.prediction.meta_copy import on_meta
from systems.prediction.products import PRODUCTS, STAND_INS
from systems.ranks.expert_exchange import observe_exchange
from systems.recipe.model.calls import Calls
from systems.recipe.model.units import COMPUTED, find_units
from systems.recipe.recomputation.recompute import Recomputation, recomputed_units
from systems.substrate.hooks import UnitHooks
from systems.substrate.progress import Progress

_aten = torch.ops.aten
_ROWS = (_aten.embedding.default, _aten.index_select.default, _aten.gather.default, _aten.index.Tensor)
_NO_WORK = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "detach_", "lift_fresh")
_FLASH_BACKWARD = 5, 2  # products of a fused attention's backward, which makes the scores again, to its forward's


def observe(
    model: nn.Module,
    loss: Callable[..., torch.Tensor],
    *,
    batch_size: int,
    seq_len: int,
    dtype: torch.dtype,
    recompute: Literal["none", "full"] | tuple[int, ...] = "none",
    by_gradients: bool = True,
    expert_ranks: int = 1,
) -> tuple[ModelIndex, MicroStepWork]:
    """A micro-step on token ids (batch_size, seq_len). `model` is left as it is, with the experts of one of `expert_ranks`.
    by_gradients: as in UnitHooks.

    loss: called with (model, batch of input_ids and labels, label_count), as in Engine.forward_backward.
    Raises UnsupportedError, one line, if the model cannot run on the meta device.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout is not torch.strided:
            raise UnsupportedError(
                f"{type(model).__name__} cannot be planned: {name} is sparse, and the meta device cannot say how much it holds"
            )
    module = on_meta(model).train()
    for parameter in module.parameters():
        if parameter.dtype in COMPUTED:
            parameter.data = torch.empty_like(parameter, dtype=dtype)
    found = find_units(module, dtype)
    recomputation = Recomputation(found, found.index.blocks)
    recomputation.switch(recomputed_units(found, recompute))
    ids = torch.zeros(batch_size, seq_len, dtype=torch.int64, device="meta")
    observer = _Observer(_ObservedMemory(module, batch_bytes=2 * ids.nbytes))  # ids and labels
    hooks = UnitHooks(
        found, observer, progress=observer.progress, calls=Calls(), bundle_of=lambda p: p, by_gradients=by_gradients
    )
    hooks.watch(found.parameters)
    observe_exchange(module, expert_ranks, observer.meter.swap)
    try:
        with observer.meter, FusedAttention(observer.meter.attend):
            value = loss(module, {"input_ids": ids, "labels": ids}, batch_size * seq_len)
            with observer.backward():
                _run_backward(value)
    except UnsupportedError:
        raise
    except Exception as error:  # the model's code, and the loss's, may raise anything
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise UnsupportedError(
            f"{type(model).__name__} cannot be planned: it does not run on the meta device: {one_line(reason)}"
        ) from error
    finally:
        hooks.remove()
    return found.index, replace(observer.work(), input_bytes=tuple(sorted(recomputation.input_bytes.items())))


class Unfilled(TorchDispatchMode):
    """While a model is built: what would write to a meta tensor is skipped, for it takes time and leaves nothing."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if args and isinstance(args[0], torch.Tensor) and args[0].is_meta and func._schema.name.endswith("_"):
            return args[0]
        return func(*args, **(kwargs or {}))


def _run_backward(loss: torch.Tensor) -> None:
    """loss.backward() without its Python layer, inside of which a function mode is off, so that recomputation misses it."""
    gradient = torch.ones_like(loss)
    Variable._execution_engine.run_backward(
        (loss,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


class _Observer:
    """Stands for the runtime: the hooks tell it of unit events, and it keeps their order by the runtime's own rules."""

    def __init__(self, meter: _ObservedMemory) -> None:
        self.meter = meter
        self.progress = Progress(accumulate=1)
        self._events: list[tuple[Phase, int]] = []
        self._left: list[int] = []  # pending calls of the event's unit
        self._intervals: list[Interval] = []
        self._open: set[int] = set()
        self._pending: dict[int, int] = {}

    def forward_enter(self, unit: int) -> None:
        self._event(Phase.FORWARD_ENTER, unit)

    def forward_exit(self, unit: int) -> None:
        self._pending[unit] = self._pending.get(unit, 0) + 1
        self._event(Phase.FORWARD_EXIT, unit)

    def backward_enter(self, unit: int) -> None:
        if unit not in self._open:
            self._event(Phase.BACKWARD_ENTER, unit)
            self._open.add(unit)

    def backward_exit(self, unit: int) -> None:
        if unit in self._open:
            self._open.remove(unit)
            self._pending[unit] = max(self._pending.get(unit, 0) - 1, 0)
            self._event(Phase.BACKWARD_EXIT, unit)

    def backward_continues(self, unit: int) -> None:
        if unit in self._open:
            self._pending[unit] = max(self._pending.get(unit, 0) - 1, 0)

    def holds_backward(self, unit: int) -> bool:
        return unit in self._open

    def gradient(self, parameter: int, bundle: int, gradient: torch.Tensor) -> None:
        self.meter.gradient(parameter, gradient.nbytes)

    @contextmanager
    def backward(self) -> Iterator[None]:
        self.progress.begin_backward()
        yield
        for unit in list(self._pending):
            self.backward_exit(unit)
        self._event(Phase.BACKWARD_END, NO_UNIT)
        self.progress.end_backward()

    def _event(self, phase: Phase, unit: int) -> None:
        self._intervals.append(self.meter.interval())
        self._events.append((phase, unit))
        self._left.append(self._pending.get(unit, 0))

    def work(self) -> MicroStepWork:
        intervals = (*self._intervals, self.meter.interval())
        gradients, buffers = dict(self.meter.gradient_bytes), self.meter.buffer_bytes
        return MicroStepWork(tuple(self._events), tuple(self._left), intervals, gradients, buffers)


class _ObservedMemory(TorchDispatchMode):
    """Sees every operation: counts its work and the bytes of storages that live. Parameters are not counted, buffers are."""

    def __init__(self, module: nn.Module, *, batch_bytes: int) -> None:
        super().__init__()
        self.gradient_bytes: dict[int, int] = {}
        self._run = _Shapes()
        self._known = {p.untyped_storage()._cdata for p in module.parameters()}
        carried = [p for p in module.parameters() if p.dtype not in COMPUTED]  # see units.py, Note [Carried along]
        buffers = {b.untyped_storage()._cdata: b.untyped_storage().nbytes() for b in (*module.buffers(), *carried)}
        self._known |= buffers.keys()
        self.buffer_bytes = sum(buffers.values())
        self._live = self._peak = self._kept = self.buffer_bytes + batch_bytes
        self._handed_over = self._flops = self._matmul = self._other = self._kernels = 0
        self._attention: dict[int, int] = {}
        self._fired: list[int] = []
        self._swaps: list[int] = []

    def interval(self) -> Interval:
        """What was since the last call."""
        found = Interval(
            matmul_flops=self._flops,
            attention=tuple(sorted(self._attention.items())),
            matmul_bytes=self._matmul,
            other_bytes=self._other,
            kernels=self._kernels,
            peak_bytes=self._peak,
            kept_peak_bytes=max(self._peak, self._kept),
            fired=tuple(self._fired),
            swaps=tuple(self._swaps),
        )
        self._peak = self._kept = self._live
        self._handed_over = self._flops = self._matmul = self._other = self._kernels = 0
        self._attention, self._fired, self._swaps = {}, [], []
        return found

    def swap(self, _: str, nbytes: int) -> None:
        self._swaps.append(nbytes)

    def gradient(self, parameter: int, nbytes: int) -> None:
        self._handed_over += nbytes
        self._kept = max(self._kept, self._live + self._handed_over - nbytes)
        self._fired.append(parameter)
        self.gradient_bytes[parameter] = nbytes

    def multiply(self, flops: int, tensors: Sequence[torch.Tensor]) -> None:
        self._kernels += 1
        self._flops += flops
        self._matmul += sum(t.nbytes for t in tensors)

    def _attended(self, flops: int, tensors: Sequence[torch.Tensor]) -> None:
        """tensors: the query first."""
        width = tensors[0].shape[-1]
        self._attention[width] = self._attention.get(width, 0) + flops
        self.multiply(0, tensors)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, *, causal: bool
    ) -> torch.Tensor:
        result: torch.Tensor = _Fused.apply(self._attended, query, key, value, mask, causal)
        return result

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _aten._local_scalar_dense.default and args[0].is_meta and args[0].dtype == torch.bool:
            return True  # a model asks whether all is as usual
        out = self._run(func, args, kwargs or {})
        made = _tensors(out)
        for tensor in made:
            self._see(tensor)
        if func.is_view or func._schema.name.removeprefix("aten::") in _NO_WORK:
            return out
        given = _tensors((args, tuple(kwargs.values())) if kwargs else args)
        if func in PRODUCTS:
            self.multiply(PRODUCTS[func](*args), (*given, *made))
        else:
            self._kernels += 1
            self._other += 2 * sum(t.nbytes for t in made) if func in _ROWS else sum(t.nbytes for t in (*given, *made))
        return out

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        nbytes = storage.nbytes()
        self._known.add(key)
        weakref.finalize(storage, self._forget, key, nbytes)
        self._live += nbytes
        self._peak = max(self._peak, self._live)
        self._kept = max(self._kept, self._live + self._handed_over)

    def _forget(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self._live -= nbytes


class _Shapes:
    """Runs operations on meta tensors, each kind once: blocks repeat, and what an operation makes follows from shapes alone."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def __call__(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func.is_view or func._schema.is_mutable:
            return func(*args, **kwargs)
        key = (func, _described(args), _described(tuple(kwargs.items())))
        try:
            known = self._known.get(key)
        except TypeError:  # an argument that cannot be a key
            return func(*args, **kwargs)
        if known is None:
            out = STAND_INS.get(func, func)(*args, **kwargs)
            if _fresh(out, (args, kwargs)):
                self._known[key] = tree_map(lambda leaf: None if leaf is None else _described(leaf), out)
            return out
        return _made(known)


class _Description(NamedTuple):
    """A meta tensor to be: what tensors alike have in common."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Description(value.shape, value.stride(), value.dtype)
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    return (type(value), value)  # 1, 1.0 and True are equal, yet make different tensors


def _made(value: Any) -> Any:
    if isinstance(value, _Description):
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")
    return type(value)(map(_made, value)) if isinstance(value, (list, tuple)) else value


def _tensors(value: Any) -> list[torch.Tensor]:
    """Tensors in nested lists and tuples, which is all that an operation takes and makes."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (list, tuple)) else []


def _fresh(out: Any, given: Any) -> bool:
    """True if everything made is a meta tensor with memory of its own, or None."""
    theirs = {t.untyped_storage()._cdata for t in tree_leaves(given) if isinstance(t, torch.Tensor)}
    made = [leaf for leaf in tree_leaves(out) if leaf is not None]
    if not all(isinstance(t, torch.Tensor) and t.is_meta and t.layout == torch.strided for t in made):
        return False
    storages = [t.untyped_storage() for t in made]
    ours = [s._cdata for s in storages]
    whole = all(t.storage_offset() == 0 for t in made)
    return whole and len(set(ours)) == len(ours) and not theirs.intersection(ours)


class _Fused(torch.autograd.Function):
    """Only where masked by a mask tensor are all pairs multiplied; the causal flag halves them."""

    @staticmethod
    def forward(
        ctx: Any,
        multiply: Callable[[int, Sequence[torch.Tensor]], None],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
    ) -> torch.Tensor:
        *batch, heads, rows, _ = query.shape
        out = query.new_empty((*batch, rows, heads, value.shape[-1])).transpose(-3, -2)  # as fused kernels lay it out
        normalizers = query.new_empty(query.shape[:-1], dtype=torch.float32)
        flops = 2 * normalizers.numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        ctx.flops, ctx.multiply, ctx.has_mask = flops // 2 if causal else flops, multiply, mask is not None
        kept = (query, key, value, out, normalizers, *(() if mask is None else (mask,)))
        multiply(ctx.flops, kept)
        ctx.save_for_backward(*kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        query, key, value, *rest = ctx.saved_tensors
        grads = [torch.empty_like(t) for t in (query, key, value)]
        more, less = _FLASH_BACKWARD
        ctx.multiply(ctx.flops * more // less, (query, key, value, *rest, grad, *grads))
        mask = rest[-1].new_empty(rest[-1].shape) if ctx.has_mask and ctx.needs_input_grad[4] else None
        return None, *grads, mask, None
