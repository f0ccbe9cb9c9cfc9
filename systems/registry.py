"""The folder is the registry: every module in systems.baselines and systems.strategies that binds SYSTEM or STRATEGY.

A baseline (a file or a small package) exposes `SYSTEM`, an object that obeys `systems.system.System`; a strategy
exposes `STRATEGY`, a class that obeys `systems.planning.strategy.Strategy`, and `systems.substrate.system` turns it into a
system. The name is the module's, with dashes for underscores. Listing names reads source text and imports nothing, so
that it is quick and one broken module does not take the others down: it is unavailable, with its reason, when asked
for.

Note [Faces]
    What a system says of itself (systems/face.py) is wanted where torch, which takes seconds to import, is not: in lists, and
    to find a wrong name or option. A strategy's module imports no torch. One that does binds FACE, an import from a module
    that does not (`from systems.baselines.faces import DUMMY as FACE`); for its face that module alone is imported. Any other
    is imported itself: that takes longer, and nothing else is different.
"""

from __future__ import annotations

import ast
import importlib
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from systems.errors import UnavailableError
from systems.face import OF_STRATEGIES, Face
from systems.messages import invalid_value, one_line, unknown_name

if TYPE_CHECKING:
    from systems.system import System

FACE = "FACE"
FOLDERS: Mapping[str, str] = MappingProxyType({"systems.baselines": "SYSTEM", "systems.strategies": "STRATEGY"})

_PARSING = threading.Lock()  # Python 3.11 loses count of its depth where threads parse at once


@dataclass(frozen=True)
class RegistryEntry:
    """A module that offers a system. exposes: SYSTEM or STRATEGY. broken: why its source cannot be read, or None.

    face: module and name that it has its face from, or None: see Note [Faces].
    """

    name: str
    module: str
    exposes: str
    broken: str | None = None
    face: tuple[str, str] | None = None


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


def _face_of(tree: ast.Module) -> tuple[str, str] | None:
    """Where a module imports FACE from, absolutely and at its top level."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == FACE:
                    return node.module, alias.name
    return None


def _parsed(path: Path) -> ast.Module:
    with _PARSING, warnings.catch_warnings(action="ignore"):  # they are told when the module is imported
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
            name, broken, face = module.replace("_", "-"), None, None
            try:
                tree = _parsed(path)
                if exposes not in _bound_names(tree):
                    continue
                face = _face_of(tree)
            except (SyntaxError, ValueError, RecursionError, MemoryError, OSError) as error:
                broken = one_line(f"{type(error).__name__}: {error}")
            entries[name] = RegistryEntry(name=name, module=f"{package}.{module}", exposes=exposes, broken=broken, face=face)
    return dict(sorted(entries.items()))


def get(name: str, entries: Mapping[str, RegistryEntry] | None = None) -> System:
    """The system of that name. ValueError if there is none, UnavailableError if its module does not import."""
    entry = _entry(name, entries)
    with _telling(name):
        exposed = getattr(importlib.import_module(entry.module), entry.exposes)
        if entry.exposes == "SYSTEM":
            return _checked(exposed, entry)
        managed: Any = importlib.import_module("systems.substrate.system")
        return _checked(managed.ManagedSystem(_checked(exposed, entry)), entry)


def is_planner(entry: RegistryEntry) -> bool:
    """Its plans are what a run does: every strategy, whatever the folder holds, and resident."""
    return entry.exposes == "STRATEGY" or entry.name == "resident"


def planners() -> Iterator[System]:
    """All of those."""
    entries = find()
    yield from (get(name, entries) for name, entry in entries.items() if is_planner(entry))


def face(name: str, entries: Mapping[str, RegistryEntry] | None = None) -> Face:
    """What that system says of itself: see Note [Faces]. ValueError and UnavailableError as in `get`."""
    entry = _entry(name, entries)
    with _telling(name):
        module, attribute = entry.face or (entry.module, entry.exposes)
        found = _checked(getattr(importlib.import_module(module), attribute), entry)
        abilities = OF_STRATEGIES if entry.exposes == "STRATEGY" else found.abilities
        return Face(name=found.name, summary=found.summary, Options=found.Options, abilities=abilities)


def _entry(name: str, entries: Mapping[str, RegistryEntry] | None) -> RegistryEntry:
    if not isinstance(name, str):
        raise ValueError(f"system is {name!r}: give a name, such as 'elixir'")
    entries = find() if entries is None else entries
    if name not in entries:
        raise ValueError(unknown_name("system", name, entries))
    entry = entries[name]
    if entry.broken:
        raise UnavailableError(f"{name} is unavailable: {entry.broken}")
    return entry


@contextmanager
def _telling(name: str) -> Iterator[None]:
    """Whatever a module raises while it loads makes it unavailable: its neighbours must stay usable."""
    try:
        yield
    except UnavailableError:
        raise
    except (Exception, SystemExit) as error:
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


def parse_options(system: System | Face, texts: Sequence[str]) -> BaseModel:
    """Texts such as key=value checked by the system's own Options. ValueError says in one line what is allowed."""
    return check_options(system, split_assignments("option", texts))


def check_options(system: System | Face, given: Mapping[str, Any]) -> BaseModel:
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
