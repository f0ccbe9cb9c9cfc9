"""The state of an engine whose ranks share experts: every expert's is there, by its name, whichever ranks have it.

So a checkpoint does not tell how many ranks shared experts when it was saved: Note [Experts in groups] in ranks/group_names.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple, Protocol

import torch

from systems.checkpoint.state import Described, Part, SavedParameter, TrainingState
from systems.ranks.ranks import Ranks


class SharedState(TrainingState, Protocol):
    """Of one rank, with its own experts under their numbers here."""

    def of_expert_rank(self, which: int, parameter: int, part: Part, onto: int | None) -> torch.Tensor | None:
        """What a parameter of that number is on ranks of expert rank `which`, flat: as `bring`; of onto=None on all ranks."""


class _Owned(NamedTuple):
    """which: the expert rank that has it; None: all do. number: there."""

    which: int | None
    number: int


class AllExperts:
    """A TrainingState. names: of all parameters, by expert rank. shared: whether they are experts', by number on any rank."""

    def __init__(self, state: SharedState, names: Sequence[Sequence[str]], shared: Sequence[bool], ranks: Ranks) -> None:
        self._state, self._ranks, self.control = state, ranks, state.control
        self.optimizer, self.moments = state.optimizer, state.moments
        self._owned: list[_Owned] = []
        for of_experts, numbers in groupby(range(len(shared)), key=shared.__getitem__):
            run = list(numbers)
            self._owned += [_Owned(w, n) for w in (range(len(names)) if of_experts else (None,)) for n in run]
        self.parameters: Sequence[Described] = [
            replace(state.parameters[number], name=names[which or 0][number]) for which, number in self._owned
        ]
        self._told: list[list[int]] = []

    def meet(self) -> None:
        self._told = self._ranks.exchange("updates of experts", self._state.control.updates)

    def updates(self, parameter: int) -> int:
        which, number = self._owned[parameter]
        return self._told[self._ranks.rank if which is None else which][number]

    def read(self, parameter: int, part: Part) -> torch.Tensor:
        which, number = self._owned[parameter]
        if which is None:
            return self._state.read(number, part)
        found = self._state.of_expert_rank(which, number, part, None)
        assert found is not None, "all ranks have it"
        return found.view(self.parameters[parameter].shape)

    def bring(self, parameter: int, part: Part, onto: int) -> torch.Tensor | None:
        which, number = self._owned[parameter]
        if which is None:
            return self._state.bring(number, part, onto)
        found = self._state.of_expert_rank(which, number, part, onto)
        return None if found is None else found.view(self.parameters[parameter].shape)

    def write(self, parameter: int, state: SavedParameter, updates: int) -> None:
        which, number = self._owned[parameter]
        if which in (None, self._ranks.expert_rank):
            self._state.write(number, state, updates)
