"""A file is the old one or the new one wherever the writing of it ends, nothing else is left, and what is proved is so."""

from __future__ import annotations

import errno
import os
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from systems.machine import durable
from systems.machine.durable import Over, beside, prove_folder, prove_writable, remove_unfinished, write_whole

OLD, NEW = b"what was there", b"what is new" * 1000
KINDS: tuple[Over, ...] = get_args(Over)
CALLS = ("open", "write", "fsync", "close", "fstat", "fchmod", "fchown", "stat", "lstat", "link", "replace", "unlink")


def tree(folder: Path) -> dict[str, Any]:
    """Everything below a folder: what it is, its mode, and what is in it."""

    def told(path: Path) -> tuple[Any, ...]:
        info = path.lstat()
        kind = stat.S_IFMT(info.st_mode)
        inside = {stat.S_IFREG: path.read_bytes, stat.S_IFLNK: lambda: os.readlink(path)}.get(kind, lambda: None)()
        return kind, oct(stat.S_IMODE(info.st_mode)), info.st_uid, info.st_gid, inside

    return {str(path.relative_to(folder)): told(path) for path in sorted(folder.rglob("*"))}


def make_link(path: Path, to: str) -> None:
    path.symlink_to(to)


def make_linked(path: Path) -> None:
    """To a file that is elsewhere."""
    (path.parent / "elsewhere").mkdir()
    (path.parent / "elsewhere" / "big").write_bytes(OLD)
    path.symlink_to("elsewhere/big")


def make_of_another(path: Path) -> None:
    path.write_bytes(OLD)
    if os.geteuid() == 0:
        os.chown(path, 12345, 23456)
    path.chmod(0o664)


STATES: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "a file": lambda path: path.write_bytes(OLD),
    "another's file": make_of_another,
    "a link to a file": make_linked,
    "a link to nothing": lambda path: make_link(path, "other"),
    "a link to no folder": lambda path: make_link(path, "nowhere/other"),
    "a link to itself": lambda path: make_link(path, path.name),
    "a folder": lambda path: path.mkdir(),
    "a link to a folder": lambda path: make_link(path, "."),
}
PATHS = {
    "plain": "here",
    "long": "n" * 255,
    "of wide letters": "é" * 127,
    "too long": "n" * 256,
    "in no folder": "missing/here",
    "below a file": "taken/here",
}


@contextmanager
def umask(value: int) -> Iterator[None]:
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)


def error_of(work: Callable[[], object]) -> int | None:
    try:
        work()
    except OSError as error:
        return error.errno
    return None


def folder_with(tmp_path: Path, name: str, state: str) -> tuple[Path, Path]:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "taken").write_bytes(b"a file")
    path = folder / "here"
    STATES[state](path)
    return folder, path


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077])
@pytest.mark.parametrize("state", STATES)
def test_over_content_it_does_what_a_plain_open_does(state: str, mask: int, tmp_path: Path) -> None:
    with umask(mask):
        (plain, opened), (ours, written) = (folder_with(tmp_path, name, state) for name in ("plain", "ours"))
        expected = error_of(lambda: opened.write_bytes(NEW))
        assert error_of(lambda: prove_writable(written)) == expected
        assert tree(ours) == tree(folder_with(tmp_path, "untouched", state)[0]), "to prove it leaves nothing"
        assert error_of(lambda: write_whole(written, NEW)) == expected
        assert tree(ours) == tree(plain)


@pytest.mark.parametrize("mode", [0o644, 0o755, 0o666])
@pytest.mark.parametrize("over", ["file", "nothing"])
@pytest.mark.parametrize("state", STATES)
def test_over_other_things(state: str, over: Over, mode: int, tmp_path: Path) -> None:
    """A new file of that mode, or an error and all is as before: also for what is behind a link."""
    folder, path = folder_with(tmp_path, "ours", state)
    before = tree(folder)
    expected = {
        ("nothing", True): errno.EEXIST,
        ("file", True): errno.EISDIR if state == "a folder" else None,
    }.get((over, os.path.lexists(path)))
    assert error_of(lambda: prove_writable(path, over=over)) == expected
    assert tree(folder) == before
    with umask(0o027):
        assert error_of(lambda: write_whole(path, NEW, over=over, mode=mode)) == expected
    after = tree(folder)
    if expected is None:
        assert after.pop("here") == (stat.S_IFREG, oct(mode & ~0o027), os.geteuid(), os.getegid(), NEW)
        before.pop("here", None)
    assert after == before


