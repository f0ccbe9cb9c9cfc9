"""Dynamic programming without prunings (paper, Algorithm 3 in appendix B.3): a state knows the whole switches of two layers.

It finds what Algorithm 4 finds, from far more states, and is there to be compared with that. Line 14 of Algorithm 3 adds only
what a layer keeps for good to the current memory, line 17 of Algorithm 4 also what it keeps from forward to backward (delta):
they disagree, and the second is right, as current memory is that after forward. It is taken here too. Memory is kept exactly
beside its bin, of which the m of the paper tell which states are alike; of those the fastest stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from systems.strategies.h3t.costs import ModelCosts
from systems.strategies.h3t.dynamic import BINS
from systems.strategies.h3t.evaluation import Tables, allowed, evaluate, refuse, tables
from systems.strategies.h3t.switches import SYNCHRONISED, Assignment, Switches, array_of, communication

MOST = 10**8  # transitions
MEANT = tuple(s for s in SYNCHRONISED if s.rematerialise or not s.offload_hidden)  # what this substrate tells apart


def transitions(layers: int, bins: int, choices: int = len(MEANT)) -> int:
    """At most: states are m^2 N |S|^2, each with |S| choices of the next layer (appendix B.3)."""
    return bins**2 * layers * choices**3


def check_size(layers: int, bins: int, choices: int = len(MEANT)) -> None:
    """ValueError, one line, for what would take too long."""
    found = transitions(layers, bins, choices)
    if found > MOST:
        raise ValueError(
            f"h3t's solver=basic-dp would look at up to {found:.1e} transitions ({layers} layers, {choices} choices for each, "
            f"{bins} bins), {MOST:.0e} are allowed: lower bins, or use solver=dp, which prunes them"
        )


@dataclass(frozen=True)
class _Wholes:
    """States after a layer, one entry each. before: r of that layer, 0 at first; mine: number of the next layer's choice."""

    before: np.ndarray
    mine: np.ndarray
    current: np.ndarray
    peak: np.ndarray
    runtime: np.ndarray
    parent: np.ndarray


def basic_dp(model: ModelCosts, budget: int, *, bins: int = BINS, choices: Sequence[Switches] = SYNCHRONISED) -> Assignment:
    """Algorithm 3. BudgetError if nothing fits; ValueError if there are too many transitions."""
    choices = allowed(model, choices)
    check_size(len(model.layers), bins, len(choices))
    limit, count, history = budget - model.fixed_bytes, len(choices), list[_Wholes]()
    zeros = np.zeros(count, dtype=np.int64)
    states = _Wholes(zeros, np.arange(count), zeros, zeros + model.start_bytes, 0.0 * zeros, zeros)  # lines 3 to 5
    r = communication(choices)
    for i, simulated in enumerate(tables(model, choices)):
        history.append(states)
        following = [(-1, 0)] if i == len(model.layers) - 1 else list(enumerate(r))  # lines 10 to 12
        found = [_next(states, simulated, r, number, int(after), limit, bins) for number, after in following]
        states = _Wholes(*(np.concatenate([getattr(each, name) for each in found]) for name in _Wholes.__dataclass_fields__))
    if not len(states.runtime):
        raise refuse(model, budget)
    numbers, place = [], int(states.runtime.argmin())  # lines 26 to 30
    place = int(states.parent[place])
    for layer in reversed(history):
        numbers.append(int(layer.mine[place]))
        place = int(layer.parent[place])
    return _as_assigned(model, [choices[number] for number in reversed(numbers)])


def _next(states: _Wholes, simulated: Tables, r: np.ndarray, number: int, after: int, limit: int, bins: int) -> _Wholes:
    """Lines 13 to 20 for one choice of the next layer. after: its r."""
    mine = states.mine
    resident = simulated.resident_bytes[mine]
    current = states.current + resident + simulated.delta_bytes[mine]
    peak = np.maximum(states.peak, states.current + simulated.peak_bytes[states.before, mine, after]) + resident
    runtime = states.runtime + simulated.runtime_s[states.before, mine, after]
    here = np.flatnonzero(peak <= limit)
    cells = [(memory[here] * bins // max(limit, 1)).astype(np.int64) for memory in (current, peak)]
    key = (mine[here] * (bins + 1) + cells[0]) * (bins + 1) + cells[1]
    order = np.lexsort((runtime[here], key))
    first = np.ones(len(order), dtype=bool)
    first[1:] = key[order][1:] != key[order][:-1]
    kept = here[order[first]]
    return _Wholes(r[mine[kept]], np.full(len(kept), number), current[kept], peak[kept], runtime[kept], kept)


def _as_assigned(model: ModelCosts, switches: Sequence[Switches]) -> Assignment:
    seen = evaluate(model, array_of(switches)[None])
    return Assignment(tuple(switches), float(seen.runtime_s[0]), int(seen.memory_bytes[0]), "basic-dp")
