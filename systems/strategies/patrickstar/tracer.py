"""The runtime memory tracer (section 7.1) and what follows from its curve: room for model data, and the margin (7.2).

The substrate measures R_i - C_i = N_i. Here N_i is the highest non-model memory between moments i and i + 1, temporaries
included, where the paper samples it at the moments and takes max(N_i, N_i+1) for what lies between. So A_i = L - N_i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from systems.planning.demand import Demand, Profile, Residence, Span
from systems.planning.layout import Layout


@dataclass(frozen=True)
class Margin:
    """size_bytes: device memory beside all parameters and peak non-model data; below zero if that does not fit.

    chunks: as in table 4. Above zero, the optimizer chunks it holds, a param fp32, a momentum and a variance chunk counted
    as one; below, the parameter chunks that spill.
    """

    size_bytes: int
    chunks: int


def margin(layout: Layout, limit: int, curve: Sequence[int], *, chunk: int, optimizer_itemsize: int) -> Margin:
    """chunk: elements; 0 (tensors instead of chunks) counts in bundles of mean size."""
    size = limit - max(curve) - layout.param_bytes
    elements = chunk or max(1, layout.param_bytes // layout.itemsize // len(layout.bundles))
    each = elements * (optimizer_itemsize if size >= 0 else layout.itemsize)
    return Margin(size, size // each)


def parameters_profile(demand: Demand, residence: Residence) -> list[int]:
    """Bytes per moment of all parameters, had each a place until its gradient leaves for the host, if it does."""
    last, layout = len(demand) - 1, residence.layout
    leaves = {b: moment for moment, bundles in enumerate(demand.stale) for b in bundles}
    profile = Profile(len(demand))
    for bundle in (b for b in layout.bundles if b.index not in residence.on_device):
        for span in away(leaves.get(bundle.index, last), last):
            profile.add(span, -layout.bundle_bytes(bundle.index))
    return [layout.param_bytes + change for change in profile.values()]


def away(leaves: int, last: int) -> list[Span]:
    """When a bundle updated on the host is not on the device: from its flush to the end of the step."""
    return [Span(leaves, last)] if leaves < last else []
