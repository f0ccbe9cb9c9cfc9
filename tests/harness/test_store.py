"""The results folder: written once, whole or not at all, wrong ones found before the work (case C66)."""

from __future__ import annotations

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from harness import store
from harness.record import SCHEMA_VERSION, to_json
from tests.harness.conftest import make_record


def test_a_missing_folder_is_created(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    store.prepare(folder)
    assert folder.is_dir()
    assert list(folder.iterdir()) == []


def test_a_name_in_json_or_a_file_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(store.StoreError, match="names a file"):
        store.prepare(tmp_path / "out.json")
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(store.StoreError, match="is a file, not a folder"):
        store.prepare(tmp_path / "taken")
    with pytest.raises(store.StoreError, match="lies below a file"):
        store.prepare(tmp_path / "taken" / "below")
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.parametrize(
    ("number", "said"),
    [(errno.ENOSPC, "is full"), (errno.EROFS, "read-only"), (errno.EACCES, "not writable"), (errno.EIO, "cannot be")],
)
def test_a_folder_that_takes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, said: str) -> None:
    """As root no folder of a test is read-only or full, so the system call says it."""

    def refuse(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(store.StoreError, match=said):
        store.prepare(tmp_path)
    with pytest.raises(store.StoreError, match=said):
        store.write(make_record(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_record_is_written_whole_and_read_again(tmp_path: Path) -> None:
    record = make_record(metrics={"loss": [1.0]})
    path = store.write(record, tmp_path)
    assert path.read_text() == to_json(record) + "\n"
    assert [entry.name for entry in tmp_path.iterdir()] == [f"{record.run_id}.json"]
    assert store.read_all(tmp_path) == ([record], [])


def test_no_record_is_overwritten(tmp_path: Path) -> None:
    path = store.write(make_record(), tmp_path)
    before = path.read_bytes()
    with pytest.raises(store.StoreError, match="never overwritten"):
        store.write(make_record(status="failed"), tmp_path)
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_a_file_system_without_links_keeps_the_promise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    store.write(make_record(), tmp_path)
    with pytest.raises(store.StoreError, match="never overwritten"):
        store.write(make_record(), tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_several_writers_at_once(tmp_path: Path) -> None:
    """Three of them with the same name: one wins. Thirty with their own: all are kept."""

    def write(run_id: str) -> bool:
        try:
            store.write(make_record(run_id=run_id), tmp_path)
        except store.StoreError:
            return False
        return True

    with ThreadPoolExecutor(3) as pool:
        assert sum(pool.map(write, ["same"] * 3)) == 1
        assert all(pool.map(write, [f"own-{index:02}" for index in range(30)]))
    records, unreadable = store.read_all(tmp_path)
    assert (len(records), unreadable) == (31, [])


def test_broken_files_are_told_and_left_alone(tmp_path: Path) -> None:
    whole = store.write(make_record(), tmp_path)
    (tmp_path / "cut.json").write_text(whole.read_text()[:200])
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "other.json").write_text('{"a": 1}')
    (tmp_path / "status.json").write_text(whole.read_text().replace('"ok"', '"splendid"'))
    (tmp_path / "newer.json").write_text(json.dumps({"schema_version": SCHEMA_VERSION + 1}))
    (tmp_path / ".hidden.123.tmp").write_text("{")
    records, unreadable = store.read_all(tmp_path)
    assert len(records) == 1
    why = {one.path.name: one.why for one in unreadable}
    assert set(why) == {"cut.json", "list.json", "other.json", "status.json", "newer.json"}
    assert "cut short" in why["cut.json"]
    assert "update the program" in why["newer.json"]
    assert why["status.json"].startswith("status:")
    assert all("\n" not in text for text in why.values())


def test_older_and_later_fields_are_tolerated(tmp_path: Path) -> None:
    tree = json.loads(to_json(make_record()))
    del tree["energy"], tree["memory"]["disk_peak_bytes"]
    tree["metrics"]["invented_later"] = 3
    (tmp_path / "old.json").write_text(json.dumps(tree))
    records, unreadable = store.read_all(tmp_path)
    assert unreadable == []
    assert records[0].energy.joules_per_sample is None


def test_an_older_version_is_brought_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    def rename(tree: dict[str, Any]) -> dict[str, Any]:
        return {"wall_s": tree.pop("seconds")} | tree

    monkeypatch.setattr(store, "UPGRADES", {SCHEMA_VERSION - 1: rename})
    assert store.upgrade({"schema_version": SCHEMA_VERSION - 1, "seconds": 2.0})["wall_s"] == 2.0
    with pytest.raises(ValueError, match="nothing reads"):
        store.upgrade({"schema_version": SCHEMA_VERSION - 2})


def test_run_ids_sort_by_time_and_differ() -> None:
    start = datetime(2026, 11, 28, tzinfo=UTC)
    times = [start + timedelta(seconds=seconds) for seconds in (0, 1, 59, 3600)]
    ids = [store.new_run_id("z/..system", "a model", time) for time in times]
    assert ids == sorted(ids)
    assert len({store.new_run_id("s", "m", start) for _ in range(100)}) == 100
    assert "/" not in ids[0]


def test_a_frame_has_a_row_a_record_and_dotted_columns(tmp_path: Path) -> None:
    for index in range(3):
        store.write(make_record(run_id=f"run-{index}", metrics={"tokens_per_s": 10.0 * index}), tmp_path)
    frame = store.frame(tmp_path)
    assert list(frame["run_id"]) == ["run-0", "run-1", "run-2"]
    assert list(frame["metrics.tokens_per_s"]) == [0.0, 10.0, 20.0]
    assert frame["spec.system"].unique().tolist() == ["dummy"]
    assert len(store.frame(tmp_path / "nowhere")) == 0


def test_records_in_folders_below_are_counted_and_not_read(tmp_path: Path) -> None:
    """`harness report`, `harness ls runs` and `harness check` say of how many records they are; see where the others lie."""
    run_id = store.new_run_id("elixir", "opt-tiny", datetime.now(UTC))
    for place in ("", "pairs", "empty", "other"):
        (tmp_path / place).mkdir(exist_ok=True)
    store.write(make_record(run_id=run_id), tmp_path)
    store.write(make_record(run_id=run_id), tmp_path / "pairs")
    (tmp_path / "other" / "package.json").write_text("{}")
    assert store.counts_below(tmp_path) == {"pairs": 1}
    assert store.said_below({"losses": 2, "pairs": 1}) == "3 more are in folders below it (losses 2, pairs 1)"
    assert len(store.read_all(tmp_path)[0]) == 1 and store.counts_below(tmp_path / "none") == {}
