"""Records as one table for other programs."""

from __future__ import annotations

import csv
import importlib.util
import json
from pathlib import Path

import pytest

from harness import cli, store
from harness.export import rows_of
from tests.harness.conftest import make_record, make_spec

ROOT = Path(__file__).resolve().parents[2]


def kept(folder: Path) -> Path:
    store.write(
        make_record(run_id="2026-a", metrics={"loss": [5.0, None], "tokens_per_s": 7.5}, phases_s={"build": 1.5}), folder
    )
    store.write(make_record(run_id="2026-b", spec=make_spec(tag="=cmd()"), strategy={"chunk": {"bytes": 3}}), folder)
    return folder


def test_a_row_a_run_and_the_same_columns_in_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "records.csv"
    assert cli.main(["export", "--out", str(out), "--results", str(kept(tmp_path / "r"))]) == 0
    told = json.loads(capsys.readouterr().out)
    first, second = csv.DictReader(out.read_text().splitlines())
    assert told == {"out": str(out), "rows": 2, "columns": len(first)}
    assert (first["run_id"], first["metrics.tokens_per_s"], first["metrics.loss"]) == ("2026-a", "7.5", "[5.0, null]")
    assert (first["phases_s.build"], second["phases_s.build"]) == ("1.5", "")
    assert (second["strategy.chunk.bytes"], second["spec.tag"]) == ("3", "'=cmd()"), "no cell is a formula"


def test_every_kept_record_is_in_it() -> None:
    records, _ = store.read_all(ROOT / "results")
    rows = rows_of(records)
    assert [row["run_id"] for row in rows] == sorted(record.run_id for record in records)
    assert not any(isinstance(value, list | dict) for row in rows for value in row.values())
    frame = store.frame(ROOT / "results")
    assert list(frame["run_id"]) == [record.run_id for record in records]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--out", "records.txt"], "end it in .csv or .parquet"),
        (["--out", "records.csv", "--results", "nothing"], "no record in nothing: name the folder with --results"),
        (["--out", "no/such/folder/records.csv"], "cannot be written"),
        ([], "--out is missing"),
    ],
)
def test_what_cannot_be_is_told(
    arguments: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(tmp_path / "results")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["export", *arguments]) == 2
    assert why in capsys.readouterr().err


def test_parquet_where_its_package_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["export", "--out", str(tmp_path / "records.parquet"), "--results", str(kept(tmp_path / "r"))]
    if importlib.util.find_spec("pyarrow") is None:
        assert cli.main(arguments) == 2 and "pip install pyarrow, or write a .csv file" in capsys.readouterr().err
        return
    import pandas

    assert cli.main(arguments) == 0
    assert list(pandas.read_parquet(tmp_path / "records.parquet")["run_id"]) == ["2026-a", "2026-b"]
