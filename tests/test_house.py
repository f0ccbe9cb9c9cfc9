"""The house rules that a program can check: nothing grows a long tail, and names say what a thing is."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("models", "systems", "harness", "paper_figures", "tests")
MAX_FILE_LINES = 500
MAX_STRATEGY_LINES = 300
MAX_FUNCTION_LINES = 80
MAX_METHODS = 20
MAX_SYSTEMS_FILE_LINES = 400
MAX_SYSTEMS_METHODS = 15
EMPTY_WORDS = {"util", "utils", "common", "helper", "helpers", "manager", "managers", "misc"}
# What the two caps of `systems` do not hold for, a class (file:class) or all below a folder, and why.
EXEMPT = {
    "systems/system.py:Engine": "the protocol every system obeys",
    "systems/baselines/": "they stand alone on purpose",
}
NOT_FOR_STRATEGIES = ("torch.cuda", "torch.distributed")

Function = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def sources() -> dict[str, str]:
    """Relative path to text of every Python file."""
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


@cache
def trees() -> dict[str, ast.Module]:
    return {path: ast.parse(text, filename=path) for path, text in sources().items()}


@cache
def nodes() -> dict[str, list[ast.AST]]:
    """Relative path to all nodes of every file's tree."""
    return {path: list(ast.walk(tree)) for path, tree in trees().items()}


def exemption(place: str) -> str | None:
    """The entry of EXEMPT that a file, or a class in one (file:class), falls under."""
    return next((entry for entry in EXEMPT if place == entry or (entry.endswith("/") and place.startswith(entry))), None)


def most_lines(path: str) -> int:
    if path.startswith("systems/strategies/"):
        return MAX_STRATEGY_LINES
    return MAX_SYSTEMS_FILE_LINES if path.startswith("systems/") and exemption(path) is None else MAX_FILE_LINES


def most_methods(path: str, name: str) -> int:
    narrow = path.startswith("systems/") and exemption(f"{path}:{name}") is None
    return MAX_SYSTEMS_METHODS if narrow else MAX_METHODS


@cache
def methods() -> dict[str, int]:
    """Methods of each class (file:class), the most where a file has two of a name."""
    found: dict[str, int] = {}
    for path, all_nodes in nodes().items():
        for node in all_nodes:
            if isinstance(node, ast.ClassDef):
                place = f"{path}:{node.name}"
                found[place] = max(found.get(place, 0), sum(isinstance(item, Function) for item in node.body))
    return found


def long_files() -> Iterator[str]:
    for path, text in sources().items():
        most = most_lines(path)
        if (lines := text.count("\n")) > most:
            yield f"{path}: {lines} lines, at most {most}"


def long_functions() -> Iterator[str]:
    for path, found in nodes().items():
        for node in found:
            if isinstance(node, Function):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    yield f"{path}:{node.lineno} {node.name}: {lines} lines, at most {MAX_FUNCTION_LINES}"


def wide_classes() -> Iterator[str]:
    for place, count in methods().items():
        most = most_methods(*place.split(":"))
        if count > most:
            yield f"{place}: {count} methods, at most {most}"


def needless_entries() -> Iterator[str]:
    """The lists above only shrink: an entry that nothing needs goes, and a number that is too high comes down."""
    needed = {exemption(path) for path, text in sources().items() if text.count("\n") > MAX_SYSTEMS_FILE_LINES}
    needed |= {exemption(place) for place, count in methods().items() if count > MAX_SYSTEMS_METHODS}
    yield from (f"EXEMPT: nothing needs {entry}, take it out" for entry in EXEMPT.keys() - needed)


def empty_names() -> Iterator[str]:
    for path in sources():
        words = {word for part in Path(path).with_suffix("").parts for word in part.split("_")}
        if words & EMPTY_WORDS:
            yield f"{path}: a name that says nothing; name it by what is in it"


def acting_strategies() -> Iterator[str]:
    """Strategies return data: not even by a dotted name do they reach a device or another rank."""
    for path, found in nodes().items():
        if not path.startswith("systems/strategies/"):
            continue
        for node in found:
            if isinstance(node, ast.Import):
                used = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                used = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute):
                used = [ast.unparse(node)]
            else:
                continue
            for name in used:
                if name.startswith(NOT_FOR_STRATEGIES):
                    yield f"{path}:{node.lineno} uses {name}"


RULES = (long_files, long_functions, wide_classes, needless_entries, empty_names, acting_strategies)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_house_rule(rule: Callable[[], Iterator[str]]) -> None:
    offenders = list(rule())
    assert not offenders, "\n".join(["", *offenders])


def test_the_rules_look_at_something() -> None:
    assert len(sources()) > 20
