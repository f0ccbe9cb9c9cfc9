"""Random (Algorithm 1), greedy (Algorithm 2) and manual (the best global setting).

Each returns the fastest assignment that it found within the budget, and raises BudgetError if it found none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from systems.strategies.h3t.costs import ModelCosts
from systems.strategies.h3t.evaluation import all_on, allowed, evaluate, refuse
from systems.strategies.h3t.switches import EVERY, NAMES, Assignment, Bools, Switches, array_of, switches_of

BATCH = 2048  # assignments that are evaluated at a time


def best_of(model: ModelCosts, budget: int, batches: Iterator[Bools], solver: str) -> Assignment | None:
    """The first of the fastest among assignments [any number, layers, 7] that fit."""
    best: Assignment | None = None
    for rows in batches:
        found = evaluate(model, rows)
        runtime = np.where(found.memory_bytes <= budget, found.runtime_s, np.inf)
        number = int(runtime.argmin())
        if runtime[number] < (np.inf if best is None else best.runtime_s):
            memory = int(found.memory_bytes[number])
            best = Assignment(switches_of(rows[number]), float(runtime[number]), memory, solver)
    return best


def random_solver(
    model: ModelCosts, budget: int, *, samples: int, seed: int, choices: Sequence[Switches] = EVERY
) -> Assignment:
    """Algorithm 1. samples: T_rand."""
    rows, generator = array_of(allowed(model, choices)), np.random.default_rng(seed)
    sizes = [min(BATCH, samples - done) for done in range(0, samples, BATCH)]
    drawn = (rows[generator.integers(len(rows), size=(size, len(model.layers)))] for size in sizes)
    return _found(best_of(model, budget, drawn, "random"), model, budget)


def greedy_solver(model: ModelCosts, budget: int, *, choices: Sequence[Switches] = EVERY) -> Assignment:
    """Algorithm 2: n layers, evenly spread, take one setting, all others have everything on."""
    rows, layers = array_of(allowed(model, choices)), len(model.layers)

    def tried() -> Iterator[Bools]:
        for flexible in range(1, layers + 1):
            one = np.broadcast_to(all_on(model), (len(rows), layers, len(NAMES))).copy()
            one[:, np.arange(flexible) * (layers // flexible)] = rows[:, None]
            yield one

    return _found(best_of(model, budget, _joined(tried()), "greedy"), model, budget)


def manual_solver(model: ModelCosts, budget: int, *, choices: Sequence[Switches] = EVERY) -> Assignment:
    """Every switch is on or off for the whole model: the best of those settings."""
    rows = array_of(allowed(model, choices))
    same = np.broadcast_to(rows[:, None], (len(rows), len(model.layers), len(NAMES)))
    return _found(best_of(model, budget, iter([same]), "manual"), model, budget)


def _joined(batches: Iterator[Bools]) -> Iterator[Bools]:
    """Small batches as larger ones."""
    waiting: list[Bools] = []
    for batch in batches:
        waiting.append(batch)
        if sum(map(len, waiting)) >= BATCH:
            yield np.concatenate(waiting)
            waiting = []
    if waiting:
        yield np.concatenate(waiting)


def _found(best: Assignment | None, model: ModelCosts, budget: int) -> Assignment:
    if best is None:
        raise refuse(model, budget)
    return best
