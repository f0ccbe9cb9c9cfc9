"""`harness ledger`: what it tells, and that docs/claims.md is what the records make of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness import cli, store
from harness.claims import read_claims
from harness.ledger import BEGIN, END, details, judged, read_forecasts, rendered

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "results", ROOT / "docs" / "claims.md"


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "claims.md"
    path.write_text(f"before\n{BEGIN}\nold\n{END}\nbehind\n")
    return path


def call(*arguments: str) -> int:
    return cli.main(["ledger", "--results", str(RESULTS), *arguments])


def test_the_page_is_what_the_records_make_of_it() -> None:
    """If this fails: harness ledger --out docs/claims.md"""
    assert call("--out", str(PAGE), "--check") == 0


def test_another_page_is_stale_until_it_is_written(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--out", str(page), "--check") == 1
    assert "is not what the records in" in capsys.readouterr().err and "old" in page.read_text()
    assert call("--out", str(page)) == 0 and call("--out", str(page), "--check") == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("behind\n") and "\nold\n" not in text


def test_without_records_nothing_measured_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ledger", "--results", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)
    measured = [part for claim in told["claims"] for part in claim["parts"] if not part["simulated"]]
    assert measured and {part["verdict"] for part in measured} == {"open"}
    assert all(part["value"] is None and not part["runs"] and part["wants"] for part in measured)


def test_a_program_gets_one_line_and_a_person_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--paper", "h3t") == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert (told["kind"], [one["number"] for one in told["claims"]]) == ("ledger", [30, 31, 32])
    assert "claim" in err and "H3T" in err and "Angel" not in err


def test_one_claim_is_told_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--claim", "31") == 0
    out, err = capsys.readouterr()
    (one,) = json.loads(out)["claims"]
    runs = [run for part in one["parts"] for run in part["runs"]]
    assert runs and all(run in err for run in runs)
    assert "Printed (table 1, 4.3)" in err and "Confirmed by" in err and "Refuted by" in err


def test_every_run_and_all_that_is_beside_stands_on_the_page() -> None:
    records = store.read_all(RESULTS)[0]
    found = judged(read_claims(), records, read_forecasts())
    text, known = rendered(found), {record.run_id for record in records}
    for one in found:
        told = " ".join(line.strip() for line in details(one))
        for part in one.parts:
            assert set(part.runs) <= known and all(run in text for run in part.runs)
            assert part.beside is None or f"Beside it ({part.beside}): {part.what}" in told
            assert part.verdict in ("open", "not testable here") or part.runs or part.simulated


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--claim", "33"], "--claim 33 is none of 1 to 32: use one of these"),
        (["--claim", "1", "--paper", "h3t"], "--claim 1 is none of 30 to 32"),
        (["--paper", "zero"], "--paper zero"),
        (["--check"], "--check needs --out"),
        (["--out", "a.md", "--paper", "h3t"], "leave --paper and --claim out"),
        (["--out", "nothing.md"], "--out nothing.md cannot be read"),
        (["--results", "nothing"], "--results nothing is no folder"),
    ],
)
def test_what_cannot_be_is_one_line(
    arguments: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "results").mkdir()
    monkeypatch.chdir(tmp_path)
    assert cli.main(["ledger", *arguments]) == 2
    told = capsys.readouterr().err
    assert why in told and len(told.strip().splitlines()) == 1


def test_a_page_without_its_marks_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "claims.md"
    path.write_text("mine")
    assert call("--out", str(path)) == 2
    assert "it needs the lines" in capsys.readouterr().err and path.read_text() == "mine"
