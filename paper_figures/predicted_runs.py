"""What runs on several GPUs are predicted to show: forecasts of a results table's cells, kept, and the runs of those cells.

A forecast is written down with how many runs of its cell there were by then: those with none before it are predictions. Made
anew behind a run it says so. What is to be shown with them is in `several_gpus.py`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

from harness.candidates import largest
from harness.cells import ResultsTable, TableCell, read_table, replicates
from harness.command import LAYERS, command
from harness.figures import FigureSpec
from harness.plan import observations_of, question_of
from harness.plan_spec import PlanSpec
from harness.record import Record
from harness.tables import FOLDER
from models import registry as models_registry
from models.activated import count_parameters
from models.flops import relative_tflops, tflops_6n
from paper_figures.kept import ForecastFound, KeptForecasts, simulated
from paper_figures.recorded import records
from systems import registry
from systems.planning import hardware
from systems.prediction.forecast import Observations, Question, fits, forecast

MOST_LAYERS = 200
BEFORE = "runs_before"  # of the cell, when its forecast was made


@dataclass(frozen=True)
class PredictedCase:
    """command: what makes the forecast, but for a search: of the most layers that fit, where they are searched for."""

    command: str
    search: bool = False

    def __str__(self) -> str:
        return self.command.removeprefix("harness plan ")


@dataclass(frozen=True)
class Depth:
    """Of how many layers a model may have. memory: of the host; devices are used whole, and all of them."""

    model: str
    hardware: str
    memory: int

    @property
    def spec(self) -> PlanSpec:
        return PlanSpec(
            system="elixir",
            model=self.model,
            hardware=self.hardware,
            host_memory=self.memory,
            batch_size=16,
            seq_len=1024,
            recompute="full",
        )

    @property
    def case(self) -> PredictedCase:
        return PredictedCase(command("plan", self.spec), search=True)


@dataclass(frozen=True)
class PredictedRun:
    """A cell, its forecast and the last runs that nothing known tells apart. hardware: the forecast's profile."""

    cell: TableCell
    hardware: str
    found: ForecastFound
    runs: tuple[Record, ...]

    @property
    def step_s(self) -> float | None:
        return self.found.step_s

    def figure(self, name: str) -> float | None:
        """Of the forecast's statistics; None where it does not fit, or has none of the name."""
        return self.found.statistics.get(name) if self.found.fits else None

    @property
    def bounds_s(self) -> dict[str, float]:
        """By name, the highest first."""
        named = {key.partition(".")[2]: value for key, value in self.found.statistics.items() if key.startswith("bound.")}
        return dict(sorted(named.items(), key=lambda pair: -pair[1]))

    @property
    def predicted_tokens_per_s(self) -> float | None:
        """Of a GPU."""
        spec = self.cell.spec
        tokens = (spec.batch_size or 0) * (spec.seq_len or 0) * spec.accumulate
        return None if self.step_s is None else tokens / self.step_s

    @property
    def ahead_of_runs(self) -> bool:
        """Nothing was measured when it was predicted."""
        return not self.found.statistics.get(BEFORE)

    @cached_property
    def measured_s(self) -> float | None:
        """A step with its part of the last drain, the median of the runs."""
        known = [run.metrics.mean_step_time_s for run in self.runs if run.metrics.mean_step_time_s]
        return statistics.median(known) if known else None

    @property
    def measured_peak(self) -> int | None:
        """Bytes of the device with the most."""
        return max((run.memory.device_peak_bytes or 0 for run in self.runs), default=0) or None


def plan_of(cell: TableCell, profile: str) -> PlanSpec:
    """What forecasts a cell's run on a machine with that profile."""
    left_out = {*PlanSpec.left_out, "trace", "repeat", "timeout"}
    given = cell.spec.model_dump(exclude_defaults=True, exclude=left_out)
    return PlanSpec.model_validate(given | {"hardware": profile, "ranks": cell.spec.ranks})


def case_of(cell: TableCell, profile: str) -> PredictedCase:
    return PredictedCase(command("plan", plan_of(cell, profile)))


def cells_of(table: ResultsTable, profile: str) -> dict[PredictedCase, TableCell]:
    """Each work once, in the table's order, the first cell that has it."""
    found: dict[PredictedCase, TableCell] = {}
    for cell in (cell for group in table.groups for cell in group.cells):
        found.setdefault(case_of(cell, profile), cell)
    return found


