"""Two rows of a table that are of different work look different: what they differ in has a column."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from harness import cells, figures
from harness.paper_table import MeasuredCell, PaperTable
from paper_figures import recorded
from tests.harness.conftest import make_record
from tests.test_docs import ROOT

OTHER: dict[str, Any] = {
    "system": "elixir",
    "model": "opt-125m",
    "device_memory": 1 << 30,
    "disk": "somewhere",
    "disk_rate": 1 << 20,
    "ranks": 2,
    "accumulate": 2,
    "dtype": "fp32",
    "recompute": "full",
    "clip": 1.0,
    "optimizer": "sgd",
    "set": ("num_layers=2",),
    "hyper": ("eps=1e-6",),
    "batch_size": 4,
    "seq_len": 32,
}
"""Another value of each field that makes other work."""
RESOLVED = {"device": "cuda", "device_label": "a device", "batch_size": 2, "seq_len": 16}


def names_of_rows(made: PaperTable) -> list[tuple[Any, ...]]:
    """What tells a measured row from others."""
    measured = [row for row in made.rows if any(isinstance(cell, MeasuredCell) for cell in row)]
    named = [place for place, column in enumerate(made.columns) if not column.origin]
    return [tuple(row[place] for place in named) for row in measured]


def rows_of(field: str) -> PaperTable:
    """Two runs that differ in one field."""
    spec = {"system": "resident", "model": "opt-tiny"} | ({"disk": "there"} if field == "disk_rate" else {})
    changed = {field: OTHER[field]}
    resolved = changed if field in cells.RESOLVED_WORK else {}
    metrics = {"tokens_per_s": 1.0, "mean_step_time_s": 1.0}
    records = [
        make_record(run_id="2026-1", spec=spec, resolved=RESOLVED, metrics=metrics),
        make_record(run_id="2026-2", spec=spec | changed, resolved={**RESOLVED, **resolved}, metrics=metrics),
    ]
    return recorded.work_table("Two rows", records, lambda record: True)


@pytest.mark.parametrize("field", [*cells.WORK, *cells.SETS, *cells.RESOLVED_WORK])
def test_rows_that_differ_in_one_setting_have_it_in_a_column(field: str) -> None:
    first, second = names_of_rows(rows_of(field))
    assert first != second


def test_what_all_rows_share_has_no_column_of_its_own() -> None:
    assert [column.name for column in rows_of("model").columns][:7] == [
        "system", "model", "options", "device budget", "GPUs", "batch", "tokens/s",
    ]  # fmt: skip


def test_rows_of_another_device_say_so() -> None:
    records = [
        make_record(run_id=f"2026-{label}", resolved={**RESOLVED, "device_label": label}, metrics={"tokens_per_s": 1.0})
        for label in ("one", "other")
    ]
    assert recorded.work_table("Two rows", records, lambda record: True).column("device") == ["one", "other"]


@pytest.mark.parametrize(
    "name",
    ["elixir-figure6", "angel-figure7", "patrickstar-figure2", "patrickstar-figure11", "h3t-figure10", "forecast-errors"],
)
def test_no_two_rows_of_records_look_alike(name: str) -> None:
    asked = figures.FigureSpec(name=name, results=str(ROOT / "results"))
    counts = Counter(row for made in figures.find()[name].loaded().tables(name, asked) for row in names_of_rows(made))
    assert counts and max(counts.values()) == 1, counts.most_common(2)
