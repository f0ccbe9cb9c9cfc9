"""Tokens on their way to experts that other ranks have, and back: one all-to-all of equal parts each way.

Note [The experts' all-to-all]
    It is compute's own: the thread that runs a pass issues it in program order, on the current stream, over a group and a
    communicator that nothing else uses. Behind the link it would wait for all that was prefetched. Ranks that share experts run
    the same layers in the same order, forward, recomputed and backward, so each meets the others; all parts have one size,
    wherever tokens go, so none waits for what another does not send. It is the one exception to Note [The one rule]: its order
    beside the link's collectives differs from rank to rank, and need not be the same, as neither waits for the other. Over NCCL
    nobody compares tags, so ranks that share experts compare once a step what they swapped: `check_swapped`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from systems.errors import UnsupportedError
from systems.ranks.group_names import EXPERTS
from systems.ranks.groups import RankGroup
from systems.ranks.link import Alone
from systems.ranks.ranks import Ranks

ATTRIBUTE = "exchange"  # of a layer of experts: what has the methods of ExpertExchange
COUNTED = "exchange_bytes"  # what passed a port of this rank


class ExpertExchange:
    """Of one layer, whose name is `layer`. group: of the ranks that share its experts, each of which has as many, those of
    lower numbers first. count: is told what passes a port.
    """

    def __init__(self, layer: str, group: RankGroup, count: Callable[[str, int], None]) -> None:
        self._layer, self._group, self._count = layer, group, count

    def dispatch(self, slots: torch.Tensor) -> torch.Tensor:
        """Slots [experts, capacity, width] of all experts, to those of the experts here [local experts, ranks x capacity,
        width], each expert's rank by rank.
        """
        ranks, (experts, capacity, width) = self._group.size, slots.shape
        if experts % ranks:
            raise UnsupportedError(
                f"{self._layer} has {experts} experts, which {ranks} ranks cannot share evenly: give a multiple of "
                "`expert_ranks`"
            )
        came = _Swap.apply(slots, self, "dispatch").view(ranks, experts // ranks, capacity, width)
        found: torch.Tensor = came.transpose(0, 1).reshape(experts // ranks, ranks * capacity, width)
        return found

    def combine(self, results: torch.Tensor) -> torch.Tensor:
        """The reverse."""
        ranks, (local, places, width) = self._group.size, results.shape
        goes = results.view(local, ranks, places // ranks, width).transpose(0, 1)
        found: torch.Tensor = _Swap.apply(goes, self, "combine").view(local * ranks, places // ranks, width)
        return found

    def swap(self, source: torch.Tensor, what: str) -> torch.Tensor:
        """Part r of what each rank has, cut along the first dimension, to rank r. what: for tags."""
        source, group = source.contiguous(), self._group
        into, link = torch.empty_like(source), group.link
        self._count(COUNTED, source.nbytes - source.nbytes // group.size)
        link.swap(link.issue(f"{what} of {self._layer}, {tuple(source.shape)} {source.dtype}"), into, source)
        return into


class _Swap(torch.autograd.Function):
    """Its own backward: what came from a rank goes back to it."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, exchange: ExpertExchange, what: str) -> torch.Tensor:
        ctx.swapped = exchange, what
        return exchange.swap(source, what)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        exchange, what = ctx.swapped
        return exchange.swap(gradients[0], f"backward of {what}"), None, None


def swapped(ranks: Ranks) -> int:
    """What this rank swapped so far, and in which order: the same on those that share experts with it."""
    return ranks.group(EXPERTS).link.chain


def check_swapped(told: Sequence[int], ranks: Ranks) -> None:
    """RuntimeError on all ranks unless it was. told: by rank."""
    for rank, theirs in enumerate(told):
        first = rank - rank % ranks.expert_ranks
        if theirs != told[first]:
            raise RuntimeError(
                f"rank {first} and rank {rank}, which share experts, did not send each other the same layers' tokens, or as "
                "many of them, in the same order: do the model and its batches' shapes differ?"
            )


def reached(model: nn.Module) -> dict[str, nn.Module]:
    """Layers of experts that other ranks' tokens can reach, by name."""
    found = {name or "<root>": module for name, module in model.named_modules()}
    return {name: module for name, module in found.items() if _is_exchange(getattr(module, ATTRIBUTE, None))}


def exchange_experts(model: nn.Module, ranks: Ranks, count: Callable[[str, int], None]) -> Callable[[], None]:
    """Layers of experts reach those of other ranks from here on, where ranks share them. Returns what undoes it."""
    return exchange_among(model, ranks.group(EXPERTS), count) if ranks.expert_ranks > 1 else lambda: None


def observe_exchange(model: nn.Module, expert_ranks: int, count: Callable[[str, int], None]) -> None:
    """Layers of experts of a model on the meta device have fellows that are not there, and tell what they would swap."""
    if expert_ranks > 1:
        exchange_among(model, RankGroup(tuple(range(expert_ranks)), 0, _NobodyThere()), count)


class _NobodyThere(Alone):
    """Of tensors without values, into which nothing comes."""

    def swap(self, tag: str, into: torch.Tensor, source: torch.Tensor) -> None:
        return


def exchange_among(model: nn.Module, group: RankGroup, count: Callable[[str, int], None]) -> Callable[[], None]:
    """The same, given the group of ranks that share one set of experts."""
    before: list[tuple[dict[str, Any], Any]] = []
    for name, module in reached(model).items():
        own = vars(module)  # which is looked in before a module's class and submodules are
        before.append((own, own.get(ATTRIBUTE)))
        own[ATTRIBUTE] = ExpertExchange(name, group, count)

    def undo() -> None:
        for own, exchange in before:
            own[ATTRIBUTE] = exchange
            if exchange is None:
                del own[ATTRIBUTE]

    return undo


def _is_exchange(it: object) -> bool:
    return callable(getattr(it, "dispatch", None)) and callable(getattr(it, "combine", None))
