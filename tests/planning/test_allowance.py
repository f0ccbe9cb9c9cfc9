"""What is left to an allocator: budgets and what plans may fill of them are inverses, and a slab stays near what it holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from systems.planning.allowance import CUDA, EXACT, Allowance

SIZES = st.integers(0, 1 << 40)


@pytest.mark.parametrize("allowance", [EXACT, CUDA, CUDA.on(2)])
@given(nbytes=SIZES)
def test_the_smallest_budget_for_what_a_plan_fills(allowance: Allowance, nbytes: int) -> None:
    budget = allowance.budget_for(nbytes)
    assert allowance.plannable(budget) >= nbytes
    assert budget == 0 or allowance.plannable(budget - 1) < nbytes


@given(pool=SIZES, largest=SIZES, others=SIZES, budget=SIZES)
def test_the_expected_peak_holds_the_slab_and_the_rest(pool: int, largest: int, others: int, budget: int) -> None:
    slab = CUDA.slab(pool, largest, budget)
    assert pool <= slab <= pool + 2 * largest and slab <= max(1.03 * pool, pool + largest)
    assert CUDA.plannable(budget) + slab - pool <= budget, "holes are in what plans leave free"
    peak = CUDA.expected_peak(slab, others, budget)
    assert slab + others <= peak <= max(1.06 * (slab + others), budget)
    assert peak >= min(slab + others + min(64 << 20, budget // 8), budget)
    assert EXACT.slab(pool, largest, budget) == EXACT.expected_peak(pool, 0, budget) == pool


@given(others=SIZES, budget=SIZES)
def test_what_a_pool_takes_beside_others_leaves_the_allocator_a_share(others: int, budget: int) -> None:
    pool = CUDA.beside(others, budget)
    assert pool + others <= min(budget / 1.029, budget - min(64 << 20, budget // 8))
    assert EXACT.beside(others, budget) == budget - others


@given(pool=SIZES, largest=SIZES, others=SIZES, budget=SIZES)
def test_what_reductions_have_is_taken_from_all_else(pool: int, largest: int, others: int, budget: int) -> None:
    """On several ranks every figure is that of one rank whose device has so much less."""
    several = CUDA.on(3)
    staging = several.staging(budget)
    left = budget - staging
    assert staging == min(budget // 8, 64 << 20)
    assert several.plannable(budget) == CUDA.plannable(left)
    assert several.slab(pool, largest, budget) == CUDA.slab(pool, largest, left)
    assert several.beside(others, budget) == CUDA.beside(others, left)
    assert several.expected_peak(pool, others, budget) == staging + CUDA.expected_peak(pool, others, left)
    assert CUDA.on(1) == CUDA and EXACT.on(3) == EXACT


def test_plans_fill_most_of_a_large_device_and_half_of_a_tiny_one() -> None:
    assert CUDA.plannable(20 << 30) == (20 << 30) - int(0.08 * (20 << 30))
    assert CUDA.plannable(80 << 30) == (80 << 30) - (3 << 30), "a large one needs no more than a middling one"
    assert CUDA.plannable(1 << 20) == 1 << 19
    assert EXACT.plannable(7) == 7


def test_the_slab_has_a_hole_for_its_largest_block() -> None:
    """ps-4b's word embedding, 221 MiB, in a pool of 2 GiB under 4 GiB: 3 % of the pool would be 63 MiB."""
    largest = 221 << 20
    assert CUDA.slab(2 << 30, largest, 4 << 30) == (2 << 30) + largest
