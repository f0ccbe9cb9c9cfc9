"""Compiles `csrc` with the machine's C++ compiler, once, into cached shared libraries that ctypes loads.

A library is named by a hash of its sources, flags and compiler, so a stale one is never loaded and concurrent builds
agree: each compiles to a file of its own and renames it into place.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

CSRC = Path(__file__).parent / "csrc"
PROJECT = "offload-bench"  # not read from a pyproject.toml: the one above an installed package is someone else's
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-w")
# No -ffast-math and no -march=native: results must not depend on the machine. Fused operations are explicit.
ADAM_FLAGS = ("-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing")
ADAM_SOURCES = ("adam.cpp", "kernels.h", "lanes.h", "formats.h")
COMPILE_TIMEOUT_S = 600


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


def compiler() -> tuple[str, str]:
    """Path and version text of the C++ compiler: $CXX if set, else the first of c++, g++, clang++ found."""
    wanted = os.environ.get("CXX")
    names = (wanted,) if wanted else COMPILERS
    path = next((found for name in names if (found := shutil.which(name))), None)
    if path is None:
        raise NoCompilerError(f"no C++ compiler found (looked for {', '.join(names)}): install g++ or set CXX")
    return path, _version(path)


@functools.cache
def _version(path: str) -> str:
    return subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60).stdout.strip()


def cache_directory() -> Path:
    """$XDG_CACHE_HOME/offload-bench or ~/.cache/offload-bench; where neither can be written, one of this user's in /tmp."""
    base = os.environ.get("XDG_CACHE_HOME")
    preferred = (Path(base) if base else Path("~/.cache").expanduser()) / PROJECT
    try:
        preferred.mkdir(parents=True, exist_ok=True)
        if os.access(preferred, os.W_OK | os.X_OK):
            return preferred
    except OSError:
        pass  # the fallback below is a place of equal standing, only less lasting
    fallback = Path(tempfile.gettempdir()) / f"{PROJECT}-{os.getuid()}"
    fallback.mkdir(mode=0o700, exist_ok=True)
    info = fallback.lstat()
    if info.st_uid != os.getuid() or not stat.S_ISDIR(info.st_mode) or info.st_mode & 0o022:
        raise BuildError(f"{fallback} belongs to someone else or is open to others: set XDG_CACHE_HOME to a directory of yours")
    return fallback


def _loaded(library: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:  # a cache on a file system mounted noexec, say
        raise BuildError(f"built, but cannot be loaded: {error}") from error


def _built(name: str, sources: Sequence[str], flags: Sequence[str], *, key: str = "") -> Path:
    """Path of the shared library of csrc/sources[0]; the other sources are its includes, which only enter the hash."""
    path, version = compiler()
    digest = hashlib.sha256("\0".join((key, path, version, platform.machine(), *FLAGS, *flags)).encode())
    for source in sources:
        digest.update((CSRC / source).read_bytes())
    library = cache_directory() / f"{name}-{digest.hexdigest()[:16]}.so"
    if not library.exists():
        _compile([path, *FLAGS, str(CSRC / sources[0])], list(flags), library)
    return library


def _compile(command: list[str], flags: list[str], library: Path) -> None:
    handle, temporary = tempfile.mkstemp(prefix=library.stem, suffix=".tmp", dir=library.parent)
    os.close(handle)
    try:
        result = subprocess.run(
            [*command, *flags, "-o", temporary], capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False
        )
        if result.returncode != 0:
            last = " | ".join(line.strip() for line in result.stderr.strip().splitlines()[-3:])
            raise BuildError(f"{command[0]} could not build {command[-1]} (exit {result.returncode}): {last[-600:]}")
        os.replace(temporary, library)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"building {command[-1]} failed: {error}") from error
    finally:
        Path(temporary).unlink(missing_ok=True)
