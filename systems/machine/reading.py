"""Files that others left, read so that none of them hangs, fills the memory or ends the program.

Only regular files, or links to such, and no more of them than a limit. JSON is strict and plain: what is read can be
walked, printed and written again.
"""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any

JSON_LIMIT = 16 << 20  # bytes of a profile or configuration
JSON_DEPTH = 64  # of lists and objects in each other: recursion ends far above
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_regular(mode: int) -> None:
    """mode: of a stat. ValueError, one line, for what is no regular file."""
    if not stat.S_ISREG(mode):
        raise ValueError(f"it is {_KINDS.get(stat.S_IFMT(mode), 'something else')}, not a regular file")


def read_bytes(path: Path, limit: int) -> bytes:
    """The whole of a regular file. OSError, or ValueError of one line for another kind of file or more than `limit` bytes."""
    check_regular(path.stat().st_mode)  # to open a device may do something to it
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)  # it may be another one by now
    with open(descriptor, "rb") as file:
        check_regular(os.fstat(descriptor).st_mode)
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"it has more than {limit} bytes")
    return data


def read_text(path: Path, limit: int) -> str:
    """The same, as UTF-8."""
    return read_bytes(path, limit).decode("utf-8")


def read_json(path: Path, limit: int = JSON_LIMIT) -> Any:
    """The same, as JSON. ValueError, one line, also for nesting deeper than JSON_DEPTH, for numbers that are not finite or
    no 64 bits hold, and for text that is no Unicode."""
    text = read_text(path, limit)
    try:
        tree = json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _check_plain(tree)
    return tree


_TOO_DEEP = f"it is nested more than {JSON_DEPTH} deep"


def _refuse(constant: str) -> None:
    raise ValueError(f"it has the number {constant}, which is no JSON")


def _check_plain(tree: Any) -> None:
    level, depth = [tree], 0
    while level:
        if depth > JSON_DEPTH:
            raise ValueError(_TOO_DEEP)
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below += value.keys()
                below += value.values()
            elif isinstance(value, list):
                below += value
            elif isinstance(value, str):
                _check_text(value)
            elif isinstance(value, float):
                if not math.isfinite(value):
                    raise ValueError("it has a number above all that 64 bits hold")
            elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
                raise ValueError("it has an integer that 64 bits do not hold")
        level, depth = below, depth + 1


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"it has text that is no Unicode (half of a surrogate pair): {text[:40]!a}") from None
