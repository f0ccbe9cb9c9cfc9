"""Adam on CUDA as one Triton pass, with the operations of csrc/kernels.h one for one, so that it gives the CPU's bits.

What that takes: explicit fma, division and square root rounded correctly (`div_rn`, `sqrt_rn`; Triton's `/` is
approximate), no fusion by the compiler (`enable_fp_fusion=False`), and one pattern for every NaN.

A launch costs the host tens of microseconds, more than a small tensor costs the device. So one launch takes any number of
ranges in any number of tensors: their addresses and scalars go to the device as a table, in which each program looks its
range up. Imports without Triton; `HAS_TRITON` says. Work is queued on the current stream; nothing here waits.
"""

from __future__ import annotations

import logging
import os
import struct
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import torch

from systems.adam.kernel import AdamKernel, AdamTask, TorchKernel, check_squares, coefficients
from systems.errors import UnsupportedError

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

LOG = logging.getLogger(__name__)
UPDATE_KERNEL = "_update_kernel"  # as its files are called in Triton's cache
PIECE = 1024  # elements handled together, 8 a thread
UPDATE_PIECES, SQUARES_PIECES = 4, 16  # one after another by each program
KEPT_ROWS = 64  # longest table that is kept on the device
# addresses of master, both moments, gradient and out; numel; first program; scalars
ROW = struct.Struct("=5q q q 8f")
SQUARES_ROW = struct.Struct("=q q q q")  # address; numel; first program; place of the result
# What the kernel stores for a NaN, which also says how it narrows: none, fp32, or the NaN of a 16-bit type.
NO_OUT, FP32_OUT = -1, 0
NAN_OF = {torch.float32: FP32_OUT, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}

Formats = tuple[torch.dtype, torch.dtype | None]  # of the gradient and of out

