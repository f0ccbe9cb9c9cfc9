"""What the records in a folder say of a cell: the last run of its work, and the runs that nothing known tells from it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from harness import store
from harness.cells import cell_of, replicates
from harness.likeness import alike
from harness.options_in_force import spelled
from harness.paper_table import FigureCell, FigureColumn, MeasuredCell, PaperTable, Value, table
from harness.record import Record
from systems.sizes import format_size

Keep = Callable[[Record], bool]


def _budget(run: Record) -> str:
    return "" if run.spec.device_memory is None else format_size(run.spec.device_memory)


def _recomputed(run: Record) -> str:
    asked = run.spec.recompute
    return asked if isinstance(asked, str) else "blocks " + ",".join(map(str, asked))


SETTINGS: Mapping[str, Callable[[Record], Value]] = MappingProxyType(
    {
        "system": lambda run: run.spec.system,
        "model": lambda run: run.spec.model,
        "options": lambda run: " ".join(spelled(run)),
        "device budget": _budget,
        "GPUs": lambda run: run.spec.ranks,
        "batch": lambda run: f"{run.resolved.batch_size} x {run.resolved.seq_len}",
        "device": lambda run: run.resolved.device_label or "",
        "shape": lambda run: " ".join(sorted(run.spec.set)),
        "micro-batches": lambda run: run.spec.accumulate,
        "dtype": lambda run: run.spec.dtype,
        "recomputed": _recomputed,
        "clip": lambda run: f"{run.spec.clip:g}",
        "optimizer": lambda run: " ".join((run.spec.optimizer, *sorted(run.spec.hyper))),
        "disk": lambda run: "no" if run.spec.disk is None else "yes",
        "disk rate": lambda run: "" if run.spec.disk_rate is None else f"{format_size(run.spec.disk_rate)}/s",
    }
)
"""What tells one work from another (`harness.cells.WORK`), by the heading of its column."""
NOT_THE_PAPER_S = "Neither the paper's machine nor its batches: no ratio of the paper follows from rows of different work."


def records(folder: str) -> list[Record]:
    """Of runs on a GPU that went well. Files that are no records are left out: harness ls runs tells of them."""
    found, _ = store.read_all(Path(folder))
    return [record for record in found if record.status == "ok" and record.resolved.device == "cuda"]


def last_like(found: Sequence[Record], keep: Keep) -> list[Record]:
    """The last run that is kept, with its replicates, oldest first; empty: there is none."""
    kept = sorted((record for record in found if keep(record)), key=lambda record: record.run_id)
    return [record for record in kept if record is kept[-1] or alike(record, kept[-1])]


def cells(found: Sequence[Record], keep: Keep) -> list[list[Record]]:
    """The same of each work that is kept, by system, model and device."""
    groups = dict[str, list[Record]]()
    for record in sorted((record for record in found if keep(record)), key=lambda record: record.run_id):
        like = replicates(found, cell_of(record), record.resolved.device_label or "")
        groups.setdefault(like[-1].run_id, like)
    return sorted(groups.values(), key=lambda runs: (runs[-1].spec.model, runs[-1].spec.system, runs[-1].run_id))


def measured(runs: Sequence[Record], figure: Callable[[Record], float | None]) -> MeasuredCell | None:
    """The median of a figure. None: no run, or none that has it."""
    known = [(run, value) for run in runs if (value := figure(run)) is not None]
    if not known:
        return None
    value = statistics.median(value for _, value in known)
    return MeasuredCell(value, tuple(run.run_id for run, _ in known), machine_of(known[-1][0]))


def machine_of(record: Record) -> str:
    """In words: the device, and how many."""
    ranks = record.spec.ranks
    return f"{record.resolved.device_label}{f' x {ranks}' if ranks > 1 else ''}"


def with_plan_errors(made: PaperTable, folder: str, system: str) -> PaperTable:
    """With a remark on what the plans of a system's runs said of their steps, over what was measured."""
    found = [run for run in records(folder) if run.spec.system == system and run.plan.predicted_step_time_s]
    pairs = [(run.plan.predicted_step_time_s, run.metrics.mean_step_time_s) for run in found]
    known = [planned / took - 1 for planned, took in pairs if planned and took]
    spread = f"{100 * min(known):+.0f} to {100 * max(known):+.0f} %" if known else "not known"
    where = " and ".join(sorted({machine_of(run) for run in found})) or "no machine"
    said = f"error: plans of {system} were {spread} off the steps of their runs ({len(known)}, {where})"
    return replace(made, remarks=(*made.remarks, f"{said}; elsewhere it is not known."))


def settings(
    runs: Sequence[Record], always: Sequence[str] = ("system", "model", "options", "device budget", "GPUs", "batch")
) -> tuple[list[FigureColumn], list[list[FigureCell]]]:
    """Columns that name rows, and of each run its cells: `always`, and each further one of SETTINGS in which they differ."""
    told = {name: [read(run) for run in runs] for name, read in SETTINGS.items()}
    names = [*always, *(name for name, values in told.items() if name not in always and len(set(values)) > 1)]
    return [FigureColumn(name) for name in names], [[told[name][place] for name in names] for place in range(len(runs))]


def work_table(title: str, found: Sequence[Record], keep: Keep, *remarks: str) -> PaperTable:
    """A row for each work that is kept: rates and the step."""
    kept = cells(found, keep)
    columns, named = settings([runs[-1] for runs in kept])
    figures = (lambda r: r.metrics.tokens_per_s, lambda r: r.metrics.relative_tflops, lambda r: r.metrics.mean_step_time_s)
    rows = [[*row, *(measured(runs, figure) for figure in figures)] for row, runs in zip(named, kept, strict=True)]
    columns += [FigureColumn(each, "measured") for each in ("tokens/s", "relative TFLOPS a GPU", "mean step s")]
    return table(title, columns, rows, NOT_THE_PAPER_S, *remarks)
