"""What the simulator's forecasts are off by, where they can be held to runs: on one H200, its profile and its records.

A cell is the last runs that nothing known tells apart, as in `forecast_accuracy`; here DeepSpeed and PyTorch are among them,
whose rules (`systems/prediction/zero_policy.py`) leave out what the packages do beyond them. Forecasts are kept; what they are
set against is read from the records each time.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal

from harness.figures import FigureSpec
from harness.options_in_force import spelled
from harness.paper_table import FigureCell, FigureColumn, MeasuredCell, PaperTable, SimulatedCell, table
from harness.record import Record
from paper_figures import forecast_accuracy
from paper_figures.kept import ForecastFound, simulated
from paper_figures.recorded import machine_of, records, settings
from systems.planning import hardware

SHOWS = {"forecast-errors": "what forecasts are off by, beside records of one H200"}
PROFILE = "h200-141g-x1"
OURS = ("angel-ptm", "elixir", "h3t", "patrickstar", "resident")
ZERO = ("deepspeed-zero2", "deepspeed-zero2-offload", "deepspeed-zero3", "deepspeed-zero3-offload")
VERSIONS = "DeepSpeed: the papers had 0.5 to 0.7, records here are of 0.19.8, and its forecasts of its rules alone."
Whose = Literal["ours", "DeepSpeed"]


@dataclass(frozen=True)
class ErrorCase:
    """run_id: of the last run of a cell."""

    run_id: str

    def __str__(self) -> str:
        return self.run_id


@dataclass(frozen=True)
class KnownError:
    """A cell's runs and the forecast of its step. error: of the measured time; above 0 where the forecast is too slow."""

    runs: tuple[Record, ...]
    forecast_s: float

    @property
    def measured_s(self) -> float:
        return statistics.median(run.metrics.mean_step_time_s or 0.0 for run in self.runs)

    @property
    def error(self) -> float:
        return self.forecast_s / self.measured_s - 1

    @property
    def whose(self) -> Whose:
        return "DeepSpeed" if self.runs[-1].spec.system in ZERO else "ours"


def cells(folder: str) -> dict[str, list[Record]]:
    """The last of each work, by the run id of its last run."""
    return _cells(folder, frozenset(path.name for path in Path(folder).glob("*.json")))


@lru_cache(maxsize=2)
def _cells(folder: str, names: frozenset[str]) -> dict[str, list[Record]]:
    """names: of the files, which no one edits."""
    asked = [run for run in records(folder) if run.spec.optimizer == "adamw"]  # which forecasts are of
    found = forecast_accuracy.cells_of(asked, hardware.load(PROFILE), planned=frozenset((*OURS, *ZERO)))
    last = {_work(runs[-1]): runs for runs in sorted(found, key=lambda runs: runs[-1].run_id)}
    return {runs[-1].run_id: runs for runs in last.values()}


def _work(run: Record) -> tuple[object, ...]:
    spec, resolved = run.spec, run.resolved
    asked = (spec.system, spec.model, *sorted(spelled(run)), spec.device_memory, spec.dtype, spec.recompute, spec.clip)
    return (*asked, spec.accumulate, resolved.batch_size, resolved.seq_len)


def _ask(asked: Sequence[ErrorCase], *, folder: str) -> Iterator[tuple[ErrorCase, ForecastFound]]:
    known, profile = cells(folder), hardware.load(PROFILE)
    for case in sorted(asked, key=lambda case: known[case.run_id][-1].spec.model):  # which is observed once
        try:
            made = forecast_accuracy.compare(known[case.run_id], profile)
        except ValueError as error:  # of options that are no longer known
            yield case, ForecastFound(None, str(error))
        else:
            yield case, ForecastFound(made.predicted_s, None)


def known_errors(asked: FigureSpec, *, fresh: bool = False) -> list[KnownError]:
    """Of cells whose forecast is kept and whose records are there, by system and model. Raises OSError."""
    there = cells(asked.results)
    cases = [ErrorCase(run_id) for run_id in there]
    kept = simulated("forecast-errors", cases, fresh=fresh, ask=partial(_ask, folder=asked.results))
    found = [(there[case.run_id], kept.of(case)) for case in cases]
    made = [KnownError(tuple(runs), seen.step_s) for runs, seen in found if seen is not None and seen.step_s is not None]
    return sorted(made, key=lambda one: (one.whose == "DeepSpeed", one.runs[-1].spec.system, one.runs[-1].run_id))


def error_remark(asked: FigureSpec, *whose: Whose) -> str:
    """A line under a table with simulated cells. whose: systems that it has."""
    errors, said = known_errors(asked), list[str]()
    for each in whose or ("ours", "DeepSpeed"):
        known = [one.error for one in errors if one.whose == each]
        spread = f"{100 * min(known):+.0f} to {100 * max(known):+.0f} %" if known else "not known"
        median = f", median {100 * statistics.median(known):+.0f} %" if known else ""
        said.append(f"{each} {spread} ({len(known)} cells{median})")
    versions = f" {VERSIONS}" if "DeepSpeed" in (whose or ("DeepSpeed",)) else ""
    known_here = f"error of simulated step times, known on one H200 alone: {', '.join(said)}"
    return f"{known_here}: harness figure forecast-errors.{versions}"


def tables(name: str, asked: FigureSpec) -> Iterator[PaperTable]:
    errors = known_errors(asked, fresh=asked.fresh)
    names, works = settings([one.runs[-1] for one in errors], ("system", "model", "options", "device budget", "batch"))
    rows: list[list[FigureCell]] = []
    for one, work in zip(errors, works, strict=True):
        measured = MeasuredCell(one.measured_s, tuple(each.run_id for each in one.runs), machine_of(one.runs[-1]))
        row: list[FigureCell] = [one.whose, *work, measured]
        rows.append([*row, SimulatedCell(one.forecast_s, PROFILE), SimulatedCell(f"{100 * one.error:+.1f} %", PROFILE)])
    columns = [FigureColumn("whose"), *names, FigureColumn("mean step s", "measured")]
    columns += [FigureColumn("step s", "simulated"), FigureColumn("error", "simulated")]
    yield table(
        "What forecasts are off by",
        columns,
        rows,
        error_remark(asked),
        f"With AdamW. Runs of at least {forecast_accuracy.MIN_STEPS} timed steps, or of fewer long ones, on one GPU.",
        "No machine of a paper is here: of theirs the error is not known.",
    )
