"""`harness figure` and `harness ls figures`: what is there is found without importing it, shown, and written."""

from __future__ import annotations

import csv
import json
import re
import time
from pathlib import Path

import pytest

from harness import cli
from harness.figures import find
from tests.test_docs import ROOT, text_of

PAGE = ROOT / "docs" / "papers.md"


def test_files_that_show_nothing_of_a_paper_are_not_listed() -> None:
    found = find()
    assert {"weak_scaling", "forecast_accuracy", "kept"}.isdisjoint(each.module for each in found.values())
    assert {"patrickstar-table4", "angel-table1", "elixir-figure6", "h3t-figure8"} <= found.keys()


def test_they_are_listed_paper_by_paper_and_tables_first() -> None:
    names = [*find()]
    assert names.index("angel-table6") < names.index("angel-figure7") < names.index("patrickstar-table2")
    assert names.index("patrickstar-figure2") < names.index("patrickstar-figure10")


def test_every_name_says_the_paper_and_is_of_one_file() -> None:
    found = find().values()
    assert all(each.paper and each.summary for each in found)
    listed = [name for each in {one.module: one for one in found}.values() for name in each.loaded().SHOWS]
    assert sorted(listed) == sorted(find())


def test_the_list_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ls", "figures", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in told] == [*find()]


def test_the_page_has_a_command_for_each_and_no_other() -> None:
    assert set(re.findall(r"\| `harness figure ([\w-]+)`", text_of(PAGE))) == find().keys()


def test_one_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["figure", "angel-table6"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.startswith("### Angel-PTM table 6") and "942.31" in out and "962.31" in out


def test_one_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, rows = tmp_path / "table.md", tmp_path / "table.csv"
    assert cli.main(["figure", "angel-table6", "--out", str(text)]) == 0
    assert cli.main(["figure", "angel-table6", "--out", str(rows)]) == 0
    assert text.read_text().startswith("### Angel-PTM table 6")
    with rows.open() as file:
        read = list(csv.DictReader(file))
    assert {each["origin"] for each in read} == {"paper", "computed", "measured", "simulated"}
    assert all(each["value"] == each["runs"] == "" for each in read if each["origin"] == "measured")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["patrickstar-figure2", "h3t-figure9"])
def test_pictures_are_drawn(name: str, tmp_path: Path) -> None:
    for suffix in ("png", "pdf"):
        path = tmp_path / f"drawn.{suffix}"
        assert cli.main(["figure", name, "--out", str(path)]) == 0
        assert path.stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["patrickstar-tabel4"], "unknown figure 'patrickstar-tabel4': did you mean patrickstar-table4"),
        ([], "name is missing"),
        (["angel-table6", "--results", "/no/such/folder"], "--results /no/such/folder is no folder"),
        (["angel-table6", "--out", "x.docx"], "ends in none of .md, .csv"),
        (["angel-table6", "--out", "x.pdf"], "there is no picture of angel-table6: use .md or .csv"),
        (["angel-table6", "--out", "/no/such/folder/x.md"], "/no/such/folder/x.md cannot be used"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["figure", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and err.count("\n") == 1


@pytest.mark.long
def test_all_of_them_the_tables_and_the_ledger_take_less_than_ten_minutes(tmp_path: Path) -> None:
    """From what is kept, without a GPU: seconds of this process, which other load on the machine does not lengthen."""
    started_s = time.process_time()
    for name in find():
        assert cli.main(["figure", name, "--out", str(tmp_path / f"{name}.md")]) == 0
        assert (tmp_path / f"{name}.md").stat().st_size > 100
    results = str(ROOT / "results")
    assert cli.main(["tables", "--results", results, "--out", str(ROOT / "docs" / "results.md"), "--check"]) == 0
    assert cli.main(["ledger", "--results", results, "--out", str(ROOT / "docs" / "claims.md"), "--check"]) == 0
    assert time.process_time() - started_s < 600
