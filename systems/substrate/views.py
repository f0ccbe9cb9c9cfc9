"""Storages whose memory moves under their tensors, and the NaNs they point to while they have none.

`RebindableStorage`: one permanent torch storage per bundle. Parameters are views made once; fetching and evicting swap
the storage's data pointer, so every view follows, those saved by autograd included. The memory pointed at always
belongs to someone else: nothing here allocates or frees it.

`Poison`: what a released storage points to, so that a use after release reads NaN and never another layer's bytes.

Rebinding bypasses autograd's version check: one micro-step must pin one version of a parameter from forward to
backward.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Protocol

import torch

from systems.substrate import build

PAGE = 2 << 20
MAX_MAPPINGS = 512  # of the poison's page, to stay far from the kernel's limit of 65530 per process
NAN_BYTE = 0xFF  # bytes of ones are a NaN in fp32, bf16, fp16, fp64 and both fp8 formats
MAP_FIXED = 0x10
MAP_FAILED = ctypes.c_void_p(-1).value

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
    return _view(storage, dtype, 0, shape)


def _view(storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, shape: Sequence[int]) -> torch.Tensor:
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, tuple(shape), tuple(strides))


class RebindableStorage:
    """One bundle's permanent storage. Born released; `point_at` and `release` take a microsecond or two.

    nbytes: its size, fixed. poison: at least as large, on the same device; it stays alive as long as any view does.
    """

    def __init__(self, nbytes: int, device: torch.device, poison: Poison, *, rebind: Rebind | None = None) -> None:
        if nbytes > poison.nbytes or poison.device != device:
            raise ValueError(
                f"a bundle of {nbytes} bytes on {device} needs poison as large on that device, "
                f"got {poison.nbytes} bytes on {poison.device}"
            )
        self.nbytes, self.poison, self.resident = nbytes, poison, False
        self._rebind = rebind or default_rebind()
        self._storage = storage_at(poison.data_ptr, nbytes, device)
        # torch keeps this Python object for as long as any tensor uses the storage, and so the poison behind it.
        self._storage.poison = poison  # type: ignore[attr-defined]

    @property
    def data_ptr(self) -> int:
        return self._storage.data_ptr()

    def view(self, dtype: torch.dtype, offset: int, shape: Sequence[int]) -> torch.Tensor:
        """A contiguous tensor at offset (in elements of dtype) that follows every rebind."""
        if offset < 0 or (offset + prod(shape)) * dtype.itemsize > self.nbytes:
            raise ValueError(f"{tuple(shape)} of {dtype} at element {offset} does not fit a bundle of {self.nbytes} bytes")
        return _view(self._storage, dtype, offset, shape)

    @property
    def untyped(self) -> torch.UntypedStorage:
        """The permanent storage itself, to recognise it by; never resize or write it."""
        return self._storage

    def point_at(self, data_ptr: int) -> None:
        """Use nbytes at this address, until further notice. Its owner must outlive that."""
        if data_ptr == 0 and self.nbytes:
            raise ValueError("a storage cannot point at address 0: release it instead")
        self._rebind(self._storage, data_ptr)
        self.resident = True

    def release(self) -> None:
        """Every view reads NaN from here on."""
        self.resident = False  # first: Ctrl-C in between leaves one that is pointed anew before it is read
        self._rebind(self._storage, self.poison.data_ptr)


class _Backing(Protocol):
    """data_ptr: where at least `nbytes` of NaNs start. page: the physical memory behind them, as bytes."""

    data_ptr: int
    page: torch.Tensor


class _Buffer:
    """Ordinary memory of the whole size."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.page = torch.full((max(nbytes, 1),), NAN_BYTE, dtype=torch.uint8, device=device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # once: any stream may read it from now on
        self.data_ptr = self.page.data_ptr()


class _RepeatedPage:
    """One page of shared memory mapped again and again over the whole range: 2 MiB of memory up to 1 GiB of range."""

    def __init__(self, nbytes: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        integer = ctypes.c_int
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, integer, integer, integer, ctypes.c_int64]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        unit = PAGE * max(1, -(-nbytes // (PAGE * MAX_MAPPINGS)))
        count = max(1, -(-nbytes // unit))

        def mapped(address: int | None, size: int, protection: int, flags: int, file: int) -> int:
            result = libc.mmap(address, size, protection, flags, file, 0)
            if result == MAP_FAILED:
                error = ctypes.get_errno()
                raise OSError(error, f"cannot map {size} bytes for poison: {os.strerror(error)}")
            return int(result)

        file = os.memfd_create("poison", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, unit)
            self.data_ptr = mapped(None, unit * count, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
            unmap = weakref.finalize(self, libc.munmap, self.data_ptr, unit * count)
            unmap.atexit = False  # at exit tensors may outlive us
            for start in range(self.data_ptr, self.data_ptr + unit * count, unit):
                mapped(start, unit, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED, file)
        finally:
            os.close(file)
        ctypes.memset(self.data_ptr, NAN_BYTE, unit)
        self.page = tensor_at(self.data_ptr, torch.uint8, (unit,), torch.device("cpu"))


class Poison:
    """A range of nothing but NaNs for released storages, made at first need. nbytes: the largest bundle.

    It can be written: a read-only mapping would kill the process without a word when a released parameter is edited in
    place. Instead `check`, called once a step before its results count, finds any such write, restores the NaNs and
    says so. On a CPU it costs a page of memory; on CUDA a buffer of its full size.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes, self.device = nbytes, device
        self._backing: _Backing | None = None

    @property
    def data_ptr(self) -> int:
        return self._made().data_ptr

    def contains(self, data_ptr: int) -> bool:
        """True for an address inside the range: its reader has got hold of a released parameter."""
        return 0 <= data_ptr - self.data_ptr < self.nbytes

    def intact(self) -> torch.Tensor:
        """0-dim bool on the device: no released parameter was written. Does not wait for the device."""
        page = self._made().page
        if page.is_cuda:
            return page.amin() == NAN_BYTE
        # numpy, because it stays on this thread: on a busy machine a second one is milliseconds away.
        return torch.tensor(bool(page.numpy().min() == NAN_BYTE))

    def check(self) -> None:
        """Raises RuntimeError, with the NaNs restored, if a released parameter was written. Waits for the device."""
        if not self.intact():
            self.restore()
            raise RuntimeError("a released parameter was written: edit parameters inside engine.summon()")

    def restore(self) -> None:
        self._made().page.fill_(NAN_BYTE)

    def _made(self) -> _Backing:
        if self._backing is None:
            shared_page = self.device.type == "cpu" and hasattr(os, "memfd_create")
            with torch.inference_mode(False):
                self._backing = _RepeatedPage(self.nbytes) if shared_page else _Buffer(self.nbytes, self.device)
        return self._backing
