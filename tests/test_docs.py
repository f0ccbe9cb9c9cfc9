"""What is said of the code is so: files, functions, layers, states, moments, notes, words and links.

docs/architecture.md and docs/words.md are read as tables, one picture and code spans; the code is read as syntax trees. What
docstrings and comments name is looked for too. The log has its own tests (test_log.py).
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from systems.planning.trace import Phase
from systems.substrate.bundle.states import GRADIENT_MOVES, PARAMETER_MOVES
from tests.test_log import MAX_LINE, anchor

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURE, WORDS, CONTRIBUTING, README = (
    ROOT / name for name in ("docs/architecture.md", "docs/words.md", "CONTRIBUTING.md", "README.md")
)
TESTS = ROOT / "tests" / "README.md"
DOCUMENTS = [README, CONTRIBUTING, TESTS, *sorted((ROOT / "docs").glob("*.md"))]
LINKING = [README, CONTRIBUTING, TESTS, *sorted((ROOT / "docs").rglob("*.md"))]
README_LINES = 120
FOLDERS = ("harness", "models", "systems")
INDENT = 4
SIX = 6

FENCE = re.compile(r"^```.*?^```$", flags=re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
PLACE = re.compile(r"([\w/]+\.py):([\w.]+)")
PATH = re.compile(r"(?:docs|harness|models|paper_figures|systems|tests)/[\w./-]*")
COMMAND = re.compile(r"^(?:\$ )?(?:harness|torchrun|python|make) .*$", flags=re.MULTILINE)
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


def test_the_index_names_a_place_for_each_thing() -> None:
    """That functions are in these files, and files there, is looked at for all documents together."""
    found = rows(section(ARCHITECTURE, "## If you look for X, open Y"))
    assert len(found) > 5 * SIX
    assert len({wanted for wanted, _, _ in found}) == len(found)
    for wanted, place, beside in found:
        spans = CODE.findall(place)
        assert spans and all(PLACE.fullmatch(span) or PATH.fullmatch(span) for span in [*spans, *own_paths(beside)]), wanted


def own_paths(text: str) -> list[str]:
    """Code spans that say a folder; a bare file's name stands for several."""
    return [span for span in CODE.findall(text) if "/" in span]


