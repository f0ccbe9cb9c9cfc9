"""A layer of experts, for every family: a gate, slots of a fixed number, experts, and the loss that keeps their load even.

Sources: Shazeer et al. 2017 (arXiv 1701.06538); GShard, Lepikhin et al. 2021 (arXiv 2006.16668); Switch, Fedus et al. 2022
(arXiv 2101.03961), equations 4 to 6. Each token goes to the `choices` experts that the gate likes best, one or two. An expert
takes `capacity` tokens of a micro-batch, first choices before second, earlier tokens before later ones. What finds no place is
dropped: it adds nothing here, and the block's residual carries it on.

Note [Slots]
    Tokens are laid into slots [experts, capacity, width], zero where nobody came, and every expert here multiplies all of its
    slots. So shapes, memory, the order of events and which weights have gradients do not depend on where tokens go, and on
    several ranks all exchange parts of one size. The price is what multiplies zeros: `padding`.

Note [What a mixture tells]
    Beside its output a mixture tells a few numbers, `TOLD`, the first of them the load-balancing loss. They leave a block as
    a tensor beside the hidden states, summed from block to block, so that an engine sees whose gradient begins where, and a
    block that is recomputed counts once. The model hands the loss to `models.loss`, and keeps the others on the device,
    in the buffer `routing`, to be read when a run is over.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import nn

LEAST_CAPACITY = 4
TOLD = ("balance", "load", "dropped", "padding", "idle")
"""balance: the loss, 1 if even. load: of the expert with the most, over the mean. dropped: share of choices without a place.
padding: share of slots that nobody took. idle: share of experts that no token chose.
"""
ROUTING = "routing"  # the buffer of a model that has mixtures: fp32 (1 + len(TOLD),): mixtures that ran, and sums of TOLD


class Exchange(Protocol):
    """How tokens come to experts of other ranks and back; both are differentiable, and each is the other's backward.

    Slots are in the order of the experts' global numbers; what arrives is rank by rank within an expert.
    """

    def dispatch(self, slots: torch.Tensor) -> torch.Tensor:
        """Slots of all experts [experts, capacity, width] to what came for those here [here, ranks x capacity, width]."""

    def combine(self, results: torch.Tensor) -> torch.Tensor:
        """The reverse: [here, ranks x capacity, width] to [experts, capacity, width]."""


class OneRank:
    """All experts are here."""

    def dispatch(self, slots: torch.Tensor) -> torch.Tensor:
        return slots

    def combine(self, results: torch.Tensor) -> torch.Tensor:
        return results


class Elsewhere:
    """Other ranks have the other experts, and nothing reaches them yet: shapes are right, for who only observes them."""

    def __init__(self, experts: int, here: int) -> None:
        self._experts, self._here = experts, here

    def dispatch(self, slots: torch.Tensor) -> torch.Tensor:
        return self._observed(slots).reshape(self._here, -1, slots.shape[-1])

    def combine(self, results: torch.Tensor) -> torch.Tensor:
        return self._observed(results).reshape(self._experts, -1, results.shape[-1])

    def _observed(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            raise RuntimeError(
                f"{self._here} of {self._experts} experts are here, and the others are on no rank that this one knows: share "
                "them with `expert_ranks`, or build the model with all of them"
            )
        return tensor


def capacity_of(*, tokens: int, experts: int, factor: float) -> int:
    """Slots of an expert for a micro-batch of one rank."""
    return max(LEAST_CAPACITY, math.ceil(factor * tokens / experts))


class Gate(nn.Module):
    """Probabilities (tokens, experts) in fp32, whatever the model computes in."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, width))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        device = tokens.device.type
        with torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext():
            return nn.functional.linear(tokens.float(), self.weight.float()).softmax(-1)


