"""What the documents say of the code is so: files, functions, floors, states, moments, notes, words and links.

docs/architecture.md and docs/words.md are read as tables, one picture and code spans; the code is read as syntax trees. The log
has its own tests (test_log.py).
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from systems.planning.trace import Phase
from systems.substrate.bundle.states import GRADIENT_MOVES, PARAMETER_MOVES
from tests.test_log import MAX_LINE, anchor

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURE, WORDS, CONTRIBUTING, README = (
    ROOT / name for name in ("docs/architecture.md", "docs/words.md", "CONTRIBUTING.md", "README.md")
)
DOCUMENTS = [README, CONTRIBUTING, *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("harness", "models", "systems")
INDENT = 4
SIX = 6

FENCE = re.compile(r"^```.*?^```$", flags=re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
PLACE = re.compile(r"([\w/]+\.py):([\w.]+)")
PATH = re.compile(r"(?:docs|harness|models|paper_figures|systems|tests)/[\w./-]*")
NOTE = re.compile(r"Note \[([^\]\n]+)\]")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def section(path: Path, heading: str) -> str:
    """What stands below a heading, up to the next of its level or of a higher one."""
    level = heading.split(" ", 1)[0]
    below = re.split(rf"^{re.escape(heading)}$", text_of(path), flags=re.MULTILINE)
    assert len(below) == 2, f"{path.name} has {len(below) - 1} headings {heading!r}"
    return re.split(rf"^#{{1,{len(level)}}} ", below[1], flags=re.MULTILINE)[0]


def rows(text: str) -> list[list[str]]:
    """Of all tables in a text: the cells of each row that is neither a table's head nor the line below it."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rules = {number for number, cells in enumerate(found) if all(re.fullmatch(r":?-+:?", cell) for cell in cells)}
    return [cells for number, cells in enumerate(found) if number not in rules and number + 1 not in rules]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


@cache
def sources() -> dict[str, ast.Module]:
    """Relative path to syntax tree, in order of path."""
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): tree(path) for path in sorted(paths)}


def fields(body: list[ast.stmt]) -> Iterator[str]:
    """Names that a class or a module binds in its body, functions and classes left aside."""
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        for target in targets:
            yield from (each.id for each in ast.walk(target) if isinstance(each, ast.Name))


