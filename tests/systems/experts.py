"""A toy with mixtures of experts, that ranks may share: blocks of a linear layer and of experts, one linear layer each.

Its experts have their global numbers for names, and take slots of a fixed number, wherever tokens go.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.systems.models_small import tokens
from tests.systems.running import Run, settings
from tests.systems.test_ranks import trained_together

WIDTH, EXPERTS, VOCABULARY, STEPS = 16, 4, 64, 3


class Here:
    """All experts are here."""

    def dispatch(self, slots: torch.Tensor) -> torch.Tensor:
        return slots

    def combine(self, results: torch.Tensor) -> torch.Tensor:
        return results


class Expert(nn.Module):
    data_parallel = "replica"

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class Layer(nn.Module):
    """Each token goes to its best expert. here: global numbers of the experts that are built. fixed: all go to that one, and if
    `idle`, no other runs.
    """

    idle = False

    def __init__(self, here: range, fixed: int | None) -> None:
        super().__init__()
        self.gate, self.fixed, self.exchange = nn.Linear(WIDTH, EXPERTS, bias=False), fixed, Here()
        self.experts = nn.ModuleDict({str(number): Expert() for number in here})

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, WIDTH)
        weights, chosen = self.gate(rows).softmax(-1).max(-1)
        if self.fixed is not None:
            chosen = torch.full_like(chosen, self.fixed)
        slots = nn.functional.one_hot(chosen, EXPERTS).t().unsqueeze(-1).to(rows.dtype) * rows  # as many as there are tokens
        came = self.exchange.dispatch(slots)
        run = [x if self.idle and int(n) != self.fixed else self.experts[n](x) for n, x in zip(self.experts, came, strict=True)]
        results = self.exchange.combine(torch.stack(run))
        return hidden + (results[chosen, torch.arange(len(rows))] * weights.unsqueeze(-1)).view_as(hidden)


class Block(nn.Module):
    def __init__(self, here: range, fixed: int | None) -> None:
        super().__init__()
        self.dense, self.layer = nn.Linear(WIDTH, WIDTH), Layer(here, fixed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.dense(x).tanh())


class Toy(nn.Module):
    def __init__(self, here: range, blocks: int, fixed: int | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(here, fixed) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def toy(expert_ranks: int = 1, expert_rank: int = 0, *, blocks: int = 2, fixed: int | None = None) -> Toy:
    """With first values that do not depend on who has which experts."""
    mine = EXPERTS // expert_ranks
    model = Toy(range(expert_rank * mine, (expert_rank + 1) * mine), blocks, fixed)
    for name, parameter in model.named_parameters():
        seed = sum(ord(letter) * 7**place for place, letter in enumerate(reversed(name))) % (1 << 31)
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 0.2)
    return model


def toy_loss(model: Any, ids: torch.Tensor, count: int) -> torch.Tensor:
    logits = model(ids[:, :-1])
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="sum") / count


def on_ranks(
    system: Any,
    size: int,
    expert_ranks: int,
    options: Any = None,
    *,
    accumulate: int = 1,
    build: Callable[..., nn.Module] = toy,
    loss: Callable[..., torch.Tensor] = toy_loss,
    before: Callable[[Any, int, int], None] | None = None,
    jitter: bool = False,
    **given: Any,
) -> list[Run]:
    """As tests.systems.test_ranks.on_ranks, of ranks that share experts. build: takes expert_ranks and expert_rank."""
    batches = tokens(STEPS, size * accumulate) % VOCABULARY
    models = [build(expert_ranks, rank % expert_ranks) for rank in range(size)]
    asked = settings(ranks=size, expert_ranks=expert_ranks, accumulate=accumulate, **given)
    return trained_together(system, models, asked, options, batches, loss, jitter=jitter, before=before)
