"""Compiles `csrc` with the machine's C++ compiler, once, into cached shared libraries that ctypes loads.

A library is named by a hash of its sources, flags and compiler, so a stale one is never loaded and concurrent builds
agree: each compiles to a file of its own and renames it into place.

Note [What is loaded]
    Code that runs in this process: a file of this user's (or root's) that nobody else may write, in a folder of which the same
    is true, and which nobody can put another one in the place of. Behind the library's end is a hash of it, which loaders
    ignore: one that was cut short or damaged is built anew (a short one would end the process with SIGBUS). Both in one file,
    so that one rename replaces both.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from systems.machine.durable import beside, open_regular, write_whole

LOG = logging.getLogger(__name__)
CSRC = Path(__file__).parent / "csrc"
PROJECT = "offload-bench"  # not read from a pyproject.toml: the one above an installed package is someone else's
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-w")
# No -ffast-math and no -march=native: results must not depend on the machine. Fused operations are explicit.
ADAM_FLAGS = ("-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing")
ADAM_SOURCES = ("adam.cpp", "kernels.h", "lanes.h", "formats.h")
COMPILE_TIMEOUT_S = 600
OTHERS_WRITE = 0o022
HASH_BYTES = 32


class BuildError(RuntimeError):
    """A library of csrc could not be built here. One line: what failed, and the compiler's last words."""


class NoCompilerError(BuildError):
    """There is no C++ compiler on this machine."""


def adam_library() -> ctypes.CDLL:
    """The CPU kernels of csrc/adam.cpp, built at first use (about 5 s). Raises BuildError."""
    return _loaded(_built("adam", ADAM_SOURCES, ADAM_FLAGS))


def rebind_library() -> ctypes.CDLL:
    """csrc/rebind.cpp, built against the headers of the torch in use. Raises BuildError."""
    import torch
    from torch.utils.cpp_extension import include_paths

    library_path = Path(torch.__file__).parent / "lib"
    flags = (
        *(f"-I{path}" for path in include_paths()),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-L{library_path}",
        f"-Wl,-rpath,{library_path}",
        "-lc10",
    )
    return _loaded(_built("rebind", ("rebind.cpp",), flags, key=torch.__version__))


def compiler() -> tuple[tuple[str, ...], str]:
    """The C++ compiler as the first words of a command, and its version: $CXX if set, which may have arguments or begin with
    another program (`ccache g++`), else the first of c++, g++, clang++ found. Raises BuildError."""
    wanted = os.environ.get("CXX", "").strip()
    names = (wanted,) if wanted else COMPILERS
    path = next((found for name in names if (found := shutil.which(name))), None)
    command = (path,) if path else _with_arguments(wanted)
    if not command:
        raise NoCompilerError(f"no C++ compiler found (looked for {', '.join(names)}): install g++ or set CXX")
    return command, _version(command)


def _with_arguments(wanted: str) -> tuple[str, ...]:
    """$CXX as a shell reads it; nothing if it names no program."""
    try:
        first, *others = shlex.split(wanted) or [""]
    except ValueError as error:
        raise NoCompilerError(f"CXX={wanted} cannot be read ({error}): set it to a C++ compiler") from None
    path = shutil.which(first)
    return (path, *others) if path else ()


@functools.cache
def _version(command: tuple[str, ...]) -> str:
    try:
        told = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{shlex.join(command)} cannot be run as a C++ compiler: {error}: set CXX to one") from None
    return told.stdout.strip()


def cache_directory(*below: str) -> Path:
    """$XDG_CACHE_HOME/offload-bench or ~/.cache/offload-bench; where neither can be had alone, one of this user's in /tmp.

    The first is this project's own: if it is this user's, others lose the right to write there. below: folders in it, each the
    next one's parent, of which the same is true. Raises BuildError.
    """
    folder = _root()
    for name in below:
        folder = folder / name
        if not _is_alone(folder):
            raise BuildError(f"{folder} belongs to someone else or is open to others: remove it, or set XDG_CACHE_HOME")
    return folder


