"""Solvers that H3T's own are compared with: all assignments tried, and Algorithm 3, which keeps far more states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, product
from typing import ClassVar

import numpy as np

from systems.strategies.h3t.costs import ModelCosts
from systems.strategies.h3t.dynamic import BINS, Pass, States, pairs, solved, without_near
from systems.strategies.h3t.evaluation import R, allowed, refuse
from systems.strategies.h3t.solvers import BATCH, best_of
from systems.strategies.h3t.switches import EVERY, SYNCHRONISED, Assignment, Bools, Switches, array_of


def exhaustive_solver(model: ModelCosts, budget: int, *, choices: Sequence[Switches] = EVERY) -> Assignment:
    """All |S|^N of them."""
    rows = array_of(allowed(model, choices))
    numbers = product(range(len(rows)), repeat=len(model.layers))

    def batches() -> Iterator[Bools]:
        while batch := list(islice(numbers, BATCH)):
            yield rows[np.array(batch, dtype=np.int64).reshape(len(batch), -1)]

    best = best_of(model, budget, batches(), "exhaustive")
    if best is None:
        raise refuse(model, budget)
    return best


class WholePass(Pass):
    """A state knows the whole switches of its two layers; one that another matches is dropped inside a pair of bins alone.

    Line 14 of Algorithm 3 leaves out the delta that line 17 of Algorithm 4 adds: it is added.
    """

    widths: ClassVar[tuple[int, ...]] = (200, 2_000, 20_000)
    candidates: ClassVar[int] = 4

    def _keys(self) -> tuple[np.ndarray, int]:
        return np.arange(len(self._costs.r)), len(self._costs.r)

    def _next_keys(self, i: int, after_r: np.ndarray) -> tuple[np.ndarray | slice, np.ndarray]:
        members = np.flatnonzero(self._costs.useful[i])
        return pairs(after_r, self._costs.r[members], members, R)

    def _rest(self, i: int) -> np.ndarray:
        least: np.ndarray = self._bounds.through[i].min(axis=0)
        return least

    def _undominated(self, states: States, group: np.ndarray, cells: np.ndarray) -> np.ndarray:
        return without_near(np.lexsort((states.runtime, cells)), cells, states)


def basic_dp(model: ModelCosts, budget: int, *, bins: int = BINS, choices: Sequence[Switches] = SYNCHRONISED) -> Assignment:
    """Algorithm 3. BudgetError if nothing fits."""
    return solved(WholePass, model, budget, bins, choices)
