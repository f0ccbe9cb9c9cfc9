"""Finds weights that share memory with something else under another name: what one engine would silently make two of.

Two Parameters on one storage, a slice of a weight, an expanded one, a buffer, an attribute, a closure or a partial that looks
into a weight: plain PyTorch trains all of it at once. An engine gives every Parameter memory of its own, so they are refused by
both names. Places in one storage that do not overlap, and frozen Parameters among themselves, are fine. Tying one Parameter
object is too.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm

from systems.errors import UnsupportedError

MAX_DEPTH = 3  # of what is in an attribute: lists and dicts, an object's own attributes, what a function has with it
_EMPTY = CellType()
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_INTERNAL = frozenset(vars(nn.Module())) - {"_buffers"}


class _ByteRange(NamedTuple):
    """Bytes [start, stop) that a tensor lies in, if with gaps. trained: it is a Parameter that is."""

    start: int
    stop: int
    name: str
    tensor: torch.Tensor
    trained: bool


def refuse_shared_memory(model: nn.Module, parameters: Mapping[nn.Parameter, Sequence[str]]) -> None:
    """UnsupportedError, one line with both names. parameters: of the model, with their names."""
    spans = [_span(names[0], p, trained=p.requires_grad) for p, names in parameters.items() if _has_memory(p)]
    for span in spans:
        if span.trained and _overlaps_itself(span.tensor):
            raise UnsupportedError(
                f"parameter {span.name} has elements that share memory, as expand() makes them: give initialize a model whose "
                f"parameter is .clone()d"
            )
    known = {id(p) for p in parameters}
    for name, tensor in _others(model):
        if id(tensor) not in known and _has_memory(tensor):
            spans.append(_span(name, tensor, trained=False))
    spans.sort(key=lambda span: (str(span.tensor.device), span.start))
    open_ones: list[_ByteRange] = []
    for span in spans:
        open_ones = [o for o in open_ones if o.stop > span.start and o.tensor.device == span.tensor.device]
        for other in open_ones:
            if (span.trained or other.trained) and _overlap(span, other):
                first, second = (other, span) if other.trained else (span, other)
                raise UnsupportedError(
                    f"parameter {first.name} shares memory with {second.name}, and would not under an engine: make them one "
                    "Parameter (head.weight = embedding.weight, model.tie_weights()), or .clone() one of them"
                )
        open_ones.append(span)


def _has_memory(tensor: torch.Tensor) -> bool:
    """False also for one of a class that only stands for others."""
    plain = type(tensor).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    return plain and not tensor.is_meta and tensor.layout == torch.strided and tensor.numel() > 0


def _extent(tensor: torch.Tensor) -> int:
    """Elements from the first to the last, gaps included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _span(name: str, tensor: torch.Tensor, *, trained: bool) -> _ByteRange:
    start = tensor.data_ptr()
    return _ByteRange(start, start + _extent(tensor) * tensor.itemsize, name, tensor, trained)


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    known = torch._debug_has_internal_overlap(tensor)  # 0 is no, 1 yes, 2 unknown
    return known == 1 or (known == 2 and int(_marks(tensor, 0, _extent(tensor)).sum()) < tensor.numel())


def _overlap(one: _ByteRange, other: _ByteRange) -> bool:
    """True if an element of one is an element of the other; what lies in gaps is found by marking."""
    if not (_has_gaps(one.tensor) or _has_gaps(other.tensor)) or one.tensor.itemsize != other.tensor.itemsize:
        return True
    size, start = one.tensor.itemsize, min(one.start, other.start)
    if (one.start - other.start) % size:
        return True
    extent = (max(one.stop, other.stop) - start) // size
    marks = [_marks(span.tensor, (span.start - start) // size, extent) for span in (one, other)]
    return bool((marks[0] & marks[1]).any())


def _has_gaps(tensor: torch.Tensor) -> bool:
    return _extent(tensor) != tensor.numel()


def _marks(tensor: torch.Tensor, offset: int, extent: int) -> torch.Tensor:
    """One element for each of `extent`, true where the tensor has one."""
    marks = torch.zeros(extent, dtype=torch.bool)
    marks.as_strided(tensor.shape, tensor.stride(), offset).fill_(True)
    return marks


def _others(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers, and tensors in attributes and in hooks, and in what these have in turn."""
    depths: dict[int, int] = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        made = {hook.name for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)}
        for attribute, value in vars(module).items():
            if attribute == "_buffers":
                yield from ((f"buffer {prefix}{key}", buffer) for key, buffer in value.items() if buffer is not None)
            elif attribute in _HOOKS:
                yield from ((f"a hook of {name or 'the model'}", tensor) for tensor in _tensors(value, depths))
            elif attribute not in _INTERNAL and attribute not in made:  # which its hook makes anew before each forward
                yield from ((f"attribute {prefix}{attribute}", tensor) for tensor in _tensors(value, depths))


def _tensors(value: Any, depths: dict[int, int], depth: int = 0) -> Iterator[torch.Tensor]:
    """depths: at which an object was looked into, for it may be had by many modules."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < MAX_DEPTH and depths.get(id(value), MAX_DEPTH) > depth:
        parts = _parts(value)
        if parts:
            depths[id(value)] = depth
        for each in parts:
            yield from _tensors(each, depths, depth + 1)


def _parts(value: Any) -> Collection[Any]:
    """What an object has, as far as it shows: not what a module has, which is looked at by itself."""
    if isinstance(value, (str, bytes, int, float, type(None), nn.Module, ModuleType, type)):
        return ()
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY]
        return (*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    try:
        return vars(value).values()
    except (TypeError, AttributeError, ReferenceError):  # it has none, or is a reference to what is gone
        return ()
