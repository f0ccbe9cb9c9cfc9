"""Whole gradients summed over ranks, where each rank keeps all of them: what a reference does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from systems.ranks.ranks import Ranks

BUCKET_BYTES = 64 << 20  # a collective of its own for each parameter costs more than what it moves


def summed(gradients: Mapping[int, torch.Tensor], ranks: Ranks, like: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Of each parameter that has a gradient on any rank, in order of numbers: see Note [The ordered sum] in link.py.

    gradients: flat, of one micro-batch. like: by number, what the gradients are of; a rank without one adds zeros.
    """
    if ranks.size == 1:
        return dict(gradients)
    found: dict[int, torch.Tensor] = {}
    for bucket in _buckets(sorted(set().union(*ranks.exchange("gradients", sorted(gradients)))), like):
        sizes = [like[number].numel() for number in bucket]
        padded = -(-sum(sizes) // ranks.size) * ranks.size
        whole = torch.zeros(padded, dtype=like[bucket[0]].dtype, device=like[bucket[0]].device)
        places = dict(zip(bucket, whole[: sum(sizes)].split(sizes), strict=True))
        for number in places.keys() & gradients.keys():
            places[number].copy_(gradients[number])
        of = f"the gradients of {len(bucket)} parameters from number {bucket[0]}"
        ranks.link.reduce(f"reduce {of}", whole)
        ranks.link.gather(f"gather {of}", whole)
        found |= places
    return found


def _buckets(numbers: Sequence[int], like: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """In order, of one type and device each and of at most BUCKET_BYTES, or one parameter that is larger."""
    bucket: list[int] = []
    taken = 0
    for number in numbers:
        mine = like[number]
        first = like[bucket[0]] if bucket else mine
        if bucket and (taken + mine.nbytes > BUCKET_BYTES or (mine.dtype, mine.device) != (first.dtype, first.device)):
            yield bucket
            bucket, taken = [], 0
        bucket.append(number)
        taken += mine.nbytes
    if bucket:
        yield bucket
