"""Which runs a forecast is held to, and that their cells come out of the records that are kept."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from harness import store
from harness.record import Record
from paper_figures import forecast_accuracy
from paper_figures.forecast_accuracy import Compared, cells_of, compare, counts, main, planned_systems
from systems.planning import hardware

RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return store.read_all(RESULTS)[0]


@pytest.fixture(scope="module")
def cells(records: list[Record]) -> list[list[Record]]:
    return cells_of(records, hardware.load("h100-80g-x1"))


@pytest.fixture(scope="module")
def resident_cell(cells: list[list[Record]]) -> list[Record]:
    return next(c for c in cells if (c[-1].spec.system, c[-1].spec.model) == ("resident", "opt-1.3b"))


@pytest.fixture(scope="module")
def compared(resident_cell: list[Record]) -> Compared:
    """A forecast takes ten seconds: one serves all tests."""
    return compare(resident_cell, hardware.load("h100-80g-x1"))


def test_runs_that_count(records: list[Record]) -> None:
    profile, planned = hardware.load("h100-80g-x1"), planned_systems()
    record = next(r for r in records if counts(r, profile, planned))
    assert record.status == "ok" and record.resolved.device == "cuda"
    other = profile.model_copy(update={"device_name": "another device"})
    short = record.model_copy(update={"resolved": record.resolved.model_copy(update={"timed_steps": 3})})
    ranks = record.model_copy(update={"spec": record.spec.model_copy(update={"ranks": 2})})
    package = record.model_copy(update={"spec": record.spec.model_copy(update={"system": "torch-ddp"})})
    assert not counts(record, other, planned)
    assert not any(counts(r, profile, planned) for r in (short, ranks, package, record.model_copy(update={"status": "failed"})))


def test_a_cell_is_its_last_runs_and_is_compared_as_it_was_run(
    cells: list[list[Record]], resident_cell: list[Record], compared: Compared
) -> None:
    runs = [run.run_id for cell in cells for run in cell]
    assert len(cells) >= 3 and len(runs) == len(set(runs))
    cell, found = resident_cell, compared
    assert found.runs == len(cell) and found.tokens == cell[-1].resolved.tokens_per_step
    assert min(run.metrics.mean_step_time_s or 0 for run in cell) <= found.measured_s
    assert found.device_budget == cell[-1].memory.device_budget_bytes
    assert abs(found.step_error) < 0.2 and found.step_error == found.predicted_s / found.measured_s - 1


def test_it_writes_what_it_shows(
    resident_cell: list[Record],
    compared: Compared,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(forecast_accuracy, "cells_of", lambda *_: [resident_cell])
    monkeypatch.setattr(forecast_accuracy, "compare", lambda *_: compared)
    out = tmp_path / "cells.csv"
    assert main(["--out", str(out), "--results", str(RESULTS)]) == 0
    rows = pd.read_csv(out)
    assert list(rows["model"]) == [resident_cell[-1].spec.model] and {"step_error", "peak_error"} <= set(rows)
    shown = capsys.readouterr().out
    assert "1 cells" in shown and resident_cell[-1].spec.model in shown


def test_a_cell_without_a_forecast_is_named_and_left_out(
    cells: list[list[Record]],
    resident_cell: list[Record],
    compared: Compared,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = next(c for c in cells if c[-1].spec.system == "elixir")
    spec = runs[-1].spec.model_copy(update={"option": ("no_such_option=1",)})
    old = runs[-1].model_copy(update={"spec": spec, "run_id": "an-old-run"})
    monkeypatch.setattr(forecast_accuracy, "cells_of", lambda *_: [[old], resident_cell])
    known = lambda cell, profile: compared if cell is resident_cell else compare(cell, profile)  # noqa: E731
    monkeypatch.setattr(forecast_accuracy, "compare", known)
    assert main(["--results", str(RESULTS)]) == 0
    shown = capsys.readouterr().out
    assert "left out: an-old-run: " in shown and "no_such_option" in shown and "1 cells" in shown


def test_bad_input_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--hardware", "no-such-machine"]) == 2
    assert "no-such-machine" in capsys.readouterr().out
    assert main(["--results", str(tmp_path)]) == 1
    assert "no record" in capsys.readouterr().out
