"""Adam on the CPU: the kernels of csrc/adam.cpp, in every instruction set that the machine has."""

from __future__ import annotations

import ctypes
import os
import struct
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from systems.adam.kernel import FORMATS, AdamKernel, AdamTask, TorchKernel, check_pair, check_squares, coefficients
from systems.errors import UnsupportedError
from systems.native import build

Isa = Literal["auto", "avx512", "avx2", "plain"]
ISAS: tuple[Isa, ...] = ("plain", "avx2", "avx512")  # by their number in csrc/adam.cpp
NO_OUTPUT = 3
ROW = struct.Struct("=qq8f")  # AdamRow in csrc/adam.cpp
C_TYPES = {"i": ctypes.c_int, "l": ctypes.c_int64, "f": ctypes.c_float, "p": ctypes.c_void_p, "c": ctypes.c_char_p}


def _function(library: ctypes.CDLL, name: str, arguments: str, result: type | None = None) -> Callable[..., Any]:
    """arguments: one letter of C_TYPES each."""
    function = getattr(library, name)
    function.argtypes, function.restype = [C_TYPES[letter] for letter in arguments], result
    return function


class CpuKernel(AdamKernel):
    """csrc/adam.cpp through ctypes, which holds no GIL. Bit-equal for every instruction set and number of threads."""

    def __init__(self, library: ctypes.CDLL, isa: int, threads: int) -> None:
        self.name = ISAS[isa]
        self.threads = threads
        self._mode = (isa, threads)
        self._update = _function(library, "adam_update", "iippppippppiclf")
        self._sum_squares = _function(library, "sum_squares", "iipil", ctypes.c_double)
        self._accumulate = _function(library, "accumulate", "iippil")
        self._cast = _function(library, "cast", "iippil")
        self._copy = _function(library, "copy", "ippl")

    def update_all(self, tasks: Sequence[AdamTask], *, factor: float) -> None:
        for task in tasks:
            task.check()
            _check_cpu(task.master)
            rows = [ROW.pack(each.offset, each.numel, *coefficients(each)) for each in task.ranges]
            self._update(
                *self._mode,
                task.master.data_ptr(),
                task.exp_avg.data_ptr(),
                task.exp_avg_sq.data_ptr(),
                task.gradient.data_ptr(),
                FORMATS[task.gradient.dtype],
                *((None, None, None) if task.into is None else (tensor.data_ptr() for tensor in task.into)),
                None if task.out is None else task.out.data_ptr(),
                NO_OUTPUT if task.out is None else FORMATS[task.out.dtype],
                b"".join(rows),
                len(rows),
                factor,
            )

    def sum_squares_all(self, tensors: Sequence[torch.Tensor]) -> list[float]:
        sums = []
        for tensor in tensors:
            _check_cpu(tensor)
            check_squares(tensor)
            sums.append(self._sum_squares(*self._mode, tensor.data_ptr(), FORMATS[tensor.dtype], tensor.numel()))
        return sums

    def accumulate(self, accumulator: torch.Tensor, gradient: torch.Tensor) -> None:
        check_pair(accumulator, gradient)
        _check_cpu(accumulator)
        self._accumulate(*self._mode, accumulator.data_ptr(), gradient.data_ptr(), FORMATS[gradient.dtype], gradient.numel())

    def cast(self, master: torch.Tensor, out: torch.Tensor) -> None:
        check_pair(master, out)
        _check_cpu(master)
        self._cast(*self._mode, master.data_ptr(), out.data_ptr(), FORMATS[out.dtype], out.numel())

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        _check_cpu(destination)
        _check_cpu(source)
        if destination.dtype is not source.dtype or destination.numel() != source.numel():
            raise ValueError(
                "copy needs equal types and lengths, "
                f"got {destination.dtype} x {destination.numel()} and {source.dtype} x {source.numel()}"
            )
        if not (destination.is_contiguous() and source.is_contiguous()):
            raise ValueError("copy needs contiguous tensors")
        self._copy(self.threads, destination.data_ptr(), source.data_ptr(), source.nbytes)


def _check_cpu(tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu":
        raise ValueError(f"a CPU kernel was given a tensor on {tensor.device}: use cuda_kernel()")


def cpu_kernel(isa: Isa = "auto", threads: int | None = None) -> AdamKernel:
    """The kernel for host tensors.

    isa: "auto" takes the best this processor has; where nothing can be compiled it warns and gives the torch kernel.
    threads: OpenMP threads per call; None means every core this process may use.
    Raises UnsupportedError if an instruction set is named that this machine cannot run or build.
    """
    if isa != "auto" and isa not in ISAS:
        raise ValueError(f"unknown instruction set {isa!r}: use auto, {', '.join(ISAS)}")
    threads = len(os.sched_getaffinity(0)) if threads is None else threads
    if threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    try:
        library = build.adam_library()
    except build.BuildError as error:
        if isa != "auto":
            raise UnsupportedError(f"the {isa} Adam kernel cannot be built: {error}") from error
        warnings.warn(f"Adam runs in plain torch operations, several times slower: {error}", RuntimeWarning, stacklevel=2)
        return TorchKernel()
    best: int = library.best_isa()
    chosen = best if isa == "auto" else ISAS.index(isa)
    if chosen > best:
        raise UnsupportedError(f"this processor has no {isa}: the best it has is {ISAS[best]}")
    return CpuKernel(library, chosen, threads)
