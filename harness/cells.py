"""Which runs the results tables show: one TOML file in `results_tables/` is one table.

It names the cells, each as the flags of a run, and the system that others are set against. A cell's last run is shown with
its replicates, the runs that nothing known tells from it. How a table looks is in results_page.py.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.likeness import alike
from harness.record import Record
from harness.spec import RunSpec
from systems.machine.reading import read_text
from systems.messages import invalid_value, one_line

TEXT_LIMIT = 16 << 20  # bytes

# Of a run's flags those that decide which cell its record belongs to. Batch and sequence are looked up as resolved.
WORK = ("system", "model", "device_memory", "disk", "ranks", "accumulate", "dtype", "recompute", "clip", "optimizer")
SETS = ("set", "option", "hyper")  # of WORK too, in any order
RESOLVED_WORK = ("batch_size", "seq_len")
LENGTH = ("steps", "warmup")  # of any run, unless the cell names them


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
    named = [*WORK, *SETS, *(field for field in LENGTH if field in cell.spec.model_fields_set)]
    asked = all(_comparable(spec, field) == _comparable(cell.spec, field) for field in named)
    return asked and all(getattr(resolved, field) == getattr(cell.spec, field) for field in RESOLVED_WORK)


def _comparable(spec: RunSpec, field: str) -> Any:
    value = getattr(spec, field)
    if field == "disk":  # wherever it is
        return value is not None
    return sorted(value) if field in SETS else value


def replicates(records: Sequence[Record], cell: TableCell, hardware: str) -> list[Record]:
    """The cell's last run and those like it in every fact that is known of both, the code among them; oldest first."""
    found = sorted((record for record in records if belongs(record, cell, hardware)), key=lambda record: record.run_id)
    return [record for record in found if record is found[-1] or alike(record, found[-1])]
