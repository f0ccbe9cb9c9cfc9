"""Whole gradients summed over ranks, where each rank keeps all of them: what a reference does."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from systems.ranks.ranks import Ranks


def summed(gradients: Mapping[int, torch.Tensor], ranks: Ranks, like: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Of each parameter that has a gradient on any rank, in order of numbers: see Note [The ordered sum] in link.py.

    gradients: flat, of one micro-batch. like: by number, tensors with the gradients' types and numbers of elements; a rank
    without a gradient adds zeros.
    """
    if ranks.size == 1:
        return dict(gradients)
    found: dict[int, torch.Tensor] = {}
    for number in sorted(set().union(*ranks.exchange(sorted(gradients)))):
        numel = like[number].numel()
        whole = like[number].new_zeros(-(-numel // ranks.size) * ranks.size)
        if number in gradients:
            whole[:numel].copy_(gradients[number])
        ranks.link.reduce(f"reduce gradient of parameter {number}", whole)
        ranks.link.gather(f"gather gradient of parameter {number}", whole)
        found[number] = whole[:numel]
    return found
