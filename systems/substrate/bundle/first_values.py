"""First values: every parameter is drawn once, as fp32, into its master and, rounded, to where it rests."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from systems.planning.layout import Placement
from systems.planning.plan import Tier
from systems.substrate.bundle.bundle import ManagedBundle
from systems.substrate.bundle.segments import OptimizerState, StoredSegment
from systems.substrate.bundle.store import Store

Piece = tuple[StoredSegment, Placement, torch.Tensor]  # of a parameter: where, and its elements in the compute dtype at rest
FILL_SHARE = 8  # a parameter's fp32 values may take this part of the device while they are made


class FirstValues:
    """shapes: of the parameters, by number. initial: (number, fp32 tensor of its shape) fills the tensor."""

    def __init__(self, store: Store, shapes: Sequence[tuple[int, ...]], initial: Callable[[int, torch.Tensor], None]) -> None:
        self._store, self._device = store, store.device
        self._shapes, self._initial = shapes, initial

    def fill(self, bundle: ManagedBundle) -> None:
        """One that never moves has its block by now."""
        pieces: dict[int, list[Piece]] = {}
        for stored, rest in zip(bundle.segments, bundle.at_rest(), strict=True):
            for place in stored.placements:
                pieces.setdefault(place.parameter, []).append((stored, place, rest[place.here]))
        away = [each for each in bundle.segments if each.tier is Tier.DISK]
        made = {each.segment.index: torch.zeros(each.segment.shard_numel) for each in away}
        for parameter, mine in pieces.items():
            self._draw(parameter, mine, made)
        for stored in away:
            self._store.overwrite_part(stored, "master", made[stored.segment.index])
        if bundle.block is not None:
            states = [each.state.memory for each in bundle.segments if each.state is not None]
            label = f"first values of bundle {bundle.index}"
            self._device.transfers.compute(writes=[*states, bundle.block.memory], label=label)

    def _draw(self, parameter: int, pieces: Sequence[Piece], made: Mapping[int, torch.Tensor]) -> None:
        """made: masters that the disk will be given, by segment.

        Made on the compute device where they fit (same bits, and a GPU draws them faster), and in their place where that is
        one and there; masters that stay on the device are drawn there.
        """
        shape = self._shapes[parameter]
        fits = math.prod(shape) * 4 <= self._device.account.budget // FILL_SHARE
        settled = pieces[0][0].tier is Tier.DEVICE
        made_on = self._device.torch_device if fits or settled else torch.device("cpu")
        homes = [
            made[stored.segment.index][place.here]
            if stored.segment.index in made
            else (stored.state.master[place.here] if isinstance(stored.state, OptimizerState) else None)
            for stored, place, _ in pieces
        ]
        home = homes[0] if len(homes) == 1 and pieces[0][1].numel == math.prod(shape) else None
        value = torch.empty(shape, device=made_on) if home is None or home.device != made_on else home.view(shape)
        self._initial(parameter, value)
        flat = value.reshape(-1)
        for (_, place, rounded), target in zip(pieces, homes, strict=True):
            piece = flat[place.piece]
            if target is not None and target.data_ptr() != piece.data_ptr():
                if target.device == piece.device:
                    target.copy_(piece)
                else:
                    self._device.copy_to_host(piece, target)
            if piece.device.type == rounded.device.type == "cpu":
                self._device.host_kernel.cast(piece, rounded)
            else:
                rounded.copy_(piece if piece.device == rounded.device else piece.to(self._store.dtype))
