"""The one statistics module: what several processes of one system say together, and how two systems differ.

Note [Replicates are processes]
    Steps of one process share its memory layout, clocks and neighbours, so a process counts once, by one figure: a median
    over its steps, or a rate over its timed region. The centre is the median over processes. The spread is the range from
    the smallest to the largest below BOOTSTRAP_FROM processes, where resampling has too little to draw from; from there
    on it is the bootstrap's 95 % interval of the median. Ratios likewise: every pair of processes below, resampled medians
    from there on. The seed is fixed, so that the same records give the same interval.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

BOOTSTRAP_FROM = 5
RESAMPLES = 4000
_SEED = 20240229
_TAIL = 0.025

Spread = Literal["one process", "min-max", "bootstrap 95 %"]
Verdict = Literal["faster", "slower", "no difference", "too few runs"]


class Figure(BaseModel):
    """A median over n processes and its spread; low and high are null for a single one, which has none."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    median: float
    low: float | None
    high: float | None
    n: int
    spread: Spread


class Ratio(BaseModel):
    """One rate over another, above 1 where the first is faster. low, high: null where a side has a single process."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    value: float
    low: float | None
    high: float | None
    spread: Spread
    verdict: Verdict


def _resample(values: Sequence[float], draw: random.Random) -> float:
    return statistics.median(draw.choices(values, k=len(values)))


def _interval(resampled: list[float]) -> tuple[float, float]:
    """The middle 95 % of what resampling gave."""
    resampled.sort()
    last = len(resampled) - 1
    return resampled[round(_TAIL * last)], resampled[round((1 - _TAIL) * last)]


def summarize(values: Sequence[float]) -> Figure | None:
    """values: one a process. None if there is none."""
    if not values:
        return None
    median, n = statistics.median(values), len(values)
    if n == 1:
        return Figure(median=median, low=None, high=None, n=1, spread="one process")
    if n < BOOTSTRAP_FROM:
        return Figure(median=median, low=min(values), high=max(values), n=n, spread="min-max")
    draw = random.Random(_SEED)
    low, high = _interval([_resample(values, draw) for _ in range(RESAMPLES)])
    return Figure(median=median, low=low, high=high, n=n, spread="bootstrap 95 %")


def compare_rates(rates: Sequence[float], reference: Sequence[float]) -> Ratio | None:
    """rates, reference: one a process, higher is faster. None where a side has no process, or a reference of zero."""
    if not rates or not reference or min(reference) <= 0:
        return None
    value, fewest = statistics.median(rates) / statistics.median(reference), min(len(rates), len(reference))
    if fewest == 1:
        return Ratio(value=value, low=None, high=None, spread="one process", verdict="too few runs")
    spread: Spread
    if fewest < BOOTSTRAP_FROM:
        spread, low, high = "min-max", min(rates) / max(reference), max(rates) / min(reference)
    else:
        draw = random.Random(_SEED)
        spread = "bootstrap 95 %"
        low, high = _interval([_resample(rates, draw) / _resample(reference, draw) for _ in range(RESAMPLES)])
    verdict: Verdict = "no difference" if low <= 1 <= high else "faster" if low > 1 else "slower"
    return Ratio(value=value, low=low, high=high, spread=spread, verdict=verdict)
