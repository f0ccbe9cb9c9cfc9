"""H3T's case study: what the paper says of its table holds for ours."""

from __future__ import annotations

from dataclasses import replace

import pytest

from models import registry
from paper_figures.h3t_solvers import GB, SolverCase, dp, layer_parameters, main, model_costs, solved, solvers
from systems.strategies.h3t.evaluation import all_on, memory_of
from systems.strategies.h3t.switches import Assignment

PLAIN = SolverCase("bert-1.8b", "h3t-2080ti-10g-x8", 128, 8 * GB)


def assignment(cell: SolverCase) -> Assignment:
    found, _ = solved(dp(cell))
    assert found is not None
    return found


@pytest.mark.parametrize(("name", "billions"), [("bert-1.8b", 1.84), ("bert-6b", 6.68), ("bert-13b", 13.8), ("bert-100b", 102)])
def test_layers_have_the_parameters_of_table_2(name: str, billions: float) -> None:
    shape = registry.resolve(name)
    blocks = layer_parameters(shape) * shape.num_layers / 1e9
    assert 0.95 * billions < blocks < 1.01 * billions


def test_slow_copies_switch_off_what_copies() -> None:
    ratios = assignment(replace(PLAIN, host_link_factor=0.1)).ratios()
    assert ratios["partition"] == ratios["lazy_prefetch"] == ratios["offload_hidden"] == 0.0
    assert ratios["rematerialise"] > 0.9


def test_more_memory_switches_rematerialisation_off() -> None:
    small, large = assignment(PLAIN), assignment(replace(PLAIN, budget=25 * GB))
    assert large.ratios()["rematerialise"] < small.ratios()["rematerialise"] < 1.0
    assert large.runtime_s < small.runtime_s


@pytest.mark.parametrize("model", ["bert-6b", "bert-13b"])
def test_solvers_rank_as_figure_6_has_them(model: str) -> None:
    cell = SolverCase(model, "h3t-a100-40g-x8", 256, 28 * GB)
    manual, random, greedy, pruned = (solved(each)[0] for each in solvers(model_costs(cell), cell.budget))
    assert random is None and manual is not None and greedy is not None and pruned is not None
    assert pruned.runtime_s < greedy.runtime_s < manual.runtime_s


def test_gpt3_fits_64_devices() -> None:
    costs = model_costs(SolverCase("gpt3-175b", "h3t-a100-40g-x64", 512, 28 * GB))
    need = int(memory_of(costs, all_on(costs))[0][0])
    assert 0.7 * 11.1 * GB < need < 1.5 * 11.1 * GB


def test_an_unknown_table_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table7"]) == 2
    assert "table5, table6" in capsys.readouterr().out
