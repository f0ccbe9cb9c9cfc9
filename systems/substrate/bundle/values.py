"""Values at rest, read and written parameter by parameter wherever they are: for checkpoints, summon, edits and exports.

Call it only when drained, outside a step, and on all ranks alike: what their shards have is brought together on each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from systems.checkpoint import Part
from systems.planning.layout import Placement, space_of
from systems.ranks.group_names import REPLICA
from systems.substrate.bundle.bundle import ManagedBundle
from systems.substrate.bundle.pages import in_pages
from systems.substrate.bundle.segments import StoredSegment
from systems.substrate.bundle.store import Store

Pieces = Callable[[], list[tuple[int, torch.Tensor]]]  # looks up what this rank has of a parameter, with the first elements


class StoredValues:
    """Masters, moments, slots and device copies of the parameters of a model."""

    def __init__(self, store: Store, bundles: Sequence[ManagedBundle]) -> None:
        self._store, self._bundles = store, bundles

    def parameter(self, number: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Its fp32 master (or, if frozen, its value at rest) as a CPU copy."""
        return self._whole(number, partial(self._values_here, number)).view(shape)

    def _values_here(self, number: int) -> list[tuple[int, torch.Tensor]]:
        """Pieces that this rank has, with their first elements."""
        bundle, mine = self.bundle_of(number), list[tuple[int, torch.Tensor]]()
        for stored, rest in zip(bundle.segments, bundle.at_rest(), strict=True):
            here = [p for p in stored.placements if p.parameter == number]
            whole = rest if stored.state is None or not here else self._store.part(stored, "master")
            mine += [(p.start, whole[p.here].float().cpu()) for p in here]
        return mine

    def _moments_here(self, number: int, which: Part) -> list[tuple[int, torch.Tensor]]:
        return [(p.start, self._store.part(stored, which)[p.here].cpu()) for stored, p in self.pieces_of(number)]

    def of_expert_rank(self, which: int, number: int, part: Part, onto: int | None) -> torch.Tensor | None:
        """What a parameter of that number is on ranks of expert rank `which`: master or a moment, flat. None on ranks other
        than `onto`; of None all have it.
        """
        return _brought(self._store, self.bundle_of(number), number, _look(self, number, part), which, onto, torch.float32)

    def bring(self, number: int, part: Part, onto: int) -> torch.Tensor | None:
        """A parameter's master or one of its moments, flat: whole on rank `onto`, None on the others."""
        ranks, here = self._store.ranks, _look(self, number, part)
        if ranks.rank == onto:
            return self._whole(number, here, onto)
        if not self.bundle_of(number).scattered:
            return None

        def given() -> list[list[torch.Tensor]]:
            return [[values for _, values in here()] if rank == ranks.rank else [] for rank in range(ranks.size)]

        ranks.bring(f"parameter {number}", given, onto)
        return None

    def at_rest(self, number: int) -> torch.Tensor:
        """In the compute dtype, out of the slots of all ranks, flat."""

        def here() -> list[tuple[int, torch.Tensor]]:
            return [(p.start, stored.slot[p.here]) for stored, p in self.pieces_of(number)]

        return self._whole(number, here, dtype=self._store.dtype)

    def _whole(
        self,
        number: int,
        here: Pieces,
        onto: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        """A parameter out of the pieces that each rank has; here: looks up this one's."""
        ranks = self._store.ranks
        if space_of(self._store.layout, self.bundle_of(number).index).group == REPLICA:
            mine, bundle = None, self.bundle_of(number)
            for which in range(ranks.expert_ranks):
                found = _brought(self._store, bundle, number, here, which, None, dtype)
                mine = found if which == ranks.expert_rank else mine
            assert mine is not None, "all ranks have it"
            return mine
        if ranks.size == 1 or not self.bundle_of(number).scattered:  # every rank has all
            return torch.cat([values for _, values in sorted(here(), key=lambda piece: piece[0])])
        made: list[torch.Tensor] = []

        def places() -> list[list[torch.Tensor]]:
            made.append(whole := torch.empty(self._store.layout.places[number].numel, dtype=dtype))
            for start, values in here():
                whole[start : start + values.numel()].copy_(values)
            segments = self.bundle_of(number).segments
            return [
                [whole[p.piece] for stored in segments for p in stored.segment.shard(rank) if p.parameter == number]
                for rank in range(ranks.size)
            ]

        ranks.bring(f"parameter {number}", places, onto)
        return made[0]

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
            for there in in_pages(bundle.pages, stored, bundle.starts()[bundle.segments.index(stored)]):
                there[place.here].copy_(piece)
        if bundle.block is not None:
            for stored, there in zip(bundle.segments, bundle.pieces(bundle.block), strict=True):
                for place in stored.segment.placements:
                    if place.parameter == number:
                        there[place.here].copy_(flat[place.piece])

    def restore(self, number: int) -> None:
        """What this rank has of a parameter in its slots and on the device was edited, and is again as at rest."""
        bundle, here = self.bundle_of(number), dict(self._values_here(number))
        if bundle.movable:
            for stored, place in self.pieces_of(number):
                self._store.device.host_kernel.cast(here[place.start], stored.slot[place.here])
                for there in in_pages(bundle.pages, stored, bundle.starts()[bundle.segments.index(stored)]):
                    there[place.here].copy_(here[place.start])
        if bundle.block is not None:
            for stored, there in zip(bundle.segments, bundle.own_pieces(bundle.block), strict=True):
                for place in stored.placements:
                    if place.parameter == number:
                        there[place.here].copy_(here[place.start])

    def moment(self, parameter: int, which: Part) -> torch.Tensor:
        """One of a trained parameter, as a flat CPU copy."""
        return self._whole(parameter, partial(self._moments_here, parameter, which))

    @property
    def moments(self) -> tuple[Part, ...]:
        """Their names."""
        return self._store.stated[1:]

    def overwrite_moments(self, parameter: int, values: Sequence[torch.Tensor]) -> None:
        """Flat and of the whole parameter, which is trained."""
        for stored, p in self.pieces_of(parameter):
            for part, whole in zip(self.moments, values, strict=True):
                self._store.overwrite_part(stored, part, whole[p.piece], p)

    def pieces_of(self, parameter: int) -> list[tuple[StoredSegment, Placement]]:
        """That this rank has."""
        segments = self.bundle_of(parameter).segments
        return [(stored, p) for stored in segments for p in stored.placements if p.parameter == parameter]

    def bundle_of(self, parameter: int) -> ManagedBundle:
        return self._bundles[self._store.layout.bundle_of_parameter[parameter]]


def _look(values: StoredValues, number: int, part: Part) -> Pieces:
    return partial(values._values_here, number) if part == "value" else partial(values._moments_here, number, part)


def _brought(
    store: Store,
    bundle: ManagedBundle,
    number: int,
    here: Pieces,
    which: int,
    onto: int | None,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """A parameter of that number and bundle that ranks of expert rank `which` have, called on all ranks alike. here: looks up
    what one of those has of it. onto: as in `of_expert_rank`.
    """
    ranks, made = store.ranks, list[torch.Tensor]()
    members = range(which, ranks.size, ranks.expert_ranks)
    givers = members if bundle.scattered else members[:1]

    def pieces() -> list[list[torch.Tensor]]:
        mine = here() if ranks.rank in givers else []
        if onto not in (None, ranks.rank):
            return [[values for _, values in mine] if rank == ranks.rank else [] for rank in range(ranks.size)]
        made.append(whole := torch.empty(store.layout.places[number].numel, dtype=dtype))
        for start, values in mine:
            whole[start : start + values.numel()].copy_(values)
        return [
            [
                whole[p.piece]
                for stored in bundle.segments
                for p in stored.segment.shard(members.index(rank))
                if p.parameter == number
            ]
            if rank in givers
            else []
            for rank in range(ranks.size)
        ]

    ranks.bring(f"parameter {number} of expert rank {which}", pieces, onto)
    return made[0] if made else None
