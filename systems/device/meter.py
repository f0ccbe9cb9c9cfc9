"""Measures what of a device's memory is not the pool's, and shows who reads which parameter.

On CUDA the caching allocator counts; a CPU has no such thing. So there forward and backward run under a dispatch mode that sees
every operation's outputs: a new storage is added to the device's account, and given back when the storage dies. Memory that a
kernel takes and frees inside one operation is not seen.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from systems.device.memory.account import Account
from systems.device.memory.pool import Pool

Check = Callable[[Any, Sequence[torch.Tensor]], None]
_SHAPE_ALONE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_")


class Meter(Protocol):
    """Activations, temporaries and gradients in autograd's buffers, from interval to interval, and the whole device's peak."""

    def start_interval(self) -> tuple[int, int]:
        """Peak non-model bytes since the last call, and the same had the gradients handed over in it been kept."""

    def hand_over(self, nbytes: int) -> None:
        """A gradient of this many bytes has been copied out of autograd's buffer, which is about to be freed."""

    def exempt(self, storage: torch.UntypedStorage) -> None:
        """These bytes are in the account as model data already: never count them as activations."""

    def set_aside(self, nbytes: int) -> None:
        """So much was allocated on the device for good, and is neither the pool's nor activations'."""

    def live_bytes(self) -> int | None:
        """Of activations, reckoned anew; None where the device itself counts them."""

    def peak_bytes(self) -> int:
        """The most that the device had in use at once, the pool included."""


class ActivationMeter(TorchDispatchMode):
    """The emulated device's, which sees every operation that runs inside it.

    make_room(nbytes): called when the account has less room than that; it evicts or raises OutOfMemoryError.

    check(func, tensors): called with the input tensors of every operation that reads its inputs' bytes.
    kept: what the interval's peak would be if gradients handed over in it had stayed where autograd put them.
    """

    def __init__(
        self,
        account: Account,
        make_room: Callable[[int], None],
        check: Check | None = None,
    ) -> None:
        super().__init__()
        self._account, self._make_room, self._check = account, make_room, check
        self._known: dict[int, int] = {}
        self._exempt: set[int] = set()
        self._handed_over = 0
        self.kept_peak = 0

    def attend(self, make_room: Callable[[int], None], check: Check) -> None:
        self._make_room, self._check = make_room, check

    def exempt(self, storage: torch.UntypedStorage) -> None:
        """When the storage dies, another may get its address."""
        key = storage._cdata
        self._exempt.add(key)
        weakref.finalize(storage, self._exempt.discard, key)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [*_tensors(args), *_tensors(kwargs.values())]
        if self._check is not None and _reads_bytes(func):
            self._check(func, given)
        out = func(*args, **kwargs)
        for tensor in _tensors((out,)):
            if not any(tensor is other for other in given):  # what was given is not made: a batch is the caller's
                self._see(tensor, func)
        return out

    def _see(self, tensor: torch.Tensor, func: Any) -> None:
        if tensor.is_meta or tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or key in self._exempt:
            return
        nbytes = storage.nbytes()
        if self._account.room < nbytes:
            self._make_room(nbytes)
        weakref.finalize(storage, self._forget, key)
        self._known[key] = nbytes
        self._account.add_other(nbytes, _name(func))
        self.kept_peak = max(self.kept_peak, self._account.other + self._handed_over)

    def _forget(self, key: int) -> None:
        nbytes = self._known.pop(key, None)
        if nbytes is not None:
            self._account.return_other(nbytes)

    def set_aside(self, nbytes: int) -> None:
        return  # only what runs inside is counted

    def live_bytes(self) -> int:
        return sum(list(self._known.values()))

    def peak_bytes(self) -> int:
        return self._account.peak

    def hand_over(self, nbytes: int) -> None:
        self._handed_over += nbytes

    def start_interval(self) -> tuple[int, int]:
        peak, kept = self._account.start_interval(), self.kept_peak
        self._handed_over, self.kept_peak = 0, self._account.other
        return peak, max(peak, kept)


class AllocatorMeter:
    """A CUDA device's: torch's caching allocator counts by itself, the pool's granules included."""

    def __init__(self, device: torch.device, pool: Pool) -> None:
        self._device, self._pool, self._set_aside = device, pool, 0
        self._handed_over = self._reserved_peak = self._interval_peak = 0

    def exempt(self, storage: torch.UntypedStorage) -> None:
        return

    def set_aside(self, nbytes: int) -> None:
        self._set_aside += nbytes

    def live_bytes(self) -> None:
        return None

    def peak_bytes(self) -> int:
        return max(self._reserved_peak, torch.cuda.max_memory_reserved(self._device))

    def hand_over(self, nbytes: int) -> None:
        self._handed_over += nbytes

    def start_interval(self) -> tuple[int, int]:
        self.take_in_peak()
        peak, self._interval_peak = self._interval_peak, 0
        kept, self._handed_over = peak + self._handed_over, 0
        return peak, kept

    def take_in_peak(self) -> None:
        """Peak of what is not the pool's since the last call; called before the pool grows or shrinks."""
        other = torch.cuda.max_memory_allocated(self._device) - self._pool.reserved_bytes - self._set_aside
        self._interval_peak = max(self._interval_peak, other)
        self._reserved_peak = self.peak_bytes()
        torch.cuda.reset_peak_memory_stats(self._device)


class ReadWatch(TorchDispatchMode):
    """For a device that counts by itself: only `check`, called as the meter calls it."""

    def __init__(self, check: Check) -> None:
        super().__init__()
        self._check = check

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _reads_bytes(func):
            self._check(func, [*_tensors(args), *_tensors(kwargs.values())])
        return func(*args, **kwargs)

    @contextlib.contextmanager
    def uncompiled(self) -> Iterator[None]:
        """It is told of all operations within: see Note [Compiled forwards] in recipe/model/foreign_calls.py."""
        with torch.compiler.set_stance("force_eager"), self:
            yield


@cache
def _reads_bytes(func: Any) -> bool:
    return not func.is_view and not func._schema.name.removeprefix("aten::").startswith(_SHAPE_ALONE)


@cache
def _name(func: Any) -> str:
    return str(func)


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """An operation's arguments and results are tensors, lists of tensors and what holds none: no tree has to be walked."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found
