"""Loss curves over each other: of each group of the tables, a curve a row, and how far it is from the reference's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.cells import ResultsTable
from harness.record import Record
from harness.results_page import ShownGroup, short_label

WIDE, HIGH = 1000.0, 400.0  # of a drawing, in its own units
MARGIN = 0.04  # of its height, above and below


@dataclass(frozen=True)
class Curve:
    """points: of a polyline, in the drawing's units. deviation: the largest of all steps and processes, relative to the
    reference's loss; None where there is none to compare, 0 of the reference itself.
    """

    label: str
    points: str
    steps: int
    first: float
    last: float
    deviation: float | None
    is_reference: bool
    runs: tuple[str, ...]


@dataclass(frozen=True)
class Course:
    """steps: of the longest curve. low, high: of the losses shown."""

    title: str
    machine: str
    steps: int
    low: float
    high: float
    curves: tuple[Curve, ...]


def courses(shown: Sequence[tuple[ResultsTable, ShownGroup]], records: Sequence[Record]) -> list[Course]:
    """Of groups with two curves or more; those with most first."""
    by_id = {record.run_id: record for record in records}
    found = [one for table, group in shown if (one := _course(table.hardware, group, by_id)) is not None]
    return sorted(found, key=lambda one: -len(one.curves))


def _course(machine: str, shown: ShownGroup, by_id: Mapping[str, Record]) -> Course | None:
    known: list[tuple[str, list[tuple[int, float]], float | None, bool, tuple[str, ...]]] = []
    for cell, row in shown.run:
        record = next((by_id[run] for run in row.runs if by_id[run].status == "ok"), None)
        losses = [] if record is None else [(n, loss) for n, loss in enumerate(record.metrics.loss) if loss is not None]
        if len(losses) > 1:
            is_reference = cell is shown.group.reference
            deviation = 0.0 if is_reference else row.losses.max_relative_deviation
            known.append((short_label(cell), losses, deviation, is_reference, tuple(row.runs)))
    if len(known) < 2:
        return None
    values = [loss for _, losses, _, _, _ in known for _, loss in losses]
    steps, low, high = max(losses[-1][0] + 1 for _, losses, _, _, _ in known), min(values), max(values)
    curves = [
        Curve(label, _points(losses, steps, low, high), len(losses), losses[0][1], losses[-1][1], deviation, is_reference, runs)
        for label, losses, deviation, is_reference, runs in known
    ]
    return Course(shown.group.title, machine, steps, low, high, tuple(curves))


def _points(losses: Sequence[tuple[int, float]], steps: int, low: float, high: float) -> str:
    def place(step: int, loss: float) -> str:
        share = (loss / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.5  # halves: a difference may be beyond floats
        return f"{WIDE * step / (steps - 1):.1f},{HIGH * (1 - MARGIN - (1 - 2 * MARGIN) * share):.1f}"

    return " ".join(place(step, loss) for step, loss in losses)
