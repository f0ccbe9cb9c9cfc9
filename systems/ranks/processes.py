"""Ranks as processes that torch.distributed knows, over gloo."""

from __future__ import annotations

import torch
import torch.distributed as dist

from systems.ranks.link import Link, check_tags, ordered_sum, shard_of
from systems.ranks.ranks import Ranks

PIECE_BYTES = 16 << 20  # of what all ranks send at once in a reduction: its staging
TAG_BYTES = 128


class _GlooLink(Link):
    """Over a group of its own, which no other thread uses."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size, self._group = dist.get_rank(group), dist.get_world_size(group), group

    def _check(self, tag: str) -> None:
        mine = torch.zeros(TAG_BYTES, dtype=torch.uint8)
        text = tag.encode()[:TAG_BYTES]
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine, group=self._group)
        check_tags([bytes(each.tolist()).rstrip(b"\0").decode(errors="replace") for each in found])

    def gather(self, tag: str, *wholes: torch.Tensor) -> None:
        self._check(tag)
        for whole in wholes:
            places = [shard_of(whole, rank, self.size) for rank in range(self.size)]
            dist.all_gather(places, self.own(whole).clone(), group=self._group)

    def reduce(self, tag: str, *wholes: torch.Tensor) -> None:
        """Piece by piece, every rank sends each its shard and adds up what comes."""
        self._check(tag)
        for whole in wholes:
            self._reduce(whole)

    def _reduce(self, whole: torch.Tensor) -> None:
        numel = whole.numel() // self.size
        step = max(1, PIECE_BYTES // whole.element_size() // self.size)
        for begin in range(0, numel, step):
            here = slice(begin, min(begin + step, numel))
            outgoing = torch.stack([shard_of(whole, rank, self.size)[here] for rank in range(self.size)])
            coming = torch.empty_like(outgoing)
            dist.all_to_all_single(coming, outgoing, group=self._group)
            ordered_sum(list(coming), self.own(whole)[here])


class Processes(Ranks):
    """Of torch.distributed's default group, which is there already. Groups of our own are made here, on all ranks alike."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._control = dist.new_group(backend="gloo")
        self._collectives = dist.new_group(backend="gloo")
        self.link = _GlooLink(self._collectives)

    def exchange_bytes(self, told: bytes) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(told)]), group=self._control)
        longest = max(int(size) for size in sizes)
        mine = torch.zeros(max(longest, 1), dtype=torch.uint8)
        mine[: len(told)] = torch.frombuffer(bytearray(told), dtype=torch.uint8) if told else mine[:0]
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine, group=self._control)
        return [each[: int(size)].numpy().tobytes() for each, size in zip(found, sizes, strict=True)]

    def close(self) -> None:
        for group in (self._control, self._collectives):
            dist.destroy_process_group(group)
