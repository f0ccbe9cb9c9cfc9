"""The link: all collectives of a rank, one after the other, over flat tensors that all ranks cut in the same way.

A shard is an even part of a tensor, the r-th of them rank r's. Each collective has a tag. Between processes over gloo,
and threads, tags are compared before anything is moved: ranks that differ are told by name, where a library would mix their
bytes or end the process. Over NCCL ranks compare once a step what they issued (`Link.chain`).

Note [The ordered sum]
    A reduction adds the ranks' values in rank order, in fp32, and rounds once to the tensor's type. Its bits depend neither on
    the layout nor on the transport, and in fp32 they are those of one rank that accumulates the same micro-batches.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Literal

import torch

from systems.errors import UnsupportedError
from systems.ranks.staging import Staged, Staging
from systems.ranks.staging_size import MOST_BYTES

Reduction = Literal["ordered", "native"]


class RanksDifferError(RuntimeError):
    """Ranks are at different collectives: a defect, or a model that does other things on one rank than on another."""

    def __init__(self, tags: Sequence[str]) -> None:
        told = "; ".join(f"rank {rank} at {tag!r}" for rank, tag in enumerate(tags))
        super().__init__(f"ranks are at different collectives ({told}): does the model do the same on all of them?")


class Link(ABC):
    """rank, size: as in Ranks. chain: of the tags of all collectives that were issued, in order; equal on all ranks.

    remark: what tags say besides for now: what other ranks have to have met too, or they differ by the next collective.
    queues: a collective of what is on a device only joins the device's queue, and keeps nobody waiting for other ranks; what
    goes out need not lie row behind row.
    """

    rank: int
    size: int
    chain: int = 0
    remark: str = ""
    queues: bool = False

    def __init__(self) -> None:
        self._staging: dict[torch.device, Staging] = {}
        self._beside: Link | None = None

    def stage_in(self, other: Link) -> None:
        """Reductions take their room where another link's do, which the same thread calls, if it has any."""
        self._beside = other

    def stage(self, nbytes: int, device: torch.device) -> None:
        """Reductions of what is on this device have so many bytes there from here on, the same on all ranks."""
        staging = Staging(nbytes, device, self.size, together=not self.queues)
        self._staging[staging.device] = staging

    def pieces(self, whole: torch.Tensor) -> Iterator[Staged]:
        """Of a tensor that is to be summed, one after the other; without `stage` in as much room as they can use."""
        return self._room(whole.device).pieces(whole, self.rank)

    def _room(self, device: torch.device) -> Staging:
        if device not in self._staging:
            if self._beside is None:
                self.stage(MOST_BYTES, device)
            else:
                self._staging[device] = self._beside._room(device).shared_by(self.size)
        return self._staging[device]

    def issue(self, tag: str, alike: str | None = None) -> str:
        """A collective is on its way to the link's thread, with the tag that is returned. Called by the thread that runs the
        steps. alike: what of the tag all ranks have, where a part of them calls it otherwise; None: all of it.
        """
        counted = tag if alike is None else alike
        tag, counted = tag + self.remark, counted + self.remark
        self.chain = zlib.crc32(counted.encode(), self.chain)
        return tag

    def remind(self, remark: str) -> None:
        """See `remark`; "" for nothing."""
        self.remark = remark

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's shard of it, a view."""
        return shard_of(whole, self.rank, self.size)

    @abstractmethod
    def gather(self, tag: str, *wholes: torch.Tensor) -> None:
        """The own shard of each is there already; afterwards those of all ranks are. Waits for all of them."""

    @abstractmethod
    def reduce(self, tag: str, *wholes: torch.Tensor) -> None:
        """Afterwards the own shard of each has the sum over all ranks: see Note [The ordered sum]. The rest is anything."""

    @abstractmethod
    def swap(self, tag: str, into: torch.Tensor, source: torch.Tensor) -> None:
        """Parts of one size, rank by rank along the first dimension: part r of `source` goes to rank r, and what rank r has for
        this one comes to part r of `into`. Both lie in one piece each, and apart.
        """

    def abandon(self) -> None:
        """Other ranks may not come any more: what they are waited for in on devices ends, with anything as its result."""
        return

    def sum_by(self, reduction: Reduction) -> None:
        """How the ranks' values are added on devices from here on: "ordered" is Note [The ordered sum], "native" the library's
        own way, whose bits may depend on sizes and topology. UnsupportedError where there is no such way.
        """
        if reduction == "native":
            raise UnsupportedError("reduction: native is NCCL's own sum, and these ranks have no NCCL: use ordered")


class Alone(Link):
    """One rank: nothing is moved."""

    rank, size = 0, 1

    def gather(self, tag: str, *wholes: torch.Tensor) -> None:
        return

    def reduce(self, tag: str, *wholes: torch.Tensor) -> None:
        return

    def swap(self, tag: str, into: torch.Tensor, source: torch.Tensor) -> None:
        into.copy_(source)

    def sum_by(self, reduction: Reduction) -> None:
        return


def shard_of(whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """A rank's part of a flat tensor that all share evenly."""
    numel, rest = divmod(whole.numel(), size)
    if rest:
        raise ValueError(f"{whole.numel()} elements cannot be shared evenly by {size} ranks")
    return whole[rank * numel : (rank + 1) * numel]


def check_tags(tags: Sequence[str]) -> None:
    """RanksDifferError unless all are the same."""
    if len(set(tags)) > 1:
        raise RanksDifferError(tags)
