"""Ranks as processes that have a CUDA device each, over NCCL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from systems.ranks.gloo import GlooLink
from systems.ranks.link import Link, Reduction
from systems.ranks.stuck import Waits

# torch 2.13 calls them so, and warns about the older names.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class NcclLink(Link):
    """Queues its collectives on the stream that is current where it is called, and returns before they are done.

    Tags are not compared: that would keep the host waiting. Ranks that differ find it at the step's end, by `chain`, or are
    stuck, which the watch sees. host: for tensors that are not on a device; it compares them.
    """

    queues = True

    def __init__(self, group: dist.ProcessGroup, host: GlooLink, waits: Waits, queue: str = "devices") -> None:
        super().__init__()
        self.rank, self.size, self._queue = host.rank, host.size, queue
        self._group, self._host, self._waits = group, host, waits
        self._reduction: Reduction = "ordered"

    def sum_by(self, reduction: Reduction) -> None:
        self._reduction = reduction

    def gather(self, tag: str, *wholes: torch.Tensor) -> None:
        if not wholes[0].is_cuda:
            self._host.gather(tag, *wholes)
            return
        with self._waits.queued(self._queue, tag, _mark):
            for whole in wholes:
                _gather(whole, self.own(whole), group=self._group)

    def reduce(self, tag: str, *wholes: torch.Tensor) -> None:
        if not wholes[0].is_cuda:
            self._host.reduce(tag, *wholes)
            return
        with self._waits.queued(self._queue, tag, _mark):
            for whole in wholes:
                self._sum(whole)

    def swap(self, tag: str, into: torch.Tensor, source: torch.Tensor) -> None:
        if not source.is_cuda:
            self._host.swap(tag, into, source)
            return
        with self._waits.queued(self._queue, tag, _mark):
            dist.all_to_all_single(into, source, group=self._group)

    def _sum(self, whole: torch.Tensor) -> None:
        if self._reduction == "native":
            _reduce_scatter(self.own(whole), whole, group=self._group)
            return
        for piece in self.pieces(whole):
            coming, going = list(piece.coming), list(piece.part)
            coming[self.rank] = going[self.rank] = whole[:0]  # no rank sends itself anything
            dist.all_to_all(coming, going, group=self._group)
            piece.add_up()

    def abandon(self) -> None:
        backend: Any = self._group._get_backend(torch.device("cuda"))
        backend.abort()


def _mark() -> Callable[[], bool]:
    """Behind all that the current stream was given so far: whether the device is there."""
    event = torch.cuda.Event()
    event.record()

    def reached() -> bool:
        try:
            return event.query()
        except RuntimeError:  # of the device: told where its results are waited for
            return True

    return reached
