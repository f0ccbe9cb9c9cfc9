"""Ranks: the processes that train one model together, or threads of one process that stand for them in tests.

Note [The one rule]
    On several ranks nothing that decides a collective may depend on a value, a clock or an allocator: only on unit events, on
    the plan, and on what all ranks have exchanged. Then all ranks issue the same collectives in the same order, every operation
    waits only for operations issued before it, and each queue is first in, first out: so the earliest operation of all ranks
    that is not done can always go on.

    So on several ranks a unit ends by tensors, whatever gradients came (Note [Ends on several ranks] in substrate/hooks.py); a
    bundle's gradient is reduced once no backward that uses it is to come, with zeros where nothing came; nothing is evicted,
    and what no plan keeps goes with its last holder; batches are as large as the largest of all ranks; and what one rank
    finds wrong as a step ends is told to all, and raised by all.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import torch

from systems.ranks.group_names import EXPERTS, REPLICA, WORLD
from systems.ranks.groups import RankGroup, cut
from systems.ranks.link import Alone, Link, check_tags
from systems.ranks.told import ToldError

Told = TypeVar("Told")


class Ranks(ABC):
    """rank: this one's number, from 0. size: of all. local_rank, local_size: the same among those of its host, which is number
    `host` of all that there are.

    link: for tensors; one thread of each rank calls it. Everything else is called by the thread that runs the steps, on all
    ranks alike. devices: kinds of device whose tensors the link takes.
    of_one_engine: they end with the engine that they were made for.
    expert_ranks: see `divide`; expert_rank: this one's number among those that share one set of experts.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: int = 0
    link: Link
    devices: tuple[str, ...] = ("cpu", "cuda")
    of_one_engine: bool = False
    expert_ranks: int = 1
    _divided: dict[int, dict[str, RankGroup]] | None = None

    @property
    def expert_rank(self) -> int:
        return self.rank % self.expert_ranks

    def divide(self, expert_ranks: int) -> None:
        """How many share one set of experts from here on: see Note [Experts in groups] in group_names.py. Said by all alike.
        UnsupportedError where that does not divide them.
        """
        replicas, fellows = cut(self.size, expert_ranks)
        made = self._divided = {} if self._divided is None else self._divided
        if expert_ranks > 1 and expert_ranks not in made:
            kinds = ((REPLICA, replicas), (EXPERTS, fellows))
            made[expert_ranks] = {name: self._group(groups, name) for name, groups in kinds}
            made[expert_ranks][REPLICA].link.stage_in(self.link)
        self.expert_ranks = expert_ranks

    def group(self, name: str) -> RankGroup:
        """All ranks, unless they share experts and that is what the group is about."""
        if name == WORLD or self.expert_ranks == 1 or self._divided is None:
            return RankGroup(tuple(range(self.size)), self.rank, self.link)
        return self._divided[self.expert_ranks][name]

    def abandon(self) -> None:
        """See Link.abandon, of all groups."""
        self.link.abandon()
        for groups in (self._divided or {}).values():
            for group in groups.values():
                group.link.abandon()

    def _group(self, groups: Sequence[tuple[int, ...]], name: str) -> RankGroup:
        mine = next(members for members in groups if self.rank in members)
        return RankGroup(mine, mine.index(self.rank), self._link_among(groups, name) if len(mine) > 1 else Alone())

    @abstractmethod
    def _link_among(self, groups: Sequence[tuple[int, ...]], name: str) -> Link:
        """Of this rank's one of these groups, of several ranks each. name: what they are about."""

    @abstractmethod
    def exchange_bytes(self, about: str, told: bytes) -> list[bytes]:
        """What each rank tells, by rank. about: for whoever waits too long."""

    def exchange(self, about: str, told: Told) -> list[Told]:
        """The same of any value that can be pickled. RanksDifferError where ranks tell about different things."""
        if self.size == 1:
            return [told]
        found = [pickle.loads(each) for each in self.exchange_bytes(about, pickle.dumps((about, told)))]
        check_tags([theirs for theirs, _ in found])
        return [value for _, value in found]

    def together(self, about: str, work: Callable[[], Told]) -> list[Told]:
        """What each rank's `work` returns, by rank. What it raises on one is raised on all of them, with that rank's name: else
        the others would wait for one that does not come.
        """
        if self.size == 1:
            return [work()]
        found, wrong, cause = None, None, None
        try:
            found = work()
        except Exception as error:  # noqa: BLE001 - raised below, by all
            cause, wrong = error, ToldError.of(error)
        told = self.exchange(about, (found, wrong))
        for rank, (_, theirs) in enumerate(told):
            if theirs is not None:
                raise theirs.of_rank(rank) from cause
        return [cast(Told, value) for value, _ in told]

    def bring(self, about: str, pieces: Callable[[], Sequence[Sequence[torch.Tensor]]], onto: int | None = None) -> None:
        """What each rank has of something comes together on rank `onto`, or on all: bit for bit, with no second copy.

        pieces: makes, by rank, flat tensors on the CPU, of the same types and sizes on all ranks. The own ones have their
        content, the others are places for it; a rank that is not `onto` needs no places. What it raises on one rank is raised
        on all, as in together; RanksDifferError as in exchange.
        """
        if self.size == 1:
            return
        made: list[list[list[torch.Tensor]]] = []

        def make() -> None:
            made.append([[in_bytes(piece) for piece in theirs if piece.numel()] for theirs in pieces()])

        self.together(f"{about}, onto {'all' if onto is None else onto}", make)
        self._bring(made[0], onto)

    def of_first(self, about: str, mine: torch.Tensor, group: str = WORLD) -> torch.Tensor:
        """Rank 0's tensor, on the CPU; those of the others say its type and shape, which are the same. group: an expert's is
        the first rank's that has it.
        """
        if self.size == 1:
            return mine
        kept, wanted = mine, self.expert_rank if group == REPLICA else 0
        for first in range(self.expert_ranks) if group == REPLICA else range(1):
            found = self._of(about, mine, first)
            kept = found if first == wanted else kept
        return kept

    def _of(self, about: str, mine: torch.Tensor, first: int) -> torch.Tensor:
        made: list[torch.Tensor] = []

        def pieces() -> list[list[torch.Tensor]]:
            is_first = self.rank == first
            made.append(
                mine.detach().cpu().contiguous().reshape(-1) if is_first else torch.empty(mine.numel(), dtype=mine.dtype)
            )
            return [made if rank == first else [] for rank in range(self.size)]

        self.bring(about, pieces)
        return made[0].view(mine.shape)

    @abstractmethod
    def _bring(self, pieces: Sequence[Sequence[torch.Tensor]], onto: int | None) -> None:
        """Of bytes (uint8), none of them empty."""

    def leave(self) -> None:
        """An engine of theirs is closed, whatever closing met."""
        if self.of_one_engine:
            self.close()

    @abstractmethod
    def close(self) -> None:
        """Nobody calls this or the link any more."""


class SingleRank(Ranks):
    """All there is."""

    def __init__(self) -> None:
        self.rank, self.size, self.link = 0, 1, Alone()
        self.local_rank, self.local_size = 0, 1

    def _link_among(self, groups: Sequence[tuple[int, ...]], name: str) -> Link:
        return self.link

    def exchange_bytes(self, about: str, told: bytes) -> list[bytes]:
        return [told]

    def _bring(self, pieces: Sequence[Sequence[torch.Tensor]], onto: int | None) -> None:
        return

    def close(self) -> None:
        return


def in_bytes(piece: torch.Tensor) -> torch.Tensor:
    """The same memory."""
    return piece.detach().view(torch.uint8)
