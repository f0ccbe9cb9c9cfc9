"""Figures of which only sentences are known: the bars and points are an image. A row is what one sentence says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.paper_table import ComputedCell, FigureColumn, MeasuredCell, PaperTable, PrintedCell, SimulatedCell, Value, table


@dataclass(frozen=True)
class Sentence:
    """computed: the same from other numbers that the paper prints; how says from which."""

    what: str
    printed: Value | None
    place: str
    computed: Value | None = None
    how: str = ""
    measured: MeasuredCell | None = None
    simulated: SimulatedCell | None = None


def sentences(title: str, said: Sequence[Sentence], *remarks: str) -> PaperTable:
    """Columns that nothing fills are there all the same: they say that there is nothing."""
    origins = (FigureColumn("number", "paper"), FigureColumn("from other printed numbers", "computed"))
    here = (FigureColumn("here", "measured"), FigureColumn("here", "simulated"))
    rows = [
        (
            one.what,
            None if one.printed is None else PrintedCell(one.printed, one.place),
            None if one.computed is None else ComputedCell(f"{one.computed}{f' ({one.how})' if one.how else ''}"),
            one.measured,
            one.simulated,
        )
        for one in said
    ]
    return table(title, (FigureColumn("what"), *origins, *here), rows, *remarks)
