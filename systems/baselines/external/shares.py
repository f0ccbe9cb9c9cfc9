"""Whole parameters of which each rank of a package has a share: how a value is cut, and how it is brought together."""

from __future__ import annotations

import torch

from systems.ranks.link import shard_of
from systems.ranks.ranks import Ranks


def own_share(value: torch.Tensor, numel: int, ranks: Ranks) -> torch.Tensor:
    """This rank's part, flat, of `numel` elements, where the r-th has those from r x numel on. Behind the last are zeros."""
    flat = value.reshape(-1)
    begin = min(ranks.rank * numel, flat.numel())
    share = flat[begin : begin + numel]
    return share if share.numel() == numel else torch.nn.functional.pad(share, (0, numel - share.numel()))


def whole_value(share: torch.Tensor, numel: int, shape: torch.Size, ranks: Ranks, name: str) -> torch.Tensor:
    """The parameter as an fp32 tensor of its own on the CPU, on all ranks, which call this alike. share: as it is cut above;
    what is missing of it lies behind the last element.
    """
    whole = torch.zeros(ranks.size * numel, dtype=torch.float32)
    flat = share.detach().reshape(-1)
    shard_of(whole, ranks.rank, ranks.size)[: flat.numel()].copy_(flat)
    ranks.link.gather(f"gather {name}", whole)
    return whole[: shape.numel()].view(shape)
