"""What others left in a folder that the harness reads: told and left alone, the rest shown; nothing hangs or is obeyed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from harness import cells, cli, store, tables
from harness.record import Record, build, to_json
from models.data import open_dataset
from systems.baselines.external.package import read_config
from systems.machine.reading import read_bytes, read_json
from systems.planning import hardware
from systems.strategies.h3t.profiling import read_profile
from tests.harness.conftest import make_record, make_spec

HOSTILE = "\x1b[2J[red]:boom:\n\u202e"
SHOWN = r"\x1b[2J[red]:boom:\n\u202e"


def put_odd(folder: Path) -> set[str]:
    """Files of every odd kind, and their names."""
    whole = to_json(make_record(run_id="whole"))
    written = {
        "deep": "[" * 200_000,
        "deep-below": whole.replace('"strategy": null', '"strategy": {"a": ' + "[" * 200 + "]" * 200 + "}"),
        "half-letter": whole.replace('"whole"', r'"\ud800"'),
        "half-letter-below": whole.replace('"strategy": null', r'"strategy": {"a": "\ud800"}'),
        "no-number": whole.replace('"strategy": null', '"strategy": {"a": NaN}'),
        "infinite": whole.replace('"strategy": null', '"strategy": {"a": 1e999}'),
        "wide": whole.replace('"strategy": null', '"strategy": {"a": ' + "9" * 400 + "}"),
        "line\nend\x1b": "{",
    }
    for name, text in written.items():
        assert text != whole
        (folder / f"{name}.json").write_text(text)
    (folder / "bytes.json").write_bytes(b"\xff\xfe")
    os.mkfifo(folder / "pipe.json")
    (folder / "folder.json").mkdir()
    for name, target in (
        ("endless", "/dev/zero"),
        ("circle", "circle.json"),
        ("dangling", "nowhere"),
        ("pipe-link", "pipe.json"),
    ):
        (folder / f"{name}.json").symlink_to(target)
    with open(folder / "huge.json", "wb") as file:
        file.truncate(1 << 40)  # sparse
    (folder / os.fsdecode(b"\xff.json")).write_text("{")
    return {path.name for path in folder.iterdir()}


def test_odd_files_hide_no_record(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_MOST_BYTES", 1 << 20)
    odd = put_odd(tmp_path)
    record = make_record(run_id="good", metrics={"tokens_per_s": 12.5})
    store.write(record, tmp_path)
    other = make_record(run_id="other", spec=make_spec(system="resident"))
    (tmp_path / "elsewhere").write_text(to_json(other))
    (tmp_path / "other.json").symlink_to("elsewhere")  # a link to a regular file is one
    records, unreadable = store.read_all(tmp_path)
    assert records == [record, other]
    assert {one.path.name for one in unreadable} == odd
    why = {one.path.stem: one.why for one in unreadable}
    assert why["deep"] == why["deep-below"] == "it is nested more than 64 deep"
    assert why["pipe"] == why["pipe-link"] == "it is a pipe, not a regular file"
    assert why["endless"] == "it is a device, not a regular file"
    assert why["folder"] == "it is a folder, not a regular file"
    assert why["huge"] == f"it has more than {1 << 20} bytes"
    assert cli.main(["ls", "runs", "--results", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == ["run", "other", "good"]
    assert len([line for line in err.splitlines() if "is no record: " in line]) == len(odd)
    assert err.splitlines()[-1] == f"2 of 2 runs in {tmp_path}" and err.count("\n") == len(odd) + 1
    assert err.replace("\n", "").isprintable()
    assert cli.main(["compare", "--runs", "good", "other", "--results", str(tmp_path)]) == 0
    assert [row["n"] for row in json.loads(capsys.readouterr().out)["rows"]] == [1, 1]
    document = tmp_path / "results.md"
    document.write_text(f"{tables.BEGIN}\n{tables.END}\n")
    assert tables.write_tables(tables.TablesSpec(results=str(tmp_path), out=str(document))) == tables.UP_TO_DATE


def test_tags_ids_and_labels_are_printed_and_not_obeyed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run_id, system in (("first", "dummy"), ("second", HOSTILE)):
        made = make_record(run_id=run_id + HOSTILE, spec=make_spec(system=system, tag=HOSTILE), notes=[HOSTILE])
        (tmp_path / f"{run_id}.json").write_text(to_json(made))
    assert cli.main(["ls", "runs", "--results", str(tmp_path)]) == 0
    out, _ = capsys.readouterr()
    assert out.count(SHOWN) == 4
    assert cli.main(["compare", "--runs", "first", "second", "--results", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert SHOWN in err
    assert (out + err).replace("\n", "").isprintable()


def test_what_is_no_utf_8_is_kept_as_escapes() -> None:
    made = build({**make_record().model_dump(), "notes": ["\udcff"], "strategy": {"\udcff": "a\udc80"}})
    assert (made.strategy, made.notes) == ({r"\udcff": r"a\udc80"}, [r"\udcff"])
    assert Record.model_validate_json(to_json(made)) == made


def test_numbers_that_no_machine_has_end_no_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, rate in enumerate((1e308, 5e-324, 1e308)):
        figures = {"tokens_per_s": rate, "median_step_time_s": rate, "loss": [rate]}
        store.write(make_record(run_id=f"run-{number}", spec=make_spec(system=f"s{number % 2}"), metrics=figures), tmp_path)
    assert cli.main(["compare", "--runs", "run-0", "run-1", "run-2", "--results", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][1]["speed_ratio"] is None


@pytest.mark.parametrize("kind", ["pipe", "folder", "endless", "deep", "half-letter", "bytes"])
def test_other_files_that_are_named_are_refused_in_one_line(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put_odd(tmp_path)
    path = tmp_path / f"{kind}.json"
    readers: list[Any] = [lambda: hardware.load(str(path)), lambda: read_config(str(path)), lambda: read_profile(path)]
    if kind in ("pipe", "endless"):
        readers.append(lambda: open_dataset(str(path), vocab_size=512, seed=0))
    readers.append(lambda: cells.read_table(path))
    readers.append(lambda: tables.write_tables(tables.TablesSpec(results=str(tmp_path), out=str(path))))
    for read in readers:
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            read()


def test_what_is_read_is_all_of_it_and_no_more_than_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"[1, 2]")
    assert read_bytes(path, 6) == b"[1, 2]"
    assert read_json(path) == [1, 2]
    with pytest.raises(ValueError, match="it has more than 5 bytes"):
        read_bytes(path, 5)
