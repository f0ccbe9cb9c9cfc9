"""The one statistics module: what several processes of one system say together, and how two systems differ.

Note [Replicates are processes]
    Steps of one process share its memory layout, clocks and neighbours, so a process counts once, by one figure: a median
    over its steps, or a rate over its timed region. The centre is the median over processes. The spread is the range from
    the smallest to the largest below BOOTSTRAP_FROM processes, where resampling has too little to draw from; from there
    on it is the bootstrap's 95 % interval of the median. The seed is fixed, so that the same records give the same interval.

Note [Verdicts]
    Two equal systems may be called faster or slower in one comparison of twenty, whatever the noise is like. The ranges of
    two equal systems lie apart in 33 % of comparisons of two processes each and in 10 % of three, and resampled medians go
    wrong where one system scatters more than the other (10 %, seven processes, ten times the scatter). So a ratio has
    Student's interval of the mean logarithms, with the degrees of freedom of the smaller side alone, which are right for
    any two variances of normal noise, and the larger of two errors: with each side's own variance, and with that of both
    together, since few processes may by chance have missed what many have met. In simulations (3 to 40 processes a side;
    normal, lognormal and heavy-tailed noise, outliers, two and three modes, scatter of 1 to 10) it went wrong in 0 to 5 %,
    and in 5.6 % with seven processes that take one of two values and none between.
    Two processes give no verdict: where a system has two modes, both of one may be in the one and both of the other in
    the other, which went wrong in 12 %. What there is of them is shown as the range of all pairs.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

BOOTSTRAP_FROM = 5
ENOUGH_PROCESSES = 3  # of each side, for a verdict
RESAMPLES = 4000
LARGEST = 1e30  # of a figure, and its inverse the smallest of a rate: what is beyond was not measured
_SEED = 20240229
_TAIL = 0.025
# Student's t at 97.5 %, from one degree of freedom on. Beyond the last the last is kept: a little wider than it need be.
_STUDENT = (
    12.706, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604, 2.1448, 2.1314,
    2.1199, 2.1098, 2.1009, 2.0930, 2.0860, 2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip

Spread = Literal["one process", "min-max", "bootstrap 95 %", "t 95 %"]
Verdict = Literal["faster", "slower", "no difference", "too few runs"]


class MedianFigure(BaseModel):
    """A median over n processes and its spread; low and high are null for a single one, which has none."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    median: float
    low: float | None
    high: float | None
    n: int
    spread: Spread


class Ratio(BaseModel):
    """One rate over another, above 1 where the first is faster. low, high: null where a side has a single process.

    value: of the medians.
    """

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


def summarize(values: Sequence[float]) -> MedianFigure | None:
    """values: one a process. None if there is none."""
    if not values:
        return None
    median, n = statistics.median(values), len(values)
    if n == 1:
        return MedianFigure(median=median, low=None, high=None, n=1, spread="one process")
    if n < BOOTSTRAP_FROM:
        return MedianFigure(median=median, low=min(values), high=max(values), n=n, spread="min-max")
    draw = random.Random(_SEED)
    low, high = _interval([_resample(values, draw) for _ in range(RESAMPLES)])
    return MedianFigure(median=median, low=low, high=high, n=n, spread="bootstrap 95 %")


def compare_rates(rates: Sequence[float], reference: Sequence[float]) -> Ratio | None:
    """rates, reference: one a process, higher is faster. None where a side has no process, or one that has no rate.

    See Note [Verdicts].
    """
    if not rates or not reference or not all(1 / LARGEST < rate < LARGEST for rate in (*rates, *reference)):
        return None
    value, fewest = statistics.median(rates) / statistics.median(reference), min(len(rates), len(reference))
    if fewest == 1:
        return Ratio(value=value, low=None, high=None, spread="one process", verdict="too few runs")
    if fewest < ENOUGH_PROCESSES:
        low, high = min(rates) / max(reference), max(rates) / min(reference)
        return Ratio(value=value, low=low, high=high, spread="min-max", verdict="too few runs")
    low, high = _student(rates, reference)
    low, high = min(low, value), max(high, value)  # of many processes a median may lie far from the mean
    verdict: Verdict = "no difference" if low <= 1 <= high else "faster" if low > 1 else "slower"
    return Ratio(value=value, low=low, high=high, spread="t 95 %", verdict=verdict)


def _student(rates: Sequence[float], reference: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the ratio of geometric means."""
    ours, theirs = [math.log(rate) for rate in rates], [math.log(rate) for rate in reference]
    centre = statistics.fmean(ours) - statistics.fmean(theirs)
    n, m, a, b = len(ours), len(theirs), statistics.variance(ours), statistics.variance(theirs)
    apart, pooled = a / n + b / m, ((n - 1) * a + (m - 1) * b) / (n + m - 2) * (1 / n + 1 / m)
    reach = _STUDENT[min(n, m, len(_STUDENT) + 1) - 2] * math.sqrt(max(apart, pooled))
    return math.exp(centre - reach), math.exp(centre + reach)
