"""A table or figure of a paper beside what is known here: which number is whose is part of the type of its cell.

The paper's own numbers have a place in it, measured ones the ids of their runs and a machine, simulated ones a profile.
A cell that nothing fills is None and stays empty. How a table is found and asked for is in `figures.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from systems.messages import printable

Origin = Literal["", "paper", "computed", "measured", "simulated"]
"""Of a column: "" names the row; computed is worked out from the paper's numbers or from a model's shape."""
Value = str | int | float


@dataclass(frozen=True)
class PrintedCell:
    """place: in the paper."""

    value: Value
    place: str


@dataclass(frozen=True)
class ComputedCell:
    value: Value


@dataclass(frozen=True)
class MeasuredCell:
    """run_ids: of the records that the value is of. machine: their device."""

    value: Value
    run_ids: tuple[str, ...]
    machine: str


@dataclass(frozen=True)
class SimulatedCell:
    """profile: of hardware."""

    value: Value
    profile: str


FigureCell = Value | PrintedCell | ComputedCell | MeasuredCell | SimulatedCell | None
KINDS: dict[Origin, tuple[type, ...]] = {
    "": (str, int, float),
    "paper": (PrintedCell,),
    "computed": (ComputedCell,),
    "measured": (MeasuredCell,),
    "simulated": (SimulatedCell,),
}


@dataclass(frozen=True)
class FigureColumn:
    """name: with the unit."""

    name: str
    origin: Origin = ""

    @property
    def heading(self) -> str:
        return f"{self.origin}: {self.name}" if self.origin else self.name


@dataclass(frozen=True)
class PaperTable:
    """remarks: what contradicts itself, what is a hole and why, how something was worked out; a line each. drawing: as text."""

    title: str
    columns: tuple[FigureColumn, ...]
    rows: tuple[tuple[FigureCell, ...], ...]
    remarks: tuple[str, ...] = ()
    drawing: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            assert len(row) == len(self.columns), f"{self.title}: {len(row)} cells for {len(self.columns)} columns"
            for cell, column in zip(row, self.columns, strict=True):
                fits = cell is None or isinstance(cell, KINDS[column.origin])
                assert fits, f"{self.title}: {cell!r} is none of the column {column.heading!r}"

    def column(self, heading: str) -> list[FigureCell]:
        """All cells below a heading."""
        place = [column.heading for column in self.columns].index(heading)
        return [row[place] for row in self.rows]

    def markdown(self) -> str:
        """The table, where its numbers are from, and the remarks."""
        runs: dict[tuple[str, ...], int] = {}
        lines = [f"### {self.title}", "", _line(column.heading for column in self.columns), "| --- " * len(self.columns) + "|"]
        lines += [_line(_shown(cell, runs) for cell in row) for row in self.rows]
        said = [*self._sources(), *self.remarks]
        drawn = ["", "```text", self.drawing, "```"] if self.drawing else []
        return "\n".join([*lines, "", *(f"* {printable(line)}" for line in said), *drawn]).rstrip() + "\n"

    def _sources(self) -> Iterator[str]:
        cells = [cell for row in self.rows for cell in row]
        places = list(dict.fromkeys(cell.place for cell in cells if isinstance(cell, PrintedCell)))
        if places:
            yield f"paper: {'; '.join(places)}. An empty cell: the paper prints no number."
        measured = dict.fromkeys((cell.run_ids, cell.machine) for cell in cells if isinstance(cell, MeasuredCell))
        for number, (run_ids, machine) in enumerate(measured, start=1):
            yield f"measured [{number}]: {machine}, {', '.join(run_ids)}"
        if any(column.origin == "measured" for column in self.columns):
            none = "" if measured else "no record of this work; "
            yield f"measured: {none}a cell without a record is empty, and the machine is not the paper's."
        profiles = list(dict.fromkeys(cell.profile for cell in cells if isinstance(cell, SimulatedCell)))
        if profiles:
            yield f"simulated, not measured: on the profile {', '.join(profiles)}."
        elif any(column.origin == "simulated" for column in self.columns):
            yield "simulated: nothing is."

    def cells(self) -> Iterator[dict[str, Any]]:
        """One a cell, all with the same names: for a file that another program reads."""
        for number, row in enumerate(self.rows, start=1):
            named = [str(cell) for cell, column in zip(row, self.columns, strict=True) if not column.origin]
            for cell, column in zip(row, self.columns, strict=True):
                if column.origin:
                    yield {
                        "table": self.title,
                        "row": number,
                        "of": ", ".join(named),
                        "column": column.name,
                        "origin": column.origin,
                        "value": getattr(cell, "value", None),
                        "place": getattr(cell, "place", None),
                        "runs": " ".join(getattr(cell, "run_ids", ())) or None,
                        "machine": getattr(cell, "machine", None),
                        "profile": getattr(cell, "profile", None),
                    }


def _line(texts: Iterator[str]) -> str:
    return "| " + " | ".join(printable(text).replace("|", "\\|") for text in texts) + " |"


def _shown(cell: FigureCell, runs: dict[tuple[str, ...], int]) -> str:
    """runs: numbers of notes so far, which grows."""
    if cell is None:
        return ""
    if isinstance(cell, str | int | float):
        return _text(cell)
    if isinstance(cell, MeasuredCell):
        return f"{_text(cell.value)} [{runs.setdefault(cell.run_ids, len(runs) + 1)}]"
    return str(cell.value) if isinstance(cell, PrintedCell) else _text(cell.value)  # digit by digit as it is printed


def _text(value: Value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value


def table(title: str, columns: Sequence[FigureColumn], rows: Sequence[Sequence[FigureCell]], *remarks: str) -> PaperTable:
    return PaperTable(title, tuple(columns), tuple(map(tuple, rows)), remarks)
