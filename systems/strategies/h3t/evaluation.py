"""Runtime(s) and Memory(s) of whole assignments, many at a time, and the tables of ModelSimulator_i for dynamic programming.

Runtime walks the segments of a step in order; that is Theta(N) for each assignment, as the paper's model simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from systems.errors import BudgetError
from systems.sizes import format_need, format_size
from systems.strategies.h3t import costs
from systems.strategies.h3t.costs import Clocks, ModelCosts, on
from systems.strategies.h3t.switches import ALL_ON, COMMUNICATION, NAMES, Bools, Switches, array_of

R = 1 << len(COMMUNICATION)


@dataclass(frozen=True)
class Evaluated:
    """One entry an assignment."""

    runtime_s: np.ndarray
    memory_bytes: np.ndarray


def evaluate(model: ModelCosts, rows: Bools) -> Evaluated:
    """rows: bools [assignments, layers, 7]."""
    memory, _ = memory_of(model, rows)
    return Evaluated(runtime_of(model, rows), memory)


def runtime_of(model: ModelCosts, rows: Bools) -> np.ndarray:
    rules, count = model.rules, len(model.layers)
    switches = _switches(rows)
    clocks = Clocks(rules, np.zeros(rows.shape[0]))
    costs.start(clocks, rules, model.start_s, model.layer(0), switches[1])
    for i in range(count):
        costs.forward(clocks, rules, _around(model, i), switches[i : i + 3])
    costs.turn(clocks, rules, model.turn_s, model.layer(count - 1), switches[count])
    for i in reversed(range(count)):
        costs.backward(clocks, rules, _around(model, i), switches[i : i + 3])
    costs.end(clocks, model.end_s, model.layer(0), switches[1])
    total: np.ndarray = clocks.end + model.fixed_s
    for i in range(count if rules.renews else 0):
        total = total + costs.renewal(rules, model.layer(i), switches[i + 1])
    return total


def memory_of(model: ModelCosts, rows: Bools) -> tuple[np.ndarray, np.ndarray]:
    """(bytes, layer that sets them), see Algorithm 4 lines 17 and 18; without synchronisation the lag is added."""
    switches = _switches(rows)
    current = np.zeros(rows.shape[0], dtype=np.int64)
    peak = np.full(rows.shape[0], model.start_bytes, dtype=np.int64)
    where = np.zeros(rows.shape[0], dtype=np.int64)
    lag = 0 * current
    for i in range(len(model.layers)):
        found = costs.memory(model.rules, _around(model, i), switches[i : i + 3])
        mine = current + found.peak + lag
        where = np.where(mine > peak, i, where)
        peak = np.maximum(peak, mine) + found.resident
        current = current + found.delta + found.resident
        lag = found.lag * ~switches[i + 1].synchronise
    return peak + model.fixed_bytes, where


def _around(model: ModelCosts, i: int) -> tuple[Any, Any, Any]:
    return model.layer(i - 1), model.layer(i), model.layer(i + 1)


def _switches(rows: Bools) -> list[Any]:
    """Per layer, with one that has all switches off on either side."""
    nothing = np.zeros((rows.shape[0], len(NAMES)), dtype=bool)
    return [on(each) for each in (nothing, *np.moveaxis(rows, 1, 0), nothing)]


@dataclass(frozen=True)
class Tables:
    """ModelSimulator of one layer with synchronisation, over (r of the layer before, choice, r of the layer after).

    runtime_s, peak_bytes: [8, choices, 8]. delta_bytes, resident_bytes: [choices].
    """

    runtime_s: np.ndarray
    peak_bytes: np.ndarray
    delta_bytes: np.ndarray
    resident_bytes: np.ndarray


def tables(model: ModelCosts, choices: Sequence[Switches]) -> list[Tables]:
    """One a layer; equal layers between equal neighbours share theirs."""
    known: dict[object, Tables] = {}
    found = []
    for i in range(len(model.layers)):
        near = (i == 0, i == len(model.layers) - 1, model.layers[max(i - 1, 0)], model.layers[i], *model.layers[i + 1 : i + 2])
        if near not in known:
            known[near] = _tables(model, i, array_of(choices))
        found.append(known[near])
    return found


def _tables(model: ModelCosts, i: int, rows: Bools) -> Tables:
    last = len(model.layers) - 1
    neighbours = np.zeros((R, len(NAMES)), dtype=bool)
    for number, row in enumerate(product((False, True), repeat=len(COMMUNICATION))):
        neighbours[number, list(COMMUNICATION)] = row[::-1]
    quiet = np.zeros_like(neighbours)
    before = on((quiet if i == 0 else neighbours)[:, None, None, :])
    after = on((quiet if i == last else neighbours)[None, None, :, :])
    mine = on(rows[None, :, None, :])
    switches, around, rules = (before, mine, after), _around(model, i), model.rules
    shape = (R, len(rows), R)
    total = np.zeros(shape)
    for segment in _segments(model, i):
        clocks = Clocks(rules, np.zeros(shape))
        segment(clocks, around, switches)
        total = total + clocks.end
    if rules.renews:
        total = total + costs.renewal(rules, model.layer(i), mine)
    memory = costs.memory(rules, around, switches)
    alone = costs.memory(rules, around, (on(np.zeros_like(rows)), on(rows), on(np.zeros_like(rows))))
    peak = np.broadcast_to(memory.peak, shape).astype(np.int64)
    return Tables(total, peak, *(np.broadcast_to(each, len(rows)).astype(np.int64) for each in (alone.delta, alone.resident)))


def _segments(model: ModelCosts, i: int) -> list[Any]:
    rules, layer = model.rules, model.layer(i)
    found: list[Any] = [
        lambda clocks, around, s: costs.forward(clocks, rules, around, s),
        lambda clocks, around, s: costs.backward(clocks, rules, around, s),
    ]
    if i == 0:
        found.append(lambda clocks, around, s: costs.start(clocks, rules, model.start_s, layer, s[1]))
        found.append(lambda clocks, around, s: costs.end(clocks, model.end_s, layer, s[1]))
    if i == len(model.layers) - 1:
        found.append(lambda clocks, around, s: costs.turn(clocks, rules, model.turn_s, layer, s[1]))
    return found


def allowed(model: ModelCosts, choices: Sequence[Switches]) -> tuple[Switches, ...]:
    """Those that mean something under the model's rules."""
    return tuple(s for s in choices if not model.rules.needs_remat or s.rematerialise or not s.offload_hidden)


def all_on(model: ModelCosts) -> Bools:
    """The minimal plan, [1, layers, 7]."""
    return np.broadcast_to(array_of([ALL_ON]), (1, len(model.layers), len(NAMES)))


def refuse(model: ModelCosts, budget: int) -> BudgetError:
    """What to raise where no assignment fits: the minimum needed, and the layer that sets it."""
    need, layer = memory_of(model, all_on(model))
    name = model.layers[int(layer[0])].name if model.layers else "no layer"
    return BudgetError(
        f"h3t needs at least {format_need(int(need[0]), budget)} of device memory with every switch on, set by {name}, "
        f"{format_size(budget)} is given: raise `device_memory`, or lower the batch or the sequence length",
        tier="device",
        need=int(need[0]),
        have=budget,
    )
