"""Whole gradients summed over ranks, where each rank keeps all of them: what a reference does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from systems.ranks.expert_exchange import check_swapped, swapped
from systems.ranks.group_names import EXPERTS, REPLICA, WORLD
from systems.ranks.groups import RankGroup
from systems.ranks.ranks import Ranks

BUCKET_BYTES = 64 << 20  # a collective of its own for each parameter costs more than what it moves


def summed(
    gradients: Mapping[int, torch.Tensor], ranks: Ranks, like: Sequence[torch.Tensor], groups: Sequence[str]
) -> dict[int, torch.Tensor]:
    """Of each parameter that has a gradient on any rank of its group, by numbers: see Note [The ordered sum] in link.py.

    gradients: flat, of one micro-batch. like: by number, what the gradients are of; a rank without one adds zeros. groups: by
    number.
    """
    if ranks.size == 1:
        return dict(gradients)
    told, swaps = zip(*ranks.exchange("gradients", (sorted(gradients), swapped(ranks))), strict=True)
    check_swapped(swaps, ranks)
    found: dict[int, torch.Tensor] = {}
    for name in (WORLD, REPLICA) if ranks.expert_ranks > 1 else (WORLD,):
        theirs = set[int]().union(*(told[rank] for rank in ranks.group(name).members))
        mine = sorted(n for n in theirs if ranks.expert_ranks == 1 or groups[n] == name)
        found |= _summed(gradients, mine, ranks.group(name), like)
    return dict(sorted(found.items()))


def of_all_experts(sums: Mapping[int, float], ranks: Ranks, groups: Sequence[str]) -> dict[int, float]:
    """Squares by parameter: of an expert's those of all that have its number, in order of expert ranks."""
    if ranks.expert_ranks == 1:
        return dict(sums)
    told = ranks.exchange("sums of squares", {number: each for number, each in sums.items() if groups[number] == REPLICA})
    found = {number: each for number, each in sums.items() if groups[number] != REPLICA}
    for rank in ranks.group(EXPERTS).members:
        for number, each in told[rank].items():
            found[number] = found.get(number, 0.0) + each
    return found


def _summed(
    gradients: Mapping[int, torch.Tensor], numbers: Sequence[int], group: RankGroup, like: Sequence[torch.Tensor]
) -> dict[int, torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    for bucket in _buckets(numbers, like):
        sizes = [like[number].numel() for number in bucket]
        padded = -(-sum(sizes) // group.size) * group.size
        whole = torch.zeros(padded, dtype=like[bucket[0]].dtype, device=like[bucket[0]].device)
        places = dict(zip(bucket, whole[: sum(sizes)].split(sizes), strict=True))
        for number in places.keys() & gradients.keys():
            places[number].copy_(gradients[number])
        of = f"the gradients of {len(bucket)} parameters from number {bucket[0]}"
        group.link.reduce(f"reduce {of}", whole)
        group.link.gather(f"gather {of}", whole)
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
