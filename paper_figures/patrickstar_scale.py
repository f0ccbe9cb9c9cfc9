"""PatrickStar's figure 10: the largest model that trains. Only what its text says of the bars is known; the rest is an image.

Beside it, by forecast on the paper's machines: the largest of table 2's models that fits at batch 4, the least that the paper
tested, and the largest that reaches the paper's efficiency bar with one of two of its batches. PatrickStar under the paper's
own rules (variant=paper); DeepSpeed and PyTorch by the rules of their memory, which leave out what the packages take beyond it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from harness.figures import FigureSpec
from harness.paper_table import FigureCell, FigureColumn, PaperTable, PrintedCell, SimulatedCell, table
from paper_figures.best_batch import PRODUCTS, tflops
from paper_figures.forecast_errors import error_remark
from paper_figures.kept import ForecastCase, KeptForecasts, ask_all, simulated

SHOWS = {"patrickstar-figure10": "largest model of PyTorch, DeepSpeed and PatrickStar, one to eight GPUs"}
SYSTEMS = {"PyTorch": "resident", "DeepSpeed-DP": "deepspeed-zero3-offload", "PatrickStar": "patrickstar"}
BATCHES = (4, 32)
RANKS = (1, 2, 4, 8)


class Cluster(NamedTuple):
    """bar: the paper's, Tflops a GPU. models: of table 2, the smallest first."""

    name: str
    profile: str
    bar: float
    models: tuple[str, ...]


MODELS = tuple(f"ps-{size}b" for size in (1, 2, 4, 6, 8, 10, 12, 15, 18, 20, 30, 40, 50, 60, 68))
YARD = Cluster("YARD", "yard-v100-32g-x8", 30.0, MODELS[: MODELS.index("ps-30b") + 1])
SUPERPOD = Cluster("SuperPod", "superpod-a100-40g-x8", 50.0, MODELS)
PRINTED = {
    ("YARD", "PyTorch", 1): "1B",
    ("YARD", "DeepSpeed-DP", 1): "4B",
    ("YARD", "PatrickStar", 1): "12B",
    ("YARD", "DeepSpeed-DP", 2): "6B",
    ("YARD", "DeepSpeed-DP", 4): "6B",
    ("YARD", "DeepSpeed-DP", 8): "4B",
    ("YARD", "PatrickStar", 8): "18B",
    ("SuperPod", "PyTorch", 1): "1B",
    ("SuperPod", "DeepSpeed-DP", 1): "15B",
    ("SuperPod", "PatrickStar", 1): "50B",
    ("SuperPod", "DeepSpeed-DP", 8): "30B",
    ("SuperPod", "PatrickStar", 8): "68B",
}
PLACE = "section 8.2.1, of figure 10"


def case(cluster: Cluster, system: str, model: str, ranks: int, batch: int) -> ForecastCase:
    name = SYSTEMS[system]
    option = ("variant=paper",) if name == "patrickstar" else ()
    return ForecastCase(system=name, model=model, profile=cluster.profile, ranks=ranks, batch_size=batch, option=option)


def cases() -> Iterator[ForecastCase]:
    """Of DeepSpeed and PyTorch only whether it fits, and only models that may."""
    for cluster in (YARD, SUPERPOD):
        for model in cluster.models:
            for ranks in RANKS:
                yield from (case(cluster, "PatrickStar", model, ranks, batch) for batch in BATCHES)
                yield case(cluster, "DeepSpeed-DP", model, ranks, BATCHES[0])
                if model in cluster.models[:3]:
                    yield case(cluster, "PyTorch", model, ranks, BATCHES[0])


def largest(
    kept: KeptForecasts, cluster: Cluster, system: str, ranks: int, *, bar: float, batches: tuple[int, ...]
) -> str | None:
    """The last model of table 2 that fits with one of these batches, at so many Tflops a GPU; None: none does or is kept."""
    found = None
    for model in cluster.models:
        for batch in batches:
            asked = case(cluster, system, model, ranks, batch)
            seen = kept.of(asked)
            if seen is not None and seen.step_s is not None and tflops(asked, seen.step_s) >= bar:
                found = model.removeprefix("ps-").upper()
    return found


def tables(name: str, asked: FigureSpec) -> Iterator[PaperTable]:
    kept = simulated(name, list(cases()), fresh=asked.fresh, ask=ask_all)
    rows = []
    for cluster in (YARD, SUPERPOD):
        for ranks in RANKS:
            for system in SYSTEMS:
                said = PRINTED.get((cluster.name, system, ranks))
                fits = largest(kept, cluster, system, ranks, bar=0.0, batches=BATCHES[:1])
                fast = (
                    None if system != "PatrickStar" else largest(kept, cluster, system, ranks, bar=cluster.bar, batches=BATCHES)
                )
                row: list[FigureCell] = [cluster.name, ranks, system, said and PrintedCell(said, PLACE)]
                rows.append([*row, *(model and SimulatedCell(model, cluster.profile) for model in (fits, fast))])
    columns = (
        FigureColumn("cluster"), FigureColumn("GPUs"), FigureColumn("system"), FigureColumn("largest", "paper"),
        FigureColumn("largest that fits, batch 4", "simulated"),
        FigureColumn("and reaches 30 (YARD) or 50 (SuperPod) Tflops a GPU, batch 4 or 32", "simulated"),
    )  # fmt: skip
    yield table(
        "PatrickStar figure 10: largest model",
        columns,
        rows,
        kept.remark(name),
        error_remark(asked),
        "All of table 2 is tried on SuperPod, whose largest is 68B, and up to 30B on YARD.",
        "The paper's models are within its efficiency bar, 30 and 50 Tflops a GPU, where it says nothing else; its batches "
        "are not printed.",
        "Printed too: 8 to 18B, 2.25x, of DeepSpeed with model parallelism on 8 GPUs of YARD. The conclusion says 2.5x of what "
        "section 8.2.1 has as 2.25x; 68B over 30B is its 2.27x.",
        f"Tflops of a forecast: {PRODUCTS} operations a parameter and token, recomputation included.",
    )