@cache
def layers() -> Mapping[str, list[str]]:
    """By package, "" for the tree: its layers as pyproject.toml has them, the highest first."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts: list[dict[str, Any]] = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    layered = [contract for contract in contracts if contract["type"] == "layers"]
    return {package: contract["layers"] for contract in layered for package in contract.get("containers", [""])}


def expected_picture(package: str = "", depth: int = 0) -> Iterator[tuple[int, str]]:
    for layer in layers()[package]:
        yield depth, layer
        for part in layer.split(" | "):
            inside = f"{package}.{part}" if package else part
            if inside in layers():
                yield from expected_picture(inside, depth + 1)


def test_the_picture_shows_the_layers() -> None:
    """A line is a layer, indented by its depth, and, two spaces further on, what it is."""
    (picture,) = FENCE.findall(section(ARCHITECTURE, "## Who may import whom"))
    lines = picture.splitlines()[1:-1]
    shown = [re.fullmatch(r"( *)(\S+(?: \S+)*?)  +(\S.*)", line) for line in lines]
    assert all(shown), [line for line, match in zip(lines, shown, strict=True) if match is None]
    found = [(len(match[1]) / INDENT, match[2]) for match in shown if match is not None]
    assert found == list(expected_picture())
    assert {"systems", "systems.substrate", "systems.device", "systems.planning", "systems.recipe"} <= layers().keys()


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


# ---- docstrings and comments

PACKAGES = {path.parent for folder in FOLDERS for path in (ROOT / folder).rglob("__init__.py")}
MODULES = sorted(ROOT / path for path in sources())
SOURCE_FILE = re.compile(r"[\w./-]*\w\.(?:py|cpp|h)\b")
DOTTED = re.compile(r"(?<![\w./-])[A-Za-z_]\w*(?:\.\w+)+(?![\w/])")
NATIVE_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", flags=re.DOTALL)
NOT_MODULES = ("py", "cpp", "h", "json")  # what follows the last dot of a file's name
A_USER_S = "model"  # `model.layers.5` is of a user's model, not of the package of that name
Said = list[tuple[Path, str]]


def said(path: Path) -> Iterator[str]:
    """The docstrings and comments of a source file."""
    if path.suffix != ".py":
        yield from NATIVE_COMMENT.findall(text_of(path))
        return
    yield from (
        ast.get_docstring(node) or "" for node in ast.walk(tree(path)) if isinstance(node, ast.Module | ast.ClassDef | Function)
    )
    yield from (
        each.string for each in tokenize.generate_tokens(io.StringIO(text_of(path)).readline) if each.type == tokenize.COMMENT
    )


@cache
def all_said() -> Said:
    native = sorted(path for path in (ROOT / "systems/native/csrc").iterdir())
    return [(path, text) for path in (*MODULES, *native) for text in said(path)]


@cache
def source_files() -> frozenset[str]:
    paths = (path for folder in (*FOLDERS, "paper_figures", "tests") for path in (ROOT / folder).rglob("*"))
    return frozenset(path.relative_to(ROOT).as_posix() for path in paths if SOURCE_FILE.fullmatch(path.name))


def names_of(path: Path) -> frozenset[str]:
    """Of a package: what its `__init__` has, imported or its own. Else: what the module defines."""
    if not path.is_dir():
        return names(path)
    module = path / "__init__.py"
    imported = (
        alias.asname or alias.name
        for node in ast.walk(tree(module))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    )
    return frozenset((*names(module), *imported))


def leads_to(start: Path, parts: Sequence[str]) -> bool:
    """start: a package's folder or a module. parts: packages and modules below it, and a name that the last of them has."""
    for number, part in enumerate(parts):
        if start.is_dir() and (start / part).is_dir():
            start /= part
        elif start.is_dir() and (start / f"{part}.py").is_file():
            start = start / f"{part}.py"
        else:
            return ".".join(parts[number:]) in names_of(start)
    return True


def of_an_instance(dotted: str) -> bool:
    """`watch.end` may be said of an object too, which is called as its class, or as the last word of that."""
    kind, _, attribute = dotted.partition(".")
    last = kind.title().replace("_", "")
    return any(name.endswith(last) and attribute in mine for name, mine in attributes().items())


@cache
def attributes() -> Mapping[str, frozenset[str]]:
    """By class: all that it and its methods bind."""
    found: dict[str, set[str]] = {}
    for module in sources().values():
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                mine = found.setdefault(node.name, set())
                mine.update(item.name for item in node.body if isinstance(item, Function))
                mine.update(fields(node.body))
                stored = (
                    each for each in ast.walk(node) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
                )
                mine.update(each.attr for each in stored if ast.unparse(each.value) == "self")
    return {name: frozenset(mine) for name, mine in found.items()}


def unfound_files(everything: Said) -> list[str]:
    """Paths from a folder above the text's own file, or of a name that one file alone has."""
    missing = []
    for path, text in everything:
        for named in SOURCE_FILE.findall(text):
            there = any((folder / named).is_file() for folder in path.parents if folder.is_relative_to(ROOT))
            if not there and sum(f"/{file}".endswith(f"/{named}") for file in source_files()) != 1:
                missing.append(f"{path.relative_to(ROOT)}: {named}")
    return missing


def unfound_names(everything: Said) -> list[str]:
    """Of dotted names those that begin with a package of ours, and in backquotes those that begin with a module of ours too."""
    missing = []
    for path, text in everything:
        in_code = {*CODE.findall(text)}
        for dotted in sorted({*DOTTED.findall(text)}):
            head, *parts = dotted.split(".")
            starts = [package for package in PACKAGES if package.name == head]
            if dotted in in_code:
                beside = path.parent / f"{head}.py"
                starts += [beside] if beside in MODULES else [module for module in MODULES if module.stem == head]
            if not starts or head == A_USER_S or parts[-1] in NOT_MODULES or of_an_instance(dotted):
                continue
            if not any(leads_to(start, parts) for start in starts):
                missing.append(f"{path.relative_to(ROOT)}: {dotted}")
    return missing


