"""Predictions of runs on several GPUs: each cell has one that was written down, and what is shown beside it is the records'."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from harness.cells import read_table
from harness.figures import FigureSpec
from harness.paper_table import MeasuredCell, PaperTable, SimulatedCell
from harness.tables import FOLDER
from paper_figures import several_gpus
from paper_figures.predicted_runs import BEFORE, PredictedRun, cells_of, predicted
from paper_figures.several_gpus import HOSTS, Host, Line
from systems.planning import hardware
from tests.test_docs import ROOT

NAMES = sorted(HOSTS)


def asked(name: str, results: str = "results") -> FigureSpec:
    return FigureSpec(name=name, results=str(ROOT / results))


@cache
def seen(name: str) -> tuple[Host, list[PredictedRun]]:
    host = HOSTS[name]
    return host, predicted(name, host.table, host.profile, [host.depth], asked(name))[1]


@pytest.mark.parametrize("name", NAMES)
def test_each_cell_has_a_prediction_that_keeps_its_budgets(name: str) -> None:
    """If this fails a table has other cells: harness figure NAME --fresh."""
    host, runs = seen(name)
    assert len(runs) == len(cells_of(read_table(FOLDER / f"{host.table}.toml"), host.profile))
    whole = hardware.load(host.profile).device_memory_bytes.value
    for run in runs:
        assert run.found.fits and run.step_s, run.found.why_not
        assert 0 < (run.figure("device_peak_bytes") or 0) <= (run.cell.spec.device_memory or whole)
        assert (run.figure("host_bytes") or 0) <= (run.cell.spec.host_memory or 0)
        assert run.step_s > 0.999 * max(run.bounds_s.values())
        assert run.bounds_s == dict(sorted(run.bounds_s.items(), key=lambda pair: -pair[1]))


@pytest.mark.parametrize("name", NAMES)
def test_forecasts_on_as_many_gpus_as_the_host_has(name: str) -> None:
    host, runs = seen(name)
    assert hardware.load(host.profile).devices == host.gpus == max(run.cell.spec.ranks for run in runs)


@cache
def shown(name: str) -> list[PaperTable]:
    return list(several_gpus.tables(name, asked(name)))


def test_a_cell_s_records_are_beside_its_prediction_with_the_error() -> None:
    _, runs = seen("two-gpus")
    cells, _, _ = shown("two-gpus")
    for run, step, error in zip(
        runs, cells.column("measured: step s"), cells.column("simulated: error of the step"), strict=True
    ):
        if run.runs:
            assert isinstance(step, MeasuredCell) and isinstance(error, SimulatedCell)
            assert step.run_ids == tuple(each.run_id for each in run.runs)
            assert step.value == pytest.approx(run.measured_s)
            assert error.value == f"{100 * (run.step_s / float(step.value) - 1):+.1f} %"  # type: ignore[operator]
        else:
            assert step is None and error is None
    assert any(run.runs for run in runs), "void"


def test_what_was_measured_before_is_no_prediction() -> None:
    _, runs = seen("two-gpus")
    late = [run for run in runs if not run.ahead_of_runs]
    assert late and all(run.runs for run in late)
    assert all(run.found.statistics[BEFORE] >= 1 for run in late)
    (said,) = [remark for remark in shown("two-gpus")[0].remarks if "no prediction" in remark]
    assert said.count(" on ") == len(late)


def test_scaling_is_of_the_steps_by_hand() -> None:
    _, runs = seen("two-gpus")
    two = next(run for run in runs if (run.cell.spec.model, run.cell.spec.ranks) == ("ps-10b", 2))
    one = several_gpus.on_one(two, runs)
    assert one is not None and one.cell.spec.ranks == 1 and one.cell.spec.system == two.cell.spec.system
    expected, found = several_gpus.scaling(two, runs)
    assert expected == 2 * one.step_s / two.step_s  # type: ignore[operator]
    assert found == 2 * one.measured_s / two.measured_s  # type: ignore[operator]
    assert several_gpus.scaling(two, [two]) == (None, None)


def test_a_line_is_met_by_the_number_alone() -> None:
    host, runs = seen("two-gpus")
    found = list(several_gpus.lines(host, runs))
    _, _, table = shown("two-gpus")
    said = table.column("simulated: met")
    for line, cell in zip(found, said, strict=False):
        assert isinstance(cell, SimulatedCell) and line.predicted is not None
        assert cell.value == ("yes" if line.predicted >= line.least else "no")
    assert {"yes", "no"} <= {cell.value for cell in said if isinstance(cell, SimulatedCell)}


def best(host: Host, runs: list[PredictedRun]) -> Line:
    (found,) = [line for line in several_gpus.lines(host, runs) if line.what.startswith("ps-10b, the best")]
    return found


def test_the_best_is_not_below_a_line_before_all_were_measured() -> None:
    host, runs = seen("two-gpus")
    alone = [replace(run, runs=() if run.cell.spec.system != "elixir" else run.runs) for run in runs]
    reached = several_gpus.scaling(
        next(r for r in alone if r.runs and r.cell.spec.model == "ps-10b" and r.cell.spec.ranks == 2), alone
    )
    assert reached[1] is not None
    assert best(replace(host, weak_best=reached[1] + 0.1), alone).measured is None
    assert best(replace(host, weak=0.1, weak_best=reached[1] - 0.1), alone).measured == reached[1]


@pytest.mark.parametrize("name", NAMES)
def test_a_search_says_what_one_more_layer_lacks(name: str) -> None:
    *_, last = shown(name)[2].rows
    _, least, parameters, met, lacks, *_ = last
    assert isinstance(parameters, SimulatedCell) and isinstance(met, SimulatedCell) and isinstance(lacks, SimulatedCell)
    assert (float(str(parameters.value).partition("B")[0]) >= float(str(least).rstrip("B"))) is (met.value == "yes")
    assert "host memory" in str(lacks.value) or "device" in str(lacks.value)


def test_without_records_nothing_is_measured(tmp_path: object) -> None:
    made = several_gpus.tables("two-gpus", FigureSpec(name="two-gpus", results=f"{tmp_path}/none"))
    assert not any(isinstance(cell, MeasuredCell) for each in made for row in each.rows for cell in row)
