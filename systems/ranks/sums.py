"""Whole gradients summed over ranks, where each rank keeps all of them: what a reference does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from systems.ranks.ranks import Ranks


def summed(gradients: Mapping[int, torch.Tensor], ranks: Ranks, like: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Of each parameter that has a gradient on any rank, in order of numbers: see Note [The ordered sum] in link.py.

    gradients: flat, of one micro-batch. like: by number, what the gradients are of; a rank without one adds zeros.
    """
    if ranks.size == 1:
        return dict(gradients)
    found: dict[int, torch.Tensor] = {}
    for number in sorted(set().union(*ranks.exchange("gradients", sorted(gradients)))):
        numel = like[number].numel()
        whole = torch.zeros(-(-numel // ranks.size) * ranks.size, dtype=like[number].dtype, device=like[number].device)
        if number in gradients:
            whole[:numel].copy_(gradients[number])
        ranks.link.reduce(f"reduce gradient of parameter {number}", whole)
        ranks.link.gather(f"gather gradient of parameter {number}", whole)
        found[number] = whole[:numel]
    return found
