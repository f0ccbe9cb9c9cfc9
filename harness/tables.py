"""`harness tables`: the results in the README, written from the records of a folder and from nothing else.

One TOML file in `results_tables/` is one table: it names the cells, each as the flags of a run, and the system that others
are set against. A cell's last run is shown with its replicates, the runs that nothing known tells from it. A cell
without a record shows "-", one whose runs failed says how. With `--check` nothing is written: the README must be what the
records make of it, which a test asks for, so that it cannot go stale.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness import comparison, store
from harness.comparison import ComparisonRow
from harness.likeness import alike
from harness.output import complain, say
from harness.record import Reason, Record
from harness.spec import KEPT, BadInputError, RunSpec
from harness.stats import MedianFigure
from systems.machine.durable import write_whole
from systems.machine.reading import read_text
from systems.messages import invalid_value, one_line, printable
from systems.sizes import format_size

FOLDER = Path(__file__).with_name("results_tables")
BEGIN, END = "<!-- harness tables: begin -->", "<!-- harness tables: end -->"
UP_TO_DATE, STALE = 0, 1
TEXT_LIMIT = 16 << 20  # bytes
NONE = "-"
COLUMNS = (
    "system",
    "device budget",
    "n",
    "step s",
    "range",
    "tokens/s",
    "relative TFLOPS",
    "device peak",
    "host peak",
    "speed",
)

# Of a run's flags those that decide which cell its record belongs to. Batch and sequence are looked up as resolved.
WORK = ("system", "model", "set", "device_memory", "ranks", "accumulate", "dtype", "recompute", "clip", "option")
RESOLVED_WORK = ("batch_size", "seq_len")
LENGTH = ("steps", "warmup")  # of any run, unless the cell names them
BUDGET_FACTS = frozenset({"device memory asked for", "device memory budget in force"})  # where the table itself differs in it


class TablesSpec(BaseModel):
    """Write the README's results tables from the records that are kept, or check that they are what the records say."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    results: str = Field(KEPT, description="folder of the records")
    readme: str = Field("README.md", description="file that has the two marks between which the tables are written")
    check: bool = Field(False, description="write nothing; exit code 1 if the file differs from the records")


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class GroupData(_Data):
    """rows: flags of a run each, over those of the group and of the table. reference: a row's name, as it is shown."""

    title: str
    reference: str
    work: dict[str, Any] = {}
    rows: tuple[dict[str, Any], ...] = Field(min_length=1)


class TableData(_Data):
    """hardware: the device label of the records; those of other devices never mix in."""

    title: str
    hardware: str
    work: dict[str, Any] = {}
    groups: tuple[GroupData, ...] = Field(min_length=1)


@dataclass(frozen=True)
class TableCell:
    label: str
    spec: RunSpec


@dataclass(frozen=True)
class Group:
    """The reference is one of the cells."""

    title: str
    reference: TableCell
    cells: tuple[TableCell, ...]


@dataclass(frozen=True)
class ResultsTable:
    title: str
    hardware: str
    groups: tuple[Group, ...]


def read_table(path: Path) -> ResultsTable:
    """Raises ValueError, one line that names the file, for a table that cannot be read."""
    try:
        data = TableData.model_validate(tomllib.loads(read_text(path, TEXT_LIMIT)))
        return ResultsTable(data.title, data.hardware, tuple(_group(data, group) for group in data.groups))
    except ValidationError as error:
        raise ValueError(f"{path.name}: {invalid_value(error, lambda field, _: field)}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path.name}: {one_line(str(error))}") from None


def _group(table: TableData, group: GroupData) -> Group:
    cells = tuple(_cell(table.work | group.work | row) for row in group.rows)
    by_label = {cell.label: cell for cell in reversed(cells)}
    if group.reference not in by_label:
        raise ValueError(f"group {group.title!r}: no row is called {group.reference!r}: {', '.join(by_label)}")
    return Group(group.title, by_label[group.reference], cells)