class Mixture(nn.Module):
    """(..., width) to the same shape, without a residual.

    experts: of all ranks. here: global numbers of those that are modules of this one, all by default; `exchange` reaches the
    others. make: a new expert, (rows, width) to the same. choices: experts of a token. factor: of capacity.
    A token's weight is its probability with one choice, and with two the chosen ones' share of both.
    """

    def __init__(
        self,
        width: int,
        make: Callable[[], nn.Module],
        *,
        experts: int,
        here: range | None = None,
        choices: int = 1,
        factor: float,
    ) -> None:
        super().__init__()
        self.width, self.choices, self.factor, self.expert_count = width, choices, factor, experts
        self.gate = Gate(width, experts)
        self.experts = nn.ModuleDict({str(number): make() for number in (range(experts) if here is None else here)})
        for expert in self.experts.values():
            setattr(expert, "data_parallel", "replica")  # noqa: B010 - which ranks hold the same values
        mine = len(self.experts)
        self.exchange: Exchange = OneRank() if mine == experts else Elsewhere(experts, mine)
        self.told: torch.Tensor | None = None  # TOLD of the last call, fp32, for the block around to take

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.reshape(-1, self.width)
        likely = self.gate(tokens)
        weights, chosen = likely.topk(self.choices, dim=-1)
        if self.choices > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        capacity = capacity_of(tokens=len(tokens), experts=self.expert_count, factor=self.factor)
        places, counts = self._places(chosen, capacity)
        kept = places < self.expert_count * capacity
        self.told = self._tell(likely, chosen[:, 0], counts, kept, capacity)
        slots = self._slots(tokens, places, capacity)
        results = self._return(self._run(self.exchange.dispatch(slots)))
        return self._gather(results, places, kept, weights.to(hidden.dtype)).view_as(hidden)

    def _places(self, chosen: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Slot of each choice (choices, tokens), behind the last one if there is no place; and choices of each expert."""
        wanted = chosen.t().reshape(-1)
        counts = torch.zeros(self.expert_count, dtype=torch.int64, device=chosen.device)
        counts.scatter_add_(0, wanted, torch.ones_like(wanted))
        order = wanted.argsort(stable=True)
        before = counts.cumsum(0) - counts
        turn = torch.arange(len(wanted), device=chosen.device) - before.index_select(0, wanted.index_select(0, order))
        turn = torch.empty_like(wanted).scatter_(0, order, turn)
        places = torch.where(turn < capacity, wanted * capacity + turn, self.expert_count * capacity)
        return places.view(self.choices, -1), counts

    def _slots(self, tokens: torch.Tensor, places: torch.Tensor, capacity: int) -> torch.Tensor:
        size = self.expert_count * capacity
        slots = tokens.new_zeros(size + 1, self.width)  # one more, for what is dropped
        for choice in places:
            slots.index_copy_(0, choice, tokens)
        return slots[:size].view(self.expert_count, capacity, self.width)

    def _run(self, slots: torch.Tensor) -> torch.Tensor:
        return torch.stack([expert(mine) for expert, mine in zip(self.experts.values(), slots.unbind(), strict=True)])

    def _return(self, results: torch.Tensor) -> torch.Tensor:
        return self.exchange.combine(results).reshape(-1, self.width)

    def _gather(self, results: torch.Tensor, places: torch.Tensor, kept: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Dropped choices read any slot, each another one, and count nothing."""
        anywhere = torch.arange(places.shape[1], device=places.device) % len(results)
        out: Any = None
        for number, (place, mine) in enumerate(zip(places, kept, strict=True)):
            weight = torch.where(mine, weights[:, number], 0.0).unsqueeze(-1)
            part = results.index_select(0, torch.where(mine, place, anywhere)) * weight
            out = part if out is None else out + part
        return out

    def _tell(
        self, likely: torch.Tensor, first: torch.Tensor, counts: torch.Tensor, kept: torch.Tensor, capacity: int
    ) -> torch.Tensor:
        """TOLD. The loss: experts x the sum over them of the share of tokens that choose it first x its mean probability."""
        experts, tokens = self.expert_count, len(first)
        load = torch.zeros(experts, device=likely.device).scatter_add_(0, first, torch.ones_like(first, dtype=torch.float32))
        balance = experts * (load / tokens * likely.mean(0)).sum()
        taken = kept.sum()
        others = torch.stack(
            [
                counts.max() * (experts / kept.numel()),
                1 - taken / kept.numel(),
                1 - taken / (experts * capacity),
                (counts == 0).float().mean(),
            ]
        )
        return torch.cat([balance.unsqueeze(0), others.detach()])


def routing_of(model: nn.Module) -> dict[str, float] | None:
    """Means of TOLD over all mixtures of all micro-batches that trained, from `ROUTING`; None where no mixture has run."""
    buffer = dict(model.named_buffers(recurse=False)).get(ROUTING)
    if buffer is None:
        return None
    ran, *sums = buffer.tolist()
    return {name: total / ran for name, total in zip(TOLD, sums, strict=True)} if ran else None
