"""A group of ranks, and which group a module's parameters are of."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from systems.errors import UnsupportedError
from systems.ranks.group_names import REPLICA, WORLD
from systems.ranks.link import Link

ATTRIBUTE = "data_parallel"  # of a module: see Note [Experts in groups] in group_names.py


@dataclass(frozen=True, eq=False)
class RankGroup:
    """members: ranks, ascending. rank: the place of this one among them. link: between them alone."""

    members: tuple[int, ...]
    rank: int
    link: Link

    @property
    def size(self) -> int:
        return len(self.members)


def cut(ranks: int, expert_ranks: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Groups that hold an expert together, by expert rank; and groups that share one set of experts, by replica.

    UnsupportedError where the ranks are no whole number of replicas.
    """
    if ranks % expert_ranks:
        raise UnsupportedError(
            f"`expert_ranks` is {expert_ranks}, which does not divide the number of ranks, {ranks}: give a number that does"
        )
    replicas = [tuple(range(expert, ranks, expert_ranks)) for expert in range(expert_ranks)]
    return replicas, [tuple(range(first, first + expert_ranks)) for first in range(0, ranks, expert_ranks)]


def group_of(module: nn.Module) -> object:
    """By its own word; anything, where its attribute is about something else."""
    return getattr(module, ATTRIBUTE, WORLD)


def of_replicas(model: nn.Module) -> frozenset[nn.Parameter]:
    """Parameters that not all ranks hold where they share experts. UnsupportedError for a group that there is not."""
    found: set[nn.Parameter] = set()
    for name, module in model.named_modules():
        group = group_of(module)
        if isinstance(group, str) and group not in (WORLD, REPLICA):
            raise UnsupportedError(
                f"module {name or '<root>'} has {ATTRIBUTE}={group!r}: give {REPLICA!r} for what only the ranks of one expert "
                "rank hold, or leave it out"
            )
        if group == REPLICA:
            found.update(module.parameters())
    return frozenset(found)