def _cell(work: Mapping[str, Any]) -> TableCell:
    spec = RunSpec.model_validate(work)
    for field in RESOLVED_WORK:
        if getattr(spec, field) is None:
            raise ValueError(f"a row of {spec.system} names no {field}")
    return TableCell(":".join(filter(None, [spec.system, ",".join(spec.option)])), spec)


def belongs(record: Record, cell: TableCell, hardware: str) -> bool:
    """Whether the run did the cell's work on that device."""
    spec, resolved = record.spec, record.resolved
    if resolved.device_label != hardware:
        return False
    named = [*WORK, *(field for field in LENGTH if field in cell.spec.model_fields_set)]
    asked = all(_comparable(spec, field) == _comparable(cell.spec, field) for field in named)
    return asked and all(getattr(resolved, field) == getattr(cell.spec, field) for field in RESOLVED_WORK)


def _comparable(spec: RunSpec, field: str) -> Any:
    value = getattr(spec, field)
    return sorted(value) if field in ("set", "option") else value


def replicates(records: Sequence[Record], cell: TableCell, hardware: str) -> list[Record]:
    """The cell's last run and those like it in every fact that is known of both, the code among them; oldest first."""
    found = sorted((record for record in records if belongs(record, cell, hardware)), key=lambda record: record.run_id)
    return [record for record in found if record is found[-1] or alike(record, found[-1])]


def markdown(table: ResultsTable, records: Sequence[Record]) -> list[str]:
    """The table's lines, each of its groups under its own title."""
    lines = [f"### {table.title}", "", f"On {table.hardware}."]
    for group in table.groups:
        lines += ["", f"**{group.title}**", "", _line(COLUMNS), _line(["---"] * len(COLUMNS))]
        rows = [_row(group, cell, records, table.hardware) for cell in group.cells]
        for cell, row in zip(group.cells, rows, strict=True):
            lines.append(_line(_columns(cell, row, is_reference=cell is group.reference)))
        lines += [line for note in _notes(rows, group.reference.label) for line in ("", note)]
    return lines


def _row(group: Group, cell: TableCell, records: Sequence[Record], hardware: str) -> ComparisonRow:
    """The cell's row of a comparison with the reference, budgets aside where the two are asked to differ in them."""
    ours, reference = (replicates(records, one, hardware) for one in (cell, group.reference))
    if cell is group.reference:
        return comparison.compare({cell.label: ours}).rows[0]
    intended = BUDGET_FACTS if cell.spec.device_memory != group.reference.spec.device_memory else frozenset()
    return comparison.compare({f"reference {cell.label}": reference, cell.label: ours}, intended=intended).rows[1]


def _columns(cell: TableCell, row: ComparisonRow, *, is_reference: bool) -> list[str]:
    budget = "all" if cell.spec.device_memory is None else format_size(cell.spec.device_memory)
    head = [cell.label, budget]
    if not row.runs:
        return head + [NONE] * (len(COLUMNS) - len(head))
    if not row.n:
        failed = [str(len(row.runs)), _failure(row.status, row.reason), *[NONE] * 3]
        return [*head, *failed, _size(row.peaks.device_bytes), _size(row.peaks.host_rss_bytes), NONE]
    step = row.median_step_time_s
    ratio = "1" if is_reference else NONE if row.speed_ratio is None else _ratio(row)
    return [
        *head,
        str(row.n),
        _number(step),
        NONE if step is None or step.low is None else f"{step.low:.4g} to {step.high:.4g}",
        NONE if row.tokens_per_s is None else f"{row.tokens_per_s.median:,.0f}",
        _number(row.relative_tflops),
        _size(row.peaks.device_bytes),
        _size(row.peaks.host_rss_bytes),
        ratio,
    ]


def _ratio(row: ComparisonRow) -> str:
    assert row.speed_ratio is not None
    low, high = row.speed_ratio.low, row.speed_ratio.high
    spread = "" if low is None or high is None else f" ({low:.3g} to {high:.3g})"
    return f"{row.speed_ratio.value:.3g}x{spread}"


