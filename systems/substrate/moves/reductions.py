"""A bundle's gradient over all ranks: summed where it lies on the device, so that each rank has the sum of its own shards."""

from __future__ import annotations

from collections.abc import Callable

import torch

from systems.device.device import Device
from systems.device.memory.pool import Allocation
from systems.planning.layout import Layout
from systems.planning.plan import LaneKind
from systems.planning.step.operations import Work, of_bundle
from systems.ranks.ranks import Ranks
from systems.substrate.bundle.bundle import ManagedBundle
from systems.substrate.bundle.gradient import BundleGradient
from systems.substrate.moves.squares import Squares


class Reductions:
    """squares: where each leaves the sums of squares of this rank's shards, unless the norm is of accumulators."""

    def __init__(self, ranks: Ranks, layout: Layout, device: Device, squares: Squares, *, several: bool) -> None:
        self._ranks, self._layout, self._device, self._squares, self._several = ranks, layout, device, squares, several

    def clear(self, bundle: ManagedBundle, gradient: BundleGradient, place: Callable[[int], torch.Tensor]) -> None:
        """Zeros where nothing came, before compute leaves: other ranks' may have. place: of a parameter's gradient, flat."""
        if self._ranks.size > 1:
            for parameter in gradient.parameters:
                if parameter not in gradient.fired:
                    place(parameter).zero_()

    def reduce(self, bundle: ManagedBundle, block: Allocation) -> None:
        """Of the gradient in this block, a range or the bundle's own; compute has left it, and zeros where nothing came."""
        if self._ranks.size == 1:
            return
        link, kernel, several = self._ranks.link, self._device.kernel, self._several
        operation = of_bundle(self._layout, Work.REDUCE, LaneKind.REDUCE, bundle.index)
        pieces = list(zip(bundle.segments, bundle.pieces(block), strict=True))

        def work() -> None:
            sums: dict[int, float] = {}
            for stored, piece in pieces:
                link.reduce(operation.label, piece)
                if not several:
                    own = piece[stored.own]
                    found = kernel.sum_squares_all([own[p.here] for p in stored.placements])
                    for p, value in zip(stored.placements, found, strict=True):
                        sums[p.parameter] = sums.get(p.parameter, 0.0) + float(value)
            if not several:
                self._squares.left_by_lane(bundle.index, tuple(sums), list(sums.values()))

        self._device.log.count("reduce_bytes", bundle.nbytes - bundle.shard_nbytes)
        ticket = self._device.transfers.issue(operation, work, writes=[block.memory])
        if not several:
            self._squares.wait_for(ticket)
