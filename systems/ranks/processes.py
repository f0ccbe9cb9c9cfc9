"""Ranks as processes that torch.distributed knows: who they are and what they tell each other, over gloo."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from systems.errors import UnsupportedError
from systems.messages import one_line
from systems.ranks.link import Link, PeerGoneError, check_tags, ordered_sum, shard_of
from systems.ranks.ranks import Ranks

PIECE_BYTES = 16 << 20  # of what all ranks send at once in a reduction: its staging
TAG_BYTES = 128
TIMEOUT_S = 1800.0  # for a rank that others wait for: it may save, or compile
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class _GlooLink(Link):
    """Over a group of its own, which no other thread uses."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size, self._group = dist.get_rank(group), dist.get_world_size(group), group

    def _check(self, tag: str) -> None:
        mine = torch.zeros(TAG_BYTES, dtype=torch.uint8)
        text = tag.encode()[:TAG_BYTES]
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        _all_gather(found, mine, self._group, tag)
        check_tags([bytes(each.tolist()).rstrip(b"\0").decode(errors="replace") for each in found])

    def gather(self, tag: str, *wholes: torch.Tensor) -> None:
        self._check(tag)
        for whole in wholes:
            places = [shard_of(whole, rank, self.size) for rank in range(self.size)]
            _all_gather(places, self.own(whole).clone(), self._group, tag)

    def reduce(self, tag: str, *wholes: torch.Tensor) -> None:
        """Piece by piece, every rank sends each its shard and adds up what comes."""
        self._check(tag)
        for whole in wholes:
            self._reduce(tag, whole)

    def _reduce(self, tag: str, whole: torch.Tensor) -> None:
        numel = whole.numel() // self.size
        step = max(1, PIECE_BYTES // whole.element_size() // self.size)
        for begin in range(0, numel, step):
            here = slice(begin, min(begin + step, numel))
            outgoing = torch.stack([shard_of(whole, rank, self.size)[here] for rank in range(self.size)])
            coming = torch.empty_like(outgoing)
            with _with_peers(tag):
                dist.all_to_all_single(coming, outgoing, group=self._group)
            ordered_sum(list(coming), self.own(whole)[here])


@contextmanager
def _with_peers(what: str) -> Iterator[None]:
    """What the library says of a peer that is gone, or that lets wait too long, is a PeerGoneError."""
    try:
        yield
    except RuntimeError as error:
        if type(error) is RuntimeError or isinstance(error, dist.DistError):
            told = one_line(str(error))
            raise PeerGoneError(f"another rank is gone, or has let wait too long, at {what!r}: {told}") from error
        raise


def _all_gather(into: list[torch.Tensor], mine: torch.Tensor, group: dist.ProcessGroup, what: str) -> None:
    with _with_peers(what):
        dist.all_gather(into, mine, group=group)


def link_of(device: Literal["cuda", "cpu"], timeout: timedelta) -> tuple[Link, dist.ProcessGroup]:
    """What collectives of devices of this kind go through, and the group that was made for it, on all ranks alike."""
    if device == "cuda":
        raise UnsupportedError("several ranks run on the emulated device so far: use `device='cpu'`, or one rank")
    group = dist.new_group(backend="gloo", timeout=timeout)
    return _GlooLink(group), group


class Processes(Ranks):
    """Of torch.distributed's default group, which is there already. Groups of our own are made here, on all ranks alike.

    device: of all ranks. timeout_s: how long a rank waits for others. end_default: the default group ends with these.
    """

    def __init__(
        self, device: Literal["cuda", "cpu"] = "cpu", *, timeout_s: float = TIMEOUT_S, end_default: bool = False
    ) -> None:
        self.rank, self.size, self._end_default = dist.get_rank(), dist.get_world_size(), end_default
        timeout = timedelta(seconds=timeout_s)
        self.link, collectives = link_of(device, timeout)
        self._groups = [collectives, dist.new_group(backend="gloo", timeout=timeout)]
        hosts = self.exchange("hosts", BOOT_ID.read_text())
        here = [rank for rank, host in enumerate(hosts) if host == hosts[self.rank]]
        self.local_rank, self.local_size = here.index(self.rank), len(here)

    def exchange_bytes(self, told: bytes) -> list[bytes]:
        _, control = self._groups
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        _all_gather(sizes, torch.tensor([len(told)]), control, "what ranks tell each other")
        longest = max(int(size) for size in sizes)
        mine = torch.zeros(max(longest, 1), dtype=torch.uint8)
        mine[: len(told)] = torch.frombuffer(bytearray(told), dtype=torch.uint8) if told else mine[:0]
        found = [torch.empty_like(mine) for _ in range(self.size)]
        _all_gather(found, mine, control, "what ranks tell each other")
        return [each[: int(size)].numpy().tobytes() for each, size in zip(found, sizes, strict=True)]

    def close(self) -> None:
        groups, self._groups = self._groups, []
        for group in groups:
            dist.destroy_process_group(group)
        if self._end_default and groups:
            dist.destroy_process_group()
