"""Which options a run had, defaults and all. A record has them with the defaults of its day, a flag means what it means today.

So a run by a default that was another then belongs to the cell that names its value, and to no cell of today's default.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from harness.record import Record
from harness.spec import RunSpec
from systems import registry
from systems.errors import UnavailableError


def meant(spec: RunSpec) -> Mapping[str, Any] | None:
    """Today, by option. None where today's system, if there is one, does not take them."""
    return _meant(spec.system, spec.option)


@lru_cache(maxsize=1024)
def _meant(system: str, options: tuple[str, ...]) -> Mapping[str, Any] | None:
    known = registry.find()
    if system not in known:
        return None
    try:
        return MappingProxyType(registry.parse_options(registry.face(system, known), options).model_dump(mode="json"))
    except (UnavailableError, ValueError):
        return None


def otherwise(record: Record) -> dict[str, Any]:
    """Of the run's options those that its flags would not set as they were, for a default has changed since."""
    today, then = meant(record.spec) or {}, record.resolved.options or {}
    return {name: then[name] for name in today if name in then and then[name] != today[name]}


def had(record: Record) -> Mapping[str, Any] | None:
    """By option; one that is younger than the run is as its flags set it today. None as of `meant`."""
    today = meant(record.spec)
    return None if today is None else {**today, **otherwise(record)}


def spelled(record: Record) -> tuple[str, ...]:
    """The options as flags that say today what the run had."""
    return (*record.spec.option, *(f"{name}={value}" for name, value in otherwise(record).items()))
