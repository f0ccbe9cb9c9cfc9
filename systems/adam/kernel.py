"""Adam in the project's own arithmetic: the interface that all kernels have, and plain torch as a fallback.

The one idea: a table of ranges, each with its own hyperparameters, over five flat tensors that share offsets (master, both
moments, gradient, 16-bit output), updated in one pass over memory. Scalars are derived in double precision in one place
(`coefficients`), and every kernel but the fallback applies the same explicitly fused operations to each element, so `avx512`,
`avx2`, `plain` and `triton` give the same bits, NaNs included. `torch` agrees to 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@dataclass(frozen=True, slots=True)
class AdamRange:
    """Elements [offset, offset + numel) of a segment and their hyperparameters, as torch.optim names them.

    decoupled: AdamW's decay of the weight; otherwise Adam's, added to the gradient. step: this update's number, from 1.
    """

    offset: int
    numel: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    step: int


class Coefficients(NamedTuple):
    """A range's scalars as kernels take them: computed in double precision, each rounded once to fp32 on the way in."""

    decay: float  # master *= decay
    l2: float  # gradient += l2 * master
    w1: float  # 1 - beta1
    b2: float
    w2: float  # 1 - beta2
    inverse_root_correction2: float  # 1 / sqrt(1 - beta2^step)
    eps: float
    negative_step: float  # -lr / (1 - beta1^step)


@dataclass(frozen=True, slots=True)
class AdamTask:
    """Flat tensors that share offsets, and the ranges of them to update: ascending and disjoint; the rest is not touched.

    master, exp_avg, exp_avg_sq: fp32. gradient: fp32, bf16 or fp16. out: gets the new weights rounded to its type, or
    None; it may be the very memory of gradient, if of one width. into: where the new master, exp_avg and exp_avg_sq (fp32) go,
    None for in place; with it the task writes nothing that it reads, so that the update can still be dropped. All 1-D,
    contiguous, of one length, on one device.
    """

    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    gradient: torch.Tensor
    out: torch.Tensor | None
    ranges: Sequence[AdamRange]
    into: tuple[torch.Tensor, ...] | None = None

    def check(self) -> None:
        """Raises ValueError unless the task is what the class says."""
        master, gradient = self.master, self.gradient
        numel, device = master.numel(), master.device
        states = (master, self.exp_avg, self.exp_avg_sq, *(self.into or ()))
        for tensor in states:
            if tensor.dtype is not torch.float32:
                raise ValueError(f"master, exp_avg and exp_avg_sq must be fp32, old and new, got {tensor.dtype}")
        for tensor in (*states, gradient, gradient if self.out is None else self.out):
            if tensor.dtype not in FORMATS:
                raise ValueError(f"gradient and out must be fp32, bf16 or fp16, got {tensor.dtype}")
            if tensor.numel() != numel or tensor.device != device or not tensor.is_contiguous():
                raise ValueError(
                    f"Adam's tensors must be contiguous with {numel} elements on {device}, "
                    f"got one with {tensor.numel()} on {tensor.device}"
                )
        if self.out is not None and numel and _clash(gradient, self.out):
            raise ValueError(
                "gradient and out overlap: they must be disjoint, or start at one address with elements of one width"
            )
        if self.into is not None and numel:
            self._check_apart(self.into)
        end = 0
        for each in self.ranges:
            if each.offset < end or each.numel < 0:
                raise ValueError(f"ranges must be ascending and disjoint: one starts at {each.offset}, below {end}")
            end = each.offset + each.numel
        if end > numel:
            raise ValueError(f"ranges end at {end}, beyond the tensors' {numel} elements")

    def _check_apart(self, into: Sequence[torch.Tensor]) -> None:
        read = {"master": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq, "gradient": self.gradient}
        written = dict(zip(("the new master", "the new exp_avg", "the new exp_avg_sq"), into, strict=True))
        if self.out is not None:
            written["out"] = self.out
        taken = [(name, *_place(tensor)) for name, tensor in read.items()]
        for name, tensor in written.items():
            begin, end = _place(tensor)
            for other, other_begin, other_end in taken:
                if begin < other_end and other_begin < end:
                    raise ValueError(f"{name} overlaps {other}: an update into other memory leaves what it reads as it is")
            taken.append((name, begin, end))