@cache
def functions(path: Path) -> frozenset[str]:
    """Functions and methods that a file defines, and its classes: `f`, `Class`, `Class.method`."""
    found: set[str] = set()
    for node in tree(path).body:
        if isinstance(node, Function | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found.update(f"{node.name}.{item.name}" for item in node.body if isinstance(item, Function))
    return frozenset(found)


@cache
def names(path: Path) -> frozenset[str]:
    """The same and all else that a file defines: what it binds, and fields of its classes (`Class.field`)."""
    found = {*functions(path), *fields(tree(path).body)}
    for node in tree(path).body:
        if isinstance(node, ast.ClassDef):
            mine = {*fields(node.body)}
            mine.update(
                each.attr
                for each in ast.walk(node)
                if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self"
            )
            found.update(f"{node.name}.{name}" for name in mine)
    return frozenset(found)


# ---- docs/architecture.md


def test_there_are_six_files_to_read() -> None:
    text = section(ARCHITECTURE, "## The code in six files")
    numbered = re.findall(r"^(\d)\. \[(\S+)\]\(\.\./(\S+)\) is ", text, flags=re.MULTILINE)
    assert [int(number) for number, _, _ in numbered] == list(range(1, SIX + 1))
    assert all(shown == linked for _, shown, linked in numbered)


@cache
def floors() -> Mapping[str, list[str]]:
    """By package, "" for the tree: its floors as pyproject.toml has them, the highest first."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts: list[dict[str, Any]] = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    layered = [contract for contract in contracts if contract["type"] == "layers"]
    return {package: contract["layers"] for contract in layered for package in contract.get("containers", [""])}


def expected_picture(package: str = "", depth: int = 0) -> Iterator[tuple[int, str]]:
    for floor in floors()[package]:
        yield depth, floor
        for room in floor.split(" | "):
            inside = f"{package}.{room}" if package else room
            if inside in floors():
                yield from expected_picture(inside, depth + 1)


def test_the_picture_shows_the_floors() -> None:
    """A line is a floor, indented by its depth, and, two spaces further on, what it is."""
    (picture,) = FENCE.findall(section(ARCHITECTURE, "## Who may import whom"))
    lines = picture.splitlines()[1:-1]
    shown = [re.fullmatch(r"( *)(\S+(?: \S+)*?)  +(\S.*)", line) for line in lines]
    assert all(shown), [line for line, match in zip(lines, shown, strict=True) if match is None]
    found = [(len(match[1]) / INDENT, match[2]) for match in shown if match is not None]
    assert found == list(expected_picture())
    assert {"systems", "systems.substrate", "systems.device", "systems.planning", "systems.recipe"} <= floors().keys()


def test_every_function_that_is_named_is_there() -> None:
    missing = []
    named = [span for path in DOCUMENTS for code in CODE.findall(text_of(path)) for span in PLACE.findall(code)]
    for file, name in named:
        if not (ROOT / file).is_file() or name not in functions(ROOT / file):
            missing.append(f"{file}:{name}")
    assert not missing
    assert len(named) > SIX


def test_every_line_of_a_parameter_s_life_names_its_functions() -> None:
    life = section(ARCHITECTURE, "## The life of one parameter through a step")
    items = re.split(r"^(?=\d+\. \*\*|\* \*\*)", life, flags=re.MULTILINE)[1:]
    numbers = [int(item.split(".")[0]) for item in items if item[0].isdigit()]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) > SIX
    assert not [item.splitlines()[0] for item in items if not PLACE.search(item)]


def test_the_moments_are_all_there() -> None:
    shown = [cells[0] for cells in rows(section(ARCHITECTURE, "## What happens at each moment of a step"))]
    assert shown == [f"`{phase.name}`" for phase in Phase]


@pytest.mark.parametrize("moves", [PARAMETER_MOVES, GRADIENT_MOVES], ids=["parameters", "gradient"])
def test_the_tables_of_states_are_the_code_s(moves: Mapping[Enum, frozenset[Enum]]) -> None:
    states = type(next(iter(moves)))
    text = section(ARCHITECTURE, "## The two states of a bundle")
    (table,) = (part for part in re.split(r"^(?=\*\*)", text, flags=re.MULTILINE) if f"(`{states.__name__}`)" in part)
    shown = {CODE.findall(cells[0])[0]: set(CODE.findall(cells[1])) for cells in rows(table)}
    assert shown == {state.name: {after.name for after in moves[state]} for state in states}
    assert len(rows(table)) == len(states)


def defined_notes() -> Iterator[tuple[str, str]]:
    """(name, file) of every note: a line of a docstring that begins with its name begins a note."""
    for path, module in sources().items():
        for node in ast.walk(module):
            if isinstance(node, ast.Module | ast.ClassDef | Function):
                for line in (ast.get_docstring(node) or "").splitlines():
                    if match := NOTE.match(line.strip()):
                        yield match[1], path


def test_the_index_of_notes_is_the_code_s() -> None:
    shown = [(cells[0], cells[1]) for cells in rows(section(ARCHITECTURE, "## All named notes"))]
    there = list(defined_notes())
    assert shown == [(name, f"[{path}](../{path})") for name, path in there]
    assert max(Counter(name for name, _ in there).values()) == 1, "two notes of one name"
    assert all(cells[2].endswith(".") for cells in rows(section(ARCHITECTURE, "## All named notes")))


def test_every_note_that_is_named_is_there() -> None:
    there = {name for name, _ in defined_notes()}
    named = {(name, path) for path in sources() for name in NOTE.findall(text_of(ROOT / path))}
    assert not {(name, path) for name, path in named if name not in there}


# ---- docs/words.md


def words() -> list[list[str]]:
    """Rows of word, name in code, meaning, file."""
    return rows(text_of(WORDS))


def test_every_word_is_where_the_table_says() -> None:
    for word, code, meaning, link in words():
        (name,), (target,) = CODE.findall(code), LINK.findall(link)
        assert link == f"[{target.removeprefix('../')}]({target})", word
        assert name in names((WORDS.parent / target).resolve()), f"{word}: {target} defines no {name}"
        assert re.fullmatch(r"[A-Z].*[^.]\.", meaning), f"{word}: a meaning is one sentence"


def test_every_word_has_one_meaning() -> None:
    """Rows of a word that has several are told apart by what it is a word of: "Phase, of a moment"."""
    found = Counter(word.removesuffix("s") for word, *_ in words())
    assert not [word for word, count in found.items() if count > 1]


def test_the_words_of_contributing_are_in_the_table() -> None:
    listed = section(CONTRIBUTING, "## Words").strip().split(":", 1)[0].split(", ")
    assert len(listed) > SIX
    assert not set(listed) - {word for word, *_ in words()}


def test_a_class_name_has_one_meaning() -> None:
    found: dict[str, list[str]] = {}
    for path, module in sources().items():
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name.lstrip("_"), []).append(f"{path}:{node.lineno}")
    assert len(found) > SIX
    assert not {name: places for name, places in found.items() if len(places) > 1}


# ---- all documents


def anchors(path: Path) -> set[str]:
    """GitHub numbers equal anchors of one file."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", text_of(path)), flags=re.MULTILINE):
        name = anchor(heading)
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_every_link_leads_somewhere(path: Path) -> None:
    for target in LINK.findall(CODE.sub("", FENCE.sub("", text_of(path)))):
        if "://" in target:
            continue
        file, _, place = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), target
        assert not place or place in anchors(there), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_every_path_that_is_named_is_there(path: Path) -> None:
    named = [code for code in CODE.findall(FENCE.sub("", text_of(path))) if PATH.fullmatch(code)]
    assert named
    assert not [code for code in named if not (ROOT / code).exists()]


@pytest.mark.parametrize("path", [ARCHITECTURE, WORDS], ids=lambda path: path.stem)
def test_lines_are_short(path: Path) -> None:
    lines = text_of(path).splitlines()
    assert not [number for number, line in enumerate(lines, 1) if len(line) > MAX_LINE and not line.startswith("|")]
