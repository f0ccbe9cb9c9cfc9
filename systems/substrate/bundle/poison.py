"""`Poison`: what a released storage points to, so that a use after release reads NaN and never another layer's bytes."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Protocol

import torch

from systems.substrate.bundle.addresses import tensor_at

PAGE = 2 << 20

MAX_MAPPINGS = 512  # of the poison's page, to stay far from the kernel's limit of 65530 per process

NAN_BYTE = 0xFF  # bytes of ones are a NaN in fp32, bf16, fp16, fp64 and both fp8 formats

MAP_FIXED = 0x10

MAP_FAILED = ctypes.c_void_p(-1).value


class _Backing(Protocol):
    """data_ptr: where at least `nbytes` of NaNs start. page: the physical memory behind them, as bytes."""

    data_ptr: int
    page: torch.Tensor


class _FilledRange:
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
                self._backing = _RepeatedPage(self.nbytes) if shared_page else _FilledRange(self.nbytes, self.device)
        return self._backing
