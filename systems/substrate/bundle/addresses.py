"""Tensors and storages at an address, and how a storage is pointed at another one."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from systems.native import build

Rebind = Callable[[torch.UntypedStorage, int], None]
"""Point a storage at an address, its size kept; the address before is forgotten, not freed."""


def rebind_by_swap(storage: torch.UntypedStorage, data_ptr: int) -> None:
    """torch 2.13 and later. Sizes must agree: swapping with an empty storage would leave a size of zero behind."""
    storage._swap_data_ptr_(storage_at(data_ptr, storage.nbytes(), storage.device))  # type: ignore[attr-defined]


@functools.cache
def rebind_by_extension() -> Rebind:
    """The same through csrc/rebind.cpp, for a torch without `_swap_data_ptr_`. Raises build.BuildError."""
    function = build.rebind_library().rebind
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None

    def rebind(storage: torch.UntypedStorage, data_ptr: int) -> None:
        function(storage._cdata, data_ptr, storage.nbytes())

    return rebind


def default_rebind() -> Rebind:
    return rebind_by_swap if hasattr(torch.UntypedStorage, "_swap_data_ptr_") else rebind_by_extension()


def storage_at(data_ptr: int, nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """A storage over memory that someone else owns and frees."""
    make: Any = torch._C._construct_storage_from_data_pointer
    storage: torch.UntypedStorage = make(data_ptr, device, nbytes)
    return storage


def tensor_at(data_ptr: int, dtype: torch.dtype, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """A contiguous tensor over memory that someone else owns and frees."""
    storage = storage_at(data_ptr, prod(shape) * dtype.itemsize, device)
    return view_of(storage, dtype, 0, shape)


def view_of(storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, shape: Sequence[int]) -> torch.Tensor:
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, tuple(shape), tuple(strides))
