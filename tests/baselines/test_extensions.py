"""Packages build where no other environment does, and what a killed build leaves behind holds nobody up."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from systems.baselines.external import extensions
from systems.native.build import BuildError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(extensions.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_the_folder_is_set_while_building_only(cache: Path) -> None:
    with extensions.building():
        assert Path(os.environ[extensions.VARIABLE]) == extensions.folder()
        assert extensions.folder().is_relative_to(cache)
    assert extensions.VARIABLE not in os.environ


def test_nobody_else_writes_there(cache: Path) -> None:
    """Whatever the umask is, and whoever has made it writable since."""
    before = os.umask(0)
    try:
        made = extensions.folder()
        assert {each.stat().st_mode & 0o777 for each in (made, made.parent)} == {0o700}
        for each in (made, made.parent):
            each.chmod(0o777)
            assert extensions.folder() == made and each.stat().st_mode & 0o022 == 0
    finally:
        os.umask(before)


def test_one_of_somebody_else_s_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = extensions.folder()
    if os.getuid() == 0:
        os.chown(made, 12345, -1)
    else:
        monkeypatch.setattr(Path, "chmod", lambda *_, **__: None)  # which an owner alone may
        os.chmod(made, 0o777)
    with pytest.raises(BuildError, match=f"{made} belongs to someone else or is open to others: remove it"):
        extensions.folder()


def test_environments_do_not_share_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = extensions.folder()
    monkeypatch.setattr(sys, "prefix", "/another")
    assert extensions.folder() != ours


def test_a_stale_lock_goes(cache: Path) -> None:
    stale = extensions.folder() / "cpu_adam" / "lock"
    stale.parent.mkdir()
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
