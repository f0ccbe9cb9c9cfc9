"""Whether a system can run here at all: its module loads, and the outside package that it names is installed.

A system that is a front for an outside package says so in its abilities: the name it is imported by, and the command that
brings it. So its absence is known before anything is built, and a record says which version trained. What only shows
later a system raises as UnavailableError from `initialize`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from systems import registry
from systems.errors import UnavailableError
from systems.face import Face
from systems.registry import RegistryEntry

if TYPE_CHECKING:
    from systems.system import System


def load(name: str, entries: Mapping[str, RegistryEntry] | None = None) -> System:
    """The system of that name. ValueError if there is none, UnavailableError if it cannot run here."""
    system = registry.get(name, entries)
    why = why_unavailable(system)
    if why is not None:
        raise why
    return system


def faces(entries: Mapping[str, RegistryEntry]) -> Iterator[tuple[str, Face | UnavailableError]]:
    """What every system says of itself, by name, or why it cannot: what it trains with is not imported."""
    for name in entries:
        try:
            yield name, registry.face(name, entries)
        except UnavailableError as error:
            yield name, error


def why_unavailable(found: Face | System) -> UnavailableError | None:
    """That the outside package it names is not installed."""
    package = found.abilities.package
    if package is None or importlib.util.find_spec(package.partition(".")[0]) is not None:
        return None
    reason = f"{found.name} is unavailable: the package {package} is not installed"
    return UnavailableError(reason, install=found.abilities.install)


def package_of(system: System) -> str | None:
    """Name and version of the outside package that does the work, None for this project's own code."""
    package = system.abilities.package
    if package is None:
        return None
    try:
        return f"{package} {importlib.metadata.version(package.partition('.')[0])}"
    except importlib.metadata.PackageNotFoundError:
        return f"{package} (version not known)"


def load_all(entries: Mapping[str, RegistryEntry]) -> Iterator[tuple[str, System | UnavailableError]]:
    """Every system by name, or why it cannot run here."""
    for name, entry in entries.items():
        try:
            yield name, load(name, {name: entry})
        except UnavailableError as error:
            yield name, error
