"""What a loop keeps in a checkpoint beside the engine's state: JSON, as a tensor of bytes, so that nothing is unpickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from systems.checkpoint.state import CheckpointError
from systems.errors import UnsupportedError
from systems.sizes import format_need, format_size

CLIENT_STATE = "client_state"  # its tensor's name, beside the checkpoint
CLIENT_STATE_BYTES = 16 << 20
SHOWN = 80  # letters of a key in a message
DEEPEST = 100  # Python's reader of JSON goes deeper, and ends in a RecursionError


def client_state_tensor(given: Mapping[str, Any] | None) -> torch.Tensor:
    """Of what the user gave. UnsupportedError as `as_tensor`."""
    if given is not None and not isinstance(given, Mapping):
        raise UnsupportedError(f"client_state is {type(given).__name__}: give a dict, such as {{'step': 3}}")
    return as_tensor(dict(given or {}), CLIENT_STATE)


def as_tensor(value: Any, what: str) -> torch.Tensor:
    """UTF-8 of its JSON; tuples become lists.

    UnsupportedError, by the path from `what`, for what would not come back as it was: other types, other keys than strings;
    and for more than CLIENT_STATE_BYTES.
    """
    least = _check(value, what, 0, {}).nbytes
    try:
        text = json.dumps(value).encode() if least <= CLIENT_STATE_BYTES else b""
    except (TypeError, ValueError, OverflowError) as error:  # an int of thousands of digits
        raise UnsupportedError(f"{what} cannot be saved, which is kept as JSON: {error}") from None
    if (taken := max(least, len(text))) > CLIENT_STATE_BYTES:
        raise UnsupportedError(
            f"{what} takes {format_need(taken, CLIENT_STATE_BYTES)} as JSON, {format_size(CLIENT_STATE_BYTES)} at most: "
            "keep what is large in a file of its own"
        )
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def of_tensor(tensor: torch.Tensor, what: str) -> Any:
    """The way back. CheckpointError for what `as_tensor` did not make."""
    if tensor.dtype is not torch.uint8 or tensor.dim() != 1 or tensor.numel() > CLIENT_STATE_BYTES:
        raise CheckpointError(f"{what} is broken: it is no JSON of at most {format_size(CLIENT_STATE_BYTES)}")
    try:
        return json.loads(tensor.numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is broken: {error}") from None


def client_state_of(tensor: torch.Tensor, what: str) -> dict[str, Any]:
    """See of_tensor."""
    found = of_tensor(tensor, what)
    if not isinstance(found, dict):
        raise CheckpointError(f"{what} is broken: it is no mapping")
    return found


class _Looked(NamedTuple):
    """At a value. nbytes: that its JSON has at least. height: of what is in it, in containers."""

    nbytes: int
    height: int


_LEAF = _Looked(1, 0)


def _check(value: Any, where: str, depth: int, known: dict[int, _Looked]) -> _Looked:
    """known: by id, so that what is there many times is looked at once: its JSON may have more bytes than any memory."""
    if isinstance(value, str):
        return _Looked(len(value), 0)
    if value is None or isinstance(value, bool | int | float):
        return _LEAF
    if depth + known.get(id(value), _LEAF).height >= DEEPEST:
        raise UnsupportedError(f"{where[:80]}... is more than {DEEPEST} deep, or in itself: keep less of it")
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, list | tuple):
        inside = [_check(each, f"{where}[{number}]", depth + 1, known) for number, each in enumerate(value)]
    elif isinstance(value, dict):
        if {"state", "param_groups"} <= value.keys() and value["state"]:
            raise UnsupportedError(
                f"{where} is an optimizer's state_dict(), whose moments the checkpoint has already: keep its 'param_groups'"
            )
        inside = []
        for key, each in value.items():
            if not isinstance(key, str):
                told = f"{where} has the key {key!r:.{SHOWN}}, and those of JSON are strings"
                raise UnsupportedError(f"{told}: write {str(key)!r:.{SHOWN}}")
            inside.append(_check(each, f"{where}[{key!r:.{SHOWN}}]", depth + 1, known))
    else:
        hint = ": give .tolist() of it" if hasattr(value, "tolist") else ": give numbers, strings, lists and dicts of it"
        raise UnsupportedError(f"{where} is {type(value).__name__}, which JSON does not have{hint}")
    height = 1 + max((each.height for each in inside), default=0)
    known[id(value)] = _Looked(len("[]") + sum(each.nbytes for each in inside), height)
    return known[id(value)]
