"""Losses of all systems on real text, over each other: training and validation, from records of the emulated device.

`losses.toml` has the runs and `harness sweep` makes those that are missing. They are small, and prove no speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.figure import Figure

from harness import store
from harness.cells import read_table, replicates
from harness.figures import FigureSpec
from harness.paper_table import FigureCell, FigureColumn, MeasuredCell, PaperTable, table
from harness.record import Record
from paper_figures.recorded import machine_of
from systems.sizes import format_size

SHOWS = {"losses": "training and validation loss of all systems on real text, over each other"}
PICTURES = ("losses",)
TABLE = Path(__file__).with_name("losses.toml")
FOLDER = "losses"  # below that of the records
MEAN_OF = 20  # steps, of a training loss in a table
MAKE = "harness sweep paper_figures/losses.toml --results results/losses runs what is missing."


def runs(results: str) -> list[tuple[str, Record | None]]:
    """Of each row of the table its name and its last run that went well."""
    asked, (found, _) = read_table(TABLE), store.read_all(Path(results) / FOLDER)
    good = [record for record in found if record.status == "ok"]
    cells = [cell for group in asked.groups for cell in group.cells]
    return [(cell.label, next(reversed(replicates(good, cell, asked.hardware)), None)) for cell in cells]


def _values(numbers: Sequence[float | None]) -> list[float]:
    """NaN where a loss was not finite."""
    return [float("nan") if number is None else number for number in numbers]


def farthest(losses: Sequence[float | None], reference: Sequence[float | None]) -> float | None:
    """The largest difference of two curves at a step; None: they are not of the same steps."""
    if len(losses) != len(reference) or None in losses or None in reference:
        return None
    return max(abs(a - b) for a, b in zip(_values(losses), _values(reference), strict=True))


def tables(name: str, asked: FigureSpec) -> Iterator[PaperTable]:
    found = runs(asked.results)
    there = [(label, run) for label, run in found if run is not None]
    reference = found[0][1]
    rows: list[list[FigureCell]] = []
    for label, run in found:
        if run is None:
            rows.append([label, "", *[None] * 5])
            continue
        budget = "" if run.spec.device_memory is None else format_size(run.spec.device_memory)
        loss, evaluated = run.metrics.loss, run.metrics.eval_loss
        numbers: list[float | None] = [loss[0], loss[-1], evaluated[-1] if evaluated else None]
        both = (
            (farthest(loss, reference.metrics.loss), farthest(evaluated, reference.metrics.eval_loss))
            if reference
            else (None,) * 2
        )
        rows.append([label, budget, *(_cell(run, number) for number in (*numbers, *both))])
    columns = [FigureColumn("system"), FigureColumn("device budget")]
    names = ("first loss", "last loss", "last validation loss", "farthest from resident", "of validation")
    data = reference.resolved.data if reference else None
    told = [] if data is None else [f"{data.source}, sha256 {(data.sha256 or '')[:12]}; a token is a byte."]
    yield table(
        "Losses of all systems on real text",
        [*columns, *(FigureColumn(each, "measured") for each in names)],
        rows,
        *told,
        MAKE,
        "0 in the last columns: bit for bit the reference's. RoundPipe runs on CUDA alone.",
    )
    yield _curves("Training loss, mean of the steps up to", there, MEAN_OF)
    yield _validation(there)


def _cell(run: Record, value: float | None) -> MeasuredCell | None:
    return None if value is None else MeasuredCell(value, (run.run_id,), machine_of(run))


def _curves(title: str, there: Sequence[tuple[str, Record]], every: int) -> PaperTable:
    most = max((len(run.metrics.loss) for _, run in there), default=0)
    rows: list[list[FigureCell]] = []
    for last in range(every, most + 1, every):
        parts = [(run, _values(run.metrics.loss[last - every : last])) for _, run in there]
        rows.append([last, *(_cell(run, sum(part) / every) if len(part) == every else None for run, part in parts)])
    return table(f"{title} a step", _columns(there), rows)


def _validation(there: Sequence[tuple[str, Record]]) -> PaperTable:
    steps = sorted({step for _, run in there for step in run.metrics.eval_step})
    known = [dict(zip(run.metrics.eval_step, run.metrics.eval_loss, strict=True)) for _, run in there]
    rows = [[step, *(_cell(run, losses.get(step)) for (_, run), losses in zip(there, known, strict=True))] for step in steps]
    return table("Validation loss after a step", _columns(there), rows)


def _columns(there: Sequence[tuple[str, Record]]) -> list[FigureColumn]:
    return [FigureColumn("step"), *(FigureColumn(label, "measured") for label, _ in there)]


def picture(name: str, asked: FigureSpec) -> Figure:
    """Training and validation beside each other, a curve a system."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    training, validation = figure.subplots(1, 2, sharey=True)
    for axis in (training, validation):
        axis.set_prop_cycle(color=[colormaps["tab20"](number) for number in range(20)])  # more than there are systems
    for number, (label, run) in enumerate(runs(asked.results)):
        if run is None:
            continue
        style = {"label": label, "lw": 1 + 0.25 * (12 - number), "alpha": 0.7}  # the first ones show behind the others
        steps = range(1, len(run.metrics.loss) + 1)
        training.plot(steps, _values(run.metrics.loss), **style)
        validation.plot(run.metrics.eval_step, _values(run.metrics.eval_loss), marker="o", ms=3, **style)
    for axis, what in ((training, "training"), (validation, "validation")):
        axis.set_xlabel("step")
        axis.set_title(f"{what} loss, measured on the emulated device", fontsize=9)
    training.set_ylabel("loss, nats a token")
    if validation.lines:
        validation.legend(fontsize=6)
    return figure
