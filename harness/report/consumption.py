"""What chosen runs take: memory of each tier at its peak, and energy of the device a sample.

Chosen are, of each machine, the group of the tables in which most systems ran, and runs with a disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.cells import ResultsTable
from harness.comparison import ComparisonRow
from harness.record import Record
from harness.results_page import ShownGroup, budget, short_label
from harness.stats import LARGEST, MedianFigure, summarize
from systems.sizes import format_size


@dataclass(frozen=True)
class Taken:
    """Bytes at the peak, the most of the processes; None: not known. account: whether host_bytes is what the system itself
    counts, or, where it counts nothing, the resident memory of the process. joules: a sample, of the device alone.
    """

    label: str
    budget: str
    device_bytes: int | None
    host_bytes: int | None
    account: bool
    disk_bytes: int | None
    joules: MedianFigure | None
    runs: tuple[str, ...]


@dataclass(frozen=True)
class TakenOf:
    """The rows of one group. where: of which table, or on which machine. most: of each figure, for bars."""

    title: str
    where: str
    rows: tuple[Taken, ...]

    @property
    def most(self) -> Mapping[str, float]:
        sizes = {name: [getattr(row, name) or 0 for row in self.rows] for name in ("device_bytes", "host_bytes", "disk_bytes")}
        joules = [row.joules.median for row in self.rows if row.joules is not None]
        return {name: max(values, default=0) for name, values in {**sizes, "joules": joules}.items()}


def consumption(shown: Sequence[tuple[ResultsTable, ShownGroup]], records: Sequence[Record]) -> list[TakenOf]:
    by_id = {record.run_id: record for record in records}
    found: list[TakenOf] = []
    for machine in dict.fromkeys(table.hardware for table, _ in shown):
        mine = [group for table, group in shown if table.hardware == machine and _systems(group)]
        if mine:
            group = max(mine, key=_systems)
            rows = [_taken(short_label(cell), budget(cell), row, by_id) for cell, row in group.run if row.n]
            title = next(table.title for table, one in shown if one is group)
            found.append(TakenOf(group.group.title, title, tuple(rows)))
    return found + _with_disk(records)


def _systems(shown: ShownGroup) -> int:
    return len({cell.spec.system for cell, row in shown.run if row.n})


def _taken(label: str, asked: str, row: ComparisonRow, by_id: Mapping[str, Record]) -> Taken:
    good = [by_id[run] for run in row.runs if by_id[run].status == "ok"]
    own = row.peaks.host_bytes
    return Taken(
        label=label,
        budget=asked,
        device_bytes=row.peaks.device_bytes,
        host_bytes=row.peaks.host_rss_bytes if own is None else own,
        account=own is not None,
        disk_bytes=max((size for record in good if (size := record.memory.disk_peak_bytes) is not None), default=None),
        joules=_joules(good),
        runs=tuple(row.runs),
    )


def _joules(records: Sequence[Record]) -> MedianFigure | None:
    """A sample, over the processes. What no device takes was not measured."""
    known = [value for record in records if (value := record.energy.joules_per_sample) is not None]
    return summarize([value for value in known if value < LARGEST])


def _with_disk(records: Sequence[Record]) -> list[TakenOf]:
    """The last run of each system, model and machine whose states lay on a disk."""
    last: dict[tuple[str, str, str], Record] = {}
    for record in sorted(records, key=lambda record: record.run_id):
        if record.status == "ok" and (record.memory.disk_peak_bytes or record.spec.disk is not None):
            last[record.resolved.device_label or "", record.spec.model, record.spec.system] = record
    found: dict[str, list[Taken]] = {}
    for (machine, model, system), record in last.items():
        memory = record.memory
        asked = record.spec.device_memory
        taken = Taken(
            label=f"{system}, {model}",
            budget="all" if asked is None else format_size(asked),
            device_bytes=memory.device_peak_bytes or memory.device_allocated_peak_bytes,
            host_bytes=memory.host_rss_peak_bytes if memory.host_peak_bytes is None else memory.host_peak_bytes,
            account=memory.host_peak_bytes is not None,
            disk_bytes=memory.disk_peak_bytes,
            joules=_joules([record]),
            runs=(record.run_id,),
        )
        found.setdefault(machine, []).append(taken)
    return [TakenOf("Optimizer states on a disk", machine, tuple(rows)) for machine, rows in found.items()]
