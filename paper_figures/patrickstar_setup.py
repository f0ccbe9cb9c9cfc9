"""PatrickStar's tables 2 (models) and 3 (chunk sizes) and its figure 2 (memory beside the model's, moment by moment).

Figure 2's curve is an image; "nearly 5 GB" of it is printed. Here the curve of a run is a statistic of its record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from matplotlib.figure import Figure

from harness.figures import FigureSpec
from harness.output import counted
from harness.paper_table import (
    ComputedCell,
    FigureCell,
    FigureColumn,
    MeasuredCell,
    PaperTable,
    PrintedCell,
    SimulatedCell,
    Value,
    table,
)
from harness.record import Record
from models import registry as models_registry
from paper_figures.kept import ForecastCase, ask_all, simulated
from paper_figures.patrickstar_chunks import PAPER, found, off_the_grid
from paper_figures.recorded import cells, machine_of, records, settings

SHOWS = {
    "patrickstar-table2": "models: labels against the parameters that their shapes have",
    "patrickstar-table3": "chunk size search",
    "patrickstar-figure2": "device memory of non-model data, moment by moment",
}
PICTURES = ("patrickstar-figure2",)
GB = 10**9
TABLE2 = (
    ("1B", 20, 2048), ("2B", 40, 2048), ("4B", 64, 2304), ("6B", 53, 3072), ("8B", 72, 3072), ("10B", 78, 4096),
    ("12B", 90, 4096), ("15B", 50, 4096), ("18B", 60, 4096), ("20B", 25, 8192), ("30B", 37, 8192), ("40B", 50, 8192),
    ("50B", 62, 8192), ("60B", 75, 8192), ("68B", 66, 9126),
)  # fmt: skip
"""Label, layers and hidden dim as printed."""
FIGURE2 = ForecastCase(
    system="patrickstar",
    model="ps-6b",
    profile="superpod-a100-40g-x8",
    ranks=1,
    batch_size=16,
    option=("variant=paper",),
)


def printed_parameters(layers: int, width: int) -> int:
    """Twelve squares of the width a layer: the matrices of its blocks alone."""
    return 12 * layers * width * width


def tables(name: str, asked: FigureSpec) -> Iterator[PaperTable]:
    yield _models() if name == "patrickstar-table2" else _chunks() if name == "patrickstar-table3" else _memory(asked)


def _models() -> PaperTable:
    rows: list[list[FigureCell]] = []
    for label, layers, width in TABLE2:
        shape = models_registry.resolve(f"ps-{label.lower()}")
        count = models_registry.parameter_count(shape)
        assert count is not None
        row: list[FigureCell] = [label, PrintedCell(layers, "table 2"), PrintedCell(width, "table 2")]
        row.append(ComputedCell(f"{printed_parameters(layers, width) / 1e9:.1f}B"))
        row += [ComputedCell(shape.name), ComputedCell(shape.num_layers), ComputedCell(f"{count / 1e9:.1f}B")]
        rows.append([*row, ComputedCell(shape.notes) if shape.notes else None])
    columns = [FigureColumn("label"), FigureColumn("layers", "paper"), FigureColumn("hidden dim", "paper")]
    names = ("blocks' matrices as printed", "name here", "layers here", "parameters here", "notes")
    return table(
        "PatrickStar table 2: models, sequence length 1024, 16 heads",
        [*columns, *(FigureColumn(each, "computed") for each in names)],
        rows,
        "Contradiction: 78 and 90 layers stand beside 10 and 12B, 50 and 60 beside 15 and 18B, which is the other way round: "
        "they are exchanged, and the label decides here.",
        "Contradiction: 16 heads do not divide 9126. The table prints no vocabulary: 50304 here.",
    )


def _chunks() -> PaperTable:
    rows: list[list[FigureCell]] = []
    for cell in counted(PAPER, len(PAPER), lambda each: each.model):
        ours = found(cell)
        row: list[FigureCell] = [
            cell.cluster,
            cell.model,
            PrintedCell(cell.size, "table 3"),
            PrintedCell(cell.utilization, "table 3"),
        ]
        figures: tuple[Value, ...] = (ours.size, f"{ours.utilization:.2f}", f"{ours.at_paper_size:.2f}")
        rows.append([*row, *map(ComputedCell, figures)])
    columns = [FigureColumn("cluster"), FigureColumn("model")]
    columns += [FigureColumn("size (Mi)", "paper"), FigureColumn("utilization (%)", "paper")]
    names = ("size (Mi)", "utilization (%)", "utilization at the paper's size (%)")
    odd = ", ".join(f"{cell.size} of {cell.model}" for cell in off_the_grid())
    return table(
        "PatrickStar table 3: chunk size search",
        [*columns, *(FigureColumn(each, "computed") for each in names)],
        rows,
        "computed: by the strategy's own search over our models of these labels (variant=paper).",
        f"Contradiction: no multiple of the 32 Mi step that the text gives: {odd}.",
    )


def _curve(record: Record) -> Sequence[int] | None:
    """Bytes at each moment of a step. None: it is not in the record."""
    return (record.strategy or {}).get("non_model_bytes") or None


def curves(results: str) -> list[Record]:
    """The newest run of each work that has a curve, of models and batches as large as a figure is worth."""
    known = [run for run in records(results) if run.spec.system == "patrickstar" and _curve(run) and run.spec.ranks == 1]
    return [runs[-1] for runs in cells(known, lambda run: run.spec.model != "opt-125m")]


def _memory(asked: FigureSpec) -> PaperTable:
    kept = simulated("patrickstar-figure2", [FIGURE2], fresh=asked.fresh, ask=ask_all)
    forecast = kept.of(FIGURE2)
    peak = None if forecast is None else forecast.statistics.get("non_model_peak_bytes")
    runs = curves(asked.results)
    columns, named = settings(runs, ("model", "options", "batch", "device budget"))
    blank = [""] * (len(columns) - 3)
    rows: list[list[FigureCell]] = [
        [
            "6B GPT, PyTorch with checkpointing and offloading", "", 16, *blank,
            PrintedCell("nearly 5 GB", "section 4, of figure 2"), None, None,
            None if peak is None else SimulatedCell(peak / GB, FIGURE2.profile),
        ]
    ]  # fmt: skip
    for run, row in zip(runs, named, strict=True):
        curve, machine = _curve(run), machine_of(run)
        assert curve is not None
        figures = (len(curve), max(curve) / GB)
        rows.append([*row, None, *(MeasuredCell(each, (run.run_id,), machine) for each in figures), None])
    columns += [FigureColumn("peak", "paper"), FigureColumn("moments", "measured"), FigureColumn("peak GB", "measured")]
    columns.append(FigureColumn("peak GB (ps-6b)", "simulated"))
    return table(
        "PatrickStar figure 2: device memory of non-model data",
        columns,
        rows,
        kept.remark("patrickstar-figure2"),
        "The curve of the paper is in an image alone. A moment here is the begin or end of a block, not of an operator.",
        "The curves themselves: --out FILE.pdf; in a record, strategy.non_model_bytes.",
    )


def picture(name: str, asked: FigureSpec) -> Figure:
    """Measured curves alone: the paper's exists only as an image."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axis = figure.subplots()
    for run in curves(asked.results):
        curve = _curve(run)
        assert curve is not None
        axis.plot([each / GB for each in curve], label=f"{run.spec.model}, batch {run.resolved.batch_size}: {run.run_id}", lw=1)
    axis.set_xlabel("moment of a step")
    axis.set_ylabel("non-model data on the device, GB")
    axis.set_title("measured here (not the paper's curve, of which only 'nearly 5 GB' is printed)", fontsize=9)
    if axis.lines:
        axis.legend(fontsize=6)
    return figure
