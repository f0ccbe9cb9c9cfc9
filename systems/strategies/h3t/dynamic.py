"""Dynamic programming over the layers (paper, section 3.3.2 and appendix B.3), segment synchronisation forced on.

Note [States]
    After segment i a state is (current memory, peak memory, switches of i, switches of i+1) with the least runtime so far.
    Memory is kept exactly; the m bins of the paper only tell which states are alike, where there are too many to keep all.
    The switches that a state knows are R, the three of communication (Algorithm 4). In Algorithm 3 it knows all of them, which
    gives far more states for the same optimum: `basic.py`.

Note [Prunings]
    The second of the paper: a state with no less memory, peak and runtime than another is dropped. Ours: choices that another
    matches in everything are left out (Note [Needless choices]), and states that cannot lead to anything faster than the best
    assignment known (Note [Prices]).

Note [Passes]
    A pass keeps at most `width` states a layer, those with the least bound, and makes the best assignment known better, so
    that the next one has fewer to look at. A pass that leaves nothing out has found the optimum, and is the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from systems.errors import BudgetError
from systems.strategies.h3t.bounds import Bounds, Stacked, raise_prices, stacked
from systems.strategies.h3t.costs import ModelCosts
from systems.strategies.h3t.evaluation import R, allowed, evaluate, refuse, tables
from systems.strategies.h3t.solvers import manual_solver
from systems.strategies.h3t.switches import NAMES, SYNCHRONISED, Assignment, Switches, array_of, communication, switches_of

BINS = 128
CHUNK = 128
NEAR = (1, 2, 3, 4, 6, 8, 12, 16)  # how many places before a state those are that it is compared with first
SLACK = 1e-12
CODE = 1 << np.arange(len(NAMES))  # of switches as one number


def pruned_dp(model: ModelCosts, budget: int, *, bins: int = BINS, choices: Sequence[Switches] = SYNCHRONISED) -> Assignment:
    """Algorithm 4. BudgetError if nothing fits."""
    return solved(Pass, model, budget, bins, choices)


def solved(search: type[Pass], model: ModelCosts, budget: int, bins: int, choices: Sequence[Switches]) -> Assignment:
    """By passes of one kind, see Note [Passes]."""
    choices = sorted(allowed(model, choices), key=lambda s: int(communication([s])[0]))
    known = _known(model, budget, choices)
    if model.layers and choices:
        limit, r = budget - model.fixed_bytes, communication(choices)
        costs = stacked(tables(model, choices), r)
        known_s = np.inf if known is None else known.runtime_s - model.fixed_s
        bounds, numbers = raise_prices(costs, limit, known_s)
        for width in search.widths:
            if numbers is not None:
                known = _better(model, budget, known, [choices[costs.number[number]] for number in numbers])
            bound = np.inf if known is None else known.runtime_s - model.fixed_s
            this = search(costs, bounds, limit, bins, bound, width)
            numbers = this.run(model.start_bytes)
            if this.exact:
                break
        if numbers is not None:
            known = _better(model, budget, known, [choices[costs.number[number]] for number in numbers])
    if known is None:
        raise refuse(model, budget)
    return replace(_spared(model, known, budget, choices), solver="dp")


def _spared(model: ModelCosts, found: Assignment, budget: int, choices: Sequence[Switches]) -> Assignment:
    """Switches that save neither time nor needed memory are turned off, in as many of the first layers as that holds for."""
    rows, codes = array_of(found.switches), array_of(choices) @ CODE
    for column, name in enumerate(NAMES):
        if name in ("rematerialise", "synchronise") or not rows[:, column].any():
            continue
        tried = np.repeat(rows[None], len(rows), axis=0)
        tried[..., column] &= ~np.tri(len(rows), dtype=bool)
        tried = tried[np.isin(tried @ CODE, codes).all(axis=1)]
        seen = evaluate(model, tried)
        good = np.flatnonzero((seen.memory_bytes <= budget) & (seen.runtime_s <= found.runtime_s * (1 + SLACK)))
        if len(good):
            last = int(good[-1])
            rows = tried[last]
            found = Assignment(switches_of(rows), float(seen.runtime_s[last]), int(seen.memory_bytes[last]), found.solver)
    return found


def _known(model: ModelCosts, budget: int, choices: Sequence[Switches]) -> Assignment | None:
    try:
        return manual_solver(model, budget, choices=choices)
    except BudgetError:
        return None


def _better(model: ModelCosts, budget: int, known: Assignment | None, switches: Sequence[Switches]) -> Assignment | None:
    """The faster of both that fits."""
    seen = evaluate(model, array_of(switches)[None])
    runtime_s, memory = float(seen.runtime_s[0]), int(seen.memory_bytes[0])
    if memory > budget or (known is not None and known.runtime_s <= runtime_s):
        return known
    return Assignment(tuple(switches), runtime_s, memory, "dp")


@dataclass(frozen=True)
class States:
    """One entry a state. before: r of the layer before; mine: key of the next; bound_s: the least that it can come to.

    parent: its number in the layer before; choice: of this layer.
    """

    before: np.ndarray
    mine: np.ndarray
    current: np.ndarray
    peak: np.ndarray
    runtime: np.ndarray
    bound_s: np.ndarray
    parent: np.ndarray
    choice: np.ndarray

    def __len__(self) -> int:
        return len(self.runtime)

    def only(self, which: np.ndarray) -> States:
        return States(*(getattr(self, name)[which] for name in self.__dataclass_fields__))


class Pass:
    """See Note [Passes]. exact: nothing was left out for want of width, so that no other pass would find better.

    widths: of the passes in turn. candidates: times the width, states that are looked at closely.
    """

    widths: ClassVar[tuple[int, ...]] = (200, 2_000, 10_000)
    candidates: ClassVar[int] = 8

    def __init__(self, costs: Stacked, bounds: Bounds, limit: int, bins: int, known_s: float, width: int) -> None:
        self._costs, self._bounds, self._limit, self._width = costs, bounds, limit, width
        self._key, self._count = self._keys()
        self._bin_bytes = max(limit, 1) / bins
        self._bound = known_s + SLACK * (known_s + bounds.ahead[0] * abs(limit))
        self.exact = True

    def _keys(self) -> tuple[np.ndarray, int]:
        """What a state knows of a layer, as a number for each choice, ascending; how many numbers there are."""
        return self._costs.r, R

    def run(self, start_bytes: int) -> list[int] | None:
        """Choices of the best assignment, or None where none fits or beats the bound."""
        states, history = self._first(start_bytes), []
        for i in range(len(self._costs.delta_bytes)):
            states = self._kept(self._next(i, states))
            history.append(states)
            if not len(states):
                return None
        number = int(states.runtime.argmin())
        numbers = []
        for layer in reversed(history):
            numbers.append(int(layer.choice[number]))
            number = int(layer.parent[number])
        return numbers[::-1]

    def _first(self, start_bytes: int) -> States:
        keys = np.unique(self._key)
        zeros = np.zeros(len(keys), dtype=np.int64)
        return States(zeros, keys, 0.0 * zeros, 0.0 * zeros + start_bytes, 0.0 * zeros, 0.0 * zeros, zeros, zeros)

    def _next(self, i: int, states: States) -> States:
        """All states of layer i that fit and that the bound lets live."""
        costs, bounds, limit, r = self._costs, self._bounds, self._limit, self._costs.r
        spent = states.runtime + bounds.ahead[i] * (states.current - limit) + bounds.behind[i] * (states.peak - limit)
        parent, choice = self._taken(i, states.mine)
        good = bounds.through[i][:, states.before[parent], choice] <= (self._bound - spent)[parent]
        last = i == len(costs.delta_bytes) - 1
        if last:
            good[1:] = False
        after_r, taken = np.nonzero(good)
        parent, choice, after = parent[taken], choice[taken], after_r
        if not last:
            those, after = self._next_keys(i + 1, after_r)
            parent, choice, after_r = parent[those], choice[those], after_r[those]
        before, resident = states.before[parent], costs.resident_bytes[i, choice]
        current = states.current[parent] + costs.delta_bytes[i, choice] + resident
        peak = np.maximum(states.peak[parent], states.current[parent] + costs.peak_bytes[i, after_r, before, choice]) + resident
        runtime = states.runtime[parent] + costs.runtime_s[i, after_r, before, choice]
        bound_s = runtime + bounds.ahead[i + 1] * (current - limit) + bounds.behind[i + 1] * (peak - limit)
        if not last:
            bound_s += self._rest(i + 1)[r[choice], after]
        alive = np.flatnonzero((peak <= limit) & (bound_s <= self._bound))
        return States(r[choice], after, current, peak, runtime, bound_s, parent, choice).only(alive)

    def _taken(self, i: int, mine: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(number of the state, choice) for all useful choices of layer i."""
        members = np.flatnonzero(self._costs.useful[i])
        return pairs(mine, self._key[members], members, self._count)

    def _next_keys(self, i: int, after_r: np.ndarray) -> tuple[np.ndarray | slice, np.ndarray]:
        """(number, key of layer i) for all that a state may know of a layer whose r is `after_r`."""
        return slice(None), after_r

    def _rest(self, i: int) -> np.ndarray:
        """[r before, key of i]: the least that layer i and all after it take."""
        return self._bounds.rest[i]

    def _kept(self, states: States) -> States:
        """See Note [Prunings] and Note [Passes]."""
        most = self.candidates * self._width
        if len(states) > most:
            self.exact = False
            states = states.only(np.argpartition(states.bound_s, most)[:most])
        group = self._key[states.choice] * self._count + states.mine
        current, peak = ((memory / self._bin_bytes).astype(np.int64) for memory in (states.current, states.peak))
        cells = (group << 40) + (current << 20) + peak
        order = self._undominated(states, group, cells)
        if len(order) > self._width:
            self.exact = False
            order = _first_of_each(order, cells, states.bound_s)[: self._width]
        return states.only(order)

    def _undominated(self, states: States, group: np.ndarray, cells: np.ndarray) -> np.ndarray:
        """Numbers of states, without those that another matches. group: of what states know; cells: with bins of memory."""
        order = np.lexsort((states.current, states.runtime, group))
        return not_dominated(without_near(order, group, states), group, states.current, states.peak)