def unfound_attributes(everything: Said) -> list[str]:
    """Of names such as `Class.attribute`: those whose class is neither ours nor torch's, and those that our class has not."""
    missing = []
    for path, text in everything:
        for dotted in DOTTED.findall(text):
            kind, attribute, *_ = dotted.split(".")
            if len(kind) > 1 and kind[0].isupper() and not hasattr(torch, kind) and attribute not in attributes().get(kind, ()):
                missing.append(f"{path.relative_to(ROOT)}: {dotted}")
    return missing


@pytest.mark.parametrize("unfound", [unfound_files, unfound_names, unfound_attributes])
def test_what_docstrings_and_comments_name_is_there(unfound: Callable[[Said], list[str]]) -> None:
    assert not unfound(all_said())


@pytest.mark.parametrize(
    ("unfound", "right", "wrong"),
    [
        (unfound_files, "See step_ending.py, moves/room.py", "mirrored in systems/substrate/adam/cpu.py"),
        (unfound_files, "systems/adam/cpu.py, adam/cpu.py, csrc/adam.cpp", "See step_endings.py"),
        (unfound_names, "planning.policy.caching, `planning.policy.eviction.ModelOrder`", "`planning.eviction.ModelOrder`"),
        (unfound_names, "policy.homes.within_host", "planning.overflow"),
        (unfound_names, "`tracer.margin`, tracer.margins", "`tracer.margins`"),
        (unfound_names, "device.close, watch.end, model.layers.5", "device.closes"),
        (unfound_attributes, "Device.close, Tensor.data, UpdateRule.AFTER_NORM", "See Room.ask."),
        (unfound_attributes, "DeviceRoom.ask", "DeviceRoom.asks"),
    ],
)
def test_what_is_not_there_would_be_found(unfound: Callable[[Said], list[str]], right: str, wrong: str) -> None:
    here = ROOT / "systems/substrate/flushes.py"
    assert not unfound([(here, right)])
    assert unfound([(here, wrong)])


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


def named_from(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", LINKING, ids=named_from)
def test_every_link_leads_somewhere(path: Path) -> None:
    for target in LINK.findall(CODE.sub("", FENCE.sub("", text_of(path)))):
        if "://" in target:
            continue
        file, _, place = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), target
        assert not place or place in anchors(there), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=named_from)
def test_every_path_that_is_named_is_there(path: Path) -> None:
    named = [code for code in CODE.findall(FENCE.sub("", text_of(path))) if PATH.fullmatch(code)]
    assert not [code for code in named if not (ROOT / code).exists()]


def test_paths_are_named() -> None:
    found = {path for path in DOCUMENTS if any(PATH.fullmatch(code) for code in CODE.findall(FENCE.sub("", text_of(path))))}
    assert {ARCHITECTURE, WORDS, CONTRIBUTING} < found


@pytest.mark.parametrize("path", [each for each in DOCUMENTS if each != CONTRIBUTING], ids=named_from)
def test_lines_are_short(path: Path) -> None:
    """But rows of tables, and commands, which are not broken."""
    lines = COMMAND.sub("", text_of(path)).splitlines()
    assert not [number for number, line in enumerate(lines, 1) if len(line) > MAX_LINE and not line.startswith("|")]


def test_the_readme_is_short() -> None:
    assert len(text_of(README).splitlines()) <= README_LINES


def test_every_document_is_named_where_it_is_looked_for() -> None:
    """In the README, by a link."""
    linked = {(ROOT / target.partition("#")[0]).resolve() for target in LINK.findall(text_of(README)) if "://" not in target}
    assert {CONTRIBUTING, *(ROOT / "docs").glob("*.md"), ROOT / "docs" / "log" / "README.md"} <= linked