def _failure(status: str, reason: Reason | None) -> str:
    """oom (device: needs 2GiB, has 1.5GiB)."""
    if reason is None:
        return status
    sizes = [f"{verb} {format_size(size)}" for verb, size in (("needs", reason.need), ("has", reason.have)) if size is not None]
    told = ": ".join(filter(None, [reason.tier, ", ".join(sizes)]))
    return f"{status} ({told})" if told else status


def _notes(rows: Sequence[ComparisonRow], reference: str) -> list[str]:
    found = []
    doubts: dict[str, list[str]] = {}
    for row in rows:
        if row.n and row.status != "ok":
            found.append(f"{row.label}: {len(row.runs) - row.n} more of its runs: {_failure(row.status, row.reason)}.")
        if row.refused:
            unlike = "; ".join(str(difference) for difference in row.refused)
            found.append(f"{row.label} is not set against {reference}: {unlike}.")
        for doubt in row.doubts:
            doubts.setdefault(doubt, []).append(row.label)
    if doubts:
        told = "; ".join(f"{printable(doubt)} ({', '.join(dict.fromkeys(labels))})" for doubt, labels in doubts.items())
        found.append(f"Doubts in these records: {told}.")
    return found


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _number(figure: MedianFigure | None) -> str:
    return NONE if figure is None else f"{figure.median:.4g}"


def _size(size: int | None) -> str:
    return NONE if size is None else f"{size / (1 << 30):.2f}GiB"


def rendered(tables: Sequence[ResultsTable], records: Sequence[Record]) -> str:
    """What stands between the two marks, with them."""
    parts = ["\n".join(markdown(table, records)) for table in tables]
    return "\n\n".join([BEGIN, *parts, END])


def replaced(text: str, block: str, where: str) -> str:
    """The text with the block in the place of what its marks enclose. Raises BadInputError if they are not there once."""
    if (text.count(BEGIN), text.count(END)) != (1, 1) or text.index(BEGIN) > text.index(END):
        raise BadInputError(f"--readme {where}: it needs the lines {BEGIN} and {END} once each, in this order")
    before, rest = text.split(BEGIN)
    return before + block + rest.split(END)[1]


def write_tables(spec: TablesSpec, folder: Path = FOLDER) -> int:
    """Exit code: 0, or 1 if `check` finds the file to differ. Raises BadInputError. folder: where the tables are."""
    readme, results = Path(spec.readme), Path(spec.results)
    try:
        tables = [read_table(path) for path in sorted(folder.glob("*.toml"))]
    except ValueError as error:
        raise BadInputError(str(error)) from None
    try:
        text = read_text(readme, TEXT_LIMIT)
    except (OSError, ValueError) as error:
        raise BadInputError(f"--readme {readme} cannot be read: {one_line(str(error))}") from None
    records, unreadable = store.read_all(results)
    if not results.is_dir():
        raise BadInputError(f"--results {results} is no folder: name the one that the records are in")
    for one in unreadable:
        complain(f"{one.path} is no record: {one.why}")
    made = replaced(text, rendered(tables, records), spec.readme)
    _tell_runs(tables, records)
    if made == text:
        return UP_TO_DATE
    if spec.check:
        complain(f"{readme} is not what the records in {results} say: run harness tables")
        return STALE
    try:
        write_whole(readme, made.encode())
    except OSError as error:
        raise BadInputError(f"--readme {readme} cannot be written: {error.strerror}") from None
    return UP_TO_DATE


def _tell_runs(tables: Sequence[ResultsTable], records: Sequence[Record]) -> None:
    """Every row that has records, with them: which runs a number is of."""
    for table in tables:
        for group in table.groups:
            for cell in group.cells:
                runs = [record.run_id for record in replicates(records, cell, table.hardware)]
                if runs:
                    say(printable(f"{group.title}: {cell.label}: {' '.join(runs)}"))