def _first_of_each(order: np.ndarray, cells: np.ndarray, bound_s: np.ndarray) -> np.ndarray:
    """The best of all cells, the second best of all cells, and so on; those of one rank by bound."""
    order = order[np.lexsort((bound_s[order], cells[order]))]
    starts = np.flatnonzero(np.concatenate([[True], np.diff(cells[order]) != 0]))
    rank = np.arange(len(order)) - np.repeat(starts, np.diff(np.append(starts, len(order))))
    return order[np.lexsort((bound_s[order], rank))]


def pairs(wanted: np.ndarray, keys: np.ndarray, members: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(position in `wanted`, member with that key) for every such pair. keys: of each member, ascending, under `count`."""
    sizes = np.bincount(keys, minlength=count)
    starts, many = np.cumsum(sizes) - sizes, sizes[wanted]
    positions = np.repeat(np.arange(len(wanted)), many)
    within = np.arange(len(positions)) - np.repeat(np.cumsum(many) - many, many)
    return positions, members[starts[wanted][positions] + within]


def without_near(order: np.ndarray, group: np.ndarray, states: States) -> np.ndarray:
    """`order` without those that one of a few places before them in the same group matches in both memories."""
    group, current, peak = group[order], states.current[order], states.peak[order]
    for near in NEAR:
        worse = (group[near:] == group[:-near]) & (current[:-near] <= current[near:]) & (peak[:-near] <= peak[near:])
        stays = np.concatenate([np.ones(min(near, len(order)), dtype=bool), ~worse])
        order, group, current, peak = order[stays], group[stays], current[stays], peak[stays]
    return order


EARLIER = np.triu(np.ones((CHUNK, CHUNK), dtype=bool), 1)


def not_dominated(order: np.ndarray, group: np.ndarray, current: np.ndarray, peak: np.ndarray) -> np.ndarray:
    """Of numbers in order of group and runtime, those that nobody of their group before them matches in both memories."""
    kept = []
    for left in np.split(order, np.flatnonzero(np.diff(group[order])) + 1):
        while len(left):
            chunk, left = left[:CHUNK], left[CHUNK:]
            c, p = current[chunk], peak[chunk]
            better = (c[:, None] <= c) & (p[:, None] <= p) & EARLIER[: len(chunk), : len(chunk)]
            chunk = chunk[~better.any(axis=0)]
            kept.append(chunk)
            if len(left):
                c, p = current[chunk, None], peak[chunk, None]
                left = left[~((c <= current[left]) & (p <= peak[left])).any(axis=0)]
    return np.concatenate(kept) if kept else order
