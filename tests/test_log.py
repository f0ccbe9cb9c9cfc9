"""The log in docs/log: each entry says what was asked, what came of it, on which evidence and with what consequence."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "log"
INDEX = FOLDER / "README.md"
DAYS = sorted(path for path in FOLDER.glob("*.md") if path != INDEX)
FIELDS = ("Question", "Answer", "Evidence", "Consequence")
MAX_LINE = 120
FIELD = re.compile(r"^\*\*(\w+)\*\* \S")
ROW = re.compile(r"^\| (?P<date>[\w-]+) \| \[(?P<title>.+)\]\((?P<target>[^)]+)\) \| (?P<answer>.+) \|$", flags=re.MULTILINE)
RUN = re.compile(r"\d{8}T\d{6}[\w.-]*\w")
SHORT_RUN = re.compile(r"(?<!\d)T\d{6}\b")


class Entry(NamedTuple):
    """One finding: the file's name without its ending, the heading, where a link leads, and the lines below the heading."""

    day: str
    title: str
    anchor: str
    lines: list[str]


def anchor(heading: str) -> str:
    """What GitHub makes of a heading: small letters, digits, underscores and hyphens; spaces are hyphens, all else goes."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def entries_of(text: str, *, day: str) -> Iterator[Entry]:
    """A heading of the third level begins an entry, any other ends it. GitHub numbers equal anchors of one file."""
    seen: Counter[str] = Counter()
    for part in re.split(r"^(?=#)", text, flags=re.MULTILINE):
        heading, *lines = part.splitlines() or [""]
        if not heading.startswith("#"):
            continue
        level, title = heading.split(" ", 1)
        name = anchor(title)
        if level == "###":
            yield Entry(day, title, f"{name}-{seen[name]}" if seen[name] else name, lines)
        seen[name] += 1


@cache
def entries() -> list[Entry]:
    return [entry for path in DAYS for entry in entries_of(path.read_text(encoding="utf-8"), day=path.stem)]


@cache
def rows() -> list[dict[str, str]]:
    """The index: one row an entry."""
    return [row.groupdict() for row in ROW.finditer(INDEX.read_text(encoding="utf-8"))]


@cache
def records() -> set[str]:
    """Names of all files below results/, without their endings."""
    return {re.sub(r"\.json(\.gz)?$", "", path.name) for path in (ROOT / "results").rglob("*.json*")}


def test_the_log_has_entries() -> None:
    assert DAYS
    assert {entry.day for entry in entries()} == {path.stem for path in DAYS}


def test_every_entry_has_the_four_fields_in_order() -> None:
    for entry in entries():
        fields = [found[1] for line in entry.lines if (found := FIELD.match(line))]
        assert fields == list(FIELDS), f"{entry.day}: {entry.title}"
        first = next(line for line in entry.lines if line)
        assert FIELD.match(first), f"{entry.day}: {entry.title}: text before the fields"


def test_every_entry_is_in_the_index_and_every_link_leads_to_one() -> None:
    listed = [(row["date"], row["title"], row["target"]) for row in rows()]
    there = [(entry.day, entry.title, f"{entry.day}.md#{entry.anchor}") for entry in entries()]
    assert sorted(listed) == sorted(there)
    links = re.findall(r"\]\(([^)]+)\)", INDEX.read_text(encoding="utf-8"))
    assert len(links) == len(listed), "a link that is in no row of the table"


def test_the_index_is_in_the_order_of_the_log() -> None:
    """Days from the newest on, and within a day as in its file."""
    there = [(entry.day, entry.title) for path in reversed(DAYS) for entry in entries() if entry.day == path.stem]
    assert [(row["date"], row["title"]) for row in rows()] == there


@pytest.mark.parametrize("path", [INDEX, *DAYS], ids=lambda path: path.stem)
def test_every_run_has_its_record(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not set(RUN.findall(text)) - records()
    assert not SHORT_RUN.findall(text), "run ids are written whole"


@pytest.mark.parametrize("path", [INDEX, *DAYS], ids=lambda path: path.stem)
def test_lines_are_short(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    long = [number for number, line in enumerate(lines, 1) if len(line) > MAX_LINE and not line.startswith("|")]
    assert not long, f"lines {long} have more than {MAX_LINE} characters"


def test_anchors_are_github_s() -> None:
    text = "# A day\n\n### A user's `models/` without an `__init__.py`\n\n### fp16, 4.5 x 2\n\n## Group\n\n### fp16, 4.5 x 2\n"
    found = [entry.anchor for entry in entries_of(text, day="a-day")]
    assert found == ["a-users-models-without-an-__init__py", "fp16-45-x-2", "fp16-45-x-2-1"]
