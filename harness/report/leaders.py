"""Which strategy when: of each group of the results tables who is fastest so far, and whether that is more than chance.

Only rows that may be set against each other are ranked: those with a ratio to the pivot, which is the group's reference or,
where that never ran, the row of most tokens/s. Beside the fastest is the next one of another system, or of other options where
there is no other system.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.cells import ResultsTable, TableCell
from harness.comparison import ComparisonRow
from harness.record import Record
from harness.results_page import ShownGroup, budget, row_against, short_label
from harness.stats import Ratio

ALONE = "nothing beside it"
Ranked = tuple[float, TableCell, ComparisonRow]


@dataclass(frozen=True)
class Standing:
    """over_pivot: 1 of the pivot itself."""

    label: str
    over_pivot: float
    n: int
    runs: tuple[str, ...]


@dataclass(frozen=True)
class Leader:
    """Of a group of a table. n: processes. over_pivot, over_next: of tokens/s. verdict: of over_next, or ALONE. next: "" where
    there is none. pivot: that the others are ranked by. is_reference: whether that is the group's reference, which may never
    have run. standings: the best row of each system, with its ratio to the pivot. unlike: rows that have none.
    """

    table: str
    group: str
    system: str
    label: str
    budget: str
    n: int
    pivot: str
    is_reference: bool
    over_pivot: Ratio | None
    next: str
    next_budget: str
    next_n: int
    over_next: Ratio | None
    verdict: str
    standings: tuple[Standing, ...]
    unlike: tuple[str, ...]
    runs: tuple[str, ...]


def leader(table: ResultsTable, shown: ShownGroup, records: Sequence[Record]) -> Leader | None:
    """None where no run ended well."""
    good = [(cell, row) for cell, row in shown.run if row.n and row.tokens_per_s is not None]
    if not good:
        return None
    pivot = next((pair for pair in good if pair[0] is shown.group.reference), None) or max(good, key=_tokens_per_s)
    ranked, unlike = _ranked(table, pivot, good, records)
    (_, cell, row), beside = ranked[0], _next(ranked)
    ratio = None if beside is None else row_against(beside[1], cell, records, table.hardware).speed_ratio
    if beside is not None and ratio is not None and ratio.value < 1:  # on the machines that both ran on it is the other one
        (cell, row), beside = beside[1:], (0.0, cell, row)
        ratio = row_against(beside[1], cell, records, table.hardware).speed_ratio
    return Leader(
        table=table.title,
        group=shown.group.title,
        system=cell.spec.system,
        label=short_label(cell),
        budget=budget(cell),
        n=row.n,
        pivot=short_label(pivot[0]),
        is_reference=pivot[0] is shown.group.reference,
        over_pivot=None if cell is pivot[0] else row_against(pivot[0], cell, records, table.hardware).speed_ratio,
        next="" if beside is None else short_label(beside[1]),
        next_budget="" if beside is None else budget(beside[1]),
        next_n=0 if beside is None else beside[2].n,
        over_next=ratio,
        verdict=ALONE if beside is None else "cannot be compared" if ratio is None else ratio.verdict,
        standings=tuple(_standings(ranked)),
        unlike=tuple(unlike),
        runs=(*row.runs, *(beside[2].runs if beside else ())),
    )


def _next(ranked: Sequence[Ranked]) -> Ranked | None:
    mine = ranked[0][1].spec.system
    return next((one for one in ranked[1:] if one[1].spec.system != mine), ranked[1] if len(ranked) > 1 else None)


def _standings(ranked: Sequence[Ranked]) -> Iterator[Standing]:
    seen: set[str] = set()
    for over, cell, row in ranked:
        if cell.spec.system not in seen:
            seen.add(cell.spec.system)
            yield Standing(short_label(cell), over, row.n, tuple(row.runs))


def _tokens_per_s(pair: tuple[TableCell, ComparisonRow]) -> float:
    rate = pair[1].tokens_per_s
    return 0.0 if rate is None else rate.median


def _ranked(
    table: ResultsTable,
    pivot: tuple[TableCell, ComparisonRow],
    good: Sequence[tuple[TableCell, ComparisonRow]],
    records: Sequence[Record],
) -> tuple[list[Ranked], list[str]]:
    """The fastest first, by the ratio to the pivot; and the names of what has none."""
    ranked: list[Ranked] = [(1.0, *pivot)]
    unlike: list[str] = []
    for cell, row in good:
        if cell is pivot[0]:
            continue
        ratio = row_against(pivot[0], cell, records, table.hardware).speed_ratio
        if ratio is None:
            unlike.append(short_label(cell))
        else:
            ranked.append((ratio.value, cell, row))
    return sorted(ranked, key=lambda one: -one[0]), unlike
