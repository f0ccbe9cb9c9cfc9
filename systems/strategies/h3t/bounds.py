"""What the layers to come take at the least, with a price on memory: lets dynamic programming drop states early.

Note [Prices]
    With d_j, a_j, p_j the delta, resident and peak memory of layer j, an assignment fits if for every layer k
        d_1 + .. + d_(k-1) + p_k + a_1 + .. + a_N <= limit,
    which is line 18 of Algorithm 4 written out. Give constraint k a price l_k >= 0, in seconds a byte, and add
    l_k * (left side - limit) to the runtime. An assignment that fits only gets cheaper by that, so the cheapest of all
    assignments, whether they fit or not, is a lower bound of the optimum (a Lagrangian relaxation). The sum splits into one
    term a layer; its minimum is a dynamic program over the three switches of communication alone. Prices are raised by the
    subgradient method with Polyak's step. Assignments that it meets on the way and that fit are good solutions themselves.
    For a state after layer i, with current memory c, peak m and runtime t, the same split gives
        t + (l_(i+1) + .. + l_N) * (c - limit) + (l_1 + .. + l_i) * (m - limit) + rest of i.

Note [Needless choices]
    A choice of layer i is left out if another is no worse in delta, resident memory, time and peak, beside all neighbours,
    and in what it does to the time and peak of both neighbours. Swapping it in keeps every assignment as good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from systems.strategies.h3t.evaluation import R, Tables

BISECTIONS = 20
ITERATIONS = 40
PATIENCE = 5  # iterations without a better bound after which steps get shorter
SHORTER = 0.6
CLOSE = 1e-9  # relative distance of bound and solution that ends the search for prices


@dataclass(frozen=True)
class Stacked:
    """Tables of all layers, choices in order of r; those needless in all layers are left out.

    runtime_s, peak_bytes: [layers, r after, r before, choices]; runtime is infinite for needless choices. delta_bytes,
    resident_bytes: [layers, choices]. useful: bools [layers, choices]. r, number: [choices], number is that in the tables.
    """

    runtime_s: np.ndarray
    peak_bytes: np.ndarray
    delta_bytes: np.ndarray
    resident_bytes: np.ndarray
    useful: np.ndarray
    r: np.ndarray
    number: np.ndarray


@dataclass(frozen=True)
class Bounds:
    """See Note [Prices]. Seconds, and seconds a byte.

    through: per layer [r after, r before, choices], the least of it and all after it. rest: one more, [r before, r of it].
    ahead, behind: prices of a byte of current memory and of peak, before each layer and after the last.
    """

    through: list[np.ndarray]
    rest: list[np.ndarray]
    ahead: np.ndarray
    behind: np.ndarray


def stacked(tables: Sequence[Tables], r: np.ndarray) -> Stacked:
    """r: of each choice, ascending."""
    known: dict[tuple[int, ...], np.ndarray] = {}
    useful = np.ones((len(tables), len(r)), dtype=bool)
    for i in range(len(tables)):
        near = tables[i - 1] if i > 0 else None, tables[i], tables[i + 1] if i + 1 < len(tables) else None
        key = tuple(map(id, near))
        if key not in known:
            known[key] = _useful(near, r)
        useful[i] = known[key]
    number = np.flatnonzero(useful.any(axis=0))
    useful = useful[:, number]
    runtime, peak = (
        np.stack([getattr(t, name)[:, number].transpose(2, 0, 1) for t in tables]).astype(float)
        for name in ("runtime_s", "peak_bytes")
    )
    delta, resident = (
        np.stack([getattr(t, name)[number] for t in tables]).astype(float) for name in ("delta_bytes", "resident_bytes")
    )
    runtime[~np.broadcast_to(useful[:, None, None], runtime.shape)] = np.inf
    return Stacked(runtime, peak, delta, resident, useful, r[number], number)


def _useful(near: tuple[Tables | None, Tables, Tables | None], r: np.ndarray) -> np.ndarray:
    """Bools [choices], see Note [Needless choices]. near: of the layer before, this one and the next."""
    left, mine, right = near
    no_worse: np.ndarray = np.ones((len(r), len(r)), dtype=bool)  # [one, other]
    for column in (mine.delta_bytes, mine.resident_bytes):
        no_worse &= np.less_equal.outer(column, column)
    for name in ("runtime_s", "peak_bytes"):
        table = getattr(mine, name).transpose(0, 2, 1).reshape(-1, len(r))
        no_worse &= (table[:, :, None] <= table[:, None]).all(axis=0)
        if left is not None:
            table = getattr(left, name).reshape(-1, R)
            no_worse &= (table[:, :, None] <= table[:, None]).all(axis=0)[np.ix_(r, r)]
        if right is not None:
            table = getattr(right, name).reshape(R, -1)
            no_worse &= (table[:, None] <= table).all(axis=2)[np.ix_(r, r)]
    first = np.triu(np.ones_like(no_worse), 1)  # of two that are equal the first stays
    useful: np.ndarray = ~(no_worse & (~no_worse.T | first)).any(axis=0)
    return useful


def bounds_of(model: Stacked, prices: np.ndarray) -> Bounds:
    """prices: [layers]."""
    total = prices.sum()
    ahead = np.concatenate([[total], total - np.cumsum(prices)])
    through = model.peak_bytes * prices[:, None, None, None]
    through += model.runtime_s
    through += (ahead[1:, None] * model.delta_bytes + total * model.resident_bytes)[:, None, None]
    present, starts = np.unique(model.r, return_index=True)
    rest = [np.zeros((R, R))]
    for layer in reversed(through):
        layer += rest[0][model.r].T[:, None]
        least = np.full((R, R), np.inf)
        least[:, present] = np.minimum.reduceat(layer.min(axis=0), starts, axis=1)
        rest.insert(0, least)
    return Bounds(list(through), rest, ahead, total - ahead)


class _Ascent:
    """Looks for prices with a high bound. known_s: of the fastest assignment that fits; found: its choices, if met here."""

    def __init__(self, model: Stacked, limit: int, known_s: float) -> None:
        self._model, self._limit, self.known_s = model, limit, known_s
        self.prices = np.zeros(len(model.delta_bytes))
        self.least_s = -np.inf
        self.found: list[int] | None = None

    def look(self, prices: np.ndarray) -> tuple[float, np.ndarray]:
        """The bound under these prices, and by how much each constraint is broken by the assignment that it is of."""
        bounds = bounds_of(self._model, prices)
        cheapest_s = float(bounds.rest[0][0].min() - prices.sum() * self._limit)
        runtime_s, excess, path = _cheapest(self._model, bounds, self._limit)
        if excess.max() <= 0 and runtime_s < self.known_s:
            self.known_s, self.found = runtime_s, path
        if cheapest_s > self.least_s:
            self.prices, self.least_s = prices, cheapest_s
        return cheapest_s, excess

    @property
    def done(self) -> bool:
        return self.known_s - self.least_s <= CLOSE * self.known_s

    def on_one(self) -> None:
        """A price on the constraint that is broken most if memory is free: doubled until it holds, then bisected."""
        least_s, excess = self.look(self.prices)
        if excess.max() <= 0:
            return
        one = np.zeros_like(self.prices)
        one[excess.argmax()] = 1.0
        low, high, price = 0.0, np.inf, (least_s + CLOSE) / max(abs(self._limit), 1)
        for _ in range(BISECTIONS):
            broken = self.look(price * one)[1][excess.argmax()] > 0
            low, high = (price, high) if broken else (low, price)
            price = 2 * price if high == np.inf else (low + high) / 2

    def on_all(self) -> None:
        prices, step, waited = self.prices, 1.0, 0
        for _ in range(ITERATIONS):
            before_s = self.least_s
            cheapest_s, excess = self.look(prices)
            waited = 0 if self.least_s > before_s else waited + 1
            if waited == PATIENCE:
                prices, step, waited = self.prices, step * SHORTER, 0
            moving = (prices > 0) | (excess > 0)
            length = float((excess[moving] ** 2).sum())
            if length == 0 or self.done:
                return
            above_s = self.known_s - cheapest_s if self.known_s < np.inf else abs(cheapest_s) + CLOSE
            prices = np.maximum(0.0, prices + step * above_s / length * excess * moving)


def raise_prices(model: Stacked, limit: int, known_s: float) -> tuple[Bounds, list[int] | None]:
    """Bounds with the best prices found, and the fastest assignment met that fits and takes less than known_s, if any."""
    ascent = _Ascent(model, limit, known_s)
    ascent.on_one()
    ascent.on_all()
    return bounds_of(model, ascent.prices), ascent.found


def _cheapest(model: Stacked, bounds: Bounds, limit: int) -> tuple[float, np.ndarray, list[int]]:
    """The assignment that the bound is of: its runtime, by how much each layer's constraint is broken, its choices."""
    numbers = np.arange(len(model.delta_bytes))
    before, mine = 0, int(bounds.rest[0][0].argmin())
    steps = []
    for layer in bounds.through:
        members = np.flatnonzero(model.r == mine)
        after, position = divmod(int(layer[:, before, members].argmin()), len(members))
        steps.append((after, before, int(members[position])))
        before, mine = mine, after
    after_r, before_r, choice = (np.array(column) for column in zip(*steps, strict=True))
    delta, resident = model.delta_bytes[numbers, choice], model.resident_bytes[numbers, choice]
    peak = model.peak_bytes[numbers, after_r, before_r, choice]
    excess = np.cumsum(delta) - delta + peak + resident.sum() - limit
    return float(model.runtime_s[numbers, after_r, before_r, choice].sum()), excess, choice.tolist()