if HAS_TRITON:
    TRITON_TYPE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, None: tl.float32}

    @triton.jit
    def _at(address, at, aligned: tl.constexpr):  # type: ignore[no-untyped-def]
        pointer = address + at
        if aligned:
            pointer = tl.multiple_of(pointer, 16)
        return pointer

    @triton.jit
    def _load(address, at, numel, masked: tl.constexpr, aligned: tl.constexpr):  # type: ignore[no-untyped-def]
        if masked:
            value = tl.load(_at(address, at, aligned), mask=at < numel, other=0.0)
        else:
            value = tl.load(_at(address, at, aligned))
        return value

    @triton.jit
    def _store(address, at, value, numel, masked: tl.constexpr, aligned: tl.constexpr):  # type: ignore[no-untyped-def]
        if masked:
            tl.store(_at(address, at, aligned), value, mask=at < numel)
        else:
            tl.store(_at(address, at, aligned), value)

    @triton.jit
    def _quiet(x):  # type: ignore[no-untyped-def]
        return tl.where(x != x, tl.full(x.shape, 0x7FC00000, tl.int32).to(tl.float32, bitcast=True), x)

    @triton.jit
    def _piece(  # type: ignore[no-untyped-def]
        master, first, second, gradient, out, at, numel, factor, scalars,
        out_nan: tl.constexpr, masked: tl.constexpr, aligned: tl.constexpr,
    ):  # fmt: skip
        decay, l2, w1, b2 = tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2), tl.load(scalars + 3)
        w2, inverse_root_correction2 = tl.load(scalars + 4), tl.load(scalars + 5)
        eps, negative_step = tl.load(scalars + 6), tl.load(scalars + 7)
        p = _load(master, at, numel, masked, aligned)
        m = _load(first, at, numel, masked, aligned)
        v = _load(second, at, numel, masked, aligned)
        g = _load(gradient, at, numel, masked, aligned).to(tl.float32) * factor
        g = tl.where(l2 != 0.0, tl.fma(p, l2, g), g)
        m = tl.fma(g - m, w1, m)
        v = tl.fma(g * w2, g, v * b2)
        p = tl.fma(tl.div_rn(m, tl.fma(tl.sqrt_rn(v), inverse_root_correction2, eps)), negative_step, p * decay)
        _store(first, at, _quiet(m), numel, masked, aligned)
        _store(second, at, _quiet(v), numel, masked, aligned)
        _store(master, at, _quiet(p), numel, masked, aligned)
        if out_nan == 0:
            _store(out, at, _quiet(p), numel, masked, aligned)
        if out_nan > 0:
            bits = p.to(out.dtype.element_ty).to(tl.int16, bitcast=True)
            bits = tl.where(p != p, tl.full(p.shape, out_nan, tl.int16), bits)
            _store(out, at, bits.to(out.dtype.element_ty, bitcast=True), numel, masked, aligned)

    @triton.jit
    def _row(first_program, stride: tl.constexpr, rows, steps, program):  # type: ignore[no-untyped-def]
        """The last row whose first program is not after this one. steps: at least log2(rows)."""
        row, end = program * 0, program * 0 + rows
        for _ in range(steps):
            middle = (row + end) // 2
            found = tl.load(first_program + middle * stride) <= program
            row, end = tl.where(found, middle, row), tl.where(found, end, middle)
        return row

    @triton.jit
    def _tree_sum(x, width: tl.constexpr, levels: tl.constexpr):  # type: ignore[no-untyped-def]
        """The same bits however the elements lie over the threads, which depends on the data's alignment."""
        for level in tl.static_range(levels):
            x = tl.sum(tl.reshape(x, [2, width >> (level + 1)]), axis=0)
        return x

    @triton.jit(do_not_specialize=["rows", "steps"])
    def _update_kernel(  # type: ignore[no-untyped-def]
        table, scalars, rows, steps, factor,
        gradient_type: tl.constexpr, out_type: tl.constexpr, out_nan: tl.constexpr, aligned: tl.constexpr,
        piece: tl.constexpr, pieces: tl.constexpr,
    ):  # fmt: skip
        program = tl.program_id(0)
        row = _row(table + 6, 11, rows, steps, program)
        table += row * 11
        scalars += row * 22 + 14
        master = tl.load(table).to(tl.pointer_type(tl.float32))
        first = tl.load(table + 1).to(tl.pointer_type(tl.float32))
        second = tl.load(table + 2).to(tl.pointer_type(tl.float32))
        gradient = tl.load(table + 3).to(tl.pointer_type(gradient_type))
        out = tl.load(table + 4).to(tl.pointer_type(out_type))
        numel = tl.load(table + 5)
        start = (program - tl.load(table + 6)) * (piece * pieces)
        for _ in range(pieces):
            at = start + tl.arange(0, piece)
            if start + piece <= numel:
                _piece(master, first, second, gradient, out, at, numel, factor, scalars, out_nan, False, aligned)
            elif start < numel:
                _piece(master, first, second, gradient, out, at, numel, factor, scalars, out_nan, True, aligned)
            start += piece

    @triton.jit(do_not_specialize=["rows", "steps"])
    def _squares_kernel(  # type: ignore[no-untyped-def]
        table, partials, rows, steps, type: tl.constexpr, aligned: tl.constexpr, piece: tl.constexpr,
        levels: tl.constexpr, pieces: tl.constexpr,
    ):  # fmt: skip
        program = tl.program_id(0)
        table += _row(table + 2, 4, rows, steps, program) * 4
        address = tl.load(table).to(tl.pointer_type(type))
        numel = tl.load(table + 1)
        start = (program - tl.load(table + 2)) * (piece * pieces)
        total = tl.zeros((piece,), tl.float64)
        for _ in range(pieces):
            at = start + tl.arange(0, piece)
            if start + piece <= numel:
                value = _load(address, at, numel, False, aligned).to(tl.float32).to(tl.float64)
                total += value * value
            elif start < numel:
                value = _load(address, at, numel, True, aligned).to(tl.float32).to(tl.float64)
                total += value * value
            start += piece
        tl.store(partials + program + tl.arange(0, 1), _tree_sum(total, piece, levels))

    @triton.jit
    def _total_kernel(  # type: ignore[no-untyped-def]
        table, partials, sums, piece: tl.constexpr, levels: tl.constexpr
    ):  # fmt: skip
        row = tl.program_id(0)
        begin, end = tl.load(table + row * 4 + 2), tl.load(table + row * 4 + 6)
        total = tl.zeros((piece,), tl.float64)
        while begin < end:
            at = begin + tl.arange(0, piece)
            total += tl.load(partials + at, mask=at < end, other=0.0)
            begin += piece
        tl.store(sums + tl.load(table + row * 4 + 3) + tl.arange(0, 1), _tree_sum(total, piece, levels))


class _Launch:
    """One launch of the update kernel for tensors of one pair of formats; its table is on its way to the device."""

    def __init__(self, device: torch.device, formats: Formats, rows: list[tuple[int | float, ...]], programs: int) -> None:
        self._device, self._formats, self._rows, self._programs = device, formats, len(rows), programs
        self._aligned = not any(int(address) % 16 for row in rows for address in row[:5])
        self._table = _table(device, [ROW.pack(*row) for row in rows])

    def run(self, factor: float) -> None:
        gradient, out = self._formats
        with torch.cuda.device(self._device):
            _update_kernel[(self._programs,)](
                self._table,
                self._table.view(torch.float32),
                self._rows,
                self._rows.bit_length(),
                float(factor),
                TRITON_TYPE[gradient],
                TRITON_TYPE[out],
                NO_OUT if out is None else NAN_OF[out],
                self._aligned,
                PIECE,
                UPDATE_PIECES,
                num_warps=4,
                enable_fp_fusion=False,
            )


