"""Whether recomputation came to what the forward came to: all that it can be wrong about is what it saves for backward.

A block may depend on what its caller has set around the call (a global, a thread's own state, an object that was given and
edited since), and no replay knows of all that. So sums over the bits of what a call saves are kept, and compared with those of
its recomputation. A sum of integers does not depend on the order it is made in, so equal bits never differ.

Note [What is compared, and when]
    Of a block's first calls every floating tensor that is saved and is no parameter, at once: the error comes before anything
    is updated. The same of one call in EVERY, and of the others a sample of the last of these tensors, which all the block did
    before has gone into: then the device is not waited for, and the step tells when its norm is read. One kernel a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from systems.errors import HiddenUseError, UnsupportedError
from systems.recipe.model.unit_tensors import SEEN

AT_ONCE = 2  # calls of a block, the first ones
EVERY = 256
SAMPLE = 1 << 20  # elements
PIECE = 1 << 22  # elements that are summed at a time: the device makes integers of 8 bytes of them first
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Alike:
    """same: 1 where every pair is alike, as the device will have it; None without any."""

    same: torch.Tensor | None
    names: Sequence[str] = ()
    each: torch.Tensor | None = None

    def check(self, same: float) -> None:
        """same: the number. UnsupportedError for the block that went another way."""
        if not same and self.each is not None:
            raise other_values(self.names[self.each.tolist().index(False)])


@dataclass
class Repeats:
    """Of all recomputed blocks of a model. later: somebody asks for `take` at each step; else only first calls are compared."""

    later: bool = True
    _names: list[str] = field(default_factory=list)
    _sums: list[torch.Tensor] = field(default_factory=list)
    _again: list[torch.Tensor] = field(default_factory=list)

    def forget(self) -> None:
        self._names, self._sums, self._again = [], [], []

    def add(self, name: str, sums: Sequence[torch.Tensor], again: Sequence[torch.Tensor]) -> None:
        self._names += [name] * len(sums)
        self._sums += sums
        self._again += again

    def take(self) -> Alike:
        """What was compared since the last time."""
        names, sums, again = self._names, self._sums, self._again
        self.forget()
        if not names:
            return Alike(None)
        each = torch.stack(sums) == torch.stack(again)
        return Alike(each.all().double().reshape(1), names, each)


class RepeatsOfBlock:
    def __init__(self, repeats: Repeats, name: str, module: nn.Module) -> None:
        self.repeats, self.name, self.module = repeats, name, module
        self._calls = 0
        self.last = -1  # of the tensors that were saved, the last that can be compared

    def call(self) -> Saves:
        number, self._calls = self._calls, self._calls + 1
        at_once = number < AT_ONCE
        if not at_once and not self.repeats.later:
            return Saves(self, number, whole=False, at_once=False, sample=-1)
        whole = at_once or number % EVERY == 0
        return Saves(self, number, whole=whole, at_once=at_once, sample=-1 if whole else self.last)


class Saves:
    """What one call saves for backward. sample: the number of the one tensor that is looked at, if not all are."""

    def __init__(self, block: RepeatsOfBlock, number: int, *, whole: bool, at_once: bool, sample: int) -> None:
        self._block, self._number, self._whole, self._at_once, self._sample = block, number, whole, at_once, sample
        self._kept: list[tuple[int, torch.Tensor]] = []  # number of the tensor, sum

    @contextmanager
    def forward(self) -> Iterator[None]:
        if not self._whole and self._sample < 0:
            yield
            return
        own = {p.untyped_storage()._cdata for p in self._block.module.parameters()} if self._whole else set()

        def see(number: int, tensor: torch.Tensor) -> None:
            if _can_be_summed(tensor) and tensor.untyped_storage()._cdata not in own:
                self._kept.append((number, self._sum(tensor)))

        with _seeing_saves(see, self._sample):
            yield
        if self._whole and self._kept:
            self._block.last = self._kept[-1][0]

    @contextmanager
    def again(self) -> Iterator[None]:
        """torch ends a recomputation with the last tensor that is needed, so this looks as they come, not at the end."""
        if not self._kept:
            yield
            return
        left = list(reversed(self._kept))
        found: list[torch.Tensor] = []

        def see(number: int, tensor: torch.Tensor) -> None:
            if left and number == left[-1][0]:
                left.pop()
                if not _can_be_summed(tensor):
                    raise other_values(self._block.name)
                found.append(self._sum(tensor))
                if not left:
                    self._compare([kept for _, kept in self._kept], found, tensor)

        with _seeing_saves(see, self._sample):
            yield

    def _compare(self, sums: list[torch.Tensor], again: list[torch.Tensor], last: torch.Tensor) -> None:
        block = self._block
        if not self._at_once:
            block.repeats.add(block.name, sums, again)
            return
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            if torch.equal(torch.stack(sums), torch.stack(again)):
                return
            lost = bool(last.detach().isnan().any())
        raise weights_gone(block.name) if lost else other_values(block.name)

    def _sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of its bits as integers: each row's by its place, or of a sample of rows, another one at each call."""
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            bits = tensor.detach().view(BITS[tensor.itemsize])
            if not self._whole:
                return _sampled(bits, self._number).sum(dtype=torch.int64)
            pieces = bits.split(max(1, PIECE * len(bits) // bits.numel())) if bits.dim() > 1 else [bits]
            rows = torch.cat([piece.sum(-1, dtype=torch.int64).reshape(-1) for piece in pieces])
            return (rows * torch.arange(1, len(rows) + 1, device=rows.device)).sum()


def _sampled(bits: torch.Tensor, number: int) -> torch.Tensor:
    """At most about SAMPLE elements, as rows along the longest dimension but the last."""
    step = -(-bits.numel() // SAMPLE)
    if step == 1 or bits.dim() < 2:
        return bits
    longest = max(range(bits.dim() - 1), key=lambda place: bits.shape[place])
    step = min(step, bits.shape[longest])
    return bits[(*[slice(None)] * longest, slice(number % step, None, step))]


def _can_be_summed(tensor: torch.Tensor) -> bool:
    """What a kernel saves for itself (the state of a generator, masks) may be memory that it never wrote."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_meta:
        return False
    return tensor.is_floating_point() and bool(tensor.numel()) and not tensor.is_neg()


@contextmanager
def _seeing_saves(see: Callable[[int, torch.Tensor], None], only: int = -1) -> Iterator[None]:
    """Tell `see` of each tensor that is saved, and its number, before the checkpoint around has it. only: of that one."""
    around = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if around is None:
        yield
        return
    pack, unpack = around
    number = -1

    def pack_seen(tensor: torch.Tensor) -> Any:
        nonlocal number
        number += 1
        if number == only or only < 0:
            see(number, tensor)
        return pack(tensor)

    with saved_tensors_hooks(pack_seen, unpack):
        yield


def weights_gone(name: str) -> HiddenUseError:
    return HiddenUseError(
        f"the recomputation of block {name} for a gradient came to NaN, as the forward did not: what module {name} makes "
        f"hides from the engine, so that its weights were not there: {SEEN}"
    )


def other_values(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"block {name} came to other values when it was recomputed than in its forward: it depends on what is set around its "
        "call (a global, an object that is edited later): set that within its forward, or use `recompute='none'`, and a system "
        "that recomputes only when asked; if an operation in it gives other bits each time, call "
        "torch.use_deterministic_algorithms(True)"
    )