class AdamKernel(Protocol):
    """`name`, for the record: avx512, avx2, plain, triton or torch. Tensors are 1-D, contiguous, on one device.

    task: makes what `update_all` takes, out of the states, gradient, out and ranges.
    """

    name: str
    task: ClassVar[Callable[..., Any]] = AdamTask

    def update(
        self,
        master: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        *,
        gradient: torch.Tensor,
        out: torch.Tensor | None,
        ranges: Sequence[AdamRange],
        factor: float,
        into: tuple[torch.Tensor, ...] | None = None,
    ) -> None:
        """One Adam step on one AdamTask. factor (loss scale and clipping) multiplies the gradient first."""
        self.update_all([AdamTask(master, exp_avg, exp_avg_sq, gradient, out, ranges, into)], factor=factor)

    def update_all(self, tasks: Sequence[AdamTask], *, factor: float) -> None:
        """`update` for several tasks. On CUDA it is one launch in all, where launches cost more than small tensors.

        Raises ValueError for a bad task; `triton` also for one with into.
        """

    def prepare_all(self, tasks: Sequence[AdamTask]) -> Callable[[float], None]:
        """`update_all` in two: all that needs no factor now, the rest when what is returned is called with it, once.

        The tensors must stay where they are until then.
        """
        return lambda factor: self.update_all(tasks, factor=factor)

    def sum_squares_all(self, tensors: Sequence[torch.Tensor]) -> list[float] | torch.Tensor:
        """The sum of squares of each, in fp64: floats on the CPU, one tensor on CUDA, for which nothing waits. The same bits as
        one by one."""

    def accumulate(self, accumulator: torch.Tensor, gradient: torch.Tensor) -> None:
        """accumulator (fp32) += gradient (fp32, bf16 or fp16)."""

    def cast(self, master: torch.Tensor, out: torch.Tensor) -> None:
        """out (fp32, bf16 or fp16) = master (fp32), rounded to nearest even."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """destination = source, of the same type and length."""


def coefficients(of: AdamRange) -> Coefficients:
    if of.step < 1:
        raise ValueError(f"Adam's step counts from 1, got {of.step}: advance it before the update")
    return Coefficients(
        decay=1.0 - of.lr * of.weight_decay if of.decoupled else 1.0,
        l2=0.0 if of.decoupled else of.weight_decay,
        w1=1.0 - of.beta1,
        b2=of.beta2,
        w2=1.0 - of.beta2,
        inverse_root_correction2=1.0 / (1.0 - of.beta2**of.step) ** 0.5,
        eps=of.eps,
        negative_step=-of.lr / (1.0 - of.beta1**of.step),
    )


def _clash(gradient: torch.Tensor, out: torch.Tensor) -> bool:
    at, to = gradient.data_ptr(), out.data_ptr()
    if at == to:
        return gradient.element_size() != out.element_size()
    return at < to + out.nbytes and to < at + gradient.nbytes


def _place(contiguous: torch.Tensor) -> tuple[int, int]:
    """Addresses of its first byte and behind its last."""
    return contiguous.data_ptr(), contiguous.data_ptr() + contiguous.nbytes


def check_pair(fp32: torch.Tensor, other: torch.Tensor) -> None:
    if fp32.dtype is not torch.float32 or other.dtype not in FORMATS or fp32.numel() != other.numel():
        raise ValueError(
            "need fp32 and one of fp32, bf16, fp16 of equal length, "
            f"got {fp32.dtype} x {fp32.numel()} and {other.dtype} x {other.numel()}"
        )
    if not (fp32.is_contiguous() and other.is_contiguous() and fp32.device == other.device):
        raise ValueError(f"tensors must be contiguous and on one device, got {fp32.device} and {other.device}")


def check_squares(tensor: torch.Tensor) -> None:
    if tensor.dtype not in FORMATS or not tensor.is_contiguous():
        raise ValueError(f"sum_squares takes contiguous fp32, bf16 or fp16, got {tensor.dtype}")


class TorchKernel(AdamKernel):
    """The same formula in plain torch operations, on any device. Agrees with the others to 1e-6, not bit for bit."""

    name = "torch"
    PIECE = 1 << 22  # elements at a time: bounds the temporaries to a few times 16 MiB

    def update_all(self, tasks: Sequence[AdamTask], *, factor: float) -> None:
        for task in tasks:
            task.check()
            for each in task.ranges:
                end = each.offset + each.numel
                for begin in range(each.offset, end, self.PIECE):
                    self._piece(task, slice(begin, min(begin + self.PIECE, end)), coefficients(each), factor)

    def _piece(self, task: AdamTask, where: slice, c: Coefficients, factor: float) -> None:
        p, m, v = task.master[where], task.exp_avg[where], task.exp_avg_sq[where]
        if task.into is not None:
            p, m, v = (new[where].copy_(old) for new, old in zip(task.into, (p, m, v), strict=True))
        g = task.gradient[where].float() * factor
        if c.l2:
            g.add_(p, alpha=c.l2)
        m.lerp_(g, c.w1)
        v.mul_(c.b2).addcmul_(g, g, value=c.w2)
        denominator = v.sqrt().mul_(c.inverse_root_correction2).add_(c.eps)
        p.mul_(c.decay).addcdiv_(m, denominator, value=c.negative_step)
        if task.out is not None:
            task.out[where].copy_(p)

    def sum_squares_all(self, tensors: Sequence[torch.Tensor]) -> list[float] | torch.Tensor:
        for tensor in tensors:
            check_squares(tensor)
        if not tensors:
            return []
        norms = torch.stack([torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors])
        return norms.square() if norms.is_cuda else norms.square().tolist()

    def accumulate(self, accumulator: torch.Tensor, gradient: torch.Tensor) -> None:
        check_pair(accumulator, gradient)
        accumulator.add_(gradient)

    def cast(self, master: torch.Tensor, out: torch.Tensor) -> None:
        check_pair(master, out)
        out.copy_(master)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.copy_(source)
