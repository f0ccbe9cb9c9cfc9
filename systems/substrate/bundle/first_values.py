"""First values: every parameter is drawn once, as fp32, into its master and, rounded, into its slot."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from systems.planning.layout import Placement
from systems.planning.plan import Tier
from systems.substrate.bundle.segments import OptimizerState, StoredSegment
from systems.substrate.bundle.store import Store

FILL_SHARE = 8  # a parameter's fp32 values may take this part of the device while they are made


class FirstValues:
    """shapes: of the parameters, by number. initial: (number, fp32 tensor of its shape) fills the tensor."""

    def __init__(
        self, store: Store, shapes: Sequence[tuple[int, ...]], initial: Callable[[int, torch.Tensor], None]
    ) -> None:
        self._store, self._device = store, store.device
        self._shapes, self._initial = shapes, initial

    def fill(self, segments: Sequence[StoredSegment]) -> None:
        """Those of one bundle."""
        pieces: dict[int, list[tuple[StoredSegment, Placement]]] = {}
        for stored in segments:
            for place in stored.segment.placements:
                pieces.setdefault(place.parameter, []).append((stored, place))
        away = [each for each in segments if each.tier is Tier.DISK]
        made = {each.segment.index: torch.zeros(each.segment.shard_numel) for each in away}
        for parameter, mine in pieces.items():
            self._draw(parameter, mine, made)
        for stored in away:
            self._store.overwrite_part(stored, "master", made[stored.segment.index])
        for stored in segments:
            if stored.tier is Tier.DEVICE:
                assert stored.state is not None
                label = f"first values of segment {stored.segment.index}"
                self._device.transfers.compute(writes=[stored.state.memory], label=label)

    def _draw(
        self, parameter: int, pieces: Sequence[tuple[StoredSegment, Placement]], made: Mapping[int, torch.Tensor]
    ) -> None:
        """made: masters that the disk will be given, by segment.

        Made on the compute device where they fit (same bits, and a GPU draws them faster), and in their place where that is
        one and there; what stays on the device is drawn there.
        """
        shape = self._shapes[parameter]
        fits = math.prod(shape) * 4 <= self._device.account.budget // FILL_SHARE
        settled = pieces[0][0].tier is Tier.DEVICE
        made_on = self._device.torch_device if fits or settled else torch.device("cpu")
        homes = [
            made[stored.segment.index][place.here]
            if stored.segment.index in made
            else (stored.state.master[place.here] if isinstance(stored.state, OptimizerState) else None)
            for stored, place in pieces
        ]
        home = homes[0] if len(homes) == 1 else None
        value = torch.empty(shape, device=made_on) if home is None or home.device != made_on else home.view(shape)
        self._initial(parameter, value)
        flat = value.reshape(-1)
        for (stored, place), target in zip(pieces, homes, strict=True):
            piece, slot = flat[place.piece], stored.slot[place.here]
            if target is not None and target.data_ptr() != piece.data_ptr():
                if target.device == piece.device:
                    target.copy_(piece)
                else:
                    self._device.copy_to_host(piece, target)
            if piece.device.type == "cpu":
                self._device.host_kernel.cast(piece, slot)
            else:
                slot.copy_(piece.to(self._store.dtype))