def _root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    preferred = (Path(base) if base else Path("~/.cache").expanduser()) / PROJECT
    with contextlib.suppress(OSError, RuntimeError):  # the fallback is a place of equal standing, only less lasting
        preferred.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_alone(preferred) and not _can_be_replaced(preferred):
            return preferred
    fallback = Path(tempfile.gettempdir()) / f"{PROJECT}-{os.getuid()}"
    try:
        fallback.mkdir(mode=0o700, exist_ok=True)
        info = fallback.lstat()
    except OSError as error:
        raise BuildError(f"neither {preferred} nor {fallback} can be a cache ({error.strerror}): set XDG_CACHE_HOME") from None
    if not stat.S_ISDIR(info.st_mode) or not _is_ours(info) or _can_be_replaced(fallback):
        raise BuildError(f"{fallback} belongs to someone else or is open to others: set XDG_CACHE_HOME to a directory of yours")
    return fallback


def _is_alone(folder: Path) -> bool:
    """It is there now, this user may write in it, and nobody else but root. Raises OSError."""
    folder.mkdir(mode=0o700, exist_ok=True)
    info = folder.stat()
    if info.st_uid == os.getuid() and info.st_mode & OTHERS_WRITE:
        folder.chmod(stat.S_IMODE(info.st_mode) & ~OTHERS_WRITE)
    return os.access(folder, os.W_OK | os.X_OK) and _is_ours(folder.stat())


def _can_be_replaced(folder: Path) -> bool:
    """By anybody: who may write in a folder above it puts another one in its place, unless only owners take away what is there.

    A group is trusted there, for on many systems every user has one alone and shares all folders with it.
    """
    above = (parent.stat().st_mode for parent in folder.resolve().parents)
    return any(mode & stat.S_IWOTH and not mode & stat.S_ISVTX for mode in above)


def _is_ours(info: os.stat_result) -> bool:
    """Nobody but this user and root may have written it."""
    return info.st_uid in (os.getuid(), 0) and not info.st_mode & OTHERS_WRITE


def _loaded(library: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:  # a cache on a file system mounted noexec, say
        raise BuildError(f"built, but cannot be loaded: {error}") from error


def _built(name: str, sources: Sequence[str], flags: Sequence[str], *, key: str = "") -> Path:
    """Path of the shared library of csrc/sources[0]; the other sources are its includes, which only enter the hash."""
    command, version = compiler()
    digest = hashlib.sha256("\0".join((key, *command, version, platform.machine(), *FLAGS, *flags)).encode())
    for source in sources:
        digest.update((CSRC / source).read_bytes())
    library = cache_directory() / f"{name}-{digest.hexdigest()[:16]}.so"
    if not _is_sound(library):
        LOG.info("building %s with %s: some seconds, once; it is kept in %s", sources[0], command[0], library.parent)
        _compile([*command, *FLAGS, str(CSRC / sources[0])], list(flags), library)
    return library


def _is_sound(library: Path) -> bool:
    """See Note [What is loaded]."""
    try:
        with open_regular(library) as file:
            content, info = file.read(), os.fstat(file.fileno())
    except OSError:
        return False
    return _is_ours(info) and content[-HASH_BYTES:] == hashlib.sha256(content[:-HASH_BYTES]).digest()


def _compile(command: list[str], flags: list[str], library: Path) -> None:
    """The source is the command's last word."""

    def compiled(made: Path) -> bytes:
        made.touch(exist_ok=False)  # where that cannot be, the compiler need not be asked
        result = subprocess.run(
            [*command, *flags, "-o", str(made)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMPILE_TIMEOUT_S,
            check=False,
        )
        if result.returncode != 0:
            last = " | ".join(line.strip() for line in result.stderr.strip().splitlines()[-3:])
            raise BuildError(f"{command[0]} could not build {command[-1]} (exit {result.returncode}): {last[-600:]}")
        return made.read_bytes()

    try:
        content = beside(library, compiled)
        write_whole(library, content + hashlib.sha256(content).digest(), over="file", mode=0o755)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"building {command[-1]} failed: {error}") from error
