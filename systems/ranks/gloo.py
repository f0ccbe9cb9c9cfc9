"""A link over gloo, between processes: for the emulated device, for host memory, and for ranks that share a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from systems.errors import PeerGoneError
from systems.machine.uncounted import uncounted
from systems.messages import one_line
from systems.ranks.link import Link, check_tags, shard_of
from systems.ranks.stuck import Waits

TAG_BYTES = 256  # of longer tags the rest is not compared, nor told


class GlooLink(Link):
    """Over a group of its own, which no other thread uses. What is on a device goes through host memory, and is waited for.

    queue: of `waits`, where its thread has one of its own.
    """

    _queue = "link"

    def __init__(self, group: dist.ProcessGroup, waits: Waits, queue: str = "link") -> None:
        super().__init__()
        self.rank, self.size, self._group, self._waits = dist.get_rank(group), dist.get_world_size(group), group, waits
        self._queue = queue

    def _check(self, tag: str) -> None:
        mine = torch.zeros(TAG_BYTES, dtype=torch.uint8)
        text = tag.encode()[:TAG_BYTES]
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        gather_on_host(found, mine, self._group, tag)
        check_tags([bytes(each.tolist()).rstrip(b"\0").decode(errors="replace") for each in found])

    def gather(self, tag: str, *wholes: torch.Tensor) -> None:
        _come_to(wholes)
        with self._waits.of(self._queue, tag):
            self._gather(tag, *wholes)

    def _gather(self, tag: str, *wholes: torch.Tensor) -> None:
        self._check(tag)
        for whole in wholes:
            places = [shard_of(whole, rank, self.size) for rank in range(self.size)]
            own = self.own(whole).to("cpu", copy=True)
            coming = places if whole.is_cpu else [torch.empty_like(own) for _ in places]
            gather_on_host(coming, own, self._group, tag)
            for place, came in zip(places, coming, strict=True):
                if place is not came:
                    place.copy_(came)

    def reduce(self, tag: str, *wholes: torch.Tensor) -> None:
        """Piece by piece, every rank sends each its shard and adds up what comes."""
        _come_to(wholes)
        with self._waits.of(self._queue, tag):
            self._reduce(tag, *wholes)

    def _reduce(self, tag: str, *wholes: torch.Tensor) -> None:
        self._check(tag)
        for whole in wholes:
            for piece in self.pieces(whole):
                here = piece.together().cpu()
                came = piece.came if whole.is_cpu else torch.empty_like(here)
                with with_peers(tag):
                    dist.all_to_all_single(came, here, group=self._group)
                if came is not piece.came:
                    piece.came.copy_(came)
                piece.add_up()

    def swap(self, tag: str, into: torch.Tensor, source: torch.Tensor) -> None:
        """The library may hold what it was given for a while longer: it gets copies, which are no activations of the pass that
        calls this.
        """
        _come_to([source])
        with self._waits.of(self._queue, tag):
            with uncounted():
                self._check(tag)
                here = source.detach().to("cpu", copy=True)
                came = torch.empty_like(here)
                with with_peers(tag):
                    dist.all_to_all_single(came, here, group=self._group)
            into.copy_(came)


def _come_to(wholes: Sequence[torch.Tensor]) -> None:
    """Before it counts as waiting for other ranks: what the own device still computes on these is over."""
    if wholes and wholes[0].is_cuda:
        torch.cuda.current_stream(wholes[0].device).synchronize()


@contextmanager
def with_peers(what: str) -> Iterator[None]:
    """What the library says of a peer that is gone, or that lets wait too long, is a PeerGoneError."""
    try:
        yield
    except RuntimeError as error:
        if type(error) is RuntimeError or isinstance(error, dist.DistError):
            told = one_line(str(error)).partition(". ")[0]
            raise PeerGoneError(f"another rank is gone, or has let wait too long, at {what!r}: {told}") from error
        raise


def gather_on_host(into: list[torch.Tensor], mine: torch.Tensor, group: dist.ProcessGroup, what: str) -> None:
    """What each rank has, by rank."""
    with with_peers(what):
        dist.all_gather(into, mine, group=group)
