"""Each strategy by its paper's own rules (`variant=paper`) beside what it does by default."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from harness.cells import ResultsTable, TableCell
from harness.record import Record
from harness.results_page import ShownGroup, budget, row_against, short_label
from harness.stats import MedianFigure, Ratio
from systems import registry

PAPER = "variant=paper"


@dataclass(frozen=True)
class PaperRules:
    """ratio: of tokens/s, the paper's rules over the default; None: there is none, and note says why. n: of processes."""

    system: str
    group: str = ""
    table: str = ""
    options: str = ""
    budget: str = ""
    paper_s: MedianFigure | None = None
    default_s: MedianFigure | None = None
    paper_n: int = 0
    default_n: int = 0
    ratio: Ratio | None = None
    note: str = ""
    runs: tuple[str, ...] = ()


def paper_rules(shown: Sequence[tuple[ResultsTable, ShownGroup]], records: Sequence[Record]) -> list[PaperRules]:
    """Strategy by strategy; of one without a run of both kinds that is said."""
    strategies = [name for name, entry in registry.find().items() if entry.exposes == "STRATEGY"]
    found: list[PaperRules] = []
    for system in strategies:
        mine = [one for table, group in shown for one in _of(system, table, group, records)]
        found += mine or [PaperRules(system, note="no run by its paper's rules in any table")]
    return found


def _of(system: str, table: ResultsTable, shown: ShownGroup, records: Sequence[Record]) -> Iterator[PaperRules]:
    rows = [(cell, row) for cell, row in shown.rows if cell.spec.system == system]
    for cell, row in rows:
        if PAPER not in cell.spec.option or not row.runs:
            continue
        wanted = sorted(option for option in cell.spec.option if option != PAPER)
        beside = next((pair for pair in rows if _is_default_of(pair[0], cell, wanted)), None)
        told = PaperRules(
            system,
            group=shown.group.title,
            table=table.title,
            options=short_label(cell),
            budget=budget(cell),
            paper_s=row.mean_step_time_s,
            paper_n=row.n,
            note="no run by default",
            runs=tuple(row.runs),
        )
        if beside is None or not beside[1].runs:
            yield told
            continue
        against = row_against(beside[0], cell, records, table.hardware)
        yield replace(
            told,
            default_s=beside[1].mean_step_time_s,
            default_n=beside[1].n,
            ratio=against.speed_ratio,
            note="; ".join(str(one) for one in against.refused) if against.speed_ratio is None else "",
            runs=(*row.runs, *beside[1].runs),
        )


def _is_default_of(cell: TableCell, of: TableCell, options: Sequence[str]) -> bool:
    return cell is not of and sorted(cell.spec.option) == options and cell.spec.device_memory == of.spec.device_memory
