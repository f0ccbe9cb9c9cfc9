"""Forecasts beside the runs that were measured: step time, and the device memory that was reserved.

    python -m paper_figures.forecast_accuracy [--results FOLDER] [--hardware PROFILE] [--out FILE.csv]

Every cell of the records is asked of `harness plan`'s forecast as if nothing had been run: its system, model, work and
budgets on a hardware profile. The peak is that of the plan that ran, as the simulator's timeline gives it. A cell is the
last runs that nothing known tells apart; runs of fewer than MIN_STEPS timed steps, of several ranks, and of packages that
make no plan are left out. What the project holds itself to: a median error of the step time of at most 10 %, none above
20 %, and of the peak 10 %, never predicted too low.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness import store
from harness.cells import cell_of, replicates
from harness.hindcast import hindcast
from harness.options_in_force import spelled
from harness.output import counted
from harness.record import Record
from harness.spreadsheet import write_csv
from systems import registry
from systems.messages import one_line, printable
from systems.planning import hardware
from systems.planning.hardware import HardwareProfile
from systems.prediction.forecast import Forecast
from systems.sizes import format_size

MIN_STEPS = 10
"""Timed steps of a run that counts (measuring: fewer only where a step takes over LONG_STEP_S)."""
LONG_STEP_S = 20.0


@dataclass(frozen=True)
class AccuracySpec:
    """Set forecasts beside measured runs.

    results: folder of the records. hardware: profile to forecast on; only records of its device count. out: CSV to write.
    """

    results: str = "results"
    hardware: str = "h100-80g-x1"
    out: str | None = None


@dataclass(frozen=True)
class Compared:
    """One cell: seconds a step, and bytes of the device."""

    system: str
    model: str
    options: str
    device_budget: int
    tokens: int
    runs: int
    measured_s: float
    predicted_s: float
    measured_peak: int
    predicted_peak: int
    bound: str

    @property
    def step_error(self) -> float:
        """Of the measured time; above 0 where the forecast is too slow."""
        return self.predicted_s / self.measured_s - 1

    @property
    def peak_error(self) -> float:
        return self.predicted_peak / self.measured_peak - 1


def planned_systems() -> set[str]:
    """Those that have forecasts."""
    return {name for name, entry in registry.find().items() if entry.exposes == "STRATEGY" or name == "resident"}


def counts(record: Record, profile: HardwareProfile, planned: Set[str]) -> bool:
    """Whether a run is one that a forecast can be held to. planned: `planned_systems()`, which reads files."""
    steps, step_s = record.resolved.timed_steps or 0, record.metrics.mean_step_time_s
    measured = record.status == "ok" and step_s is not None and record.memory.device_peak_bytes is not None
    enough = steps >= MIN_STEPS or (step_s or 0.0) > LONG_STEP_S
    same_device = record.resolved.device == "cuda" and record.resolved.device_label == profile.device_name
    return record.spec.system in planned and measured and enough and same_device and record.spec.ranks == 1


def cells_of(records: Sequence[Record], profile: HardwareProfile, *, planned: Set[str] | None = None) -> list[list[Record]]:
    """The last runs of each cell, by its first run's time. planned: systems that count; None: all that make plans."""
    planned = planned_systems() if planned is None else planned
    known = [record for record in records if counts(record, profile, planned)]
    found: dict[str, list[Record]] = {}
    for record in sorted(known, key=lambda record: record.run_id):
        like = replicates(known, cell_of(record), profile.device_name)
        found.setdefault(like[-1].run_id, like)
    return list(found.values())


def compare(runs: Sequence[Record], profile: HardwareProfile) -> Compared:
    """The forecast for a cell's work, beside the median of its runs."""
    record, found = runs[-1], hindcast(runs[-1], profile)
    spec, budget = record.spec, record.memory.device_budget_bytes
    assert budget is not None
    return Compared(
        system=spec.system,
        model=spec.model,
        options=",".join(spelled(record)),
        device_budget=budget,
        tokens=found.question.tokens,
        runs=len(runs),
        measured_s=statistics.median(run.metrics.mean_step_time_s or 0.0 for run in runs),
        predicted_s=found.simulation.step_time_s,
        measured_peak=max(run.memory.device_peak_bytes or 0 for run in runs),
        predicted_peak=_peak(runs, found),
        bound=found.simulation.bound,
    )


def _peak(runs: Sequence[Record], found: Forecast) -> int:
    """What the timelines of the plans that ran say of their peak, or where none did, the forecast's; and of the warm-up."""
    planned = [run.plan.predicted_device_peak_bytes for run in runs]
    known = [peak for peak in planned if peak is not None]
    return max(*known, found.warm_up_peak_bytes) if known else found.device_peak_bytes


def _compared(cells: Sequence[list[Record]], profile: HardwareProfile) -> tuple[list[Compared], list[str]]:
    """Cells, and a line for each of which there is no forecast: its options are part of none, or no longer known."""
    found, refused = list[Compared](), list[str]()
    for runs in counted(cells, len(cells), lambda runs: runs[-1].run_id):
        try:
            found.append(compare(runs, profile))
        except ValueError as error:
            refused.append(f"{runs[-1].run_id}: {error}")
    return found, refused


def table(found: Sequence[Compared]) -> Table:
    work, times = ("system", "model", "options", "device", "tokens", "n"), ("measured s", "predicted s", "error")
    shown = Table(*work, *times, "peak", "predicted", "error", "bound", title="Forecasts beside measured runs")
    for one in found:
        shown.add_row(
            *(escape(printable(text)) for text in (one.system, one.model, one.options)),
            format_size(one.device_budget),
            f"{one.tokens:,}",
            str(one.runs),
            f"{one.measured_s:.4g}",
            f"{one.predicted_s:.4g}",
            f"{one.step_error:+.1%}",
            format_size(one.measured_peak),
            format_size(one.predicted_peak),
            f"{one.peak_error:+.1%}",
            one.bound,
        )
    return shown


def summary(found: Sequence[Compared]) -> str:
    steps = [abs(one.step_error) for one in found]
    peaks = [one.peak_error for one in found]
    return (
        f"{len(found)} cells: step time off by {statistics.median(steps):.1%} (median), {max(steps):.1%} (worst); device peak "
        f"{min(peaks):+.1%} to {max(peaks):+.1%}"
    )


def main(arguments: Sequence[str]) -> int:
    spec = tyro.cli(AccuracySpec, args=arguments, prog="python -m paper_figures.forecast_accuracy")
    console = Console(width=180)
    try:
        profile = hardware.load(spec.hardware)
        records, unreadable = store.read_all(Path(spec.results))
        found, refused = _compared(cells_of(records, profile), profile)
        if spec.out is not None:
            rows = [vars(one) | {"step_error": one.step_error, "peak_error": one.peak_error} for one in found]
            write_csv(Path(spec.out), rows)
    except (OSError, ValueError) as error:
        console.print(printable(one_line(str(error))), markup=False)
        return 2
    for broken in [*unreadable, *refused]:
        console.print(printable(one_line(f"left out: {broken}")), markup=False)
    if not found:
        console.print(f"no record in {spec.results} of a run on {profile.device_name} that counts: see --help", markup=False)
        return 1
    console.print(table(found))
    console.print(summary(found), markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
