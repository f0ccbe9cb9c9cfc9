"""Random loops on several ranks whose updates run behind their steps; the long tests have more of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.systems.lock_free_loops import BETWEEN, STEPS, check, draw

FEW, MORE = (75, 841), range(100, 140)


@pytest.mark.parametrize("seed", [*FEW, *(pytest.param(seed, marks=pytest.mark.slow) for seed in MORE)])
def test_a_random_loop_is_as_fresh_as_it_says(seed: int, tmp_path: Path) -> None:
    check(draw(seed), tmp_path)


def test_seeds_have_all_that_there_is() -> None:
    draws = [draw(seed) for seed in range(200)]
    assert {what for drawn in draws for what, _ in drawn.actions} == {*STEPS, *BETWEEN}
    assert {drawn.most for drawn in draws} == {0, 1, 2, 5}
    assert {drawn.size for drawn in draws} == {2, 3, 4}
