"""tests/README.md: every case has a test, and every test that is named there is one that runs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.test_house import trees

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "tests" / "README.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
HEADINGS = ("Cases", "Small inputs that failed once", "Security of what is read")
CASE = re.compile(r"\bC\d{2}\b")


def rows(text: str) -> dict[str, list[list[str]]]:
    """The cells of each row of a table below a heading, without the table's head."""
    found: dict[str, list[list[str]]] = {}
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        heading, _, below = part.partition("\n")
        lines = [line for line in below.splitlines() if line.startswith("|")]
        if lines:
            found[heading] = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]
    return found


@cache
def run_from(path: str) -> frozenset[str]:
    """Those that pytest would run. What is marked `skip` is none."""
    return frozenset(
        node.name
        for node in trees()[path].body
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and not any("mark.skip" in ast.unparse(each) and "skipif" not in ast.unparse(each) for each in node.decorator_list)
    )


def missing(text: str) -> Iterator[str]:
    """Rows that name no test, and tests that are named and not there."""
    for heading, below in rows(text).items():
        for cells in below:
            named = NAMED.findall(cells[-1])
            if len(cells) != 3 or not named or NAMED.sub("", cells[-1]).strip():
                yield f"{heading}: {cells[0]}: no test, or more than tests"
            yield from (f"{path}::{name}" for path, name in named if path not in trees() or name not in run_from(path))


def test_every_test_that_is_named_is_there() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert tuple(rows(text)) == HEADINGS and all(len(below) > 10 for below in rows(text).values())
    assert list(missing(text)) == []


def test_a_case_stands_once_and_in_order() -> None:
    numbers = [cells[0] for cells in rows(DOCUMENT.read_text(encoding="utf-8"))["Cases"]]
    assert all(CASE.fullmatch(each) for each in numbers) and numbers == sorted(set(numbers))


def test_every_case_that_a_test_speaks_of_is_in_the_table() -> None:
    """With the files that say so in their docstrings."""
    spoken = {
        case
        for path, tree in trees().items()
        if path.startswith("tests/")
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.FunctionDef) and (said := ast.get_docstring(node))
        for case in CASE.findall(said)
    }
    listed = {cells[0] for cells in rows(DOCUMENT.read_text(encoding="utf-8"))["Cases"]}
    assert spoken <= listed and len(spoken) > 25


@pytest.mark.parametrize(
    "row",
    [
        "| C99 | what | `tests/test_cases.py::test_of_nothing` |",
        "| C99 | what | `tests/test_nothing.py::test_every_test_that_is_named_is_there` |",
        "| C99 | what | `tests/test_cases.py::missing` |",
        "| C99 | what | by hand |",
        "| C99 | `tests/test_cases.py::test_every_test_that_is_named_is_there` |",
        "| C99 | what | `tests/test_cases.py::test_every_test_that_is_named_is_there` and by hand |",
    ],
)
def test_what_is_not_there_would_be_seen(row: str) -> None:
    assert list(missing(f"\n## A table\n\n| a | b | c |\n| --- | --- | --- |\n{row}\n"))
