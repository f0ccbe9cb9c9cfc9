"""Which runs the results tables show: one TOML file in `results_tables/` is one table.

It names the cells, each as the flags of a run, and the system that others are set against. A cell's last run is shown with
its replicates, the runs that nothing known tells from it. How a table looks is in results_page.py.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness import options_in_force
from harness.likeness import alike
from harness.record import Record
from harness.spec import RunSpec, flag
from systems.machine.reading import read_text
from systems.messages import invalid_value, one_line
from systems.sizes import format_size

TEXT_LIMIT = 16 << 20  # bytes
MOST_GROUPS = 1000  # that one grid makes
MOST_PROCESSES = 1000  # of a cell

# Of a run's flags those that decide which cell its record belongs to. Batch and sequence are looked up as resolved.
WORK = (
    "system",
    "model",
    "device_memory",
    "disk",
    "disk_rate",
    "ranks",
    "accumulate",
    "dtype",
    "recompute",
    "clip",
    "optimizer",
)
SETS = ("set", "hyper")  # of WORK too, in any order; so are options, as they were in force
RESOLVED_WORK = ("batch_size", "seq_len")
WHERE = "give it in the row, or in `work` of its group or of the table"
SIZES = ("device_memory", "host_memory", "disk_memory", "disk_rate")
ASIDE = ("device", "timeout", "results", "tag", "repeat", "wandb")  # name no other work, also where a cell names them


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class GroupData(_Data):
    """rows: flags of a run each, over those of the group and of the table; a row's `processes` is how many runs its cell wants.
    grid: flags with a list of values each, of which every combination is a group. reference: a row's name, as it is shown.
    """

    title: str
    reference: str
    work: dict[str, Any] = {}
    grid: dict[str, Annotated[list[Any], Field(min_length=1)]] = {}
    rows: tuple[dict[str, Any], ...] = Field(min_length=1)


class TableData(_Data):
    """hardware: the device label of the records; those of other devices never mix in. processes: that a cell wants, unless its
    row says how many.
    """

    title: str
    hardware: str
    work: dict[str, Any] = {}
    processes: int = Field(1, ge=1, le=MOST_PROCESSES, strict=True)
    groups: tuple[GroupData, ...] = Field(min_length=1)


@dataclass(frozen=True)
class TableCell:
    """processes: runs that it wants. options: in force; None: those that the spec means today. apart: by field, in words, what
    else tells it from other rows of its group.
    """

    label: str
    spec: RunSpec
    processes: int = 1
    options: Mapping[str, Any] | None = None
    apart: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Which no other row of its group has, unless the two are one: elixir (dtype fp32)."""
        return f"{self.label} ({', '.join(self.apart.values())})" if self.apart else self.label


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
        groups = (made for group in data.groups for made in _groups(data, group))
        return ResultsTable(data.title, data.hardware, tuple(groups))
    except ValidationError as error:
        raise ValueError(f"{path.name}: {_misread(error)}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path.name}: {one_line(str(error))}") from None


def _misread(error: ValidationError) -> str:
    """Of the table's own keys, or of the flags of a row, whose place in the file may be the row or a work."""
    first = error.errors(include_url=False)[0]
    where, of_row = ".".join(map(str, first["loc"])), error.title == RunSpec.__name__
    if first["type"] == "missing":
        return f"a row names no {where}: {WHERE}" if of_row else f"{where} is missing: see Sweeps in docs/harness.md"
    return ("a row: " if of_row else "") + invalid_value(error, lambda *_: where)


def _groups(table: TableData, group: GroupData) -> Iterator[Group]:
    """One for each combination of the grid's values, the last of its flags changing fastest."""
    if (count := prod(map(len, group.grid.values()))) > MOST_GROUPS:
        raise ValueError(f"group {group.title!r}: its grid makes {count} groups, {MOST_GROUPS} are allowed: give fewer values")
    if twice := sorted(group.grid.keys() & set().union(*group.rows)):
        raise ValueError(f"group {group.title!r}: {twice[0]!r} is in its grid and in a row: leave it out of one")
    for values in product(*group.grid.values()):
        chosen = dict(zip(group.grid, values, strict=True))
        title = ", ".join([group.title, *(f"{flag(name)} {value}" for name, value in chosen.items())])
        cells = told_apart([made_cell(table.work | group.work | chosen | row, table.processes) for row in group.rows])
        by_label = {name: cell for cell in reversed(cells) for name in (cell.label, cell.name)}
        if group.reference not in by_label:
            raise ValueError(f"group {group.title!r}: no row is called {group.reference!r}: {', '.join(by_label)}")
        yield Group(title, by_label[group.reference], cells)