@pytest.mark.parametrize("over", KINDS)
@pytest.mark.parametrize("name", PATHS.values(), ids=PATHS)
def test_names_and_folders(name: str, over: Over, tmp_path: Path) -> None:
    folder, _ = folder_with(tmp_path, "ours", "nothing")
    before = tree(folder)
    expected = error_of(lambda: (folder / name).write_bytes(NEW))
    if expected is None:
        (folder / name).unlink()
    assert error_of(lambda: prove_writable(folder / name, over=over)) == expected
    assert tree(folder) == before
    assert error_of(lambda: write_whole(folder / name, NEW, over=over)) == expected
    assert (tree(folder) == before) is (expected is not None)
    assert expected is not None or (folder / name).read_bytes() == NEW


@pytest.mark.parametrize("made", [os.mkfifo, lambda path: path.symlink_to("/dev/null")], ids=["a pipe", "a device"])
def test_what_is_no_regular_file_is_neither_waited_for_nor_replaced(made: Callable[[Path], None], tmp_path: Path) -> None:
    made(tmp_path / "here")
    for work in (prove_writable, lambda path: write_whole(path, NEW)):
        assert error_of(lambda w=work: w(tmp_path / "here")) == errno.EINVAL  # type: ignore[misc]
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode) and os.listdir(tmp_path) == ["here"]


@pytest.fixture
def private() -> Iterator[Path]:
    """A folder in which this user is not root."""
    root = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if root:
            os.chown(folder, 12345, 12345)
            os.setegid(12345)
            os.seteuid(12345)
        try:
            yield folder
        finally:
            if root:
                os.seteuid(0)
                os.setegid(0)
            folder.chmod(0o700)


@pytest.mark.parametrize("over", KINDS)
def test_a_folder_that_takes_no_file(over: Over, private: Path) -> None:
    private.chmod(0o500)
    for work in (
        lambda: prove_folder(private),
        lambda: prove_writable(private / "here", over=over),
        lambda: write_whole(private / "here", NEW, over=over),
    ):
        with pytest.raises(PermissionError):
            work()
    assert os.listdir(private) == []


def test_a_file_that_may_not_be_written_stays(private: Path) -> None:
    """A rename would not ask: its folder may be written."""
    path = private / "here"
    path.write_bytes(OLD)
    path.chmod(0o444)
    for work in (lambda: prove_writable(path), lambda: write_whole(path, NEW)):
        with pytest.raises(PermissionError):
            work()
    assert path.read_bytes() == OLD and os.listdir(private) == ["here"]
    write_whole(path, NEW, over="file")
    assert path.read_bytes() == NEW


