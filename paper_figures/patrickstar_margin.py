"""PatrickStar's tables 4 (margin and spilling space) and 5 (bandwidth of collectives).

Table 4 beside the statistic `margin_chunks` of the plans for the paper's machines under its own rules (variant=paper), by
forecast. The paper does not say at which batch its numbers are, so there is a column for each of the batches that it tested.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from harness.figures import FigureSpec
from harness.paper_table import ComputedCell, FigureCell, FigureColumn, PaperTable, PrintedCell, SimulatedCell, table
from paper_figures.kept import ForecastCase, ask_all, simulated

SHOWS = {
    "patrickstar-table4": "margin for optimizer chunks, or parameter chunks that spill",
    "patrickstar-table5": "bandwidth of collectives, achieved and saturated",
}
BATCHES = (4, 8, 16, 32, 64)


class Plan(NamedTuple):
    """A column of table 4. margin: chunks; below 0 those that spill."""

    plan: str
    model: str
    profile: str
    ranks: int
    margin: int


TABLE4 = (
    Plan("SPod 10B", "ps-10b", "superpod-a100-40g-x8", 1, 2),
    Plan("SPod 10B", "ps-10b", "superpod-a100-40g-x8", 8, 6),
    Plan("SPod 50B", "ps-50b", "superpod-a100-40g-x8", 1, -20),
    Plan("SPod 50B", "ps-50b", "superpod-a100-40g-x8", 8, 1),
    Plan("YARD 12B", "ps-12b", "yard-v100-32g-x8", 1, -1),
    Plan("YARD 12B", "ps-12b", "yard-v100-32g-x8", 8, 5),
)
TABLE5 = (
    ("SuperPod, 8 GPUs", "10B", 160.2, 208.4, 178.9, 198.04),
    ("SuperPod, 8 GPUs", "50B", 158.3, 208.4, 173.2, 198.04),
    ("YARD, 8 GPUs", "12B", 90.2, 112.72, 92.3, 111.8),
)
"""All-gather achieved and saturated, reduce-scatter achieved and saturated, GB/s."""


def case(plan: Plan, batch: int) -> ForecastCase:
    return ForecastCase(
        system="patrickstar",
        model=plan.model,
        profile=plan.profile,
        ranks=plan.ranks,
        batch_size=batch,
        option=("variant=paper",),
    )


def tables(name: str, asked: FigureSpec) -> Iterator[PaperTable]:
    if name == "patrickstar-table5":
        yield _bandwidths()
        return
    kept = simulated(name, [case(plan, batch) for plan in TABLE4 for batch in BATCHES], fresh=asked.fresh, ask=ask_all)
    rows: list[list[FigureCell]] = []
    for plan in TABLE4:
        row: list[FigureCell] = [plan.plan, plan.ranks, PrintedCell(plan.margin, "table 4")]
        for batch in BATCHES:
            found = kept.of(case(plan, batch))
            margin = None if found is None else found.statistics.get("margin_chunks")
            row.append(None if margin is None else SimulatedCell(int(margin), plan.profile))
        rows.append(row)
    columns = [FigureColumn("plan"), FigureColumn("GPUs"), FigureColumn("chunks", "paper")]
    columns += [FigureColumn(f"chunks, batch {batch} a GPU", "simulated") for batch in BATCHES]
    yield table(
        "PatrickStar table 4: margin space (+) for optimizer chunks, spilling space (-) of param fp16 chunks",
        columns,
        rows,
        kept.remark(name),
        "The paper prints no batch for it. A chunk here is of the size that its search finds for our model (table 3), and one "
        "of the margin is a param fp32, a momentum and a variance chunk together.",
        "50B on one GPU has 100 GB of parameters in 16 bit, and 60 GB of them do not fit in 40 GB: over 50 chunks of even the "
        "largest size in the paper's range, 512 Mi elements. Its -20 cannot be had so.",
        "An empty simulated cell: there is no plan for this batch.",
    )


def _bandwidths() -> PaperTable:
    columns = [FigureColumn("cluster"), FigureColumn("model")]
    for collective in ("all-gather", "reduce-scatter"):
        columns += [FigureColumn(f"{collective} GB/s", "paper"), FigureColumn(f"{collective} saturated GB/s", "paper")]
        columns += [FigureColumn(f"{collective} share", "computed"), FigureColumn(f"{collective} GB/s", "measured")]
    rows: list[list[FigureCell]] = []
    for cluster, model, *rates in TABLE5:
        row: list[FigureCell] = [cluster, model]
        for achieved, saturated in (rates[:2], rates[2:]):
            row += [PrintedCell(achieved, "table 5"), PrintedCell(saturated, "table 5")]
            row += [ComputedCell(f"{100 * achieved / saturated:.0f} %"), None]
        rows.append(row)
    return table(
        "PatrickStar table 5: achieved and saturated bandwidth",
        columns,
        rows,
        "Section 8.2.4 says that all are above 75 % of the saturated bandwidth.",
    )
