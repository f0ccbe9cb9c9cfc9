"""The compiled libraries: cached, whole, nobody else's, and built by whatever $CXX says."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from systems.native import build


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], Path]:
    """Builds a library that answers 42, or finds it."""
    (tmp_path / "tiny.cpp").write_text('extern "C" int answer() { return 42; }')
    monkeypatch.setattr(build, "CSRC", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build.tempfile, "tempdir", str(tmp_path))
    return lambda: build._built("tiny", ("tiny.cpp",), ())


def test_libraries_are_cached_and_concurrent_builds_agree(tiny: Callable[[], Path], tmp_path: Path) -> None:
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(tiny())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 4 and len(set(paths)) == 1
    assert ctypes.CDLL(str(paths[0])).answer() == 42
    assert list(paths[0].parent.iterdir()) == [paths[0]]  # nothing left over
    (tmp_path / "tiny.cpp").write_text('extern "C" int answer() { return 43; }')
    assert tiny() != paths[0]
    (tmp_path / "tiny.cpp").write_text("int broken(")
    with pytest.raises(build.BuildError, match=r"tiny.cpp.*error") as raised:
        tiny()
    assert "\n" not in str(raised.value)


def test_one_that_is_damaged_or_not_ours_is_built_anew(tiny: Callable[[], Path], tmp_path: Path) -> None:
    library = tiny()
    content = library.read_bytes()
    elsewhere = tmp_path / "elsewhere.so"
    elsewhere.write_bytes(content)

    def link() -> None:
        library.unlink()
        library.symlink_to(elsewhere)

    def pipe() -> None:
        library.unlink()
        os.mkfifo(library)

    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 4
    for spoil in (
        lambda: library.write_bytes(b""),
        lambda: library.write_bytes(content[:1000]),
        lambda: library.write_bytes(content[: -build.HASH_BYTES]),
        lambda: library.write_bytes(flipped),
        lambda: library.chmod(0o777),
        lambda: library.chmod(0o775),
        link,
        pipe,
    ):
        spoil()
        before = library.lstat().st_ino
        assert tiny() == library
        now = library.lstat()
        assert now.st_ino != before and now.st_mode & 0o7777 == 0o755 and library.stat().st_size == len(content)
    last = library.lstat().st_ino
    assert tiny() == library and library.lstat().st_ino == last, "what is sound is not built again"
    told = subprocess.run(
        [sys.executable, "-c", f"import ctypes; print(ctypes.CDLL({str(library)!r}).answer())"], capture_output=True, check=True
    )
    assert told.stdout == b"42\n"


def test_the_compiler_may_have_arguments(tiny: Callable[[], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = next(path for name in build.COMPILERS if (path := shutil.which(name)))
    blank = tmp_path / "a folder"
    blank.mkdir()
    (blank / "my compiler").write_text(f'#!/bin/sh\nexec {found} "$@"\n')
    (blank / "my compiler").chmod(0o755)
    (tmp_path / "plain.cpp").write_text("")
    built = set()
    for wanted in ("", found, f"{found} -O1", f"  {found}   -DX='a b' ", str(blank / "my compiler"), f"env {found} -O1"):
        monkeypatch.setenv("CXX", wanted)
        library = tiny()
        built.add(library)
        assert ctypes.CDLL(str(library)).answer() == 42
    assert len(built) == 5, "the user's own flags are part of what a library is"
    monkeypatch.setenv("CXX", f"{found} -DX='a b'")
    assert build.compiler()[0] == (found, "-DX=a b")
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("no program")
    (tmp_path / "text").chmod(0o755)
    for wanted, said in (
        ("no-such-compiler -O1", "looked for no-such-compiler -O1"),
        (f"{found} '-O1", "cannot be read (No closing quotation)"),
        (str(tmp_path / "text"), "cannot be run as a C++ compiler"),
        ("false", "false could not build"),
        (f"{found} --no-such-flag", "no-such-flag"),
    ):
        monkeypatch.setenv("CXX", wanted)
        with pytest.raises(build.BuildError) as raised:
            tiny()
        assert said in str(raised.value) and "\n" not in str(raised.value)


def test_a_cache_that_others_may_write_is_closed_to_them_or_not_used(
    tiny: Callable[[], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = build.cache_directory()
    assert cache.parent == tmp_path / "cache" and cache.stat().st_mode & 0o777 == 0o700
    for mode in (0o777, 0o775, 0o722):
        cache.chmod(mode)
        assert build.cache_directory() == cache and cache.stat().st_mode & 0o777 == mode & ~0o022
    cache.chmod(0o777)
    monkeypatch.setattr(Path, "chmod", lambda *_, **__: None)  # a file system that has no modes
    fallback = build.cache_directory()
    assert fallback != cache and fallback.stat().st_mode & 0o777 == 0o700
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build.tempfile, "tempdir", str(tmp_path))
    cache.chmod(0o755)
    if os.getuid() == 0:
        os.chown(cache, 12345, -1)
    else:
        mine = os.getuid()
        monkeypatch.setattr(build.os, "getuid", lambda: mine + 1)
    assert build.cache_directory() != cache


def test_a_cache_that_others_could_replace_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Their folder would be in its place by the time that a library is loaded."""
    above, own = tmp_path / "all", tmp_path / "own"
    for folder in (above, own):
        folder.mkdir(mode=0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(above / "me" / "cache"))
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(own))
    preferred = above / "me" / "cache" / build.PROJECT
    assert build.cache_directory() == preferred
    for mode, used in ((0o777, False), (0o1777, True), (0o775, True), (0o757, False)):
        above.chmod(mode)
        assert (build.cache_directory() == preferred) is used
    own.chmod(0o777)
    with pytest.raises(build.BuildError, match="open to others: set XDG_CACHE_HOME"):
        build.cache_directory()


def test_where_home_cannot_be_written_the_cache_is_in_a_private_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path))
    where = build.cache_directory()
    assert where.parent == tmp_path and where.stat().st_mode & 0o777 == 0o700
    where.chmod(0o777)
    with pytest.raises(build.BuildError, match="XDG_CACHE_HOME"):
        build.cache_directory()
    where.rmdir()
    where.write_text("")
    with pytest.raises(build.BuildError, match="can be a cache"):
        build.cache_directory()
