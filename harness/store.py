"""The results folder: one JSON file a run, written once, never edited, never overwritten.

A file appears whole or not at all, and only under a name that is not taken (`systems.machine.durable`). What is wrong with a
folder is found by `prepare`, before any work.
"""

from __future__ import annotations

import errno
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from harness.record import SCHEMA_VERSION, Record, to_json
from harness.spec import KEPT, TRIALS, BadInputError, Device, RunSpec
from systems.machine.durable import flush, prove_folder, write_whole
from systems.machine.reading import read_json
from systems.messages import invalid_value, one_line

if TYPE_CHECKING:
    import pandas

DRIVER = Path("/dev/nvidiactl")  # there where the driver of a CUDA device is
_RUN_FILE = re.compile(r"\d{8}T\d{6}\.\d{6}Z-.+\.json$")  # as `new_run_id` names runs
_ROOM_BYTES = 1 << 20  # far more than most records
_MOST_BYTES = 256 << 20  # of a record: over a million steps
UPGRADES: Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]] = MappingProxyType({})  # version n -> n + 1


class StoreError(BadInputError):
    """The results folder cannot take a record. The message is one line and says what to change."""


@dataclass(frozen=True)
class Unreadable:
    """A file in the folder that is no record, and why. It is reported and left alone."""

    path: Path
    why: str


def new_run_id(system: str, model: str, now: datetime) -> str:
    """Sortable by start time and unique: 20261128T101530.123456Z-elixir-opt-tiny-9f3a61."""
    label = re.sub(r"[^A-Za-z0-9]+", "-", f"{system}-{model}").strip("-")[:60]
    return f"{now:%Y%m%dT%H%M%S.%fZ}-{label}-{secrets.token_hex(3)}"


def folder_of(spec: RunSpec, device: str | None = None) -> Path:
    """Where a run's record is kept: as asked, else with the evidence, or with trial runs if its device is an emulated one.

    device: what it ran on; None: not known, and so whatever this machine seems to have.
    """
    if spec.results is not None:
        return Path(spec.results)
    return Path(KEPT if (device or likely_device(spec)) == "cuda" else TRIALS)


def likely_device(spec: RunSpec) -> Device:
    """Of a run that has not begun: what it asks for, else whatever this machine seems to have."""
    return "cuda" if spec.device != "cpu" and DRIVER.exists() else "cpu"


def folders_of(asked: str | None) -> list[Path]:
    """Where records are looked for: as asked, else wherever runs keep them."""
    return [Path(KEPT), Path(TRIALS)] if asked is None else [Path(asked)]


def in_words(folders: Sequence[Path]) -> str:
    """'results and runs'."""
    return " and ".join(map(str, folders))


def prepare(folder: Path) -> None:
    """Create the folder if need be and prove that a record can be written there. Raises StoreError."""
    if folder.name.endswith(".json"):
        raise StoreError(f"--results {folder} names a file, records go one a file into a folder: use {folder.parent}")
    try:
        if folder.exists() and not folder.is_dir():
            raise StoreError(f"--results {folder} is a file, not a folder: name another folder")
        folder.mkdir(parents=True, exist_ok=True)
        prove_folder(folder, room_bytes=_ROOM_BYTES)
    except OSError as error:
        raise StoreError(_explain(folder, error)) from None


def _make(folder: Path) -> None:
    """It may be gone since `prepare`: what was measured meanwhile is worth a new one."""
    if not folder.is_dir():
        folder.mkdir(parents=True)


def _explain(folder: Path, error: OSError) -> str:
    cause = {
        errno.ENOSPC: "is full",
        errno.EDQUOT: "is over its quota",
        errno.EROFS: "is on a read-only file system",
        errno.EACCES: "is not writable for this user",
        errno.EPERM: "is not writable for this user",
        errno.ENOTDIR: "lies below a file, not a folder",
        errno.EEXIST: "lies below a file, not a folder",
    }.get(error.errno or 0, f"cannot be written: {error.strerror}")
    return f"--results {folder} {cause}: name a folder that takes a file of {_ROOM_BYTES >> 20} MiB"


def _checked_name(run_id: str) -> str:
    """Of the record's file. ValueError where what a record, which may be anybody's, calls itself leads out of its folder."""
    name = f"{run_id}.json"
    if Path(name).name != name or "\0" in name:
        raise ValueError(f"run id {run_id!r} is no name of a file")
    return name


