"""Storages whose memory moves under their tensors.

`RebindableStorage`: one permanent torch storage per bundle. Parameters are views made once; fetching and evicting swap
the storage's data pointer, so every view follows, those saved by autograd included. The memory pointed at always
belongs to someone else: nothing here allocates or frees it.

While it is released it points to NaNs (poison.py), so that a use after release never reads another layer's bytes.

Rebinding bypasses autograd's version check: one micro-step must pin one version of a parameter from forward to
backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from systems.substrate.bundle.addresses import Rebind, default_rebind, storage_at, view_of
from systems.substrate.bundle.poison import Poison


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
        return view_of(self._storage, dtype, offset, shape)

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
