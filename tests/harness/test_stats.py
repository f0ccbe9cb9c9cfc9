"""Medians over processes, their spread, and what may be called a difference."""

from __future__ import annotations

import random
import statistics

import pytest

from harness.stats import BOOTSTRAP_FROM, compare_rates, summarize


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
    ("rates", "reference", "value", "low", "high", "verdict"),
    [
        ([2.0, 2.2, 2.1], [1.0, 1.1, 1.05], 2.0, 2.0 / 1.1, 2.2, "faster"),
        ([0.5, 0.5], [1.0, 1.0], 0.5, 0.5, 0.5, "slower"),
        ([1.0, 1.2, 1.1], [1.0, 1.1, 1.2], 1.0, 1.0 / 1.2, 1.2, "no difference"),
        ([3.0], [1.0, 1.1], 3.0 / 1.05, None, None, "too few runs"),
    ],
)
def test_ratios(
    rates: list[float], reference: list[float], value: float, low: float | None, high: float | None, verdict: str
) -> None:
    ratio = compare_rates(rates, reference)
    assert ratio is not None
    assert ratio.value == pytest.approx(value)
    assert (ratio.low, ratio.high) == (pytest.approx(low) if low else None, pytest.approx(high) if high else None)
    assert ratio.verdict == verdict


def test_a_ratio_of_five_processes_is_bootstrapped() -> None:
    reference = [1.0, 1.01, 0.99, 1.02, 0.98]
    same, more = compare_rates(list(reversed(reference)), reference), compare_rates([1.3 * x for x in reference], reference)
    assert same is not None and more is not None and more.low is not None
    assert (same.verdict, more.verdict, more.spread) == ("no difference", "faster", "bootstrap 95 %")
    assert more.low > 1.2
    assert more.value == pytest.approx(1.3)


def test_nothing_is_set_against_nothing() -> None:
    assert compare_rates([], [1.0]) is None
    assert compare_rates([1.0], []) is None
    assert compare_rates([1.0], [0.0]) is None


def test_the_median_is_the_ordinary_one() -> None:
    values = [5.0, 1.0, 4.0, 2.0]
    figure = summarize(values)
    assert figure is not None
    assert figure.median == statistics.median(values)