def told_apart(cells: Sequence[TableCell]) -> tuple[TableCell, ...]:
    """The rows of a group, with what they differ in beside system and options: what makes other work always, all else where
    two would look alike without. A default is not told, as no option is.
    """
    work = [name for name in (*WORK, *SETS, *RESOLVED_WORK) if name != "system"]
    apart = _differing(cells, work)
    looks = {(cell.label, *texts.values()) for cell, texts in zip(cells, apart, strict=True)}
    if len(looks) < len(cells):
        others = [name for name in RunSpec.model_fields if name not in (*work, *ASIDE, "system", "option")]
        apart = _differing(cells, [*work, *others])
    return tuple(replace(cell, apart=texts) for cell, texts in zip(cells, apart, strict=True))


def _differing(cells: Sequence[TableCell], flags: Sequence[str]) -> list[dict[str, str]]:
    """Of each cell, by flag, in words, those of the flags in which the cells are not all alike."""
    unlike = [name for name in flags if len({repr(_comparable(cell.spec, name)) for cell in cells}) > 1]
    given = [{name: getattr(cell.spec, name) for name in unlike} for cell in cells]
    return [
        {name: _in_words(name, value) for name, value in each.items() if value != RunSpec.model_fields[name].default}
        for each in given
    ]


def _in_words(flag: str, value: Any) -> str:
    """device memory 10GiB, ranks 2, dtype fp32, eps=1e-6; of a folder that there is one."""
    if flag in SETS:
        return " ".join(value)
    name = flag.replace("_", " ")
    if value is True or flag == "disk":
        return name
    if flag in SIZES:
        return f"{name} {format_size(value)}"
    return f"{name} {','.join(map(str, value)) if isinstance(value, tuple) else value}"


def made_cell(work: dict[str, Any], processes: int) -> TableCell:
    """Of the flags of a run, `processes` possibly among them. Raises ValueError, ValidationError."""
    given = work.pop("processes", processes)
    if type(given) is not int or not 1 <= given <= MOST_PROCESSES:
        raise ValueError(f"processes = {str(given)[:20]} of a row: write a whole number from 1 to {MOST_PROCESSES}")
    spec = RunSpec.model_validate(work)
    for name in RESOLVED_WORK:
        if getattr(spec, name) is None:
            raise ValueError(f"a row of {spec.system} names no {name}: {WHERE}")
    return TableCell(":".join(filter(None, [spec.system, ",".join(spec.option)])), spec, given)


def cell_of(record: Record) -> TableCell:
    """Its work alone: of any length, seed and host."""
    spec, resolved = record.spec, record.resolved
    work = {field: getattr(spec, field) for field in (*WORK, *SETS, "option")} | {
        field: getattr(resolved, field) for field in RESOLVED_WORK
    }
    return TableCell(spec.system, RunSpec.model_validate(work), options=options_in_force.had(record))


def belongs(record: Record, cell: TableCell, hardware: str) -> bool:
    """Whether the run did the cell's work on that device: what a cell leaves open, but for WORK and SETS, may be anything."""
    resolved = record.resolved
    if resolved.device_label != hardware:
        return False
    asked = all(_comparable(record.spec, field) == _comparable(cell.spec, field) for field in _named(cell) - {"option"})
    asked = asked and all(getattr(resolved, field) == getattr(cell.spec, field) for field in RESOLVED_WORK)
    return asked and _has_options_of(record, cell)


def _has_options_of(record: Record, cell: TableCell) -> bool:
    """Where today's system does not take them, as they are spelled."""
    had, meant = options_in_force.had(record), _meant(cell)
    return sorted(record.spec.option) == sorted(cell.spec.option) if had is None or meant is None else had == meant


def work_of(cell: TableCell) -> str:
    """Equal for cells that the same records belong to, in whichever groups they are."""
    meant = _meant(cell)
    options = sorted(cell.spec.option) if meant is None else sorted(meant.items())
    named = sorted({*_named(cell), *RESOLVED_WORK} - {"option"})
    return repr([options, *((field, _comparable(cell.spec, field)) for field in named)])


def _meant(cell: TableCell) -> Mapping[str, Any] | None:
    return options_in_force.meant(cell.spec) if cell.options is None else cell.options


def _named(cell: TableCell) -> set[str]:
    return {*WORK, *SETS, *cell.spec.model_fields_set} - {*ASIDE, *RESOLVED_WORK}


def _comparable(spec: RunSpec, field: str) -> Any:
    value = getattr(spec, field)
    if field == "disk":  # wherever it is
        return value is not None
    return sorted(value) if field in SETS else value


def replicates(records: Sequence[Record], cell: TableCell, hardware: str) -> list[Record]:
    """The cell's last run, of those that were not interrupted if there are any, and those like it in every fact that is known
    of both, the code among them; oldest first.
    """
    found = sorted((record for record in records if belongs(record, cell, hardware)), key=lambda record: record.run_id)
    told = [record for record in found if record.status != "interrupted"] or found
    return [record for record in found if record is told[-1] or alike(record, told[-1])]
