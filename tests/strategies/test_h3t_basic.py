"""Algorithm 3 as a solver of H3T's: the optimum of the others, and refused before any step where it would take too long."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from systems.errors import BudgetError
from systems.strategies.h3t import basic
from systems.strategies.h3t.basic import MEANT, MOST, basic_dp, transitions
from systems.strategies.h3t.costs import SUBSTRATE, LayerCosts, ModelCosts
from systems.strategies.h3t.dynamic import pruned_dp
from systems.strategies.h3t.evaluation import Tables, allowed, tables
from systems.strategies.h3t.options import H3TOptions, Solver, Variant
from systems.strategies.h3t.switches import SYNCHRONISED, Switches
from tests.strategies.h3t_algorithm4 import algorithm_4
from tests.strategies.h3t_oracles import exhaustive_solver
from tests.strategies.test_h3t_solvers import least, models, some_choices
from tests.systems.models_small import tokens
from tests.systems.running import h3t, managed, one_step, start
from tests.systems.running import settings as asked
from tests.systems.setups import Setup

BYTES = st.integers(0, 4)


@settings(max_examples=30, deadline=None)
@given(models(most=3, sizes=BYTES), st.floats(1.0, 3.0), st.integers(0, 1000))
def test_with_a_bin_a_byte_it_is_the_optimum_and_what_algorithm_4_finds(model: ModelCosts, share: float, seed: int) -> None:
    budget, choices = int(least(model) * share), allowed(model, some_choices(seed, 6))
    found = basic_dp(model, budget, bins=max(budget, 1), choices=choices)
    assert found.memory_bytes <= budget and found.solver == "basic-dp"
    assert found.runtime_s == pytest.approx(exhaustive_solver(model, budget, choices=choices).runtime_s, rel=1e-9)
    assert found.runtime_s == pytest.approx(algorithm_4(model, budget, choices)[0], rel=1e-9)
    assert found.runtime_s == pytest.approx(pruned_dp(model, budget, choices=choices).runtime_s, rel=1e-9)


def test_what_a_layer_keeps_until_its_backward_counts_for_the_layers_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Line 17 of Algorithm 4, which line 14 of Algorithm 3 leaves out: without it nothing is recomputed, which does not fit."""
    layer = LayerCosts("layer", 1.0, 2.0, intermediate_bytes=100, backward_bytes=100)
    model, choices = ModelCosts((layer,) * 4, SUBSTRATE), (Switches(synchronise=True), Switches(True, synchronise=True))
    found = basic_dp(model, 300, choices=choices)
    assert found.memory_bytes <= 300 and 0 < found.ratios()["rematerialise"] < 1

    def by_line_14(*given: object) -> list[Tables]:
        return [replace(each, delta_bytes=0 * each.delta_bytes) for each in tables(*given)]  # type: ignore[arg-type]

    monkeypatch.setattr(basic, "tables", by_line_14)
    wrong = basic_dp(model, 300, choices=choices)
    assert wrong.ratios()["rematerialise"] == 0 and wrong.memory_bytes > 300


def test_what_does_not_fit_is_refused_with_its_layer() -> None:
    model = ModelCosts((LayerCosts("small"), LayerCosts("large", backward_bytes=1000)), SUBSTRATE)
    with pytest.raises(BudgetError, match="set by large"):
        basic_dp(model, 999, bins=8)


def test_the_estimate_is_the_paper_s_complexity_of_states_times_that_of_a_transfer() -> None:
    """B.3: O(m^2 N |S|^2) states, of which each has |S| successors."""
    assert transitions(3, 10, 48) == 10**2 * 3 * 48**2 * 48
    assert len(MEANT) == 48 and len(SYNCHRONISED) == 64
    assert transitions(48, 128, 64) > 1000 * MOST  # of the paper's experiments


@pytest.mark.parametrize("variant", get_args(Variant))
def test_too_many_transitions_are_refused_before_any_step_under_every_variant(variant: Variant) -> None:
    """Four layers: 15 bins are 99,532,800 transitions, 16 more than allowed."""
    model = Setup("opt").build()
    with pytest.raises(ValueError, match="1.1e.08 transitions .4 layers, 48 choices for each, 16 bins., 1e.08 are") as refused:
        start(h3t(), model, asked(), H3TOptions(variant=variant, solver="basic-dp", bins=16))
    assert "\n" not in str(refused.value)
    assert transitions(4, 15) <= MOST < transitions(4, 16)


@pytest.mark.parametrize("variant", ["global-offload", "paper"])
def test_it_solves_a_model_of_few_layers(variant: Variant) -> None:
    engine = start(
        h3t(), Setup("opt").build(), asked(), H3TOptions(variant=variant, solver="basic-dp", bins=6, profile_steps=1)
    )
    with engine:
        for batch in tokens(2, 1):
            one_step(engine, batch)
        told = managed(engine).statistics()
        assert told.solver == "basic-dp" and told.barriers_per_step == 11
    assert "basic-dp" in get_args(Solver)
