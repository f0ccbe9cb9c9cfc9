"""What `systems.initialize` is given, as Settings holds it. ValueError, one line, for what is none of it."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch

from systems.settings import TORCH_DTYPE, DType, check_whole
from systems.sizes import parse_size


def size_of(name: str, given: int | str | None) -> int | None:
    """Bytes of the argument of that name; None stays None."""
    if isinstance(given, str):
        try:
            return parse_size(given)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return None if given is None else check_whole(name, given, 0)


def recompute_of(given: str | Iterable[int]) -> Any:
    """Numbers of blocks as a tuple, whatever they come in; which texts there are is for Settings to say."""
    if isinstance(given, str):
        return given
    numbers = tuple(map(_plain, given)) if isinstance(given, Iterable) else (None,)
    if not all(type(number) is int for number in numbers):
        raise ValueError(f"recompute is {given!r}: give 'none', 'full' or numbers of blocks, such as (0, 2)")
    return numbers


def dtype_of(given: str | torch.dtype) -> DType:
    """torch.bfloat16, "bfloat16" and "bf16" are one."""
    names: dict[object, DType] = {}
    for name, dtype in TORCH_DTYPE.items():
        names |= {name: name, dtype: name, str(dtype).removeprefix("torch."): name}  # type: ignore[dict-item]
    if not isinstance(given, str | torch.dtype) or given not in names:
        allowed = ", ".join(f"{name!r} or {dtype}" for name, dtype in TORCH_DTYPE.items())
        raise ValueError(f"dtype is {given!r}: give {allowed}")
    return names[given]


def options_of(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Values as they are; paths are strings, and numbers of other libraries Python's."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ValueError(f"options is {type(given).__name__}: give a dict, such as {{'prefetch': 4}}")
    for name in given:
        if not isinstance(name, str):
            raise ValueError(f"options has the name {name!r}: give names as strings, such as {{'prefetch': 4}}")
    return {name.replace("-", "_"): _plain(value) for name, value in given.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, bool | int | float | str):
        return value
    try:
        return operator.index(value)
    except (TypeError, ValueError):  # as of a tensor with several values
        return value


def device_of(given: str | torch.device) -> Literal["cuda", "cpu"]:
    """An engine is on the process's current CUDA device, so another one may not be named."""
    try:
        device = torch.device(given) if isinstance(given, str | torch.device) else None
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cuda", "cpu") or (device.type == "cpu" and device.index):
        raise ValueError(f"device is {given!r}: give 'cuda', 'cpu' for the emulated one, or such a torch.device")
    if device.type == "cpu":
        return "cpu"
    if device.index is not None and torch.cuda.is_available() and device.index != (current := torch.cuda.current_device()):
        raise ValueError(
            f"device is {given!r}, and this process is on cuda:{current}: call torch.cuda.set_device({device.index}) before"
        )
    return "cuda"
