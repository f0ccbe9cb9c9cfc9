"""Where packages build their C++ extensions: a folder of this environment's own, by one process at a time.

torch's default folder is shared by all environments of a user, which rebuild each other's, and a build that was killed
leaves a lock behind that every later one waits for, for ever. Here a kernel lock, which dies with its holder, stands
around each build, and what is left of torch's lock under it is stale. A TORCH_EXTENSIONS_DIR of the user's is left alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from systems.native.build import cache_directory

LOG = logging.getLogger(__name__)
VARIABLE = "TORCH_EXTENSIONS_DIR"
ARCHITECTURES = "TORCH_CUDA_ARCH_LIST"


def folder() -> Path:
    """The user's, or the environment's own, which is there then and in which nobody else writes. Raises BuildError."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given)
    key = f"{sys.prefix} {platform.python_version()} {torch.__version__}"
    return cache_directory("torch-extensions", hashlib.sha256(key.encode()).hexdigest()[:12])


def plain_architectures(given: str) -> str:
    """torch's list without the letters of architecture-specific features ("9.0a" is "9.0"): DeepSpeed reads numbers only,
    and what it builds has no use for them."""
    return re.sub(r"(\d+\.\d+)[a-z]", r"\1", given)


@contextmanager
def plain_environment() -> Iterator[None]:
    """Within, the list of architectures to build for is one that DeepSpeed can read."""
    given = os.environ.get(ARCHITECTURES)
    if given is None:
        yield
        return
    os.environ[ARCHITECTURES] = plain_architectures(given)
    try:
        yield
    finally:
        os.environ[ARCHITECTURES] = given


@contextmanager
def building() -> Iterator[None]:
    """Within, extensions are built or loaded, and no other process of ours does so; it may have to be waited for."""
    with plain_environment(), _alone():
        yield


def tell_of_build(what: str, name: str) -> None:
    """Say that a build begins, which takes long and says nothing itself, where no library is there whose name begins so.

    Within `building`.
    """
    if not any(folder().glob(f"{name}*/{name}*.so")):
        LOG.info("building %s: minutes, once in this environment; it is kept in %s", what, folder())


@contextmanager
def _alone() -> Iterator[None]:
    if os.environ.get(VARIABLE):
        yield
        return
    own = folder()
    os.environ[VARIABLE] = str(own)
    try:
        with (own / "building").open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            for stale in own.glob("*/lock"):
                stale.unlink(missing_ok=True)
            yield
    finally:
        del os.environ[VARIABLE]
