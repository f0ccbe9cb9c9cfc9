"""Adam on CUDA as one Triton pass, with the operations of csrc/kernels.h one for one, so that it gives the CPU's bits.

What that takes: explicit fma, division and square root rounded correctly (`div_rn`, `sqrt_rn`; Triton's `/` is
approximate), no fusion by the compiler (`enable_fp_fusion=False`), and one pattern for every NaN. Imports without
Triton; `HAS_TRITON` says. Work is queued on the current stream; nothing here waits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from systems.substrate.adam import AdamRange, TorchKernel, check_update, coefficients

try:
    import triton  # type: ignore[import-not-found]
    import triton.language as tl  # type: ignore[import-not-found]

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

UPDATE_BLOCK = 1024
SQUARES_BLOCK = 4096
# What the kernel stores for a NaN, which also says how it narrows: none, fp32, or the NaN of a 16-bit type.
NO_OUT, FP32_OUT = -1, 0
NAN_OF = {torch.float32: FP32_OUT, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}

if HAS_TRITON:

    @triton.jit
    def _quiet(x):  # type: ignore[no-untyped-def]
        return tl.where(x != x, tl.full(x.shape, 0x7FC00000, tl.int32).to(tl.float32, bitcast=True), x)

    @triton.jit
    def _update_kernel(  # type: ignore[no-untyped-def]
        master, first, second, gradient, out, numel, factor, decay, l2, w1, b2, w2, inverse_root_correction2, eps,
        negative_step, coupled: tl.constexpr, out_nan: tl.constexpr, block_size: tl.constexpr,
    ):  # fmt: skip
        at = tl.program_id(0).to(tl.int64) * block_size + tl.arange(0, block_size)
        inside = at < numel
        p = tl.load(master + at, mask=inside, other=0.0)
        m = tl.load(first + at, mask=inside, other=0.0)
        v = tl.load(second + at, mask=inside, other=0.0)
        g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32) * factor
        if coupled:
            g = tl.fma(p, l2, g)
        m = tl.fma(g - m, w1, m)
        v = tl.fma(g * w2, g, v * b2)
        p = tl.fma(tl.div_rn(m, tl.fma(tl.sqrt_rn(v), inverse_root_correction2, eps)), negative_step, p * decay)
        tl.store(first + at, _quiet(m), mask=inside)
        tl.store(second + at, _quiet(v), mask=inside)
        tl.store(master + at, _quiet(p), mask=inside)
        if out_nan == 0:
            tl.store(out + at, _quiet(p), mask=inside)
        if out_nan > 0:
            bits = p.to(out.dtype.element_ty).to(tl.int16, bitcast=True)
            bits = tl.where(p != p, tl.full(p.shape, out_nan, tl.int16), bits)
            tl.store(out + at, bits.to(out.dtype.element_ty, bitcast=True), mask=inside)

    @triton.jit
    def _squares_kernel(x, partial, numel, block_size: tl.constexpr):  # type: ignore[no-untyped-def]
        block = tl.program_id(0).to(tl.int64)
        at = block * block_size + tl.arange(0, block_size)
        value = tl.load(x + at, mask=at < numel, other=0.0).to(tl.float32).to(tl.float64)
        tl.store(partial + block, tl.sum(value * value))


class TritonKernel(TorchKernel):
    """The AdamKernel for CUDA tensors; accumulate, cast and copy are single torch operations already.

    Bit-equal to CpuKernel in `update`; `sum_squares` adds in another order, the same at every call.
    """

    name = "triton"

    def update(
        self,
        *,
        master: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        gradient: torch.Tensor,
        out: torch.Tensor | None,
        ranges: Sequence[AdamRange],
        factor: float,
    ) -> None:
        check_update(master, exp_avg, exp_avg_sq, gradient, out, ranges)
        with torch.cuda.device(master.device):
            for each in ranges:
                if each.numel == 0:
                    continue
                c, at = coefficients(each), slice(each.offset, each.offset + each.numel)
                _update_kernel[(triton.cdiv(each.numel, UPDATE_BLOCK),)](
                    master[at],
                    exp_avg[at],
                    exp_avg_sq[at],
                    gradient[at],
                    master if out is None else out[at],
                    each.numel,
                    float(factor),
                    *c,
                    coupled=c.l2 != 0.0,
                    out_nan=NO_OUT if out is None else NAN_OF[out.dtype],
                    block_size=UPDATE_BLOCK,
                    num_warps=4,
                    enable_fp_fusion=False,
                )

    def sum_squares(self, tensor: torch.Tensor) -> torch.Tensor:
        blocks = triton.cdiv(tensor.numel(), SQUARES_BLOCK)
        partial = torch.empty(blocks, dtype=torch.float64, device=tensor.device)
        if blocks:
            with torch.cuda.device(tensor.device):
                _squares_kernel[(blocks,)](tensor, partial, tensor.numel(), block_size=SQUARES_BLOCK, num_warps=4)
        return partial[0] if blocks == 1 else partial.sum()