def write(record: Record, folder: Path) -> Path:
    """Keep a record; the path it has. Raises StoreError if it cannot be kept or its run_id is taken, or is no file's name."""
    try:
        path = folder / _checked_name(record.run_id)
    except ValueError as error:
        raise StoreError(f"{error}: leave it as the run made it") from None
    try:
        _make(folder)
    except OSError as error:
        raise StoreError(_explain(folder, error)) from None
    try:
        write_whole(path, to_json(record).encode() + b"\n", over="nothing", mode=0o644)
        flush(folder)
    except FileExistsError:
        raise StoreError(f"{path} exists already, and records are never overwritten") from None
    except OSError as error:
        raise StoreError(_explain(folder, error)) from None
    return path


def upgrade(tree: dict[str, Any]) -> dict[str, Any]:
    """A record as read, of any earlier version, in today's form. ValueError for a later one."""
    version = tree.get("schema_version")
    if not isinstance(version, int):
        raise ValueError("it has no schema_version")
    if version > SCHEMA_VERSION:
        raise ValueError(f"it has schema_version {version}, this program reads up to {SCHEMA_VERSION}: update the program")
    while version < SCHEMA_VERSION:
        if version not in UPGRADES:
            raise ValueError(f"nothing reads schema_version {version}")
        tree, version = UPGRADES[version](tree), version + 1
    return tree | {"schema_version": SCHEMA_VERSION}


def read(path: Path) -> Record | Unreadable:
    """One file. A broken or foreign one is told, not raised: one bad file must not hide the others."""
    try:
        tree = read_json(path, _MOST_BYTES)
        if not isinstance(tree, dict):
            raise ValueError("it is not a JSON object")
        record = Record.model_validate(upgrade(tree))
        _checked_name(record.run_id)
        return record
    except ValidationError as error:
        return Unreadable(path, invalid_value(error, lambda field, _: field))
    except json.JSONDecodeError as error:
        return Unreadable(path, one_line(f"not valid JSON (cut short?): {error}"))
    except (ValueError, OSError) as error:
        return Unreadable(path, one_line(str(error)))


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.name.endswith(".json"))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StoreError(f"--results {folder} cannot be read: {error.strerror}") from None


def counts_below(folder: Path) -> dict[str, int]:
    """How many records, by their files' names, lie in each of the folders in it, which `read_all` does not look into."""
    counts = dict[str, int]()
    with suppress(OSError):  # what cannot be looked into has nothing that could be told
        for path in sorted(path for path in folder.iterdir() if path.is_dir()):
            counts[path.name] = sum(bool(_RUN_FILE.match(each.name)) for each in _files(path))
    return {name: count for name, count in counts.items() if count}


def said_below(counts: Mapping[str, int]) -> str:
    """'97 more are in folders below it (losses 14, ...)', of `counts_below`; "" where there are none."""
    if not counts:
        return ""
    named = ", ".join(f"{name} {count}" for name, count in counts.items())
    return f"{sum(counts.values())} more are in folders below it ({named})"


def read_all(folder: Path) -> tuple[list[Record], list[Unreadable]]:
    """Every record of a folder by run_id, and every file that is none. A missing folder is an empty one.

    Raises StoreError for a folder that cannot be looked into.
    """
    found = [read(path) for path in _files(folder)]
    return [one for one in found if isinstance(one, Record)], [one for one in found if isinstance(one, Unreadable)]


def find(folders: Sequence[Path], wanted: Sequence[str]) -> list[Record]:
    """The records of these runs, in this order. wanted: run ids, or parts of ids. Raises BadInputError, one line."""
    paths = {path.stem: path for folder in folders for path in _files(folder)}
    names = sorted(paths)
    found: list[Record] = []
    for part in wanted:
        hits = [part] if part in names else [name for name in names if part in name]
        if len(hits) != 1:
            said = f"fits {len(hits)} runs: {', '.join(hits[:3])}{', ...' if len(hits) > 3 else ''}" if hits else "is not there"
            raise BadInputError(f"run {part} {said} (in {in_words(folders)}; see harness ls runs)")
        one = read(paths[hits[0]])
        if isinstance(one, Unreadable):
            raise BadInputError(f"{one.path} is no record: {one.why}")
        if one.run_id in (record.run_id for record in found):
            raise BadInputError(f"run {one.run_id} is named twice")
        found.append(one)
    return found


def frame(folder: Path) -> pandas.DataFrame:
    """One row a record, nested fields as dotted columns (metrics.tokens_per_s), lists kept as lists."""
    import pandas  # half a second that no run needs

    records, _ = read_all(folder)
    return pandas.json_normalize([record.model_dump(mode="json") for record in records])
