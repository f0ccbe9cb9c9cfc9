"""Kept simulations: every case of a figure is in its file, and one that is made anew says what the file says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.environment import source_sha256
from paper_figures import (
    angel_results,
    elixir_results,
    h3t_runs,
    h3t_solvers,
    kept,
    patrickstar_forecasts,
    patrickstar_margin,
    patrickstar_scale,
    patrickstar_setup,
    patrickstar_throughput,
)
from paper_figures.kept import MADE_BY, ROOT, ForecastCase, ForecastFound, KeptForecasts, ask_all, simulated

CASES: dict[str, Callable[[], Sequence[ForecastCase]]] = {
    "patrickstar-table4": lambda: [
        patrickstar_margin.case(plan, batch) for plan in patrickstar_margin.TABLE4 for batch in patrickstar_margin.BATCHES
    ],
    "patrickstar-figure2": lambda: [patrickstar_setup.FIGURE2],
    "patrickstar-figure10": lambda: list(patrickstar_scale.cases()),
    "elixir-figure6": elixir_results.cases,
    "angel-table5": angel_results.cases5,
    "angel-figure8": angel_results.cases8,
    "angel-figure7": angel_results.cases7,
    "elixir-figure7": elixir_results.cases7,
    "elixir-figure8": elixir_results.cases8,
    "elixir-figure9": elixir_results.cases9,
    "angel-figure9": angel_results.cases9,
    "angel-table6": angel_results.cases6,
    "patrickstar-figure11": lambda: list(patrickstar_forecasts.more_cases()),
    "patrickstar-figure14": patrickstar_forecasts.cases14,
    "patrickstar-figure15": patrickstar_forecasts.cases15,
    "patrickstar-figure17": patrickstar_forecasts.cases17,
}
REMADE = (
    "patrickstar-table4",
    "patrickstar-figure2",
    "patrickstar-figure10",
    "elixir-figure6",
    "angel-table5",
    "angel-figure8",
)
SMALL = ForecastCase(system="patrickstar", model="gpt-tiny", profile="yard-v100-32g-x8", ranks=1, batch_size=2, seq_len=16)
LARGE = ForecastCase(system="resident", model="ps-68b", profile="yard-v100-32g-x8", ranks=1, batch_size=4)


def of(name: str) -> KeptForecasts:
    return simulated(name, CASES[name](), fresh=False, ask=ask_all)


@pytest.mark.parametrize("name", [*CASES])
def test_every_case_is_in_its_file_and_no_other(name: str) -> None:
    found = of(name)
    assert all(found.of(case) is not None for case in CASES[name]())
    assert len(found.found) == len(CASES[name]())


@pytest.mark.parametrize("name", REMADE)
def test_what_is_kept_is_what_is_made(name: str) -> None:
    assert_made_again(name)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", [name for name in CASES if name not in REMADE])
def test_what_is_kept_of_others_is_what_is_made(name: str) -> None:
    assert_made_again(name)


def assert_made_again(name: str) -> None:
    """Of the smallest model; to a per cent, since a file may be of another build of torch."""
    case = min(CASES[name](), key=lambda case: (float(case.model.rpartition("-")[2][:-1]), case.ranks, case.batch_size))
    ((_, made),) = ask_all([case])
    there = of(name).of(case)
    assert there is not None and there.fits == made.fits, f"harness figure {name} --fresh makes it anew"
    assert there.step_s == pytest.approx(made.step_s, rel=0.01)
    assert there.statistics.get("margin_chunks") == made.statistics.get("margin_chunks")


def test_what_is_kept_of_h3t_s_solvers_is_what_they_find() -> None:
    setting, cell = h3t_runs.SETTINGS[2], h3t_solvers.SolverCase("bert-6b", h3t_runs.TI, 8, 8 * h3t_solvers.GB)
    runs = simulated("h3t-solved", h3t_runs.SETTINGS, fresh=False, ask=h3t_runs.ask_solvers)
    curves = simulated("h3t-figure6", [cell], fresh=False, ask=h3t_solvers.ask_every_solver)
    ((_, made),) = h3t_runs.ask_solvers([setting])
    there, curve = runs.of(setting), curves.of(cell)
    assert there is not None and there.statistics == pytest.approx(dict(made.statistics)), "harness figure h3t-table1 --fresh"
    assert curve is not None and cell.global_batch / curve.statistics["DP"] == pytest.approx(there.step_s)


def test_fresh_makes_and_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "FOLDER", tmp_path / "new")
    made = simulated("small", [SMALL, LARGE], fresh=True, ask=ask_all)
    again = simulated("small", [SMALL, LARGE], fresh=False, ask=ask_all)
    assert made == again and made.source == source_sha256(ROOT, MADE_BY)
    small, large = made.of(SMALL), made.of(LARGE)
    assert small is not None and small.fits and small.step_s is not None and small.step_s > 0
    assert large is not None and not large.fits and large.step_s is None and "ps-68b" not in made.remark("small")
    assert made.of(elixir_results.cases()[0]) is None


def test_what_another_source_made_is_told() -> None:
    other = KeptForecasts("0" * 64, {})
    assert "which has changed since" in other.remark("x") and "harness figure x --fresh" in other.remark("x")
    assert "by this source" in KeptForecasts(source_sha256(ROOT, MADE_BY), {}).remark("x")


def test_the_largest_model_is_the_last_that_fits_and_reaches_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}
    kept_here = KeptForecasts("", found)
    yard, system = patrickstar_scale.YARD, "PatrickStar"

    def largest(bar: float) -> str | None:
        return patrickstar_scale.largest(kept_here, yard, system, 1, bar=bar, batches=(4,))

    assert largest(0.0) is None
    for model, step_s in (("ps-1b", 1.0), ("ps-2b", 1.0), ("ps-4b", 100.0), ("ps-6b", None)):
        case = patrickstar_scale.case(yard, system, model, 1, 4)
        found[kept._key(case)] = ForecastFound(step_s, None if step_s else "too small")
    assert (largest(0.0), largest(yard.bar)) == ("4B", "2B")


def test_throughput_of_all_gpus_is_of_the_best_batch_that_is_kept() -> None:
    found: dict[str, Any] = {}
    kept_here = KeptForecasts("", found)
    assert patrickstar_throughput.most_tflops(kept_here, patrickstar_scale.YARD, "ps-1b") is None
    for batch, step_s in ((4, 1.0), (32, 2.0)):
        found[kept._key(patrickstar_scale.case(patrickstar_scale.YARD, "PatrickStar", "ps-1b", 8, batch))] = ForecastFound(
            step_s, None
        )
    made = patrickstar_throughput.most_tflops(kept_here, patrickstar_scale.YARD, "ps-1b")
    case = patrickstar_scale.case(patrickstar_scale.YARD, "PatrickStar", "ps-1b", 8, 32)
    assert made == pytest.approx(8 * patrickstar_scale.tflops(case, 2.0))
    angel = angel_results.case8(256, 2)
    found[kept._key(angel)] = ForecastFound(4.0, None)
    assert angel_results.samples_per_s(kept_here, angel) == 128.0
