"""What FSDP2 with CPUOffloadPolicy is known to hold, in whole rows of every parameter a rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

from systems.baselines.external.budget import pinned_bytes
from systems.errors import UnsupportedError
from systems.planning.layout import ModelIndex


def share_numel(shape: Sequence[int], ranks: int) -> int:
    """Elements of a rank's share: whole rows. The last ranks may have fewer, or none."""
    return -(-shape[0] // ranks) * math.prod(shape[1:])


def host_need(index: ModelIndex, ranks: int, *, cuda: bool) -> int:
    """Bytes of a rank: fp32 parameters, pinned each by itself, and of those that are trained gradient and moments.

    UnsupportedError for a parameter without a dimension, which fully_shard does not take.
    """
    for p in index.parameters:
        if not p.shape:
            raise UnsupportedError(f"fsdp2-offload shares rows, and parameter {p.name} has none: give it the shape (1,)")
    pin = pinned_bytes if cuda else int
    numels = [(share_numel(p.shape, ranks), p.trainable) for p in index.parameters]
    return sum(pin(4 * numel) + (12 * numel if trainable else 0) for numel, trainable in numels)
