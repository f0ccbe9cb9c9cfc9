"""Weights of a folder in transformers' format, read tensor by tensor: `*.safetensors`, or what torch.save wrote.

All that could be wrong is found before training: files that are not there or cannot be read, tensors that are missing, of
another shape, or quantized. Pickles are read with `weights_only`, which runs no code.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from systems.pretrained import FLOATS, Stored, keys_of

INDEX_BYTES = 64 << 20
OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.safetensors")
NO_WEIGHTS = (
    "training_args.bin",
    "optimizer.bin",
    "optimizer.pt",
    "scheduler.bin",
    "scheduler.pt",
    "rng_state*.pth",
    "sampler.bin",
)
CONVERT = "write it as safetensors: load it with transformers where it came from, and save_pretrained into a new folder"


def fill_buffers(model: nn.Module, stored: Mapping[str, Stored]) -> None:
    """Persistent buffers that the files have: running averages, biases that a router learned."""
    for path, module in model.named_modules():
        for attribute, buffer in module.named_buffers(recurse=False):
            name = f"{path}.{attribute}" if path else attribute
            found = next((stored[key] for key in keys_of(name, model) if key in stored), None)
            if found is None or attribute in module._non_persistent_buffers_set or found.shape != tuple(buffer.shape):
                continue
            with torch.no_grad(), _readable(found.path):
                buffer.copy_(found.read())


def stored_tensors(folder: Path) -> dict[str, Stored] | None:
    """By name; None where the folder holds no weights at all. Raises ValueError for weights that cannot be read."""
    if (folder / "adapter_config.json").exists():
        raise ValueError(f"{folder} holds an adapter: merge it into its model, and give the folder of that")
    for single, reader in (("model.safetensors", _safetensors), ("pytorch_model.bin", _pickled)):
        if (folder / single).exists():
            return reader(folder / single)
        if (index := folder / f"{single}.index.json").exists():
            return _joined(reader, sorted({folder / file for file in _weight_map(index).values()}))
    if files := sorted(folder.glob("*.safetensors")):
        return _joined(_safetensors, files)
    others = sorted(path for pattern in OTHER_WEIGHTS for path in folder.glob(pattern))
    if unread := [path for path in others if not any(path.match(each) for each in NO_WEIGHTS)]:
        raise ValueError(f"{unread[0]} cannot be read here: {CONVERT}")
    return None


def _weight_map(index: Path) -> dict[str, str]:
    try:
        _check_regular(index)
        if index.stat().st_size > INDEX_BYTES:
            raise ValueError("it is too large")
        found = json.loads(index.read_text())["weight_map"]
        if outside := [file for file in found.values() if Path(str(file)).name != str(file) or "\0" in str(file)]:
            raise ValueError(f"{str(outside[0])!r} is no file of this folder")
        return {str(name): str(file) for name, file in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} cannot be read: {type(error).__name__}: {_line(error)}") from None


def _joined(reader: Callable[[Path], dict[str, Stored]], files: Iterable[Path]) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    for path in files:
        held = reader(path)
        if both := sorted(found.keys() & held.keys()):
            raise ValueError(f"{both[0]} is in {found[both[0]].path} and in {path}: leave one of them in the folder")
        found |= held
    return found


def _safetensors(path: Path) -> dict[str, Stored]:
    from safetensors import safe_open

    def read(name: str) -> torch.Tensor:
        with _readable(path), safe_open(path, framework="pt") as file:
            value: torch.Tensor = file.get_tensor(name)
            return value

    with _readable(path), safe_open(path, framework="pt") as file:
        views = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        return {
            name: Stored(path, tuple(view.get_shape()), FLOATS.get(view.get_dtype()), partial(read, name))
            for name, view in views.items()
        }


def _pickled(path: Path) -> dict[str, Stored]:
    """Mapped, so that nothing is read before it is needed."""
    with _readable(path):
        held: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(held, Mapping) or not all(isinstance(value, torch.Tensor) for value in held.values()):
        raise ValueError(f"{path} is no state dict of tensors: {CONVERT}")
    floats = FLOATS.values()
    return {
        str(name): Stored(path, tuple(each.shape), each.dtype if each.dtype in floats else None, each.detach)
        for name, each in held.items()
    }


@contextmanager
def _readable(path: Path) -> Any:
    """Whatever torch or safetensors make of a broken file is one line."""
    from safetensors import SafetensorError

    try:
        _check_regular(path)
        yield
    except (OSError, SafetensorError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        if path.is_file() and path.open("rb").read(40).startswith(b"version https://git-lfs"):
            raise ValueError(f"{path} is a pointer of Git LFS, not the file: fetch it with git lfs pull") from None
        raise ValueError(f"{path} cannot be read ({_line(error)}): {CONVERT}") from None


def _check_regular(path: Path) -> None:
    """OSError for a pipe, which would be waited for, and a device, which may have no end. Links are followed: a hub's cache has
    them.
    """
    if path.exists() and not path.is_file():
        raise OSError("it is no regular file")


def _line(error: BaseException) -> str:
    """Its first line, which may be long."""
    return str(error).strip().partition("\n")[0][:200]
