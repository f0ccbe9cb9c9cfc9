"""The files of a checkpoint: safetensors, written one after the other, hashed, and read back with everything checked."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from systems.checkpoint.manifest import FileHash
from systems.checkpoint.state import CheckpointError
from systems.machine.durable import flush, open_regular

FILE_BYTES = 256 << 20  # a file has no more than these, or one tensor: what is copied meanwhile is both together at most
CHUNK_BYTES = 4 << 20
HASHERS = 4  # threads: SHA-256 takes 1.4 GB/s each on a processor with instructions for it, a third of that without


class Writer:
    """Gathers tensors into files of a folder. Each goes to the disk, and is hashed, while the next one is filled.

    rank: this one, of so many that write at once: they share what is held back, and each has file names of its own.
    """

    def __init__(self, folder: Path, *, rank: int = 0, ranks: int = 1) -> None:
        self._folder, self._count, self._most = folder, 0, FILE_BYTES // ranks
        self._prefix = f"state-{rank}" if ranks > 1 else "state"
        self._waiting: dict[str, torch.Tensor] = {}
        self._hashes: dict[str, Future[FileHash]] = {}
        self._pool = ThreadPoolExecutor(HASHERS, thread_name_prefix="checkpoint")

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)

    def add(self, key: str, tensor: torch.Tensor) -> str:
        """The name of the file it comes into."""
        if sum(each.nbytes for each in self._waiting.values()) + tensor.nbytes > self._most:
            self._flush()
        self._waiting[key] = tensor.contiguous()
        return self._name

    @property
    def _name(self) -> str:
        return f"{self._prefix}-{self._count:05d}.safetensors"

    def _flush(self) -> None:
        if self._waiting:
            self.write(self._name, self._waiting)
            self._waiting, self._count = {}, self._count + 1

    def write(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        path = self._folder / name
        _write(dict(tensors), path)
        self._hashes[name] = self._pool.submit(_settled, path)

    def finish(self) -> dict[str, FileHash]:
        """Of every file, once all are on the disk. Raises OSError where one of them is gone since."""
        self._flush()
        found = {name: future.result() for name, future in self._hashes.items()}
        for name, each in found.items():
            with open_regular(self._folder / name) as file:
                if os.fstat(file.fileno()).st_size != each.nbytes:
                    raise OSError(f"{self._folder / name} was changed by somebody else")
        flush(self._folder)
        return found


def _write(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Raises OSError, which the package tells by its number only, in words."""
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        found = re.search(r"\(os error (\d+)\)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from None
    path.chmod(path.parent.stat().st_mode & 0o666)  # the package's files are their owner's alone


def _settled(path: Path) -> FileHash:
    flush(path)
    return hash_of(path)


def hash_of(path: Path) -> FileHash:
    """Raises OSError, also for what is no regular file."""
    digest, buffer, size = hashlib.sha256(), memoryview(bytearray(CHUNK_BYTES)), 0
    with open_regular(path) as file:
        while read := file.readinto(buffer):  # type: ignore[attr-defined]  # of typing.BinaryIO
            digest.update(buffer[:read])
            size += read
    return FileHash(nbytes=size, sha256=digest.hexdigest())


def check_hashes(hashes: Mapping[str, FileHash], folder: Path) -> None:
    """CheckpointError for a file that is not the one that was saved. Its length alone may tell, so that comes first."""
    for name, expected in hashes.items():
        with readable(folder / name), open_regular(folder / name) as file:
            size = os.fstat(file.fileno()).st_size
        if size != expected.nbytes:
            raise CheckpointError(f"{folder / name} is damaged: it has {size} bytes and was saved with {expected.nbytes}")
    with ThreadPoolExecutor(HASHERS) as pool:
        for name, found in zip(hashes, pool.map(lambda name: _hash_or_error(folder / name), hashes), strict=True):
            if found != hashes[name]:
                raise CheckpointError(f"{folder / name} is damaged: its content is not what was saved")


def _hash_or_error(path: Path) -> FileHash:
    with readable(path):
        return hash_of(path)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """CheckpointError in one line for whatever keeps a file from being read."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        said = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise CheckpointError(f"{path} cannot be read: {said}") from None


def header(path: Path) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Name, shape and type of each tensor in a file. Its length is checked against them."""
    with readable(path):
        with open_regular(path):
            pass
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                view = file.get_slice(key)
                yield key, tuple(view.get_shape()), view.get_dtype()


def tensor(path: Path, key: str) -> torch.Tensor:
    with readable(path), safe_open(path, framework="pt") as file:
        found: torch.Tensor = file.get_tensor(key)
        return found
