"""Files that are whole whatever happens, that have to outlive a crash of the machine, or that somebody else may have made.

The one idea: what is not finished has a name of its own beside its place, and only what is finished and on the disk gets the
name that readers know. Nothing unfinished outlives the call that made it, whether that fails or Ctrl-C ends it.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal, TypeVar

Over = Literal["content", "file", "nothing"]
Made = TypeVar("Made")

_NAMED = 40  # letters of a file's name that the name of what is not finished has too: 255 bytes hold them and the rest


def flush(path: Path) -> None:
    """What the file or folder holds is on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: bytes, *, over: Over = "content", mode: int = 0o666, aside: Path | None = None) -> None:
    """The file has all of the content, which is on the disk, or all is as it was before. Raises OSError.

    Its folder has to be there; a caller whose file's name, too, is to outlive a crash of the machine flushes that folder.

    over: what may be there. content: a file, as in a plain open for writing: a link is followed, mode and owner stay, and one
    that may not be written is refused. file: whatever has the name, be it a link, and a new file takes its place. nothing:
    FileExistsError where something has the name. mode: of a new file, less the umask. aside: a path on the same file system
    beside which the file is written, if not beside its own.
    """
    target, old = _target(path, over)

    def write_and_name(unfinished: Path) -> None:
        _write_flushed(unfinished, content, mode, old)
        if over == "nothing":
            _name_once(unfinished, target)
        else:
            unfinished.replace(target)

    beside(aside or target, write_and_name)


def prove_writable(path: Path, *, over: Over = "content") -> None:
    """Before work whose result would be lost: OSError if `write_whole` could not write there. Leaves nothing."""
    prove_folder(_target(path, over)[0].parent)


def prove_folder(folder: Path, *, room_bytes: int = 0) -> None:
    """OSError if the folder takes no file of so many bytes. Leaves nothing."""
    beside(folder / "probe", lambda probe: _write_flushed(probe, bytes(room_bytes), 0o600, None))


def beside(path: Path, make: Callable[[Path], Made]) -> Made:
    """What `make` returns. It is given a name beside `path` that is free, and what it leaves under that is removed."""
    unfinished = path.with_name(f".{path.name[:_NAMED]}.{os.getpid()}-{secrets.token_hex(8)}.tmp")
    try:
        try:
            return make(unfinished)
        finally:
            unfinished.unlink(missing_ok=True)
    except BaseException:  # Ctrl-C may have come before it was removed
        unfinished.unlink(missing_ok=True)
        raise


def remove_unfinished(path: Path, *, pid: int) -> None:
    """What a process that was killed left beside `path`, and beside the file that it is a link to."""
    for place in {path, Path(os.path.realpath(path))}:
        for left in place.parent.glob(f".{glob.escape(place.name[:_NAMED])}.{pid}-*.tmp"):
            left.unlink(missing_ok=True)


def _target(path: Path, over: Over) -> tuple[Path, os.stat_result | None]:
    """Where the file comes to be, and what is there whose mode and owner it keeps. OSError for what is not to be replaced."""
    target = Path(os.path.realpath(path)) if over == "content" else path
    try:
        found = target.lstat()
    except FileNotFoundError:
        return target, None
    if over == "nothing":
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if over == "file":
        return target, None
    if stat.S_ISLNK(found.st_mode):  # after all links were followed
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    os.close(os.open(target, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC))  # a rename does not ask the file
    return target, found


def _write_flushed(path: Path, content: bytes, mode: int, like: os.stat_result | None) -> None:
    """A new file. like: of one whose mode and owner it gets."""
    kept = mode if like is None else stat.S_IMODE(like.st_mode) & 0o777
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, kept)
    try:
        if like is not None:
            _liken(descriptor, like, kept)
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _liken(descriptor: int, like: os.stat_result, mode: int) -> None:
    """As far as this user may and the file system can."""
    made = os.fstat(descriptor)
    with contextlib.suppress(OSError):
        if made.st_gid != like.st_gid:
            os.fchown(descriptor, -1, like.st_gid)
    with contextlib.suppress(OSError):
        if made.st_uid != like.st_uid:
            os.fchown(descriptor, like.st_uid, -1)
    with contextlib.suppress(OSError):
        if stat.S_IMODE(made.st_mode) != mode:
            os.fchmod(descriptor, mode)


def _name_once(unfinished: Path, target: Path) -> None:
    """A rename would overwrite what has the name by now, a link does not."""
    try:
        os.link(unfinished, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        if os.path.lexists(target):  # a file system without links: who writes there at the same time has another name
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        unfinished.replace(target)


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """For reading. OSError for what is no file of its own: a link, a pipe (which would be waited for), a device, a folder."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link", str(path)) from None
        raise
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        yield file


def read_regular(path: Path, most: int) -> bytes:
    """All of it, as `open_regular`. OSError where it has more than `most` bytes."""
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return content
