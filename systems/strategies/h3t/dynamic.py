"""Dynamic programming over the layers (paper, section 3.3.2 and appendix B.3), segment synchronisation forced on.

Note [States]
    After segment i a state is (current memory, peak memory, switches of i, switches of i+1) with the least runtime so far.
    Memory is kept exactly; the m bins of the paper only tell which states are alike. Where a few states are alive all of them
    are compared exactly, so that small cases have the optimum of exhaustive search; where many are, one of each pair of bins
    stays, the fastest. Line 14 of Algorithm 3 leaves out the delta that line 17 of Algorithm 4 adds: it is added.

Note [Prunings]
    The paper's two: of the neighbours only R, their three switches of communication, is part of a state; a state with no less
    memory, peak and runtime than another is dropped. Ours: one whose runtime and the least that the layers to come can take,
    memory left aside, exceed the best assignment known from greedy and manual search; and one that cannot fit any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from systems.errors import BudgetError
from systems.strategies.h3t.costs import ModelCosts
from systems.strategies.h3t.evaluation import R, Tables, allowed, evaluate, refuse, tables
from systems.strategies.h3t.solvers import greedy_solver, manual_solver
from systems.strategies.h3t.switches import NAMES, SYNCHRONISED, Assignment, Switches, array_of, communication

BINS = 128
EXACT = 4096  # candidates up to which all are compared exactly
PASSES = (8, 48)  # states that a group may keep before bins thin it: first few, for a tight bound
SMALL = 6  # layers up to which a last pass thins nothing
CHUNK = 128
SLACK = 1 + 1e-12


@dataclass(frozen=True)
class _States:
    """One entry a state. parent: its number in the layer before; choice: of this layer, a number in `choices`."""

    before: np.ndarray
    mine: np.ndarray
    current: np.ndarray
    peak: np.ndarray
    runtime: np.ndarray
    parent: np.ndarray
    choice: np.ndarray

    def __len__(self) -> int:
        return len(self.runtime)


def pruned_dp(model: ModelCosts, budget: int, *, bins: int = BINS, choices: Sequence[Switches] = SYNCHRONISED) -> Assignment:
    """Algorithm 4. BudgetError if nothing fits."""
    choices = allowed(model, choices)
    limit = budget - model.fixed_bytes
    simulated = tables(model, choices)
    known = _known(model, budget, choices)
    for alive in (*PASSES, EXACT) if len(model.layers) <= SMALL else PASSES:
        bound = np.inf if known is None else known.runtime_s - model.fixed_s
        search = _Search(simulated, communication(choices), limit, bins, bound, alive)
        numbers = search.run(model.start_bytes)
        if numbers is not None:
            known = _assignment(model, [choices[number] for number in numbers])
        if search.exact:
            break
    if known is None:
        raise refuse(model, budget)
    return replace(_spared(model, known, budget, frozenset(choices)), solver="dp")


def _spared(model: ModelCosts, found: Assignment, budget: int, choices: frozenset[Switches]) -> Assignment:
    """Switches that save neither time nor needed memory are turned off, in as many of the first layers as that holds for."""
    layers = len(model.layers)
    for name in (n for n in NAMES if n not in ("rematerialise", "synchronise")):
        tried = [
            tuple(replace(s, **{name: False}) if i < count else s for i, s in enumerate(found.switches))
            for count in range(1, layers + 1)
        ]
        tried = [each for each in tried if choices.issuperset(each)]
        if not tried:
            continue
        seen = evaluate(model, np.stack([array_of(each) for each in tried]))
        good = np.flatnonzero((seen.memory_bytes <= budget) & (seen.runtime_s <= found.runtime_s * SLACK))
        if len(good):
            last = int(good[-1])
            found = Assignment(tried[last], float(seen.runtime_s[last]), int(seen.memory_bytes[last]), found.solver)
    return found


def _known(model: ModelCosts, budget: int, choices: Sequence[Switches]) -> Assignment | None:
    try:
        found = [solver(model, budget, choices=choices) for solver in (greedy_solver, manual_solver)]
    except BudgetError:
        return None
    return min(found, key=lambda each: each.runtime_s)


def _assignment(model: ModelCosts, switches: Sequence[Switches]) -> Assignment:
    found = evaluate(model, array_of(switches)[None])
    return Assignment(tuple(switches), float(found.runtime_s[0]), int(found.memory_bytes[0]), "dp")


class _Search:
    """One pass. exact: nothing was thinned, so that another pass would find no better."""

    def __init__(self, simulated: Sequence[Tables], r: np.ndarray, limit: int, bins: int, bound: float, alive: int) -> None:
        self._tables, self._limit, self._bound = simulated, limit, bound * SLACK
        self._alive, self.exact = alive, True
        self._bin_bytes = max(limit, 1) / bins
        self._of_r = [np.flatnonzero(r == number) for number in range(R)]
        least = [int(t.peak_bytes.min()) for t in simulated]
        self._need = [max(least[i:], default=0) for i in range(len(simulated) + 1)]
        self._rest = self._least_runtime()

    def _least_runtime(self) -> list[np.ndarray]:
        """Per layer [r before, r of it]: the least that it and all after it can take, whatever the memory."""
        rest = [np.zeros((R, R))]
        for table in reversed(self._tables):
            total = np.full((R, R), np.inf)
            for number, mine in enumerate(self._of_r):
                if len(mine):
                    total[:, number] = (table.runtime_s[:, mine, :] + rest[0][number]).min(axis=(1, 2))
            rest.insert(0, total)
        return rest

    def run(self, start_bytes: int) -> list[int] | None:
        """Choices of the best assignment, or None where none fits or beats the bound."""
        states = self._first(start_bytes)
        history = []
        for i in range(len(self._tables)):
            groups = list(self._next(i, states))
            if not groups:
                return None
            states = _States(*(np.concatenate(columns) for columns in zip(*groups, strict=True)))
            history.append(states)
        number = int(states.runtime.argmin())
        numbers = []
        for layer in reversed(history):
            numbers.append(int(layer.choice[number]))
            number = int(layer.parent[number])
        return numbers[::-1]

    def _first(self, start_bytes: int) -> _States:
        zeros = np.zeros(R, dtype=np.int64)
        return _States(zeros, np.arange(R), zeros, zeros + start_bytes, np.zeros(R), zeros, zeros)

    def _next(self, i: int, states: _States) -> Iterator[tuple[np.ndarray, ...]]:
        """The states of layer i, group after group of (r of i, r of i+1)."""
        table, last = self._tables[i], i == len(self._tables) - 1
        for r, mine in enumerate(self._of_r):
            old = np.flatnonzero(states.mine == r)
            if not len(old) or not len(mine):
                continue
            gained = table.resident_bytes[mine]
            current = states.current[old, None] + table.delta_bytes[mine] + gained
            peaks = table.peak_bytes[states.before[old][:, None], mine]
            peak = np.maximum(states.peak[old, None, None], states.current[old, None, None] + peaks) + gained[:, None]
            runtime = states.runtime[old, None, None] + table.runtime_s[states.before[old][:, None], mine]
            good = (peak <= self._limit) & (current[:, :, None] + self._need[i + 1] <= self._limit)
            good &= runtime + self._rest[i + 1][r] <= self._bound
            for after in range(1 if last else R):
                if len(self._of_r[after]) == 0 and not last:
                    continue
                a, b = np.nonzero(good[:, :, after])
                if len(a):
                    found = current[a, b], peak[a, b, after], runtime[a, b, after]
                    kept = self._kept(*found)
                    shape = np.full(len(kept), r), np.full(len(kept), after)
                    yield (*shape, *(column[kept] for column in found), old[a[kept]], mine[b[kept]])

    def _kept(self, current: np.ndarray, peak: np.ndarray, runtime: np.ndarray) -> np.ndarray:
        """See Note [Prunings] and Note [States]."""
        order = np.lexsort((peak, current, runtime))
        if len(order) > EXACT:
            order = self._one_a_bin(order, current, peak)
        kept = not_dominated(order, current, peak)
        return kept if len(kept) <= self._alive else self._one_a_bin(kept, current, peak)[: self._alive]

    def _one_a_bin(self, order: np.ndarray, current: np.ndarray, peak: np.ndarray) -> np.ndarray:
        """The first in `order` of each pair of bins."""
        self.exact = False
        cells = (current[order] / self._bin_bytes).astype(np.int64) << 32 | (peak[order] / self._bin_bytes).astype(np.int64)
        return order[np.sort(np.unique(cells, return_index=True)[1])]


def not_dominated(order: np.ndarray, current: np.ndarray, peak: np.ndarray) -> np.ndarray:
    """Of numbers in order of runtime, those that nobody before them matches in both memories."""
    kept = []
    while len(order):
        chunk, order = order[:CHUNK], order[CHUNK:]
        c, p = current[chunk], peak[chunk]
        better = (c[:, None] <= c) & (p[:, None] <= p)
        chunk = chunk[~np.triu(better, 1).any(axis=0)]
        kept.append(chunk)
        c, p = current[chunk, None], peak[chunk, None]
        if len(order):
            order = order[~((c <= current[order]) & (p <= peak[order])).any(axis=0)]
    return np.concatenate(kept) if kept else order


State = tuple[int, int, float, tuple[int, ...]]


def basic_dp(model: ModelCosts, budget: int, *, bins: int = BINS, choices: Sequence[Switches] = SYNCHRONISED) -> Assignment:
    """Algorithm 3 as it is printed, with whole switches of both neighbours in a state: slow, for small cases.

    States of the same bins stay beside each other unless one is no better than another in anything.
    """
    choices = allowed(model, choices)
    r, limit = communication(choices), budget - model.fixed_bytes
    simulated = tables(model, choices)
    bin_bytes = max(limit, 1) / bins
    everything, last = range(len(choices)), len(simulated) - 1
    cells: dict[tuple[int, int, int, int], list[State]] = {
        (0, 0, -1, s): [(0, model.start_bytes, 0.0, (s,))] for s in everything
    }
    for i, table in enumerate(simulated):
        following: dict[tuple[int, int, int, int], list[State]] = {}
        for (_, _, before, mine), states in cells.items():
            for after in (-1,) if i == last else everything:
                left, right = (0 if s < 0 else int(r[s]) for s in (before, after))
                for current, peak, runtime, taken in states:
                    gained = int(table.resident_bytes[mine])
                    new_current = current + gained + int(table.delta_bytes[mine])
                    new_peak = max(peak, current + int(table.peak_bytes[left, mine, right])) + gained
                    if new_peak <= limit:
                        cell = following.setdefault((int(new_current / bin_bytes), int(new_peak / bin_bytes), mine, after), [])
                        new_runtime = runtime + float(table.runtime_s[left, mine, right])
                        _add(cell, (new_current, new_peak, new_runtime, (*taken, after)))
        cells = following
    found = [state for states in cells.values() for state in states]
    if not found:
        raise refuse(model, budget)
    best = min(found, key=lambda state: state[2])
    return _assignment(model, [choices[s] for s in best[3][:-1]])


def _add(cell: list[State], new: State) -> None:
    if any(all(a <= b for a, b in zip(old[:3], new[:3], strict=True)) for old in cell):
        return
    cell[:] = [old for old in cell if not all(a <= b for a, b in zip(new[:3], old[:3], strict=True))]
    cell.append(new)