class TritonKernel(TorchKernel):
    """The AdamKernel for CUDA tensors; accumulate, cast and copy are single torch operations already.

    Bit-equal to CpuKernel in the update, which is in place; sums of squares are added in another fixed order.
    """

    name = "triton"

    def __init__(self) -> None:
        # Of norms that come again: a planned step sums the same ranges at the same addresses every time.
        # Each stream has its own, which is there when that stream comes to use it.
        self._kept_table = lru_cache(maxsize=1024)(lambda device, stream, rows: _table(device, [rows]))

    def update_all(self, tasks: Sequence[AdamTask], *, factor: float) -> None:
        self.prepare_all(tasks)(factor)

    def prepare_all(self, tasks: Sequence[AdamTask]) -> Callable[[float], None]:
        launches: dict[Formats, list[tuple[int | float, ...]]] = {}
        programs: dict[Formats, int] = {}
        for task in tasks:
            task.check()
            if task.into is not None:
                raise ValueError("the CUDA kernel updates in place alone: give no into, host kernels alone take it")
            formats = task.gradient.dtype, None if task.out is None else task.out.dtype
            rows, program = launches.setdefault(formats, []), programs.get(formats, 0)
            out = task.master if task.out is None else task.out
            tensors = (task.master, task.exp_avg, task.exp_avg_sq, task.gradient, out)
            places = [(tensor.data_ptr(), tensor.element_size()) for tensor in tensors]
            for each in task.ranges:
                if each.numel:
                    addresses = [address + size * each.offset for address, size in places]
                    rows.append((*addresses, each.numel, program, *coefficients(each)))
                    program += _programs(each.numel, UPDATE_PIECES)
            programs[formats] = program
        ready = [
            _Launch(tasks[0].master.device, formats, rows, programs[formats]) for formats, rows in launches.items() if rows
        ]

        def launch(factor: float) -> None:
            for each in ready:
                each.run(factor)

        return launch

    def sum_squares_all(self, tensors: Sequence[torch.Tensor]) -> list[float] | torch.Tensor:
        if not tensors:
            return []
        for tensor in tensors:
            check_squares(tensor)
        device = tensors[0].device
        stream = torch.cuda.current_stream(device).cuda_stream
        sums = torch.empty(len(tensors), dtype=torch.float64, device=device)
        for dtype in {tensor.dtype for tensor in tensors}:
            rows, programs, addresses = [], 0, 0
            for place, tensor in enumerate(tensors):
                if tensor.dtype is dtype:
                    rows.append(SQUARES_ROW.pack(tensor.data_ptr(), tensor.numel(), programs, place))
                    programs += _programs(tensor.numel(), SQUARES_PIECES)
                    addresses |= tensor.data_ptr()
            count = len(rows)
            rows.append(SQUARES_ROW.pack(0, 0, programs, 0))
            table = self._kept_table(device, stream, b"".join(rows)) if len(rows) <= KEPT_ROWS else _table(device, rows)
            partials = torch.empty(programs, dtype=torch.float64, device=device)
            width, levels, steps = PIECE, PIECE.bit_length() - 1, count.bit_length()
            with torch.cuda.device(device):
                if programs:
                    _squares_kernel[(programs,)](
                        table, partials, count, steps, TRITON_TYPE[dtype], addresses % 16 == 0, width, levels,
                        SQUARES_PIECES, num_warps=4,
                    )  # fmt: skip
                _total_kernel[(count,)](table, partials, sums, width, levels, num_warps=4)
        return sums


def _programs(numel: int, pieces: int) -> int:
    return -(-numel // (PIECE * pieces))


def _table(device: torch.device, rows: list[bytes]) -> torch.Tensor:
    """Through pinned memory: only from there is the copy sure not to wait for the stream."""
    packed = torch.frombuffer(bytearray().join(rows), dtype=torch.int64)
    return packed.pin_memory().to(device, non_blocking=True)


def cuda_kernel() -> AdamKernel:
    """The kernel for CUDA tensors: Triton's, or with a warning torch's where Triton is not installed."""
    if not torch.cuda.is_available():
        raise UnsupportedError("there is no CUDA device: use cpu_kernel()")
    if not HAS_TRITON:
        warnings.warn("Adam on CUDA runs in plain torch operations: Triton is not installed", RuntimeWarning, stacklevel=2)
        return TorchKernel()
    if not _is_compiled():
        LOG.info("compiling the Adam kernel with Triton as steps begin: some seconds, once; it is kept in %s", _kept_in())
    return TritonKernel()


def _kept_in() -> Path:
    """Triton's own folder of what it has compiled."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home(), ".triton", "cache")
    return Path(os.environ.get("TRITON_CACHE_DIR") or home)


def _is_compiled() -> bool:
    """For any device and formats: for others it is compiled again, which is not told."""
    return any(_kept_in().glob(f"*/{UPDATE_KERNEL}.*"))
