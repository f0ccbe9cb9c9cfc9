"""Values at rest, read and written parameter by parameter wherever they are: for checkpoints, summon, edits and exports.

Call it only when drained, outside a step, and on all ranks alike: what their shards have is brought together on each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from systems.planning.layout import Placement
from systems.substrate.bundle.bundle import ManagedBundle
from systems.substrate.bundle.segments import StoredSegment
from systems.substrate.bundle.store import Store


class StoredValues:
    """Masters, moments, slots and device copies of the parameters of a model."""

    def __init__(self, store: Store, bundles: Sequence[ManagedBundle]) -> None:
        self._store, self._bundles = store, bundles

    def parameter(self, number: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Its fp32 master (or, if frozen, its value at rest) as a CPU copy."""
        bundle, mine = self.bundle_of(number), list[tuple[int, torch.Tensor]]()
        for stored, rest in zip(bundle.segments, bundle.at_rest(), strict=True):
            here = [p for p in stored.placements if p.parameter == number]
            whole = rest if stored.state is None or not here else self._store.part(stored, "master")
            mine += [(p.start, whole[p.here].float().cpu()) for p in here]
        return self._joined(mine).view(shape)

    def _joined(self, mine: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
        """Of a parameter, out of the pieces that each rank has, with their first elements."""
        ranks = self._store.ranks
        if ranks.size > 1:  # what is told is a tensor's whole memory, so it gets one of its own
            told = ranks.exchange("values of a parameter", [(start, values.clone()) for start, values in mine])
            mine = [piece for each in told for piece in each]
        pieces = dict(mine)  # where every rank has all, any will do
        return torch.cat([pieces[start] for start in sorted(pieces)])

    def overwrite_parameter(self, number: int, value: torch.Tensor) -> None:
        """Take over a new fp32 value: master, slot and any device copy."""
        flat = value.detach().float().cpu().reshape(-1)
        bundle = self.bundle_of(number)
        for stored, place in self.pieces_of(number):
            piece = flat[place.piece]
            if stored.state is not None:
                self._store.overwrite_part(stored, "master", piece, place)
            if bundle.movable:
                self._store.device.host_kernel.cast(piece, stored.slot[place.here])
            if bundle.shard.block is not None:
                there = bundle.shard.pieces(bundle.shard.block)[bundle.segments.index(stored)]
                there[place.here].copy_(piece)
        if bundle.block is not None:
            for stored, there in zip(bundle.segments, bundle.pieces(bundle.block), strict=True):
                for place in stored.segment.placements:
                    if place.parameter == number:
                        there[place.here].copy_(flat[place.piece])

    def moment(self, parameter: int, which: Literal["exp_avg", "exp_avg_sq"]) -> torch.Tensor:
        """Adam's first or second of a trained parameter, as a flat CPU copy."""
        return self._joined(
            [(p.start, self._store.part(stored, which)[p.here].cpu()) for stored, p in self.pieces_of(parameter)]
        )

    def overwrite_moments(self, parameter: int, first: torch.Tensor, second: torch.Tensor) -> None:
        """Flat and of the whole parameter, which is trained."""
        for stored, p in self.pieces_of(parameter):
            self._store.overwrite_part(stored, "exp_avg", first[p.piece], p)
            self._store.overwrite_part(stored, "exp_avg_sq", second[p.piece], p)

    def pieces_of(self, parameter: int) -> list[tuple[StoredSegment, Placement]]:
        """That this rank has."""
        segments = self.bundle_of(parameter).segments
        return [(stored, p) for stored in segments for p in stored.placements if p.parameter == parameter]

    def bundle_of(self, parameter: int) -> ManagedBundle:
        return self._bundles[self._store.layout.bundle_of_parameter[parameter]]
