"""The README's results: what the tables show of records, and that the README is what the records make of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness import cli, store, tables
from harness.record import Record
from tests.harness.conftest import make_record

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
DEVICE = "a device"
TABLE = """
title = "A table"
hardware = "a device"
work = { model = "opt-tiny", batch_size = 2, seq_len = 16 }

[[groups]]
title = "A group"
reference = "resident"
rows = [
    { system = "resident" },
    { system = "elixir", device_memory = "1GiB" },
    { system = "elixir", option = ["b=2", "a=1"] },
    { system = "dummy" },
]
"""


def record(system: str, number: int, step_s: float, **changes: Any) -> Record:
    """One run of a row of TABLE. changes: of the spec by name, of the rest of the record under `record`."""
    rest = changes.pop("record", {})
    spec = {"system": system, "model": "opt-tiny", **changes}
    rate = 32 / step_s
    figures = {"median_step_time_s": step_s, "mean_step_time_s": step_s, "tokens_per_s": rate, "relative_tflops": rate}
    given = {
        "run_id": f"2026-{number}",
        "spec": spec,
        "resolved": {"device_label": DEVICE, "batch_size": 2, "seq_len": 16, "clock": "a"},
        "metrics": figures,
        "memory": {"device_peak_bytes": GIB, "host_rss_peak_bytes": 2 * GIB, "host_budget_bytes": 4 * GIB},
    }
    return make_record(**{**given, **rest})


@pytest.fixture
def table(tmp_path: Path) -> tables.ResultsTable:
    path = tmp_path / "table.toml"
    path.write_text(TABLE)
    return tables.read_table(path)


def rows(table: tables.ResultsTable, records: list[Record]) -> list[list[str]]:
    lines = tables.markdown(table, records)
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("|")][2:]


def test_a_cell_without_a_record_is_a_dash(table: tables.ResultsTable) -> None:
    shown = rows(table, [])
    assert [row[0] for row in shown] == ["resident", "elixir", "elixir:b=2,a=1", "dummy"]
    assert [row[1] for row in shown] == ["all", "1GiB", "all", "all"]
    assert all(cell == "-" for row in shown for cell in row[2:])


def test_rows_are_medians_over_processes_with_their_range(table: tables.ResultsTable) -> None:
    records = [record("resident", number, step_s) for number, step_s in enumerate((0.1, 0.2, 0.4))]
    records += [record("elixir", 10 + number, 0.25, device_memory=GIB) for number in range(3)]
    shown = rows(table, records)
    assert shown[0] == ["resident", "all", "3", "0.2", "0.1 to 0.4", "160", "160", "1.00GiB", "2.00GiB", "1"]
    assert shown[1][2:7] == ["3", "0.25", "0.25 to 0.25", "128", "128"]
    assert shown[1][-1] == "0.8x (0.143 to 4.48)"  # budgets differ, as the table asks


def test_other_work_other_devices_and_older_code_do_not_mix_in(table: tables.ResultsTable) -> None:
    def code(sha: str) -> dict[str, Any]:
        return {"record": {"environment": {"code": {"source_sha256": sha}}}}

    others = [
        record("resident", 1, 9.0, dtype="fp32"),
        record("resident", 2, 9.0, clip=1.0),
        record("resident", 3, 9.0, set=("num_layers=2",)),
        record("resident", 4, 9.0, record={"resolved": {"device_label": "cpu-emulated", "batch_size": 2, "seq_len": 16}}),
        record("resident", 5, 9.0, record={"resolved": {"device_label": DEVICE, "batch_size": 4, "seq_len": 16}}),
        record("resident", 6, 9.0, **code("old")),
    ]
    newer = [record("resident", number, 0.2, **code("new")) for number in (7, 8)]
    assert rows(table, [*newer, *others])[0][2:4] == ["2", "0.2"]
    assert rows(table, others)[0][2:4] == ["1", "9"]


def test_options_are_a_set(table: tables.ResultsTable) -> None:
    assert rows(table, [record("elixir", 1, 0.5, option=("a=1", "b=2"))])[2][2] == "1"
    assert rows(table, [record("elixir", 1, 0.5, option=("a=1",))])[2][2] == "-"


def test_a_cell_that_names_the_length_of_its_runs_has_no_others(tmp_path: Path) -> None:
    (tmp_path / "table.toml").write_text(TABLE.replace('{ system = "dummy" }', '{ system = "dummy", steps = 15, warmup = 5 }'))
    table = tables.read_table(tmp_path / "table.toml")
    asked = record("dummy", 1, 0.5, steps=15, warmup=5)
    others = [record("dummy", 2, 9.0, steps=12, warmup=5), record("dummy", 3, 9.0, steps=15, warmup=4)]
    assert rows(table, [asked, *others])[3][2:4] == ["1", "0.5"]
    assert rows(table, others)[3][2] == "-"


def test_failed_runs_are_shown_as_what_they_are(table: tables.ResultsTable) -> None:
    reason = {"message": "no room", "tier": "device", "need": 2 * GIB, "have": GIB}
    oom = {"record": {"status": "oom", "reason": reason, "metrics": {}}}
    records = [record("resident", 1, 1.0, **oom), record("resident", 2, 1.0, **oom)]
    assert rows(table, records)[0][2:5] == ["2", "oom (device: needs 2GiB, has 1GiB)", "-"]
    died = record("dummy", 3, 1.0, record={"status": "failed", "reason": {"message": "it died"}, "metrics": {}})
    assert rows(table, [died])[3][2:4] == ["1", "failed"]
    both = [*records, record("resident", 4, 0.5)]
    assert rows(table, both)[0][2:4] == ["1", "0.5"]
    assert "resident: 2 more of its runs: oom (device: needs 2GiB, has 1GiB)." in tables.markdown(table, both)


def test_an_unlike_pair_gets_no_ratio_but_a_line(table: tables.ResultsTable) -> None:
    unlike = {"host_rss_peak_bytes": 1, "host_budget_bytes": 8 * GIB}
    records = [record("resident", 1, 0.2), record("dummy", 2, 0.2, record={"memory": unlike})]
    assert rows(table, records)[3][-1] == "-"
    assert "dummy is not set against resident: host memory budget: 8GiB, the reference has 4GiB." in tables.markdown(
        table, records
    )


def test_doubts_are_told_once_a_group(table: tables.ResultsTable) -> None:
    doubt = {"doubts": [{"code": "short", "seen": "a", "cause": "b", "advice": "c"}]}
    records = [record("resident", 1, 0.2, record=doubt), record("dummy", 2, 0.2, record=doubt)]
    assert tables.markdown(table, records)[-1] == "Doubts in these records: short (resident, dummy)."


def test_it_writes_between_the_marks_and_checks(
    table: tables.ResultsTable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme, results = tmp_path / "README.md", tmp_path / "results"
    results.mkdir()
    readme.write_text(f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n")
    write = tables.TablesSpec(results=str(results), readme=str(readme))
    check = write.model_copy(update={"check": True})
    assert tables.write_tables(check, tmp_path) == tables.STALE
    assert "run harness tables" in capsys.readouterr().err
    assert tables.write_tables(write, tmp_path) == tables.write_tables(check, tmp_path) == tables.UP_TO_DATE
    assert readme.read_text().startswith(f"before\n{tables.BEGIN}\n\n### A table\n")
    assert readme.read_text().endswith(f"\n{tables.END}\nafter\n")
    kept = record("resident", 1, 0.2)
    store.write(kept, results)
    (results / "cut.json").write_text("{")
    assert tables.write_tables(check, tmp_path) == tables.STALE
    out, err = capsys.readouterr()
    assert out == "A group: resident: 2026-1\n"
    assert "cut.json is no record" in err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TABLE.replace('"resident"\nrows', '"residnt"\nrows'), "table.toml: group 'A group': no row is called 'residnt'"),
        (TABLE.replace("batch_size = 2, ", ""), "table.toml: a row of resident names no batch_size"),
        (TABLE.replace('system = "dummy"', 'sistem = "dummy"'), "table.toml: "),
        (TABLE.replace("hardware", "hardwear"), "table.toml: "),
        (TABLE + "=", "table.toml: "),
    ],
)
def test_a_table_that_cannot_be_read_is_named(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "table.toml"
    path.write_text(text)
    with pytest.raises(ValueError) as raised:
        tables.read_table(path)
    assert str(raised.value).startswith(said)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--readme", "{here}/none.md"), "none.md cannot be read"),
        (("--readme", "{here}/bare.md"), "it needs the lines <!-- harness tables: begin -->"),
        (("--results", "{here}/none"), "none is no folder"),
        (("--check=yes",), "--check takes no value: leave =yes out"),
        (("--check", "yes"), "unexpected argument 'yes'"),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bare.md").write_text("nothing\n")
    (tmp_path / "README.md").write_text(f"{tables.BEGIN}\n{tables.END}\n")
    given = [argument.format(here=tmp_path) for argument in arguments]
    readme = [] if "--readme" in arguments else ["--readme", str(tmp_path / "README.md")]
    assert cli.main(["tables", *readme, *given]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


def test_the_readme_is_what_the_records_say() -> None:
    """If this fails: harness tables."""
    assert cli.main(["tables", "--check", "--results", str(ROOT / "results"), "--readme", str(ROOT / "README.md")]) == 0
