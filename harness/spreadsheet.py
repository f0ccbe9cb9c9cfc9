"""Numbers for other programs as a CSV file, in which no cell is a formula, whatever a user has called something."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BEGIN_A_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def plain_cell(value: object) -> object:
    """Text that a spreadsheet would work out gets a quote in front, which they do not show; anything else is as it is."""
    if isinstance(value, str) and (value.startswith(BEGIN_A_FORMULA) or value.lstrip().startswith(BEGIN_A_FORMULA)):
        return f"'{value}"
    return value


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A line of names and a line a row, all of which have the same; None is an empty cell. Raises OSError."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([plain_cell(name) for name in (rows[0] if rows else ())])
        writer.writerows([[plain_cell(value) for value in row.values()] for row in rows])
