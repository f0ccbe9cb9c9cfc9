"""A small set of rows in which every two values of different factors meet, chosen the same way every time.

A test of a product runs them in `make test`, and what is left of the product in `make test-slow`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Pair = tuple[tuple[str, Any], tuple[str, Any]]
Row = dict[str, Any]


def pairs_of(row: Mapping[str, Any]) -> set[Pair]:
    return set(combinations(sorted(row.items()), 2))


def rows_of(factors: Mapping[str, Sequence[Any]]) -> list[Row]:
    """The whole product."""
    return [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]


def pairwise(factors: Mapping[str, Sequence[Any]], possible: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Greedy: each row is the one of the whole product that covers most pairs not covered yet, the first of equals.

    possible: of rows; what cannot be meets nobody.
    """
    rows = list(filter(possible, rows_of(factors)))
    left = set().union(*(pairs_of(row) for row in rows))
    chosen = []
    while left:
        best = max(rows, key=lambda row: len(pairs_of(row) & left))
        chosen.append(best)
        left -= pairs_of(best)
    return chosen


def covered(factors: Mapping[str, Sequence[Any]], possible: Callable[[Row], bool] = lambda row: True) -> list[Any]:
    """The whole product, for `parametrize`: what the pairwise rows do not have is for the long tests."""
    chosen = pairwise(factors, possible)
    rows = filter(possible, rows_of(factors))
    return [pytest.param(*row.values(), marks=() if row in chosen else pytest.mark.slow) for row in rows]
