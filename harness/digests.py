"""Digests of what is kept, so that a number changed by hand is found.

Note [Digests of what is kept]
    Records and traces are written once. Their folder has DIGESTS, in the form of sha256sum, a line for each file below it; a
    line is added and never changed. What a command makes anew as a whole, a file of forecasts, has the digest of its content
    beside it, as `seal` gives it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from systems.machine.durable import write_whole
from systems.machine.reading import read_json, read_text

DIGESTS = "SHA256SUMS"
SEAL = "content_sha256"
KEPT_FILES = (".json", ".gz")
_LIMIT = 16 << 20


def seal(content: Any) -> str:
    """Of JSON data, however it is laid out."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def kept_files(folder: Path) -> list[str]:
    """Paths below the folder, sorted."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.suffix in KEPT_FILES)


def read_digests(folder: Path) -> dict[str, str]:
    """By path below the folder; empty where there are none. Raises OSError, ValueError."""
    path = folder / DIGESTS
    if not path.exists():
        return {}
    found = dict[str, str]()
    for line in read_text(path, _LIMIT).splitlines():
        digest, _, name = line.partition("  ")
        if len(digest) != 64 or not name or found.setdefault(name, digest) != digest:
            raise ValueError(f"{path} has the line {line!r}: a digest and a path, each path once")
    return found


def wrong_digests(folder: Path) -> Iterator[tuple[str, str]]:
    """Path and what is wrong with it. Raises OSError, ValueError."""
    known, there = read_digests(folder), kept_files(folder)
    for name in there:
        if name not in known:
            yield name, f"it has no digest in {DIGESTS}: harness check --add, if it is as its run left it"
        elif sha256_of(folder / name) != known[name]:
            yield name, f"it is not what its digest in {DIGESTS} is of: take it back as its run left it"
    for name in sorted(known.keys() - set(there)):
        yield name, f"it is in {DIGESTS}, and not there any more"


def add_digests(folder: Path) -> int:
    """Of files that have none; how many. Raises OSError, ValueError."""
    known = read_digests(folder)
    new = {name: sha256_of(folder / name) for name in kept_files(folder) if name not in known}
    if new:
        lines = [f"{digest}  {name}\n" for name, digest in sorted({**known, **new}.items())]
        write_whole(folder / DIGESTS, "".join(lines).encode(), over="file", mode=0o644)
    return len(new)


def wrong_seal(path: Path, content: str) -> str | None:
    """What is wrong with a file of forecasts, or None. content: its field that is sealed. Raises OSError."""
    try:
        tree = read_json(path)
    except ValueError as error:
        return str(error)
    if not isinstance(tree, Mapping) or content not in tree:
        return f"it has no {content}"
    if SEAL not in tree:
        return f"it has no {SEAL}: what makes it writes one"
    return None if tree[SEAL] == seal(tree[content]) else f"its {content} is not what its {SEAL} is of: make it anew"
