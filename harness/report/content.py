"""All that the page shows, gathered section by section. Pure: records and tables in, data out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import store
from harness.cells import ResultsTable
from harness.claims import Judged
from harness.comparison import ComparisonRow
from harness.record import Record
from harness.report.answers import Answer, answers
from harness.report.consumption import TakenOf, consumption
from harness.report.largest import LargestModel, largest_models
from harness.report.leaders import Leader, leader
from harness.report.losses import Course, OwnSpread, courses, own_spreads
from harness.report.machines import MachineKind, machine_kinds
from harness.report.paper_rules import PaperRules, paper_rules
from harness.report.timeline import Timeline, timeline
from harness.results_page import (
    ShownGroup,
    budget,
    doubt_marks,
    doubt_text,
    figures,
    in_order,
    letters,
    listed,
    notes,
    short_label,
    shown_group,
    used_names,
)


@dataclass(frozen=True)
class CoreRow:
    """figures: texts, as `harness tables` writes them. row: the numbers behind them."""

    label: str
    doubts: str
    budget: str
    figures: tuple[str, ...]
    row: ComparisonRow
    runs: tuple[str, ...]


@dataclass(frozen=True)
class CoreGroup:
    table: str
    title: str
    machine: str
    rows: tuple[CoreRow, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class NotedRun:
    """number: what the page calls it by."""

    number: int
    run_id: str
    status: str
    system: str
    model: str
    device: str


@dataclass(frozen=True)
class ReportContent:
    """folder: of the records. below: what lies in folders below it, of which nothing is here, "" where there are none. options,
    doubts: legends of the core table. never: groups without a run. missing: what is not here, a line each. newest: when the
    last run began, "" where there is none.
    """

    folder: str
    below: str
    newest: str
    answers: tuple[Answer, ...]
    machines: tuple[MachineKind, ...]
    leaders: tuple[Leader, ...]
    core: tuple[CoreGroup, ...]
    options: Mapping[str, tuple[str, str]]
    doubts: Mapping[str, str]
    never: tuple[str, ...]
    paper_rules: tuple[PaperRules, ...]
    largest: tuple[LargestModel, ...]
    consumption: tuple[TakenOf, ...]
    timeline: Timeline | None
    no_timeline: tuple[str, ...]
    courses: tuple[Course, ...]
    own_spreads: tuple[OwnSpread, ...]
    claims: tuple[Judged, ...]
    missing: tuple[str, ...]
    runs: tuple[NotedRun, ...]

    def number_of(self) -> dict[str, int]:
        """By run id."""
        return {run.run_id: run.number for run in self.runs}


def gathered(
    folder: Path,
    records: Sequence[Record],
    unreadable: Sequence[store.Unreadable],
    tables: Sequence[ResultsTable],
    claims: Sequence[Judged],
) -> ReportContent:
    """folder: of the records, beside which traces are looked for. claims: judged by the same records."""
    shown = [(table, shown_group(group, records, table.hardware)) for table in tables for group in table.groups]
    ran = [(table, group) for table in tables for group in in_order(one for of, one in shown if of is table)]
    marks = doubt_marks(doubt for _, group in ran for _, row in group.run for doubt in row.doubts)
    leaders = [one for table, group in ran if (one := leader(table, group, records)) is not None]
    models = sorted({record.spec.model for record in records if record.status == "ok" and record.resolved.device == "cuda"})
    curves, spreads = courses(ran, records), own_spreads(ran, records)
    step, no_step = timeline(folder, records)
    return ReportContent(
        folder=str(folder),
        below=store.said_below(store.counts_below(folder)),
        newest=max((record.started_at for record in records), default=""),
        answers=tuple(answers(leaders, claims, curves, spreads, models)),
        machines=tuple(machine_kinds(records)),
        leaders=tuple(leaders),
        core=tuple(_core(table, group, marks) for table, group in ran),
        options=used_names(cell for _, group in ran for cell, _ in group.run),
        doubts={letter: doubt_text(code) for code, letter in marks.items()},
        never=tuple(f"{table.title}; {one.group.title}: {listed(one)}" for table, one in shown if not one.run),
        paper_rules=tuple(paper_rules(ran, records)),
        largest=tuple(largest_models(records)),
        consumption=tuple(consumption(ran, records)),
        timeline=step,
        no_timeline=tuple(no_step),
        courses=tuple(curves),
        own_spreads=tuple(spreads),
        claims=tuple(claims),
        missing=tuple(_missing(records, unreadable, shown)),
        runs=tuple(_noted(number, record) for number, record in enumerate(_by_id(records), start=1)),
    )


def _by_id(records: Sequence[Record]) -> list[Record]:
    """One of each id, by which they are sorted."""
    found = {record.run_id: record for record in records}
    return [found[run_id] for run_id in sorted(found)]


def _noted(number: int, record: Record) -> NotedRun:
    device = record.resolved.device_label or ""
    return NotedRun(number, record.run_id, record.status, record.spec.system, record.spec.model, device)


def _core(table: ResultsTable, shown: ShownGroup, marks: Mapping[str, str]) -> CoreGroup:
    rows = [
        CoreRow(
            label=short_label(cell),
            doubts=letters(row, marks),
            budget=budget(cell),
            figures=tuple(figures(row, is_reference=cell is shown.group.reference)),
            row=row,
            runs=tuple(row.runs),
        )
        for cell, row in shown.run
    ]
    return CoreGroup(table.title, shown.group.title, table.hardware, tuple(rows), tuple(notes(shown)))


def _missing(
    records: Sequence[Record], unreadable: Sequence[store.Unreadable], shown: Sequence[tuple[ResultsTable, ShownGroup]]
) -> Iterator[str]:
    """What no section can say."""
    if not records:
        yield "There is no record: every section below is empty."
    cells = [(cell, row) for _, group in shown for cell, row in group.rows]
    lacking = sum(not row.runs for _, row in cells)
    single = sum(row.n == 1 for _, row in cells)
    yield f"Rows of the tables: {len(cells)}; never run: {lacking}; of one process, which has no spread: {single}."
    bad = Counter(record.status for record in records if record.status != "ok")
    if bad:
        yield f"Runs that did not end well: {', '.join(f'{count} {status}' for status, count in sorted(bad.items()))}."
    without = sum(record.status == "ok" and record.energy.joules_per_sample is None for record in records)
    if without:
        yield f"Runs that went well and have no energy, since their device could not be asked: {without}."
    yield "Energy of the host (CPU, memory, disk) and of the cooling is measured nowhere."
    for one in unreadable:
        yield f"{one.path.name} is no record: {one.why}."
