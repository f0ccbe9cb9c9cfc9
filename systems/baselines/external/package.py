"""Other people's packages: imported when an engine is made, never when systems are listed, and described in the record.

A package that is not there makes the system unavailable, with the line that installs it. There is no stand-in.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from systems.errors import UnavailableError, UnsupportedError
from systems.machine.reading import read_json
from systems.messages import one_line

Config = dict[str, Any]
_AUTO = "auto"  # transformers' word in a DeepSpeed file for "as the run says"


class PackageStatistics(BaseModel):
    """What ran: a system's `statistics()`. config: what the package was given, verbatim, the user's own file merged in.

    dtypes, recompute: where the package departs from what was asked for; None where it does not.
    """

    model_config = ConfigDict(frozen=True)

    package: str
    version: str
    real_package: Literal[True] = True
    config: Config
    config_file: str | None = Field(None, description="the user's own configuration, merged over ours key by key")
    resolved: dict[str, str | int | float | bool | None] = Field({}, description="what the package made of it")
    dtypes: dict[str, str] | None = Field(None, description="of weights, gradients and states, as computed with")
    recompute: str | None = None
    notes: list[str] = Field([], description="what a reader of the numbers should know")


def _check_file(path: str) -> str:
    read_config(path)
    return path


ConfigPath = Annotated[str, AfterValidator(_check_file)]


class ConfigOptions(BaseModel):
    """Options of a system whose package is configured by a dictionary."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: ConfigPath | None = Field(
        None, description="JSON file merged over the system's own configuration, key by key; what flags decide stays theirs"
    )


def require(package: str, install: str, system: str) -> ModuleType:
    """Import it. UnavailableError, with the line that installs it, if it is not there or does not load."""
    try:
        return importlib.import_module(package)
    except Exception as error:
        why = one_line(f"{type(error).__name__}: {error}")
        raise UnavailableError(f"{system} is unavailable: {package} does not load ({why})", install=install) from error


def version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def read_config(path: str) -> Config:
    """The object in a JSON file. ValueError, one line, if there is none."""
    try:
        found = read_json(Path(path))
    except json.JSONDecodeError as error:
        raise ValueError(one_line(f"is not JSON ({error})")) from None
    except (OSError, ValueError) as error:
        raise ValueError(one_line(f"cannot be read ({error}): give the path of a JSON file")) from None
    if not isinstance(found, dict):
        raise ValueError(f"holds a JSON {type(found).__name__}, an object is needed")
    return found


def merge(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Config:
    """theirs over ours, key by key at every depth; "auto" leaves ours, null takes ours out."""
    merged = dict(ours)
    for key, value in theirs.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            below = merged.get(key)
            merged[key] = merge(below if isinstance(below, Mapping) else {}, value)
        elif value != _AUTO:
            merged[key] = value
    return merged


def refuse_changes(path: str, theirs: Mapping[str, Any], decided: Mapping[tuple[str, ...], tuple[Any, str]]) -> None:
    """UnsupportedError if a file sets otherwise what the run decides. decided: key path to (value, what decides it)."""
    for keys, value in _leaves(theirs):
        for prefix in (keys[:depth] for depth in range(1, len(keys) + 1)):
            if prefix in decided:
                ours, by = decided[prefix]
                if value not in (ours, _AUTO):
                    name = ".".join(keys)
                    raise UnsupportedError(f"{path} sets {name} to {value!r}, here it is {ours!r}: {by}; leave it out")


def _leaves(tree: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value
