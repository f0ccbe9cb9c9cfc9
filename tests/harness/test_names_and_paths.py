"""A name is looked up, or cleaned: whatever it is, no file outside its folder is read or written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import systems
from harness import cli, store
from harness.record import to_json
from harness.spec import BadInputError
from models import registry as models_registry
from systems import registry
from systems.optimizers.choice import hyperparameters
from systems.planning import hardware
from tests.harness.conftest import make_record, make_spec

LEADING = ["../outside", "a/../../outside", "./outside", "..", ".", "", "/etc/hostname", "~/outside", "outside\0", "a/b"]


@given(system=st.text(), model=st.text())
@example("../../etc", "/passwd\0")
@example("..", "..")
def test_a_run_s_own_name_is_a_file_s_whatever_was_run(system: str, model: str) -> None:
    name = store.new_run_id(system, model, datetime(2026, 11, 28, tzinfo=UTC))
    assert Path(name).name == name and name.isascii() and name.isprintable() and len(name) < 120 and " " not in name


@pytest.mark.parametrize("run_id", [each for each in LEADING if "/" in each or "\0" in each])
def test_a_record_is_kept_under_no_name_that_leads_elsewhere(run_id: str, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    with pytest.raises(store.StoreError, match="is no name of a file: leave it") as refused:
        store.write(make_record(run_id=run_id), folder)
    assert "\n" not in str(refused.value)
    assert list(tmp_path.rglob("*.json")) == []


def test_a_record_that_says_it_is_elsewhere_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lists say its path, which others then open."""
    (tmp_path / "theirs.json").write_text(to_json(make_record(run_id="../../home/me/.ssh/id")))
    records, [unreadable] = store.read_all(tmp_path)
    assert records == [] and unreadable.why == "run id '../../home/me/.ssh/id' is no name of a file"
    assert cli.main(["ls", "runs", "--json", "--results", str(tmp_path)]) == 0
    assert ".ssh" not in capsys.readouterr().out


@pytest.mark.parametrize("wanted", LEADING)
def test_runs_are_looked_for_in_their_folder_alone(wanted: str, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    store.write(make_record(run_id="inside"), folder)
    shutil.copy(folder / "inside.json", tmp_path / "outside.json")
    try:
        found = store.find([folder], [wanted])
    except BadInputError:
        return
    assert [record.run_id for record in found] == ["inside"]  # of which the name is a part


LOOKED_UP: dict[str, Callable[[str], object]] = {
    "a system": lambda name: systems.initialize(nn.Linear(2, 2), system=name, device="cpu"),
    "a system's options": lambda name: registry.face(name),
    "a model": models_registry.resolve,
    "an optimizer": lambda name: hyperparameters(name, {}),
    "a hardware profile": hardware.load,
}


@pytest.mark.parametrize("name", [each for each in LEADING if not os.path.isdir(each)])
@pytest.mark.parametrize("kind", LOOKED_UP)
def test_what_is_no_name_is_looked_for_nowhere(
    kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that lies where the name would lead, from the registry's folder or from here, is left alone."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    bait = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    for folder in (tmp_path, tmp_path / "here"):
        for ending in (".py", ".json", ".toml"):
            (folder / f"outside{ending}").write_text(bait if ending == ".py" else "{}")
    monkeypatch.setattr(hardware, "FOLDER", tmp_path / "here")
    opened: list[object] = []
    monkeypatch.setattr(hardware, "read_json", opened.append)
    with pytest.raises(ValueError, match=r"unknown [a-z ]*") as refused:
        LOOKED_UP[kind](name)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "ran").exists() and opened == []


@pytest.mark.parametrize("tag", LEADING)
def test_a_tag_is_a_word_in_a_record_and_names_nothing(tag: str, tmp_path: Path) -> None:
    path = store.write(make_record(spec=make_spec(tag=tag)), tmp_path / "results")
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == [path]
