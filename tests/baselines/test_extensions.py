"""Packages build where no other environment does, and what a killed build leaves behind holds nobody up."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from systems.baselines.external import extensions


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(extensions.VARIABLE, raising=False)
    monkeypatch.setattr(extensions, "cache_directory", lambda: tmp_path)
    return tmp_path


def test_the_folder_is_set_while_building_only(cache: Path) -> None:
    with extensions.building():
        assert Path(os.environ[extensions.VARIABLE]) == extensions.folder()
        assert extensions.folder().is_relative_to(cache)
    assert extensions.VARIABLE not in os.environ


def test_environments_do_not_share_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = extensions.folder()
    monkeypatch.setattr(sys, "prefix", "/another")
    assert extensions.folder() != ours


def test_a_stale_lock_goes(cache: Path) -> None:
    stale = extensions.folder() / "cpu_adam" / "lock"
    stale.parent.mkdir(parents=True)
    stale.touch()
    with extensions.building():
        assert not stale.exists()


def test_a_folder_of_the_users_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(extensions.VARIABLE, str(tmp_path))
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    with extensions.building():
        assert lock.exists()
    assert os.environ[extensions.VARIABLE] == str(tmp_path)


@pytest.mark.parametrize(
    ("given", "read"), [("9.0a", "9.0"), ("8.0;9.0a+PTX", "8.0;9.0+PTX"), ("10.0f 12.0a", "10.0 12.0"), ("Hopper", "Hopper")]
)
def test_architectures_are_numbers_while_building(cache: Path, monkeypatch: pytest.MonkeyPatch, given: str, read: str) -> None:
    monkeypatch.setenv(extensions.ARCHITECTURES, given)
    with extensions.building():
        assert os.environ[extensions.ARCHITECTURES] == read
    assert os.environ[extensions.ARCHITECTURES] == given
