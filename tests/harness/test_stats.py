"""Medians over processes, their spread, and what may be called a difference."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable

import pytest

from harness.stats import BOOTSTRAP_FROM, ENOUGH_PROCESSES, compare_rates, summarize


def test_a_process_counts_once_and_one_has_no_spread() -> None:
    assert summarize([]) is None
    one = summarize([2.0])
    assert one is not None
    assert (one.median, one.low, one.high, one.n, one.spread) == (2.0, None, None, 1, "one process")


def test_few_processes_have_the_range_as_their_spread() -> None:
    figure = summarize([3.0, 1.0, 2.0, 9.0])
    assert figure is not None
    assert (figure.median, figure.low, figure.high, figure.spread) == (2.5, 1.0, 9.0, "min-max")


def test_from_five_on_the_bootstrap_gives_the_interval() -> None:
    values = [1.0, 1.1, 1.2, 1.3, 9.0]
    figure = summarize(values)
    assert len(values) == BOOTSTRAP_FROM
    assert figure is not None
    assert figure.spread == "bootstrap 95 %"
    assert figure.median == 1.2
    assert figure.low is not None and figure.high is not None
    assert 1.0 <= figure.low < 1.2 < figure.high <= 9.0
    assert summarize(values) == figure  # the same records, the same interval


def test_the_interval_covers_the_median_about_as_often_as_it_says() -> None:
    draw, covered, trials = random.Random(1), 0, 30
    for _ in range(trials):
        figure = summarize([draw.gauss(10.0, 1.0) for _ in range(15)])
        assert figure is not None and figure.low is not None and figure.high is not None
        covered += figure.low <= 10.0 <= figure.high
    assert covered / trials > 0.85


@pytest.mark.parametrize(
    ("rates", "reference", "value", "low", "high", "spread", "verdict"),
    [
        ([2.0, 2.2, 2.1], [1.0, 1.1, 1.05], 2.0, 1.69166, 2.36454, "t 95 %", "faster"),
        ([1.0, 1.1, 1.05], [2.0, 2.2, 2.1], 0.5, 1 / 2.36454, 1 / 1.69166, "t 95 %", "slower"),
        ([1.0, 1.2, 1.1], [1.0, 1.1, 1.2], 1.0, 0.72589, 1.37763, "t 95 %", "no difference"),
        ([1.0, 1.0, 1.0], [1.0] * 7, 1.0, 1.0, 1.0, "t 95 %", "no difference"),
        ([0.5, 0.6], [1.0, 1.2, 1.1], 0.5, 0.5 / 1.2, 0.6, "min-max", "too few runs"),
        ([3.0], [1.0, 1.1], 3.0 / 1.05, None, None, "one process", "too few runs"),
    ],
)
def test_ratios(
    rates: list[float],
    reference: list[float],
    value: float,
    low: float | None,
    high: float | None,
    spread: str,
    verdict: str,
) -> None:
    ratio = compare_rates(rates, reference)
    assert ratio is not None
    assert ratio.value == pytest.approx(value)
    assert ratio.low == (pytest.approx(low, rel=1e-4) if low else None)
    assert ratio.high == (pytest.approx(high, rel=1e-4) if high else None)
    assert (ratio.spread, ratio.verdict) == (spread, verdict)


def test_the_interval_holds_the_ratio_of_medians() -> None:
    """Of many processes in two modes the median is one mode, and the mean lies between."""
    ratio = compare_rates([1.0] * 12 + [0.5] * 8, [1.0 + 1e-6 * i for i in range(20)])
    assert ratio is not None and ratio.low is not None and ratio.high is not None
    assert ratio.low <= ratio.value <= ratio.high


NOISE: dict[str, Callable[[random.Random], float]] = {
    "normal": lambda draw: 1 + 0.05 * draw.gauss(0, 1),
    "lognormal": lambda draw: draw.lognormvariate(0, 0.5),
    "heavy tails": lambda draw: 2 ** (0.02 * draw.gauss(0, 1) / (0.01 + draw.random())),
    "an outlier in five": lambda draw: (1 + 0.005 * draw.gauss(0, 1)) * (0.8 if draw.random() < 0.2 else 1),
    "two modes": lambda draw: (1 + 0.002 * draw.gauss(0, 1)) * draw.choice((0.95, 1)),
}


@pytest.mark.parametrize(("ours", "theirs"), [(2, 2), (2, 5), (3, 3), (3, 10), (5, 5), (6, 30), (10, 10)])
@pytest.mark.parametrize("noise", NOISE)
def test_equal_systems_are_seldom_called_faster_or_slower(noise: str, ours: int, theirs: int) -> None:
    """One in twenty at the most: 400 comparisons, of which 5 % are 20, give or take three deviations of 4.4."""
    draw, wrong = random.Random(0), 0
    for _ in range(400):
        ratio = compare_rates(*([NOISE[noise](draw) for _ in range(n)] for n in (ours, theirs)))
        assert ratio is not None
        wrong += ratio.verdict in ("faster", "slower")
    assert wrong <= 33
    assert not wrong or min(ours, theirs) >= ENOUGH_PROCESSES


def test_a_system_that_scatters_more_is_not_called_faster_for_it() -> None:
    draw, wrong = random.Random(0), 0
    for _ in range(400):
        calm, wild = ([1 + scatter * draw.gauss(0, 1) for _ in range(7)] for scatter in (0.002, 0.02))
        ratio = compare_rates(wild, calm)
        assert ratio is not None
        wrong += ratio.verdict in ("faster", "slower")
    assert wrong <= 33


def test_a_true_difference_of_several_deviations_is_found_with_three_processes() -> None:
    draw, found = random.Random(0), 0
    for _ in range(200):
        ratio = compare_rates(*([rate * (1 + 0.01 * draw.gauss(0, 1)) for _ in range(3)] for rate in (1.1, 1.0)))
        assert ratio is not None
        found += ratio.verdict == "faster"
    assert found > 190


def test_nothing_is_set_against_nothing() -> None:
    assert compare_rates([], [1.0]) is None
    assert compare_rates([1.0], []) is None
    assert compare_rates([1.0], [0.0]) is None
    assert compare_rates([0.0, 1.0, 1.0], [1.0] * 3) is None


def test_the_median_is_the_ordinary_one() -> None:
    values = [5.0, 1.0, 4.0, 2.0]
    figure = summarize(values)
    assert figure is not None
    assert figure.median == statistics.median(values)
