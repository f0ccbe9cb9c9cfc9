"""Algorithm 4 of the H3T paper (appendix B.3) in plain Python, line by line, with a byte as the unit of memory.

Where memory is counted in bytes and m is one more than the limit, the discretisation of the paper loses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from systems.strategies.h3t.costs import ModelCosts
from systems.strategies.h3t.evaluation import R, tables
from systems.strategies.h3t.switches import Switches, communication

NULL = 0  # beyond both ends: its three switches are off

State = tuple[int, int, int, int]  # current memory, peak memory, r of this layer, r of the next


def algorithm_4(model: ModelCosts, budget: int, choices: Sequence[Switches]) -> tuple[float, tuple[int, ...] | None]:
    """(least runtime, choices of it by number), infinite and None where nothing fits. The comments are the paper's lines."""
    m, count = budget - model.fixed_bytes + 1, len(model.layers)
    r_of = [int(number) for number in communication(choices)]
    solution: dict[State, tuple[int, ...]] = {(0, model.start_bytes, NULL, r): () for r in range(R)}  # 1, 4-5
    runtime: dict[State, float] = dict.fromkeys(solution, 0.0)  # 2, 6
    alive = list(solution)  # 3, 7
    for i, simulated in enumerate(tables(model, choices)):  # 9
        next_solution: dict[State, tuple[int, ...]] = {}
        next_runtime: dict[State, float] = {}
        for state in alive:  # 10
            current, peak, r_before, r_mine = state
            for s in (s for s in range(len(choices)) if r_of[s] == r_mine):  # 11
                for r_after in range(R) if i < count - 1 else (NULL,):  # 12-15
                    delta, resident = int(simulated.delta_bytes[s]), int(simulated.resident_bytes[s])  # 16
                    needed = int(simulated.peak_bytes[r_before, s, r_after])
                    new_current = current + resident + delta  # 17
                    new_peak = max(peak, current + needed) + resident  # 18
                    new_runtime = runtime[state] + float(simulated.runtime_s[r_before, s, r_after])  # 19
                    new = (new_current, new_peak, r_mine, r_after)
                    if new_peak < m and new_runtime < next_runtime.get(new, inf):  # 20
                        next_solution[new] = (*solution[state], s)  # 21
                        next_runtime[new] = new_runtime  # 22
        solution, runtime = next_solution, next_runtime
        alive = _scanned(runtime, m)
    best_s, best = inf, None  # 44-45
    for state, taken in solution.items():  # 46
        if runtime[state] < best_s:  # 47
            best_s, best = runtime[state], taken  # 48-49
    return best_s + model.fixed_s, best


def _scanned(runtime: dict[State, float], m: int) -> list[State]:
    """The states that no other with less of both memories is as fast as, by a scan of the plane (lines 27 to 38)."""
    alive = []
    for r_mine, r_after in sorted({state[2:] for state in runtime}):  # 28-29, but for pairs without a state
        least: dict[tuple[int, int], float] = {}
        for current in range(m + 1):  # 30
            for peak in range(m + 1):  # 31; from 0: memory of the start may lie under the peak
                state = (current, peak, r_mine, r_after)
                others = min(least.get((current - 1, peak), inf), least.get((current, peak - 1), inf))  # 32-33
                mine = runtime.get(state, inf)
                if mine < others:  # 34
                    alive.append(state)  # 35
                least[current, peak] = min(mine, others)  # 37
    return alive
