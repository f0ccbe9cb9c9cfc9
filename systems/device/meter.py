"""Counts the activations of the emulated device, tensor by tensor, and shows who reads which parameter.

On CUDA the caching allocator counts; a CPU has no such thing. So forward and backward run under a dispatch mode that sees
every operation's outputs: a new storage is added to the device's account, and given back when the storage dies. Memory that a
kernel takes and frees inside one operation is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from systems.device.memory.account import Account

Check = Callable[[Any, Sequence[torch.Tensor]], None]
_SHAPE_ALONE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_")


class ActivationMeter(TorchDispatchMode):
    """make_room(nbytes): called when the account has less room than that; it evicts or raises OutOfMemoryError.

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
        """Never count this storage: its bytes are in the account already. When it dies, another may get its address."""
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

    def live_bytes(self) -> int:
        """Of the storages that are there, reckoned anew."""
        return sum(list(self._known.values()))

    def hand_over(self, nbytes: int) -> None:
        """A gradient of this many bytes has been copied out of autograd's buffer, which is about to be freed."""
        self._handed_over += nbytes

    def start_interval(self) -> tuple[int, int]:
        """(peak bytes, peak bytes had the gradients been kept) since the last call."""
        peak, kept = self._account.start_interval(), self.kept_peak
        self._handed_over, self.kept_peak = 0, self._account.other
        return peak, max(peak, kept)


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
