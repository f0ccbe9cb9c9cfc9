"""What two and four GPUs of one host are predicted to do, and what they did: each cell of the results tables of such hosts, how
tokens a second grow with the number of GPUs, and the lines that this project has drawn for them.

Predictions are forecasts on the profile of the host, kept with the commit that made them (`predicted_runs.py`). Runs that come
later are set beside them by the same command. A line that a forecast does not meet is shown as such, with its highest bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from harness.figures import FigureSpec
from harness.paper_table import FigureCell, FigureColumn, MeasuredCell, PaperTable, SimulatedCell, table
from harness.record import Record
from paper_figures.forecast_errors import error_remark
from paper_figures.kept import KeptForecasts
from paper_figures.predicted_runs import Depth, PredictedRun, deepest_run, predicted
from paper_figures.recorded import machine_of, measured
from systems.sizes import format_size

SHOWS = {
    "two-gpus": "two GPUs of one host: predicted, written down before, and measured",
    "four-gpus": "one, two and four GPUs of one host: predicted, written down before, and measured",
}

GIB = 1 << 30


@dataclass(frozen=True)
class Host:
    """table: of results. gpus: that the host has. depth: of the whole host, whose layers are counted up, and depth_least the
    parameters that it is to have. weak: the least that all GPUs together are to reach over one, of each strategy; weak_best: of
    the best one. tflops: that opt-30b on all GPUs is to have, a GPU.
    """

    table: str
    gpus: int
    depth: Depth
    depth_least: float
    weak: float
    weak_best: float
    tflops: float

    @property
    def profile(self) -> str:
        return self.depth.hardware


HOSTS = {
    "two-gpus": Host(
        table="25-h200-two",
        gpus=2,
        depth=Depth("opt-30b", "h200-141g-x2", 240 * GIB),
        depth_least=33e9,
        weak=1.85,
        weak_best=1.95,
        tflops=400.0,
    ),
    "four-gpus": Host(
        table="26-h200-four",
        gpus=4,
        depth=Depth("opt-30b", "h200-141g-x4", 480 * GIB),
        depth_least=54e9,
        weak=3.7,
        weak_best=3.7,
        tflops=350.0,
    ),
}
STRATEGIES = ("elixir", "patrickstar", "angel-ptm", "h3t")
DEEPSPEED = "deepspeed-zero3-offload"


def tables(name: str, asked: FigureSpec) -> Iterator[PaperTable]:
    host = HOSTS[name]
    kept, runs = predicted(name, host.table, host.profile, [host.depth], asked)
    remarks = (kept.remark(name), error_remark(asked))
    yield _cells(host, runs, *remarks)
    yield _scaling(host, runs)
    yield _lines(host, runs, kept, asked)


def _name(run: PredictedRun) -> list[FigureCell]:
    spec = run.cell.spec
    budget = "all" if spec.device_memory is None else format_size(spec.device_memory)
    return [spec.system, spec.model, " ".join((*spec.option, *spec.set)), spec.ranks, budget]


NAMED = ("system", "model", "options", "GPUs", "device budget")
FIGURES = ("tokens/s a GPU", "TFLOP/s a GPU (6N)", "device GiB")
BOUNDS = ("compute", "norm", "cpu-adam", "host-dram", "pcie", "link")


def _simulated(run: PredictedRun, value: float | str | None) -> SimulatedCell | None:
    return None if value is None else SimulatedCell(value, run.hardware)


def _in_gib(value: float | None) -> float | None:
    return None if value is None else round(value / GIB, 1)


def _measured(run: PredictedRun, figure: Callable[[Record], float | None]) -> MeasuredCell | None:
    return measured(run.runs, figure)


def _cells(host: Host, runs: Sequence[PredictedRun], *remarks: str) -> PaperTable:
    rows: list[list[FigureCell]] = []
    for run in runs:
        bounds = run.bounds_s
        row = [*_name(run), _simulated(run, run.step_s), _simulated(run, run.predicted_tokens_per_s)]
        row += [_simulated(run, run.figure("tflops_6n")), _simulated(run, _in_gib(run.figure("device_peak_bytes")))]
        row += [_simulated(run, _in_gib(run.figure("host_bytes"))), _simulated(run, next(iter(bounds), None))]
        row += [_simulated(run, bounds.get(bound)) for bound in BOUNDS]
        row += [_simulated(run, run.found.why_not)]
        row += [_measured(run, lambda each: each.metrics.mean_step_time_s)]
        row += [_measured(run, lambda each: _a_gpu(each.metrics.tokens_per_s, each))]
        row += [_measured(run, lambda each: each.metrics.tflops_6n)]
        row += [_measured(run, lambda each: _in_gib(each.memory.device_peak_bytes))]
        row += [_error(run, run.step_s, run.measured_s), _error(run, run.figure("device_peak_bytes"), run.measured_peak)]
        rows.append(row)
    columns = [*map(FigureColumn, NAMED)]
    columns += [FigureColumn(each, "simulated") for each in ("step s", *FIGURES, "host GiB", "highest bound")]
    columns += [FigureColumn(f"bound {each} s", "simulated") for each in BOUNDS]
    columns += [FigureColumn("why there is none", "simulated")]
    columns += [FigureColumn(each, "measured") for each in ("step s", *FIGURES)]
    columns += [FigureColumn(f"error of the {each}", "simulated") for each in ("step", "device's peak")]
    late = [f"{run.cell.spec.system} {run.cell.spec.model} on {run.cell.spec.ranks}" for run in runs if not run.ahead_of_runs]
    return table(
        f"Cells of {host.table}",
        columns,
        rows,
        *remarks,
        f"forecast when there were runs of it already, and so no prediction: {', '.join(late) if late else 'none'}.",
        "error: of the measured value; above 0 the forecast is too slow, or its peak too high. Steps are means.",
        "bounds: seconds that no order of work can beat (harness plan); norm: updates that wait for it.",
    )


def _a_gpu(value: float | None, run: Record) -> float | None:
    return None if value is None else value / run.spec.ranks


def _error(run: PredictedRun, forecast: float | None, found: float | None) -> SimulatedCell | None:
    return _simulated(run, f"{100 * (forecast / found - 1):+.1f} %") if forecast and found else None


def _work(run: PredictedRun) -> tuple[object, ...]:
    spec = run.cell.spec
    return (spec.system, spec.model, spec.option, spec.device_memory, spec.batch_size, spec.seq_len)


def on_one(run: PredictedRun, among: Sequence[PredictedRun]) -> PredictedRun | None:
    """The same on one GPU."""
    return next((each for each in among if each.cell.spec.ranks == 1 and _work(each) == _work(run)), None)


def ratio(one: float | None, other: float | None, factor: float = 1.0) -> float | None:
    return factor * one / other if one and other else None


def scaling(run: PredictedRun, among: Sequence[PredictedRun]) -> tuple[float | None, float | None]:
    """Tokens a second of all its GPUs over those of one, predicted and measured."""
    alone, ranks = on_one(run, among), run.cell.spec.ranks
    return (None, None) if alone is None else _over_steps(alone, run, ranks)


def _over_steps(slow: PredictedRun, fast: PredictedRun, factor: float = 1.0) -> tuple[float | None, float | None]:
    """How often the step of the second is in that of the first."""
    return ratio(slow.step_s, fast.step_s, factor), ratio(slow.measured_s, fast.measured_s, factor)


def _scaling(host: Host, runs: Sequence[PredictedRun]) -> PaperTable:
    rows: list[list[FigureCell]] = []
    for run in runs:
        alone = on_one(run, runs)
        if run.cell.spec.ranks == 1 or alone is None:
            continue
        expected, found = scaling(run, runs)
        row = [*_name(run), _simulated(run, None if expected is None else f"{expected:.2f}x")]
        row += [_simulated(run, next(iter(run.bounds_s), None)), _ratio_cell(found, (*run.runs, *alone.runs))]
        rows.append([*row, _error(run, expected, found)])
    columns = [*map(FigureColumn, NAMED), FigureColumn("over one GPU", "simulated"), FigureColumn("highest bound", "simulated")]
    columns += [FigureColumn("over one GPU", "measured"), FigureColumn("error", "simulated")]
    return table(f"Weak scaling in {host.table}", columns, rows, "As many tokens a GPU and as much memory a GPU as on one.")


def _ratio_cell(value: float | None, runs: Sequence[Record], unit: str = "x") -> MeasuredCell | None:
    return None if value is None else MeasuredCell(f"{value:.2f}{unit}", tuple(run.run_id for run in runs), machine_of(runs[0]))


# ---- lines


@dataclass(frozen=True)
class Line:
    """what: is to be at least `least`. of: the forecasts that it is worked out from, the first of which has the bounds."""

    what: str
    least: float
    unit: str
    predicted: float | None
    measured: float | None
    of: tuple[PredictedRun, ...]


def lines(host: Host, runs: Sequence[PredictedRun]) -> Iterator[Line]:
    """Those that follow from cells."""
    of = {
        model: [run for run in runs if run.cell.spec.model == model] for model in dict.fromkeys(r.cell.spec.model for r in runs)
    }
    for model in ("ps-4b", "ps-10b", "opt-30b"):
        yield from _scaling_lines(host, model, [run for run in _ours(of.get(model, [])) if not run.cell.spec.option])
    for run in (run for run in _ours(of["opt-30b"]) if run.cell.spec.ranks == host.gpus):
        both = run.figure("tflops_6n"), _value(_measured(run, lambda each: each.metrics.tflops_6n))
        yield Line(f"opt-30b, {run.cell.spec.system}: TFLOP/s a GPU", host.tflops, "", *both, of=(run,))
    if "opt-2.7b" in of:
        pair = of["opt-30b"][0], of["opt-2.7b"][0]
        known = [_value(_measured(run, lambda each: each.metrics.relative_tflops)) for run in pair]
        both = ratio(pair[0].figure("relative_tflops"), pair[1].figure("relative_tflops")), ratio(known[0], known[1])
        yield Line("opt-30b in 40GiB: relative TFLOPS over resident opt-2.7b's", 0.84, "x", *both, of=pair)
    mixture, dense = of["pr-moe-8.2b"][0], of["ps-8b"][0]
    both = _over_steps(dense, mixture)
    yield Line("pr-moe-8.2b: samples/s over ps-8b's", 3.0, "x", *both, of=(mixture, dense))
    still = {run.cell.spec.system: run for run in of.get("angel-1.7b", [])}
    for run in _ours([*still.values()]):
        both = _over_steps(still["torch-ddp"], run)
        yield Line(f"angel-1.7b, {run.cell.spec.system}: over torch-ddp", 0.95, "x", *both, of=(run, still["torch-ddp"]))
    for run in of.get("qwen3-30b-a3b", []):
        bound = next(iter(run.bounds_s.values()), None)
        both = ratio(bound, run.step_s), ratio(bound, run.measured_s)
        yield Line("qwen3-30b-a3b: tokens/s over its highest bound's", 0.85, "x", *both, of=(run,))
    those = [run for run in of["ps-10b"] if run.cell.spec.ranks == host.gpus and not run.cell.spec.option]
    for theirs in (run for run in those if run.cell.spec.system == DEEPSPEED):
        for run in _ours(those):
            both = _over_steps(theirs, run)
            yield Line(f"ps-10b, {run.cell.spec.system}: over {DEEPSPEED}", 2.0, "x", *both, of=(run, theirs))


def _ours(runs: Sequence[PredictedRun]) -> list[PredictedRun]:
    return [run for run in runs if run.cell.spec.system in STRATEGIES]


def _value(cell: MeasuredCell | None) -> float | None:
    return None if cell is None else float(cell.value)


def _scaling_lines(host: Host, model: str, runs: Sequence[PredictedRun]) -> Iterator[Line]:
    """runs: of the model by default options."""
    found: list[Line] = []
    for run in runs:
        if run.cell.spec.ranks == host.gpus and on_one(run, runs) is not None:
            what = f"{model}, {run.cell.spec.system}: over one GPU"
            found.append(Line(what, host.weak, "x", *scaling(run, runs), of=(run,)))
    yield from found
    if found and host.weak_best > host.weak:
        best = max(found, key=lambda line: line.predicted or 0.0)
        known = [line.measured for line in found if line.measured is not None]
        most = max(known) if known and (len(known) == len(found) or max(known) >= host.weak_best) else None
        what = f"{model}, the best of them: over one GPU"
        yield replace(best, what=what, least=host.weak_best, measured=most, of=tuple(run for line in found for run in line.of))


def _lines(host: Host, runs: Sequence[PredictedRun], kept: KeptForecasts, asked: FigureSpec) -> PaperTable:
    rows: list[list[FigureCell]] = []
    for line in lines(host, runs):
        expected = None if line.predicted is None else f"{line.predicted:.2f}{line.unit}"
        run, there = line.of[0], [record for each in line.of for record in each.runs]
        row: list[FigureCell] = [line.what, f"{line.least:g}{line.unit}", _simulated(run, expected)]
        row += [_simulated(run, _met(line.predicted, line.least)), _simulated(run, _highest(run))]
        rows.append([*row, _ratio_cell(line.measured, there, line.unit), _met_cell(line, there)])
    rows.append(_depth_row(host, kept, asked))
    columns = [FigureColumn("what"), FigureColumn("at least")]
    columns += [FigureColumn(each, "simulated") for each in ("here", "met", "highest bounds")]
    columns += [FigureColumn(each, "measured") for each in ("here", "met")]
    return table(
        f"Lines for {host.table}",
        columns,
        rows,
        f"{DEEPSPEED} is simulated by its rules alone, which are faster than the package: ratios over it are too low.",
        "highest bounds: of the first of the two where a line is of two runs.",
    )


def _met(value: float | None, least: float) -> str | None:
    return None if value is None else "yes" if value >= least else "no"


def _met_cell(line: Line, runs: Sequence[Record]) -> MeasuredCell | None:
    said = _met(line.measured, line.least)
    return None if said is None else MeasuredCell(said, tuple(run.run_id for run in runs), machine_of(runs[0]))


def _highest(run: PredictedRun) -> str:
    return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in list(run.bounds_s.items())[:2])


def _depth_row(host: Host, kept: KeptForecasts, asked: FigureSpec) -> list[FigureCell]:
    """The largest of a model's depths."""
    found, runs = kept.of(host.depth.case), deepest_run(host.depth, asked)
    parameters = None if found is None else found.statistics.get("parameters")
    layers = f", {found.statistics['layers']:.0f} layers" if found is not None and parameters else ""
    row: list[FigureCell] = [
        f"{host.depth.model} with more layers, elixir: parameters that train",
        f"{host.depth_least / 1e9:g}B",
    ]
    row += [SimulatedCell(f"{parameters / 1e9:.1f}B{layers}", host.profile) if parameters else None]
    said = _met(parameters, host.depth_least)
    lacks = None if found is None or found.why_not is None else f"one more: {found.why_not}"
    row += [None if each is None else SimulatedCell(each, host.profile) for each in (said, lacks)]
    size = runs[-1].resolved.parameters if runs else None
    if size is None:
        return [*row, None, None]
    told = (f"{size / 1e9:.1f}B", "yes" if size >= host.depth_least else "no")
    return [*row, *(MeasuredCell(each, (runs[-1].run_id,), machine_of(runs[-1])) for each in told)]