class Breaks:
    """One call of the operating system's fails: instead of being done, in its midst (a write's), or as it returns."""

    def __init__(self, name: str, number: int, when: str, error: BaseException) -> None:
        self.reached, self._left, self._when, self._error = False, number, when, error
        self._plain = getattr(os, name)

    def __call__(self, *given: Any, **named: Any) -> Any:
        self._left -= 1
        if self._left:
            return self._plain(*given, **named)
        self.reached = True
        if self._when == "half":
            descriptor, data = given
            self._plain(descriptor, data[: len(data) // 2])
        elif self._when == "after":
            self._plain(*given, **named)
        raise self._error


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()], ids=["full", "Ctrl-C"]
)
@pytest.mark.parametrize("over", KINDS)
@pytest.mark.parametrize("name", CALLS)
def test_whichever_call_fails_there_is_the_old_or_the_new(
    name: str, over: Over, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = 0
    for when in ("before", "after", *(["half"] if name == "write" else [])):
        for number in range(1, 20):
            folder, path = folder_with(tmp_path, f"{when}-{number}", "nothing" if over == "nothing" else "another's file")
            breaks, before = Breaks(name, number, when, error), tree(folder)
            with monkeypatch.context() as patch:
                patch.setattr(os, name, breaks)
                try:
                    write_whole(path, NEW, over=over)
                except type(error):
                    pass
            after = tree(folder)
            found = path.read_bytes() if path.exists() else None
            assert after.keys() - {"here"} == {"taken"}, f"{name} {when} {number} left something"
            assert found == NEW or after == before, f"{name} {when} {number}"
            reached += breaks.reached
            if not breaks.reached:
                assert found == NEW
                break
    needed = {"open", "write", "fsync", "close", "unlink", "link" if over == "nothing" else "replace"}
    assert reached or name not in needed, "void: it is not called"


class Interrupt:
    """Ctrl-C at one line of the module."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame: FrameType, event: str, arg: object) -> Interrupt | None:
        if frame.f_code.co_filename != durable.__file__:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("over", KINDS)
@pytest.mark.parametrize("state", ["nothing", "a file", "a link to a file"])
def test_ctrl_c_at_whichever_line_leaves_the_old_or_the_new(state: str, over: Over, tmp_path: Path) -> None:
    if over == "nothing":
        state = "nothing"
    for number in range(1, 200):
        folder, path = folder_with(tmp_path, str(number), state)
        before, interrupt, tracing = tree(folder), Interrupt(number), sys.gettrace()
        sys.settrace(interrupt)
        try:
            write_whole(path, NEW, over=over)
            break
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(tracing)
        after = tree(folder)
        assert after.keys() - {"here"} == before.keys() - {"here"}, number
        assert after == before or path.read_bytes() == NEW, number
    assert 20 < number < 199 and path.read_bytes() == NEW


@given(content=st.binary(max_size=2000), pieces=st.lists(st.integers(1, 300), min_size=1))
def test_a_disk_that_takes_a_little_at_a_time_gets_all(content: bytes, pieces: list[int]) -> None:
    plain_write, taken = os.write, 0

    def little(descriptor: int, data: memoryview) -> int:
        nonlocal taken
        taken += 1
        return plain_write(descriptor, data[: pieces[taken % len(pieces)]])

    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", little)
        for over in KINDS:
            write_whole(Path(name) / over, content, over=over)
            assert (Path(name) / over).read_bytes() == content
        assert sorted(os.listdir(name)) == sorted(KINDS)


@pytest.mark.parametrize("links", [True, False])
def test_of_several_at_once_one_is_first_and_no_reader_sees_a_part(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system may have no links: then a name that is taken is refused as well."""

    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    if not links:
        monkeypatch.setattr(os, "link", no_links)
    once, often, seen, errors = tmp_path / "once", tmp_path / "often", set[bytes](), list[int | None]()
    contents = [bytes([number]) * 200_000 for number in range(8)]
    write_whole(often, contents[0])
    if not links:
        write_whole(once, contents[0], over="nothing")

    def write(content: bytes) -> None:
        errors.append(error_of(lambda: write_whole(once, content, over="nothing")))
        for _ in range(3):
            write_whole(often, content)
            seen.add(often.read_bytes())

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors.count(None) == links and errors.count(errno.EEXIST) == 8 - links
    assert seen <= set(contents) and once.read_bytes() in contents
    assert sorted(os.listdir(tmp_path)) == ["often", "once"]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EEXIST])
def test_what_has_got_the_name_meanwhile_is_not_overwritten(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "here"

    def taken(*_: object) -> None:
        path.write_bytes(OLD)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", taken)
    assert error_of(lambda: write_whole(path, NEW, over="nothing")) == errno.EEXIST
    assert path.read_bytes() == OLD and os.listdir(tmp_path) == ["here"]


@pytest.mark.parametrize("full", ["write", "fsync"])
def test_a_full_disk_is_found_by_what_proves_room(full: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prove_folder(tmp_path, room_bytes=100_000)
    breaks = Breaks(full, 1, "half" if full == "write" else "before", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with monkeypatch.context() as patch:
        patch.setattr(os, full, breaks)
        assert error_of(lambda: prove_folder(tmp_path, room_bytes=100_000)) == errno.ENOSPC
    assert os.listdir(tmp_path) == []


def test_it_is_written_where_it_is_asked_to_be(tmp_path: Path) -> None:
    """And the name is given last, once all is on the disk."""
    (tmp_path / "aside").mkdir()
    seen = []
    plain_fsync = os.fsync

    def look(descriptor: int) -> None:
        plain_fsync(descriptor)
        (unfinished,) = (tmp_path / "aside").iterdir()
        seen.append((unfinished.read_bytes(), (tmp_path / "here").exists()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", look)
        write_whole(tmp_path / "here", NEW, over="file", aside=tmp_path / "aside" / "here")
    assert seen == [(NEW, False)]
    assert (tmp_path / "here").read_bytes() == NEW and os.listdir(tmp_path / "aside") == []


@pytest.mark.parametrize("name", ["step.json", "a [b] *?", "n" * 255])
def test_what_a_killed_process_left_is_found_by_its_number(name: str, tmp_path: Path) -> None:
    left, other = (beside(tmp_path / each, lambda unfinished: unfinished) for each in (name, f"x{name}"[:255]))
    for path in (left, other, tmp_path / name):
        path.touch()
    remove_unfinished(tmp_path / name, pid=os.getpid() + 1)
    assert left.exists()
    remove_unfinished(tmp_path / name, pid=os.getpid())
    assert set(tmp_path.iterdir()) == {other, tmp_path / name}
