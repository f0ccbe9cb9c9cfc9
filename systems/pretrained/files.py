"""The files of weights in a folder: which tensors they hold, of which shape and type. None of them is read here.

`model.safetensors`, or the files that `model.safetensors.index.json` names: regular files of the folder itself. That a file
holds what its header says, no more and no less, is checked by safetensors as it is opened.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from systems.errors import UnsupportedError
from systems.machine.durable import open_regular, read_regular
from systems.messages import one_line, printable

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
INDEX_BYTES = 64 << 20
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
OTHERS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.safetensors")
FILE_NAME = re.compile(r"\w[\w.-]*\.safetensors", re.ASCII)
CONVERT = "load it with transformers where it came from, and save_pretrained into a new folder"


@dataclass(frozen=True)
class Stored:
    """A tensor in a file. dtype: None for one that is no floating-point number as it lies there. read: its values."""

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    read: Callable[[], torch.Tensor]


def refused(text: str) -> UnsupportedError:
    """One line, whatever names somebody else has put into the folder."""
    return UnsupportedError(printable(one_line(text)))


def folder_of(given: str | os.PathLike[str]) -> Path:
    """UnsupportedError for what is no folder, as a model's name on a hub; the empty text names none, not the current one."""
    try:
        text = os.fsdecode(given)
    except TypeError:
        text = ""
    folder = Path(text).absolute()
    if not text or not os.path.isdir(folder):
        said = text or repr(given)
        raise refused(f"weights: {said} is no folder, and nothing is downloaded: give one with config.json and {SINGLE}")
    return folder


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """By name. UnsupportedError for weights that are not there, or not safe to read."""
    if (folder / "adapter_config.json").exists():
        raise refused(f"weights: {folder} holds an adapter: merge it into its model, and give the folder of that")
    if os.path.lexists(folder / SINGLE):
        return safetensors_in(folder / SINGLE)
    if os.path.lexists(folder / INDEX):
        return _indexed(folder)
    others = sorted(path for pattern in OTHERS for path in folder.glob(pattern))
    if others:
        raise refused(f"weights: {others[0]} is not read, only {SINGLE} or {INDEX}, which runs no code: {CONVERT}")
    raise refused(f"weights: {folder} holds neither {SINGLE} nor {INDEX}")


def _indexed(folder: Path) -> dict[str, Stored]:
    """The index and the files have to agree; what it says of their size is not read."""
    index = folder / INDEX
    file_of = _weight_map(index)
    found: dict[str, Stored] = {}
    for file in sorted(set(file_of.values())):
        for name, stored in safetensors_in(folder / file).items():
            if file_of.get(name) != file:
                said = f"names {file_of[name]} for it" if name in file_of else "does not name it"
                raise refused(f"weights: {name} is in {stored.path}, and {INDEX} {said}: {CONVERT}")
            found[name] = stored
    for name, file in file_of.items():
        if name not in found:
            raise refused(f"weights: {INDEX} says that {name} is in {file}, which lacks it: {CONVERT}")
    return found


def _weight_map(index: Path) -> dict[str, str]:
    """Name to file, a plain name of the folder."""
    found = read_json(index, INDEX_BYTES).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise refused(f"weights: {index} has no weight_map: {CONVERT}")
    for name, file in found.items():
        if not isinstance(file, str) or not FILE_NAME.fullmatch(file):
            raise refused(f"weights: {index} says that {name} is in {file!r}, which is no safetensors file of the folder")
    return found


def read_json(path: Path, most_bytes: int) -> dict[str, object]:
    """An object of JSON. UnsupportedError for anything else."""
    try:
        with readable(path):
            found = json.loads(read_regular(path, most_bytes))
    except (ValueError, RecursionError) as error:
        if isinstance(error, UnsupportedError):
            raise
        raise refused(f"weights: {path} is broken: {type(error).__name__}: {error}") from None
    if not isinstance(found, dict):
        raise refused(f"weights: {path} is broken: it is no object of JSON")
    return found


def safetensors_in(path: Path) -> dict[str, Stored]:
    """What a file's header says."""

    def read(name: str) -> torch.Tensor:
        with readable(path), open_regular(path), safe_open(path, framework="pt") as file:
            value: torch.Tensor = file.get_tensor(name)
            return value

    with readable(path):
        with open_regular(path):
            pass
        with safe_open(path, framework="pt") as file:
            views = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            return {
                name: Stored(path, tuple(view.get_shape()), FLOATS.get(view.get_dtype()), partial(read, name))
                for name, view in views.items()
            }


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """UnsupportedError in one line for whatever keeps a file from being read."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if path.is_symlink():
            raise refused(f"weights: {path} is a link, as in a hub's cache, and is not followed: cp -rL the folder") from None
        said = (error.strerror if isinstance(error, OSError) else None) or str(error)
        if _is_pointer(path):
            said = "it is a pointer of Git LFS, not the file: fetch it with git lfs pull"
        raise refused(f"weights: {path} cannot be read: {said}") from None


def _is_pointer(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            return file.read(40).startswith(b"version https://git-lfs")
    except OSError:
        return False
