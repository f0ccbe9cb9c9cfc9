"""The results tables: what they show of records, and that docs/results.md is what the records make of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness import cells, cli, results_page, store, tables
from harness.doubts import CLOSED_LIST
from harness.record import Record
from systems import registry
from systems.system import System
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
def table(tmp_path: Path) -> cells.ResultsTable:
    path = tmp_path / "table.toml"
    path.write_text(TABLE)
    return cells.read_table(path)


def page(table: cells.ResultsTable, records: list[Record]) -> list[str]:
    return results_page.page([table], records)


def rows(table: cells.ResultsTable, records: list[Record]) -> dict[str, list[str]]:
    """By system and budget; of one group."""
    lines = [line.strip("| ").split(" | ") for line in page(table, records) if line.startswith("|")][2:]
    found = {" ".join(row[:2]): row[2:] for row in lines}
    assert len(found) == len(lines)
    return found


def test_cells_without_a_record_are_one_line(table: cells.ResultsTable) -> None:
    lines = page(table, [record("resident", 1, 0.2)])
    assert list(rows(table, [record("resident", 1, 0.2)])) == ["resident all"]
    assert lines[-1] == "Not run yet: elixir with 1GiB, dummy with all, elixir (b=2, a=1) with all."


def with_groups(folder: Path, **rows: str) -> cells.ResultsTable:
    """A table with a group of each title; all but its rows are as in TABLE."""
    head = TABLE.split("\n[[groups]]")[0]
    groups = [f'[[groups]]\ntitle = "{title}"\nreference = "resident"\nrows = [{given}]' for title, given in rows.items()]
    (folder / "groups.toml").write_text("\n".join([head, *groups]))
    return cells.read_table(folder / "groups.toml")


def test_a_table_without_any_record_is_one_line(tmp_path: Path) -> None:
    never = '{ system = "resident", clip = 2.0 }, { system = "elixir", clip = 2.0, device_memory = "1GiB" }'
    lines = page(with_groups(tmp_path, Never=never, Run='{ system = "resident" }'), [record("resident", 1, 0.2)])
    assert [line for line in lines if line.startswith("**")] == ["**Run**"]
    assert lines[-1] == "* Never: resident with all, elixir with 1GiB."


def test_default_options_come_first(tmp_path: Path) -> None:
    """Rows of a group, and groups: those whose strategies ran by default, then those where some did, then the others."""
    reference, default, other = '{ system = "resident" }', '{ system = "elixir" }', '{ system = "elixir", option = ["a=1"] }'
    made = {"Others": f"{reference}, {other}", "Some": f"{reference}, {other}, {default}", "All": f"{reference}, {default}"}
    table = with_groups(tmp_path, **made)
    lines = page(table, [record("elixir", 1, 0.5), record("elixir", 2, 0.5, option=("a=1",))])
    assert [line for line in lines if line.startswith("**")] == ["**All**", "**Some**", "**Others**"]
    shown = [line.split(" |")[0] for line in lines if line.startswith("| elixir")]
    assert shown == ["| elixir", "| elixir", "| elixir (a=1)", "| elixir (a=1)"]


def test_options_have_short_names_with_a_legend(tmp_path: Path) -> None:
    path = tmp_path / "table.toml"
    path.write_text(TABLE.replace('"b=2", "a=1"', '"nonfinite=stop", "a=1"'))
    table = cells.read_table(path)
    ran = [record("elixir", 1, 0.5, option=("nonfinite=stop", "a=1"))]
    assert list(rows(table, ran)) == ["elixir (stop, a=1) all"]
    assert [line for line in page(table, ran) if line.startswith("* (")] == [
        f"* (stop): `--option nonfinite=stop`, {results_page.SHORT_NAMES['nonfinite=stop'][1]}."
    ]
    assert not [line for line in page(table, [record("elixir", 1, 0.5, device_memory=GIB)]) if line.startswith("* (")]


def test_short_names_are_of_options_that_there_are() -> None:
    """And no two options have one name."""
    known = {name: registry.get(name) for name, entry in registry.find().items() if entry.exposes == "STRATEGY"}
    for option in results_page.SHORT_NAMES:
        field, _, value = option.partition("=")
        takers = [system for system in known.values() if field in system.Options.model_fields]
        assert any(_takes(system, option) for system in takers), option
        assert value
    assert len({name for name, _ in results_page.SHORT_NAMES.values()}) == len(results_page.SHORT_NAMES)


def _takes(system: System, option: str) -> bool:
    try:
        registry.parse_options(system, [option])
    except ValueError:
        return False
    return True


def test_rows_are_medians_over_processes_with_their_range(table: cells.ResultsTable) -> None:
    records = [record("resident", number, step_s) for number, step_s in enumerate((0.1, 0.2, 0.4))]
    records += [record("elixir", 10 + number, 0.25, device_memory=GIB) for number in range(3)]
    shown = rows(table, records)
    assert shown["resident all"] == ["3", "0.2", "0.1 to 0.4", "160", "160", "1.00GiB", "2.00GiB", "1"]
    assert shown["elixir 1GiB"][:5] == ["3", "0.25", "0.25 to 0.25", "128", "128"]
    assert shown["elixir 1GiB"][-1] == "0.8x (0.143 to 4.48)"  # budgets differ, as the table asks


def test_columns_of_a_row_are_of_one_quantity_and_agree(table: cells.ResultsTable) -> None:
    """A step that leaves much behind its last boundary: by their medians the two would be in the other order."""

    def ran(system: str, number: int, step_s: float, median_s: float, **changes: Any) -> Record:
        made = record(system, number, step_s, **changes)
        return made.model_copy(update={"metrics": made.metrics.model_copy(update={"median_step_time_s": median_s})})

    records = [ran("resident", 1, 0.2, 0.19), ran("elixir", 2, 0.4, 0.1, device_memory=GIB)]
    by_name = [dict(zip(results_page.COLUMNS[2:], row, strict=True)) for row in rows(table, records).values()]
    assert [row["mean step s"] for row in by_name] == ["0.2", "0.4"]
    assert [row["speed"] for row in by_name] == ["1", "0.5x"]
    for row in by_name:
        assert float(row["mean step s"]) * float(row["tokens/s"]) == pytest.approx(32)


def test_what_makes_columns_disagree_is_said(table: cells.ResultsTable) -> None:
    """Steps that were skipped, and runs on a machine that the other row has not."""

    def on(machine: str, useful: int = 10) -> dict[str, Any]:
        return {
            "environment": {"hardware": {"boot_id": machine}},
            "resolved": {"device_label": DEVICE, "batch_size": 2, "seq_len": 16, "clock": "a", "timed_steps": 10},
            "metrics": {"mean_step_time_s": 0.2, "tokens_per_s": 16.0 * useful, "useful_steps": useful},
        }

    ran = [record("resident", 1, 0.2, record=on("here")), record("resident", 2, 0.2, record=on("there"))]
    ran += [record("elixir", 3, 0.2, device_memory=GIB, record=on("here", useful=7))]
    told = [line for line in page(table, ran) if line.startswith("elixir:")]
    assert [line.partition(":")[2].strip()[:40] for line in told] == [
        "3 of the timed steps were skipped: the m",
        "speed leaves out 1 of the two rows' runs",
    ]
    assert not [line for line in page(table, ran[:1]) if "skipped" in line or "leaves out" in line]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ('dtype = "fp32"', "dtype fp32"), ('recompute = "full"', "recompute full"), ("recompute = [0, 2]", "recompute 0,2"),
        ('optimizer = "sgd"', "optimizer sgd"),
        ('hyper = ["eps=1e-6"]', "eps=1e-6"), ('set = ["num_layers=2"]', "num_layers=2"),
        ("clip = 1.0", "clip 1.0"), ("accumulate = 2", "accumulate 2"), ("batch_size = 4", "batch size 4"),
        ('disk = "there"', "disk"), ("seed = 7", "seed 7"), ("steps = 9", "steps 9"),
        ('host_memory = "4GiB"', "host memory 4GiB"),
        ("phases = true", "phases"), ('data = "synthetic"', "data synthetic"),
    ],
)  # fmt: skip
def test_rows_that_differ_in_one_setting_say_so(row: str, told: str, tmp_path: Path) -> None:
    """What no column has stands behind the name, in the page and in what a sweep lists."""
    table = with_groups(tmp_path, one='{ system = "resident" }, { system = "elixir" }, { system = "elixir", ' + row + " }")
    plain, other = table.groups[0].cells[1:]
    assert told in results_page.short_label(other) and told in other.name
    assert results_page.short_label(plain) != results_page.short_label(other) and plain.name != other.name


def test_rows_that_differ_in_budget_or_ranks_alone_have_names_of_their_own(tmp_path: Path) -> None:
    rows = '{ system = "resident" }, { system = "elixir", device_memory = "1GiB" }, { system = "elixir", ranks = 2 }'
    cells = with_groups(tmp_path, one=rows).groups[0].cells
    assert [cell.name for cell in cells] == ["resident", "elixir (device memory 1GiB)", "elixir (ranks 2)"]
    assert [results_page.short_label(cell) for cell in cells] == ["resident", "elixir", "elixir (2 ranks)"]


def test_a_row_can_be_the_reference_by_its_full_name(tmp_path: Path) -> None:
    (tmp_path / "table.toml").write_text(
        TABLE.replace('{ system = "dummy" }', '{ system = "resident", dtype = "fp32" }').replace(
            'reference = "resident"', 'reference = "resident (dtype fp32)"'
        )
    )
    assert cells.read_table(tmp_path / "table.toml").groups[0].reference.spec.dtype == "fp32"


def test_other_work_other_devices_and_older_code_do_not_mix_in(table: cells.ResultsTable) -> None:
    def code(sha: str) -> dict[str, Any]:
        return {"record": {"environment": {"code": {"source_sha256": sha}}}}

    others = [
        record("resident", 1, 9.0, dtype="fp32"),
        record("resident", 2, 9.0, clip=1.0),
        record("resident", 3, 9.0, set=("num_layers=2",)),
        record("resident", 4, 9.0, record={"resolved": {"device_label": "cpu-emulated", "batch_size": 2, "seq_len": 16}}),
        record("resident", 5, 9.0, record={"resolved": {"device_label": DEVICE, "batch_size": 4, "seq_len": 16}}),
        record("resident", 6, 9.0, **code("old")),
        record("resident", 9, 9.0, optimizer="sgd", hyper=("momentum=0.9",)),
        record("resident", 9, 9.0, hyper=("eps=1e-6",)),
        record("resident", 9, 9.0, disk="somewhere"),
    ]
    newer = [record("resident", number, 0.2, **code("new")) for number in (7, 8)]
    assert rows(table, [*newer, *others])["resident all"][:2] == ["2", "0.2"]
    assert rows(table, others)["resident all"][:2] == ["1", "9"]


def test_options_are_a_set(table: cells.ResultsTable) -> None:
    assert rows(table, [record("elixir", 1, 0.5, option=("a=1", "b=2"))])["elixir (b=2, a=1) all"][0] == "1"
    assert not rows(table, [record("elixir", 1, 0.5, option=("a=1",))])


def test_a_cell_that_names_the_length_of_its_runs_has_no_others(tmp_path: Path) -> None:
    (tmp_path / "table.toml").write_text(TABLE.replace('{ system = "dummy" }', '{ system = "dummy", steps = 15, warmup = 5 }'))
    table = cells.read_table(tmp_path / "table.toml")
    asked = record("dummy", 1, 0.5, steps=15, warmup=5)
    others = [record("dummy", 2, 9.0, steps=12, warmup=5), record("dummy", 3, 9.0, steps=15, warmup=4)]
    assert rows(table, [asked, *others])["dummy all"][:2] == ["1", "0.5"]
    assert not rows(table, others)


def test_failed_runs_are_shown_as_what_they_are(table: cells.ResultsTable) -> None:
    reason = {"message": "no room", "tier": "device", "need": 2 * GIB, "have": GIB}
    oom = {"record": {"status": "oom", "reason": reason, "metrics": {}}}
    records = [record("resident", 1, 1.0, **oom), record("resident", 2, 1.0, **oom)]
    assert rows(table, records)["resident all"][:3] == ["2", "oom (device: needs 2GiB, has 1GiB)", "-"]
    died = record("dummy", 3, 1.0, record={"status": "failed", "reason": {"message": "it died"}, "metrics": {}})
    assert rows(table, [died])["dummy all"][:2] == ["1", "failed"]
    both = [*records, record("resident", 4, 0.5)]
    assert rows(table, both)["resident all"][:2] == ["1", "0.5"]
    assert "resident: 2 more of its runs: oom (device: needs 2GiB, has 1GiB)." in page(table, both)


def test_unlike_pairs_get_no_ratio_but_a_line(table: cells.ResultsTable) -> None:
    """One for all that differ alike."""
    unlike = {"memory": {"host_rss_peak_bytes": 1, "host_budget_bytes": 8 * GIB}}
    options = {"option": ("a=1", "b=2")}
    records = [
        record("resident", 1, 0.2),
        record("dummy", 2, 0.2, record=unlike),
        record("elixir", 3, 0.2, record=unlike, **options),
    ]
    shown = rows(table, records)
    assert shown["dummy all"][-1] == shown["elixir (b=2, a=1) all"][-1] == "-"
    said = "Not set against resident: dummy; elixir (b=2, a=1): host memory budget: 8GiB, the reference has 4GiB."
    assert said in page(table, records)


def test_doubts_are_letters_with_a_legend(table: cells.ResultsTable) -> None:
    def doubted(*codes: str) -> dict[str, Any]:
        return {"record": {"doubts": [{"code": code, "seen": "a", "cause": "b", "advice": "c"} for code in codes]}}

    later, earlier = "clocks_throttled", "step_time_spread"
    records = [record("resident", 1, 0.2, **doubted(later, "gone")), record("dummy", 2, 0.2, **doubted(earlier, later))]
    assert list(rows(table, records)) == ["resident <sup>bc</sup> all", "dummy <sup>ab</sup> all"]
    assert [line for line in page(table, records) if line[:2] == "* "] == [
        f"* a: step time spread; possible cause: {CLOSED_LIST[earlier][0]}.",
        f"* b: clocks throttled; possible cause: {CLOSED_LIST[later][0]}.",
        "* c: gone.",
    ]


def test_what_records_say_is_shown_and_not_obeyed(table: cells.ResultsTable) -> None:
    """Neither as HTML nor as a mark of the document."""
    said = f"<script>alert(1)</script> {tables.END}\n"
    doubts = [{"code": said, "seen": said, "cause": said, "advice": said}]
    other = {"doubts": doubts, "resolved": {"device_label": DEVICE, "batch_size": 2, "seq_len": 16, "clock": said}}
    text = tables.rendered([table], [record("resident", 1, 0.2), record("dummy", 2, 0.2, record=other)])
    assert "<script" not in text and text.count("<!--") == text.count("-->") == 2
    assert text.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 2  # as a doubt, and as what sets it apart


def test_no_line_but_a_row_is_long() -> None:
    text = (ROOT / "docs" / "results.md").read_text()
    assert not [line for line in text.splitlines() if len(line) > results_page.WIDTH and not line.startswith("|")]


def test_it_writes_between_the_marks_and_checks(
    table: cells.ResultsTable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out_file, results = tmp_path / "results.md", tmp_path / "results"
    results.mkdir()
    out_file.write_text(f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n")
    write = tables.TablesSpec(results=str(results), out=str(out_file))
    check = write.model_copy(update={"check": True})
    assert tables.write_tables(check, tmp_path) == tables.STALE
    assert "run harness tables" in capsys.readouterr().err
    assert tables.write_tables(write, tmp_path) == tables.write_tables(check, tmp_path) == tables.UP_TO_DATE
    assert out_file.read_text().startswith(f"before\n{tables.BEGIN}\n\n### A table\n")
    assert out_file.read_text().endswith(f"\n{tables.END}\nafter\n")
    kept = record("resident", 1, 0.2)
    store.write(kept, results)
    (results / "cut.json").write_text("{")
    assert tables.write_tables(check, tmp_path) == tables.STALE
    out, err = capsys.readouterr()
    assert out == "a device: A group: resident: 2026-1\n"
    assert "cut.json is no record" in err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TABLE.replace('"resident"\nrows', '"residnt"\nrows'), "table.toml: group 'A group': no row is called 'residnt'"),
        (TABLE.replace("batch_size = 2, ", ""), "table.toml: a row of resident names no batch_size: give it in"),
        (TABLE.replace('model = "opt-tiny", ', ""), "table.toml: a row names no model: give it in the row, or in `work`"),
        (TABLE.replace('hardware = "a device"', ""), "table.toml: hardware is missing: see Sweeps in docs/harness.md"),
        (TABLE.replace('system = "dummy"', 'sistem = "dummy"'), "table.toml: "),
        (TABLE.replace("hardware", "hardwear"), "table.toml: "),
        (TABLE + "=", "table.toml: "),
    ],
)
def test_a_table_that_cannot_be_read_is_named(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "table.toml"
    path.write_text(text)
    with pytest.raises(ValueError) as raised:
        cells.read_table(path)
    assert str(raised.value).startswith(said)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--out", "{here}/none.md"), "none.md cannot be read"),
        (("--out", "{here}/bare.md"), f"it needs the lines {tables.BEGIN}"),
        (("--results", "{here}/none"), "none is no folder"),
        (("--check=yes",), "--check takes no value: leave =yes out"),
        (("--check", "yes"), "unexpected argument 'yes'"),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bare.md").write_text("nothing\n")
    (tmp_path / "results.md").write_text(f"{tables.BEGIN}\n{tables.END}\n")
    given = [argument.format(here=tmp_path) for argument in arguments]
    out_file = [] if "--out" in arguments else ["--out", str(tmp_path / "results.md")]
    assert cli.main(["tables", *out_file, *given]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


def test_the_document_is_what_the_records_say() -> None:
    """If this fails: harness tables."""
    assert cli.main(["tables", "--check", "--results", str(ROOT / "results"), "--out", str(ROOT / "docs" / "results.md")]) == 0
