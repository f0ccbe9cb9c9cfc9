"""Forecasts behind PatrickStar's figures 11 to 17, on its clusters, each at the better of two of its batches.

Figures 11, 12, 13 and 16 are of the forecasts of figure 10 and of those that figure 11 keeps beside them. Figures 14 and 15
keep theirs with the seconds that each lane of a step is busy: lanes overlap, so they do not add up to the step as the paper's
parts do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

from harness.figures import FigureSpec
from harness.paper_table import FigureCell, FigureColumn, PaperTable, SimulatedCell, table
from paper_figures.best_batch import BestBatch, best_batch, cells_of, over, ratio_cell, together, why_not
from paper_figures.forecast_errors import error_remark
from paper_figures.kept import ForecastCase, KeptForecasts, ask_all, simulated
from paper_figures.patrickstar_scale import BATCHES, RANKS, SUPERPOD, SYSTEMS, YARD, Cluster, case, cases

ALL = 8  # GPUs of a node
FEW = (1, ALL)  # that all systems are forecast on; PatrickStar alone on 2 and 4
HAI = "hai-pcie-a100-40g-x8"
MODELS14 = ("ps-4b", "ps-10b", "ps-12b", "ps-20b", "ps-30b")
SYSTEMS14 = {
    "PatrickStar": ("patrickstar", ("variant=paper",)),
    "SpongeBob": ("patrickstar", ("variant=spongebob",)),
    "DeepSpeed": ("deepspeed-zero3-offload", ()),
}
CASES15 = ((SUPERPOD, "ps-10b"), (SUPERPOD, "ps-50b"), (YARD, "ps-12b"))
PLANS15 = {"Base": "paper", "OSC": "osc", "SP": "static-partition"}
WHY = "why it does not fit, batch 4 or 8"
LANES = ("compute", "h2d", "d2h", "gather", "reduce", "cpu")
NODES17 = {"ps-50b": (8, 16, 32, 64), "ps-68b": (8, 16, 32, 64), "gpt3-175b": (32, 64)}
BATCH17 = 8


def more_cases() -> Iterator[ForecastCase]:
    """Beside the forecasts of figure 10 the others at the larger batch, where the smaller one fits, on one GPU and a node."""
    first = simulated("patrickstar-figure10", list(cases()), fresh=False, ask=ask_all)
    for cluster in (YARD, SUPERPOD):
        for system, model, ranks in product(("DeepSpeed-DP", "PyTorch"), cluster.models, FEW):
            smaller = first.of(case(cluster, system, model, ranks, BATCHES[0]))
            if smaller is not None and smaller.fits:
                yield case(cluster, system, model, ranks, BATCHES[1])


def speeds(asked: FigureSpec) -> tuple[KeptForecasts, tuple[str, ...]]:
    """Of figures 10 and 11, and the remarks. Fresh where figure 11 itself is asked for."""
    fresh = asked.fresh and asked.name == "patrickstar-figure11"
    first = simulated("patrickstar-figure10", list(cases()), fresh=False, ask=ask_all)
    more = simulated("patrickstar-figure11", list(more_cases()), fresh=fresh, ask=ask_all)
    remarks = (first.remark("patrickstar-figure10"), more.remark("patrickstar-figure11"), error_remark(asked))
    return together(first, more), tuple(dict.fromkeys(remarks))


def best_of(kept: KeptForecasts, cluster: Cluster, system: str, model: str, ranks: int) -> BestBatch | None:
    return best_batch(kept, [case(cluster, system, model, ranks, batch) for batch in BATCHES])


def throughput(kept: KeptForecasts, title: str, clusters: Sequence[Cluster], ranks: Sequence[int], *remarks: str) -> PaperTable:
    """Tflops a GPU of the three systems; a row has one that fits."""
    rows: list[list[FigureCell]] = []
    for cluster in clusters:
        for model in cluster.models:
            for gpus in ranks:
                found = {system: best_of(kept, cluster, system, model, gpus) for system in SYSTEMS}
                if any(found.values()):
                    row: list[FigureCell] = [cluster.name, model.removeprefix("ps-").upper(), gpus]
                    row += [each for one in found.values() for each in cells_of(one)]
                    rows.append([*row, ratio_cell(found["PatrickStar"], found["DeepSpeed-DP"])])
    columns = [FigureColumn("cluster"), FigureColumn("model"), FigureColumn("GPUs")]
    for system in SYSTEMS:
        columns += [FigureColumn(f"{system}: Tflops a GPU", "simulated"), FigureColumn(f"{system}: batch a GPU", "simulated")]
    return table(title, [*columns, FigureColumn("PatrickStar over DeepSpeed-DP", "simulated")], rows, *remarks)


def ratios(
    kept: KeptForecasts, cluster: Cluster, system: str, models: Sequence[str], ranks: Sequence[int]
) -> list[float | None]:
    """Of PatrickStar over a system."""
    pairs = ((model, gpus) for model in models for gpus in ranks)
    found = ((best_of(kept, cluster, "PatrickStar", *pair), best_of(kept, cluster, system, *pair)) for pair in pairs)
    return [over(*pair) for pair in found]


def scaling(kept: KeptForecasts, *remarks: str) -> PaperTable:
    """Figure 16: Tflops of all GPUs beside those of one."""
    rows: list[list[FigureCell]] = []
    for cluster in (YARD, SUPERPOD):
        for model in cluster.models:
            found = [best_of(kept, cluster, "PatrickStar", model, gpus) for gpus in RANKS]
            if not found[0]:
                continue
            row: list[FigureCell] = [cluster.name, model.removeprefix("ps-").upper(), found[0].cell]
            for gpus, one in zip(RANKS[1:], found[1:], strict=True):
                row.append(None if one is None else SimulatedCell(f"{gpus * one.rate / found[0].rate:.2f}x", cluster.profile))
            rows.append(row)
    columns = [FigureColumn("cluster"), FigureColumn("model"), FigureColumn("Tflops of one GPU", "simulated")]
    columns += [FigureColumn(f"{gpus} GPUs over one", "simulated") for gpus in RANKS[1:]]
    return table("PatrickStar figure 16: forecasts of one to eight GPUs", columns, rows, *remarks)


def case14(system: str, model: str, batch: int) -> ForecastCase:
    name, option = SYSTEMS14[system]
    return ForecastCase(system=name, model=model, profile=HAI, ranks=ALL, batch_size=batch, option=option)


def cases14() -> list[ForecastCase]:
    return [case14(system, model, batch) for model in MODELS14 for system in SYSTEMS14 for batch in BATCHES]


def case15(cluster: Cluster, model: str, ranks: int, plan: str, batch: int) -> ForecastCase:
    option = (f"variant={PLANS15[plan]}",)
    return ForecastCase(
        system="patrickstar", model=model, profile=cluster.profile, ranks=ranks, batch_size=batch, option=option
    )


def cases15() -> list[ForecastCase]:
    work = [(cluster, model, ranks) for cluster, model in CASES15 for ranks in (1, ALL)]
    return [case15(*each, plan, batch) for each in work for plan in PLANS15 for batch in BATCHES]


def case17(model: str, ranks: int) -> ForecastCase:
    profile = f"superpod-a100-40g-x{ranks}"
    return ForecastCase(
        system="patrickstar", model=model, profile=profile, ranks=ranks, batch_size=BATCH17, option=("variant=paper",)
    )


def cases17() -> list[ForecastCase]:
    return [case17(model, ranks) for model, sizes in NODES17.items() for ranks in sizes]


def kept14(asked: FigureSpec) -> KeptForecasts:
    return simulated("patrickstar-figure14", cases14(), fresh=asked.fresh, ask=partial(ask_all, lanes=True))


def kept15(asked: FigureSpec) -> KeptForecasts:
    return simulated("patrickstar-figure15", cases15(), fresh=asked.fresh, ask=partial(ask_all, lanes=True))


def kept17(asked: FigureSpec) -> KeptForecasts:
    return simulated("patrickstar-figure17", cases17(), fresh=asked.fresh, ask=ask_all)


def best14(kept: KeptForecasts, system: str, model: str) -> BestBatch | None:
    return best_batch(kept, [case14(system, model, batch) for batch in BATCHES])


def best15(kept: KeptForecasts, cluster: Cluster, model: str, ranks: int, plan: str) -> BestBatch | None:
    """At the batch that is best for the base plan, which is what the others are set beside."""
    base = best_batch(kept, [case15(cluster, model, ranks, "Base", batch) for batch in BATCHES])
    return None if base is None else best_batch(kept, [case15(cluster, model, ranks, plan, base.case.batch_size)])


def communication_s(kept: KeptForecasts, found: BestBatch | None) -> float | None:
    """Seconds of a step that all-gathers and reduce-scatters are busy, hidden or not."""
    seen = None if found is None else kept.of(found.case)
    return None if seen is None else sum(seen.statistics.get(f"busy.{lane}", 0.0) for lane in ("gather", "reduce"))


def communication_share(kept: KeptForecasts, found: BestBatch | None) -> SimulatedCell | None:
    """Of the step."""
    busy, seen = communication_s(kept, found), None if found is None else kept.of(found.case)
    if found is None or busy is None or seen is None or seen.step_s is None:
        return None
    return SimulatedCell(f"{100 * busy / seen.step_s:.0f} %", found.case.profile)


Plan = tuple[Sequence[str | int], BestBatch | None, SimulatedCell | None]
"""What names a row, its forecast, and why it does not fit."""


def breakdown(kept: KeptForecasts, title: str, found: Sequence[Plan]) -> PaperTable:
    """A row a plan: Tflops, batch, step and the lanes' seconds."""
    rows: list[list[FigureCell]] = []
    for names, one, why in found:
        seen = None if one is None else kept.of(one.case)
        row: list[FigureCell] = [*names, *cells_of(one)]
        if one is None or seen is None or seen.step_s is None:
            rows.append([*row, *[None] * (1 + len(LANES)), why])
            continue
        times = [seen.step_s, *(seen.statistics.get(f"busy.{lane}", 0.0) for lane in LANES)]
        rows.append([*row, *(SimulatedCell(seconds, one.case.profile) for seconds in times), None])
    columns = [FigureColumn(each) for each in ("cluster", "model", "GPUs", "plan")]
    shown = ("Tflops a GPU", "batch a GPU", "step s", *(f"{lane} s" for lane in LANES), WHY)
    return table(
        title,
        [*columns, *(FigureColumn(each, "simulated") for each in shown)],
        rows,
        "Lanes overlap: their seconds do not add up to the step's, as the paper's parts do.",
    )


