"""Loss curves over each other: of each group of the tables, a curve a row, and how far it is from the reference's; and how far
processes of one and the same row are from each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from harness.cells import ResultsTable, TableCell
from harness.comparison import LOSS_TOLERANCE, ComparisonRow, loss_deviation
from harness.record import Record
from harness.results_page import ShownGroup, short_label

WIDE, HIGH = 1000.0, 400.0  # of a drawing, in its own units
MOST_POINTS = 500  # of a curve that are drawn
SEED = "seed"  # as harness.likeness calls it
MARGIN = 0.04  # of its height, above and below


@dataclass(frozen=True)
class Curve:
    """points: of a polyline, in the drawing's units. deviation: the largest of all steps and processes, relative to the
    reference's loss; None where there is none to compare, as with another seed; 0 of the reference itself. too_far: more than
    one training may differ. apart_from: the first step, counted from 1, in which the curve shown is too far; None: it never
    is. unlike: facts in which the runs differ from the reference's. other_seed: begun and fed otherwise than the reference.
    """

    label: str
    points: str
    steps: int
    first: float
    last: float
    deviation: float | None
    too_far: bool
    apart_from: int | None
    unlike: tuple[str, ...]
    other_seed: bool
    is_reference: bool
    runs: tuple[str, ...]


@dataclass(frozen=True)
class Course:
    """steps: of the longest curve. low, high: of the losses shown."""

    title: str
    table: str
    steps: int
    low: float
    high: float
    curves: tuple[Curve, ...]


@dataclass(frozen=True)
class OwnSpread:
    """deviation: the largest of a row's processes from each other, relative."""

    table: str
    title: str
    label: str
    deviation: float
    runs: tuple[str, ...]


def own_spreads(shown: Sequence[tuple[ResultsTable, ShownGroup]], records: Sequence[Record]) -> list[OwnSpread]:
    """The largest first; of rows of one process there is none."""
    by_id = {record.run_id: record for record in records}
    found: list[OwnSpread] = []
    for table, group in shown:
        for cell, row in group.run:
            good = [by_id[run] for run in row.runs if by_id[run].status == "ok"]
            apart = [loss_deviation(ours, other) for ours, other in combinations(good, 2)]
            known = [deviation for deviation in apart if deviation is not None]
            if known:
                found.append(OwnSpread(table.title, group.group.title, short_label(cell), max(known), tuple(row.runs)))
    return sorted(found, key=lambda one: -one.deviation)


def courses(shown: Sequence[tuple[ResultsTable, ShownGroup]], records: Sequence[Record]) -> list[Course]:
    """Of groups with two curves or more; those with most first."""
    by_id = {record.run_id: record for record in records}
    found = [one for table, group in shown if (one := _course(table.title, group, by_id)) is not None]
    return sorted(found, key=lambda one: -len(one.curves))


def _course(table: str, shown: ShownGroup, by_id: Mapping[str, Record]) -> Course | None:
    known: list[tuple[TableCell, ComparisonRow, list[tuple[int, float]]]] = []
    for cell, row in shown.run:
        losses = _losses(row, by_id)
        if len(losses) > 1:
            known.append((cell, row, losses))
    if len(known) < 2:
        return None
    values = [loss for _, _, losses in known for _, loss in losses]
    steps, low, high = max(losses[-1][0] + 1 for _, _, losses in known), min(values), max(values)
    curves: list[Curve] = []
    theirs = dict(next((losses for cell, _, losses in known if cell is shown.group.reference), ()))
    for cell, row, losses in known:
        is_reference = cell is shown.group.reference
        unlike = tuple(difference.fact for difference in row.differences)
        comparable = SEED not in unlike
        deviation = 0.0 if is_reference else row.losses.max_relative_deviation if comparable else None
        curve = Curve(
            label=short_label(cell),
            points=_points(losses, steps, low, high),
            steps=len(losses),
            first=losses[0][1],
            last=losses[-1][1],
            deviation=deviation,
            too_far=deviation is not None and deviation > LOSS_TOLERANCE[cell.spec.dtype],
            apart_from=_apart_from(losses, theirs, LOSS_TOLERANCE[cell.spec.dtype]) if comparable else None,
            unlike=unlike,
            other_seed=not comparable,
            is_reference=is_reference,
            runs=tuple(row.runs),
        )
        curves.append(curve)
    return Course(shown.group.title, table, steps, low, high, tuple(curves))


def _losses(row: ComparisonRow, by_id: Mapping[str, Record]) -> list[tuple[int, float]]:
    """By step, of the first process that ended well, which deviations are told of too."""
    record = next((by_id[run] for run in row.runs if by_id[run].status == "ok"), None)
    return [] if record is None else [(step, loss) for step, loss in enumerate(record.metrics.loss) if loss is not None]


def _apart_from(losses: Sequence[tuple[int, float]], theirs: Mapping[int, float], allowed: float) -> int | None:
    apart = (
        step for step, loss in losses if abs(loss / 2 - theirs.get(step, loss) / 2) > allowed * abs(theirs.get(step, loss) / 2)
    )
    first = next(apart, None)
    return None if first is None else first + 1


def _points(losses: Sequence[tuple[int, float]], steps: int, low: float, high: float) -> str:
    span = high / 2 - low / 2  # halves: a difference may be beyond what floats hold

    def place(step: int, loss: float) -> str:
        share = (loss / 2 - low / 2) / span if span else 0.5
        return f"{WIDE * step / (steps - 1):.1f},{HIGH * (1 - MARGIN - (1 - 2 * MARGIN) * share):.1f}"

    drawn = losses[:: math.ceil(len(losses) / MOST_POINTS)]
    return " ".join(place(step, loss) for step, loss in (*drawn, losses[-1]))
