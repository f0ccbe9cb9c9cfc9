"""A bundle's gradient over the ranks of its group: summed where it lies on the device, so that each rank has the sum of its own
shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from systems.device.device import Device
from systems.device.memory.pool import Allocation
from systems.planning.layout import Layout
from systems.planning.plan import LaneKind
from systems.planning.step.operations import Work, of_bundle
from systems.ranks.groups import RankGroup
from systems.ranks.ranks import Ranks
from systems.substrate.bundle.bundle import ManagedBundle
from systems.substrate.bundle.gradient import BundleGradient
from systems.substrate.moves.squares import Partials, Squares
from systems.substrate.moves.tags import issued


class Reductions:
    """Of several ranks. issued: the bundles reduced in this step, in order, which must be the same on all ranks. groups: of the
    ranks that hold each bundle.

    squares: where each leaves the sums of squares of this rank's shards. several: micro-batches; then they are of accumulators.
    """

    def __init__(
        self,
        ranks: Ranks,
        groups: Sequence[RankGroup],
        layout: Layout,
        device: Device,
        squares: Squares,
        *,
        several: bool,
    ) -> None:
        self._ranks, self._groups, self._layout, self._device = ranks, groups, layout, device
        self._squares, self._several = squares, several
        self.issued: list[int] = []

    def complete(self, gradient: BundleGradient, place: Callable[[int], torch.Tensor]) -> None:
        """Zeros where nothing came, before compute leaves: other ranks' may have, and it counts as come from here on.

        place: of a parameter's gradient, flat.
        """
        for parameter in gradient.parameters:
            if parameter not in gradient.fired:
                place(parameter).zero_()
        gradient.fired.update(gradient.parameters)

    def reduce(self, bundle: ManagedBundle, block: Allocation, shard: Allocation | None = None) -> None:
        """Of the complete gradient in this block, a range or the bundle's own; compute has left it. What compute reads of the
        block afterwards it is to be ordered behind. shard: where this rank's part of the sum goes; None leaves it in the block.
        """
        group, squares = self._groups[bundle.index], self._squares
        kernel, left = self._device.kernel, None if self._several else squares.lane_left
        operation = of_bundle(self._layout, Work.REDUCE, LaneKind.REDUCE, bundle.index)
        segments, pieces, parts = bundle.segments, bundle.pieces(block), bundle.own_pieces(block)
        kept = parts if shard is None else bundle.shard.pieces(shard)

        def work() -> None:
            group.link.reduce(tag, *pieces)
            if shard is not None:
                for target, source in zip(kept, parts, strict=True):
                    target.copy_(source, non_blocking=True)
            if left is None:
                return
            mine = [(p.parameter, own[p.here]) for stored, own in zip(segments, kept, strict=True) for p in stored.counted]
            left[bundle.index] = _by_parameter([p for p, _ in mine], kernel.sum_squares_all([own for _, own in mine]))

        self._device.log.count("reduce_bytes", bundle.nbytes - bundle.nbytes // group.size)
        self.issued.append(bundle.index)
        tag = issued(self._ranks.link, operation, of_all=group.size == self._ranks.size)
        written = [block.memory] if shard is None else [block.memory, shard.memory]
        squares.wait_for(self._device.transfers.issue(operation, work, writes=written))

    def tell_fired(self, fired: Iterable[int], bundles: Mapping[int, ManagedBundle]) -> None:
        """Of the step, parameters that got a gradient on any rank: from here on they count as come on this one."""
        for parameter in fired:
            bundles[self._layout.bundle_of_parameter[parameter]].gradients.fired_in_step.add(parameter)

    def forget(self) -> None:
        """The step is over."""
        self.issued = []


def _by_parameter(pieces: Sequence[int], sums: list[float] | torch.Tensor) -> Partials:
    """Each parameter once, its pieces added in order. pieces: whose each is. On a device nothing is waited for."""
    mine: dict[int, list[int]] = {}
    for at, parameter in enumerate(pieces):
        mine.setdefault(parameter, []).append(at)
    if not isinstance(sums, torch.Tensor):
        return tuple(mine), [sum(sums[at] for at in places) for places in mine.values()]
    added = sums
    if len(mine) < len(pieces):
        added = torch.stack([torch.stack([sums[at] for at in places]).sum() for places in mine.values()])
    return tuple(mine), torch.empty(len(mine), dtype=sums.dtype, pin_memory=True).copy_(added, non_blocking=True)