def predicted(
    name: str, table_name: str, profile: str, depths: Sequence[Depth], asked: FigureSpec
) -> tuple[KeptForecasts, list[PredictedRun]]:
    """What is kept under that name, made anew where that is asked for, beside the records. Raises OSError."""
    table = read_table(FOLDER / f"{table_name}.toml")
    cells, there = cells_of(table, profile), records(asked.results)
    runs = {case: tuple(replicates(there, cell, table.hardware)) for case, cell in cells.items()}
    specs = {case: plan_of(cell, profile) for case, cell in cells.items()} | {depth.case: depth.spec for depth in depths}
    before = {case: len(found) for case, found in runs.items()}
    kept = simulated(name, list(specs), fresh=asked.fresh, ask=partial(_ask, specs=specs, before=before))
    made = ((case, cell, kept.of(case)) for case, cell in cells.items())
    return kept, [PredictedRun(cell, profile, found, runs[case]) for case, cell, found in made if found is not None]


def _ask(
    asked: Sequence[PredictedCase], *, specs: Mapping[PredictedCase, PlanSpec], before: Mapping[PredictedCase, int]
) -> Iterator[tuple[PredictedCase, ForecastFound]]:
    seen = lru_cache(1)(observations_of)
    for case in sorted(asked, key=lambda case: (specs[case].model, specs[case].set)):  # a model is observed once
        try:
            found = _deepest(specs[case]) if case.search else _forecast(specs[case], seen)
        except ValueError as error:  # it makes no plan, or cannot be planned
            found = ForecastFound(None, str(error))
        yield case, ForecastFound(found.step_s, found.why_not, {**found.statistics, BEFORE: before.get(case, 0)})


def _forecast(spec: PlanSpec, seen: Any) -> ForecastFound:
    system = registry.get(spec.system)
    question, observations = question_of(spec, seen)
    made = forecast(system, registry.parse_options(system, spec.option), question, observations)
    if not made.fits:
        return ForecastFound(None, made.why_not)
    counted = count_parameters(observations.model)
    work = {
        "parameters": counted.total if counted.activated is None else counted.activated,
        "tokens": question.batch_size * question.seq_len * question.accumulate,
        "step_time_s": made.simulation.step_time_s,
    }
    figures = {
        "tflops_6n": tflops_6n(**work),  # type: ignore[arg-type]
        "relative_tflops": relative_tflops(**work),  # type: ignore[arg-type]
        "device_peak_bytes": made.device_peak_bytes,
        "host_bytes": made.tiers["host"].need_bytes,
    }
    bounds = {f"bound.{bound}": seconds for bound, seconds in made.simulation.bounds_s.items()}
    return ForecastFound(made.simulation.step_time_s, None, {**figures, **bounds})


def _deepest(spec: PlanSpec) -> ForecastFound:
    """The most layers that fit, and their parameters; why_not: of one more."""
    system = registry.get(spec.system)

    @lru_cache(1)
    def observed(layers: int) -> Observations:
        return observations_of(models_registry.resolve(spec.model, {LAYERS: str(layers)}))

    def asked(layers: int) -> tuple[Question, Observations]:
        return question_of(spec.model_copy(update={"set": (f"{LAYERS}={layers}",)}), lambda _: observed(layers))

    def planned(layers: int) -> bool:
        return fits(system, system.Options(), *asked(layers))

    own = models_registry.resolve(spec.model).num_layers
    layers = largest(planned, first=own, step=4, most=MOST_LAYERS)
    if not layers:
        return ForecastFound(None, f"not one layer of {spec.model} fits")
    parameters = count_parameters(observed(layers).model).total
    lacks = forecast(system, system.Options(), *asked(layers + 1)).why_not if layers < MOST_LAYERS else None
    return ForecastFound(None, lacks, {"layers": layers, "parameters": parameters})


def deepest_run(depth: Depth, asked: FigureSpec) -> list[Record]:
    """The one with most layers of a search that went well on as many GPUs with as much of the host; none: empty."""
    profile = hardware.load(depth.hardware)
    fitting = [
        run
        for run in records(asked.results)
        if (run.spec.system, run.spec.model, run.spec.ranks) == ("elixir", depth.model, profile.devices)
        and run.resolved.device_label == profile.device_name
        and run.resolved.host_budget_bytes == depth.memory
        and LAYERS in registry.split_assignments("set", run.spec.set)
    ]
    return sorted(fitting, key=lambda run: (run.resolved.parameters or 0, run.run_id))[-1:]
