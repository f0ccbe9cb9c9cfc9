"""The folder is the registry: every module in systems.baselines and systems.strategies that binds SYSTEM or STRATEGY.

A baseline (a file or a small package) exposes `SYSTEM`, an object that obeys `systems.system.System`; a strategy
exposes `STRATEGY`, a class that obeys `systems.planning.strategy.Strategy`, and `systems.substrate.system` turns it into a
system. The name is the module's, with dashes for underscores. Listing names reads source text and imports nothing, so
that it is quick and one broken module does not take the others down: it is unavailable, with its reason, when asked
for.
"""

from __future__ import annotations

import ast
import importlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from systems.errors import UnavailableError
from systems.messages import invalid_value, one_line, unknown_name

if TYPE_CHECKING:
    from systems.system import System

FOLDERS: Mapping[str, str] = MappingProxyType({"systems.baselines": "SYSTEM", "systems.strategies": "STRATEGY"})


@dataclass(frozen=True)
class RegistryEntry:
    """A module that offers a system. exposes: SYSTEM or STRATEGY. broken: why its source cannot be read, or None."""

    name: str
    module: str
    exposes: str
    broken: str | None = None


def _bound_names(tree: ast.Module) -> set[str]:
    """Names that a module binds at its top level, by assignment, definition or import."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(target.id for target in targets if isinstance(target, ast.Name))
    return names


def _parsed(path: Path) -> ast.Module:
    with warnings.catch_warnings(action="ignore"):  # they are told when the module is imported
        return ast.parse(path.read_text(encoding="utf-8"), filename=path.name)


def _sources(folder: Path) -> list[tuple[str, Path]]:
    """(module name, source file) of every public file or package in a folder."""
    found = [(path.stem, path) for path in folder.glob("*.py")]
    found += [(path.parent.name, path) for path in folder.glob("*/__init__.py")]
    return sorted((name, path) for name, path in found if not name.startswith("_"))


def find(root: Path | None = None, folders: Mapping[str, str] = FOLDERS) -> dict[str, RegistryEntry]:
    """Every entry by name. root: the folder that holds the packages; by default the one this file was loaded from."""
    root = root or Path(__file__).resolve().parents[1]
    entries: dict[str, RegistryEntry] = {}
    for package, exposes in folders.items():
        for module, path in _sources(root.joinpath(*package.split("."))):
            name, broken = module.replace("_", "-"), None
            try:
                if exposes not in _bound_names(_parsed(path)):
                    continue
            except (SyntaxError, ValueError, RecursionError, MemoryError, OSError) as error:
                broken = one_line(f"{type(error).__name__}: {error}")
            entries[name] = RegistryEntry(name=name, module=f"{package}.{module}", exposes=exposes, broken=broken)
    return dict(sorted(entries.items()))


def get(name: str, entries: Mapping[str, RegistryEntry] | None = None) -> System:
    """The system of that name. ValueError if there is none, UnavailableError if its module does not import."""
    entries = find() if entries is None else entries
    if name not in entries:
        raise ValueError(unknown_name("system", name, entries))
    entry = entries[name]
    if entry.broken:
        raise UnavailableError(f"{name} is unavailable: {entry.broken}")
    try:
        exposed = getattr(importlib.import_module(entry.module), entry.exposes)
        if entry.exposes == "SYSTEM":
            return _checked(exposed, entry)
        managed: Any = importlib.import_module("systems.substrate.system")
        return _checked(managed.ManagedSystem(_checked(exposed, entry)), entry)
    except UnavailableError:
        raise
    except (Exception, SystemExit) as error:  # whatever a module raises while it loads, its neighbours must stay usable
        raise UnavailableError(one_line(f"{name} is unavailable: {type(error).__name__}: {error}")) from error


def _checked(exposed: Any, entry: RegistryEntry) -> Any:
    """What the module exposes. ValueError where it lacks what every system has, before anybody asks for it."""
    if getattr(exposed, "name", None) != entry.name:
        raise ValueError(f"{entry.exposes}.name is {getattr(exposed, 'name', None)!r}: the file's name makes it {entry.name!r}")
    if not isinstance(getattr(exposed, "summary", None), str):
        raise ValueError(f"{entry.exposes}.summary is missing: say in a few words what it does")
    options = getattr(exposed, "Options", None)
    if not (isinstance(options, type) and issubclass(options, BaseModel)):
        raise ValueError(f"{entry.exposes}.Options is {options!r}: give a class derived from pydantic.BaseModel")
    return exposed


def split_assignments(kind: str, texts: Sequence[str]) -> dict[str, str]:
    """['depth=4'] -> {'depth': '4'}; ValueError for a text without '=' and for a key given twice."""
    assignments: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key:
            raise ValueError(f"`{kind}` {text}: write it as key=value")
        if key in assignments:
            raise ValueError(f"`{kind}` {key} is given twice: {assignments[key]} and {value}")
        assignments[key] = value.strip()
    return assignments


def parse_options(system: System, texts: Sequence[str]) -> BaseModel:
    """Texts such as key=value checked by the system's own Options. ValueError says in one line what is allowed."""
    return check_options(system, split_assignments("option", texts))


def check_options(system: System, given: Mapping[str, Any]) -> BaseModel:
    """The same of values, which may be texts."""

    def label(field: str, value: Any) -> str:
        return f"`options=dict({field}={value!r})`"

    fields = system.Options.model_fields
    for key in given:
        if key not in fields:
            raise ValueError(unknown_name(f"option of {system.name}", key, fields))
    try:
        options = system.Options.model_validate(given)
    except ValidationError as error:
        raise ValueError(invalid_value(error, label)) from None
    for key, value in given.items():
        if isinstance(value, bool) and not isinstance(getattr(options, key), bool):  # pydantic takes True for 1
            raise ValueError(f"{label(key, value)}: input should be a number")
    return options