def table14(kept: KeptForecasts) -> PaperTable:
    found: list[Plan] = []
    for model, system in product(MODELS14, SYSTEMS14):
        why = why_not(kept, [case14(system, model, BATCHES[0])])
        found.append((("HAI-PCIe", model.removeprefix("ps-").upper(), ALL, system), best14(kept, system, model), why))
    return breakdown(kept, "PatrickStar figure 14: forecasts", found)


def table15(kept: KeptForecasts) -> PaperTable:
    found: list[Plan] = []
    for (cluster, model), ranks, plan in product(CASES15, FEW, PLANS15):
        why = why_not(kept, [case15(cluster, model, ranks, plan, BATCHES[0])])
        names = (cluster.name, model.removeprefix("ps-").upper(), ranks, plan)
        found.append((names, best15(kept, cluster, model, ranks, plan), why))
    return breakdown(kept, "PatrickStar figure 15: forecasts", found)


def total17(kept: KeptForecasts, model: str, ranks: int) -> float | None:
    """Tflops of all GPUs."""
    found = best_batch(kept, [case17(model, ranks)])
    return None if found is None else ranks * found.rate


def table17(kept: KeptForecasts) -> PaperTable:
    rows: list[list[FigureCell]] = []
    for model, sizes in NODES17.items():
        first = next((total / ranks for ranks in sizes if (total := total17(kept, model, ranks))), None)
        for ranks in sizes:
            total, profile = total17(kept, model, ranks), case17(model, ranks).profile
            row: list[FigureCell] = [model, ranks, None if total is None else SimulatedCell(total, profile)]
            beside = total / ranks / first if total and first else None
            share = None if beside is None else SimulatedCell(f"{100 * beside:.0f} %", profile)
            rows.append([*row, share, why_not(kept, [case17(model, ranks)])])
    columns = [FigureColumn("model"), FigureColumn("GPUs"), FigureColumn("Tflops in all", "simulated")]
    return table(
        "PatrickStar figure 17: forecasts, batch 8 a GPU",
        [*columns, FigureColumn("of a GPU, beside the fewest", "simulated"), FigureColumn(WHY, "simulated")],
        rows,
        "The paper does not say in its text which four cases it has: 50B, 68B and GPT-3's 175B here.",
    )
