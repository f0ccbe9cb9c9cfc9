"""The runtime memory tracer (section 7.1) and what follows from its curve: room for model data, and the margin (7.2).

The substrate measures R_i - C_i = N_i. Here N_i is the highest non-model memory between moments i and i + 1, temporaries
included, where the paper samples it at the moments and takes max(N_i, N_i+1) for what lies between. So A_i = L - N_i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from systems.planning.layout import Layout


@dataclass(frozen=True)
class Margin:
    """size_bytes: device memory beside all parameters and peak non-model data; below zero if that does not fit.

    chunks: as in table 4. Above zero, the optimizer chunks it holds, a param fp32, a momentum and a variance chunk counted
    as one; below, the parameter chunks that spill.
    """

    size_bytes: int
    chunks: int


def margin_bytes(layout: Layout, limit: int, curve: Sequence[int]) -> int:
    """Of one rank's device, which has its own part of the parameters."""
    return limit - max(curve) - sum(layout.shard_bytes(b.index) for b in layout.bundles)


def margin(layout: Layout, limit: int, curve: Sequence[int], *, chunk: int, optimizer_itemsize: int) -> Margin:
    """chunk: elements; 0 (tensors instead of chunks) counts in bundles of mean size."""
    size = margin_bytes(layout, limit, curve)
    elements = chunk or max(1, sum(s.shard_numel for s in layout.segments) // len(layout.bundles))
    each = elements * (optimizer_itemsize if size >= 0 else layout.itemsize)
    return Margin(size, size // each)
