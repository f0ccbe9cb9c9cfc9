"""Angel-PTM's results: tables 5 and 6 with what contradicts them, and what the text says of figures 7 to 9, all images."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product

from harness.figures import FigureSpec
from harness.paper_table import ComputedCell, FigureCell, FigureColumn, PaperTable, PrintedCell, SimulatedCell, Value, table
from harness.record import Record
from paper_figures.best_batch import best_batch, cells_of, over, ratio_cell, why_not
from paper_figures.best_batch import samples_per_s as samples_of
from paper_figures.forecast_errors import error_remark
from paper_figures.kept import ForecastCase, KeptForecasts, MixtureCase, ask_all, simulated
from paper_figures.recorded import last_like, measured, records, work_table
from paper_figures.sentences import Sentence, sentences

SHOWS = {
    "angel-table5": "largest model on one server, and its throughput",
    "angel-table6": "T5-MoE with SSD, lock-free or not",
    "angel-figure7": "throughput beside DeepSpeed and Megatron-LM: what the text says",
    "angel-figure8": "GPT3-175B on 256 and 768 GPUs: what the text says",
    "angel-figure9": "T5-MoE on many GPUs: what the text says",
}
TABLE5 = (
    ("GPT", "DeepSpeed", "28B", 1, 18, 0.404),
    ("GPT", "DeepSpeed", "28B", 36, 40, 7.61),
    ("GPT", "AngelPTM", "28B", 38, 39, 10.99),
    ("GPT", "AngelPTM", "55B", 1, 33, 0.464),
    ("T5", "DeepSpeed", "27B", 1, 20, 0.317),
    ("T5", "DeepSpeed", "27B", 32, 39, 7.31),
    ("T5", "AngelPTM", "27B", 50, 40, 14.38),
    ("T5", "AngelPTM", "58B", 1, 38, 0.432),
    ("T5", "AngelPTM", "58B", 4, 40, 3.37),
)
"""Model, system, label, batch, GPU memory in GB, samples/s."""
TABLE6: tuple[tuple[str, str, int, float, float], ...] = (
    ("AngelPTM", "1T", 64, 37.26, 1.124),
    ("AngelPTM", "10T", 576, 317.82, 0.853),
    ("+ Lock-Free", "10T", 576, 942.31, 0.861),
)
TABLE6_COLUMNS = ("params", "GPUs", "samples/s", "valid loss")
PAPER = ("variant=paper",)
GPUS, BATCHES = (256, 768), (1, 2, 4, 8)
MODELS7, GPUS7, BATCHES7 = ("1.7b", "13b", "28b", "30b", "55b", "120b"), (8, 32), (4, 32)
GPUS9, BATCHES9 = {64: "t5-moe-0.31t", 128: "t5-moe-0.62t", 256: "t5-moe-1.24t"}, (16, 64)
MODELS6, BATCHES6 = {"1T": "t5-moe-1t", "10T": "t5-moe-10t"}, (16, 64)
SSD = (*PAPER, "states=disk")
LOCK_FREE = ("cache=auto", "nonfinite=stop", "run_ahead=false", "states=disk")  # variant=paper, which has it not
STALENESS = 4  # steps that updates of the lock-free row lie behind, at most: the paper prints none
FIGURE8 = (
    "Other points are in an image alone; batches and sequence length are not printed.",
    "simulated: 2048 tokens a sequence, the fastest of the batches 1, 2, 4 and 8 a GPU that fit, everything recomputed.",
)
HERE = {"DeepSpeed": "deepspeed-zero3-offload", "AngelPTM": "angel-ptm"}
PROFILES7 = "angel-a100-40g-x8 and -x32"
NAMES = {("GPT", "28B"): "angel-28b", ("GPT", "55B"): "angel-55b", ("T5", "27B"): "t5-27b", ("T5", "58B"): "t5-58b"}


def gain(more: float, less: float) -> str:
    return f"{100 * (more / less - 1):.1f} %"


def case5(system: str, name: str, batch: int) -> ForecastCase:
    """Of table 5, with a batch taken as a GPU's."""
    here = HERE[system]
    return ForecastCase(
        system=here,
        model=name,
        profile="angel-a100-40g-x8",
        ranks=8,
        batch_size=batch,
        option=PAPER if here == "angel-ptm" else (),
        seq_len=512 if name.startswith("t5") else 2048,
        dtype="bf16",
    )


def case8(gpus: int, batch: int) -> ForecastCase:
    return ForecastCase(
        system="angel-ptm",
        model="angel-175b",
        profile=f"angel-a100-40g-x{gpus}",
        ranks=gpus,
        batch_size=batch,
        option=PAPER,
        seq_len=2048,
        dtype="bf16",
    )


def case7(system: str, label: str, gpus: int, batch: int) -> ForecastCase:
    here = HERE[system]
    return replace(case8(gpus, batch), system=here, model=f"angel-{label}", option=PAPER if here == "angel-ptm" else ())


def case9(gpus: int, batch: int) -> MixtureCase:
    """9 experts a GPU and mixture, divided among all GPUs."""
    return MixtureCase(**vars(replace(case8(gpus, batch), model=GPUS9[gpus], seq_len=512)))


def case6(system: str, label: str, gpus: int, batch: int) -> MixtureCase:
    """Of table 6. system: as it has it."""
    option = SSD if system == "AngelPTM" else (*LOCK_FREE, f"max_staleness={STALENESS}")
    work = replace(case8(gpus, batch), model=MODELS6[label], seq_len=512, option=option)
    return MixtureCase(**vars(work), disk=True)


def cases9() -> list[MixtureCase]:
    return [case9(gpus, batch) for gpus in GPUS9 for batch in BATCHES9]


def cases6() -> list[MixtureCase]:
    return [case6(system, label, gpus, batch) for system, label, gpus, *_ in TABLE6 for batch in BATCHES6]


def cases7() -> list[ForecastCase]:
    return [case7(*each, batch) for each in product(HERE, MODELS7, GPUS7) for batch in BATCHES7]


def cases5() -> list[ForecastCase]:
    return [case5(system, NAMES[model, label], batch) for model, system, label, batch, *_ in TABLE5]


def cases8() -> list[ForecastCase]:
    return [case8(gpus, batch) for gpus in GPUS for batch in BATCHES]


def samples_per_s(kept: KeptForecasts, case: ForecastCase) -> float | None:
    """Of all GPUs. None: it does not fit, or is not kept."""
    found = kept.of(case)
    return None if found is None or found.step_s is None else case.ranks * case.batch_size / found.step_s


def tables(name: str, asked: FigureSpec) -> Iterator[PaperTable]:
    if name == "angel-table5":
        yield _table5(asked)
    elif name == "angel-table6":
        yield _table6(asked)
    elif name == "angel-figure7":
        yield from _figure7(asked)
    elif name == "angel-figure8":
        yield _figure8(simulated(name, cases8(), fresh=asked.fresh, ask=ask_all), error_remark(asked, "ours"))
    else:
        yield from _figure9(asked)


def _did(run: Record, *, system: str, model: str, batch: int) -> bool:
    return (run.spec.system, run.spec.model, run.resolved.batch_size) == (system, model, batch)


def experts_parameters(gpus: int) -> int:
    """Of T5-MoE's experts by table 4, 9 a GPU and layer as in section 6.4: two matrices each."""
    return 16 * 9 * gpus * 2 * 1024 * 16384


def _table5(asked: FigureSpec) -> PaperTable:
    found, kept = records(asked.results), simulated("angel-table5", cases5(), fresh=asked.fresh, ask=ask_all)
    rows: list[list[FigureCell]] = []
    for model, system, label, batch, memory, speed in TABLE5:
        runs = last_like(found, partial(_did, system=HERE[system], model=NAMES[model, label], batch=batch))
        printed = [PrintedCell(each, "table 5") for each in (label, batch, memory, speed)]
        case = case5(system, NAMES[model, label], batch)
        speed_here = samples_per_s(kept, case)
        row: list[FigureCell] = [model, system, *printed, measured(runs, lambda run: run.metrics.samples_per_s)]
        rows.append([*row, None if speed_here is None else SimulatedCell(speed_here, case.profile)])
    columns = [FigureColumn("model"), FigureColumn("system")]
    columns += [FigureColumn(name, "paper") for name in ("params", "batch", "GPU memory (GB)", "samples/s")]
    return table(
        "Angel-PTM table 5: largest supported model on a single server",
        [*columns, FigureColumn("samples/s", "measured"), FigureColumn("samples/s", "simulated")],
        rows,
        kept.remark("angel-table5"),
        error_remark(asked),
        "simulated: with a batch taken as a GPU's, 2048 tokens a sequence (T5: 512), everything recomputed, and the shapes "
        "of table 4; empty: it does not fit.",
        "Contradiction: the table has 0.464 samples/s for GPT-55B, section 6.2 says 3.34; the table's 3.37 is of T5-58B.",
        "Contradiction: 26 layers x 8192 of table 4 are 21.4B parameters, not 28B: harness figure angel-table4.",
        f"From the table: 55B over 28B is {gain(55, 28)} more and 10.99 over 7.61 {gain(10.99, 7.61)} (printed 96.4 and 44 %); "
        f"58B over 27B {gain(58, 27)} and 14.38 over 7.31 {gain(14.38, 7.31)} (printed 114.8 and 96.7 %).",
        "The paper does not say whether a batch is of a GPU or of all eight, nor the sequence length.",
    )


def _table6(asked: FigureSpec) -> PaperTable:
    kept = simulated("angel-table6", cases6(), fresh=asked.fresh, ask=ask_all)
    rows: list[list[FigureCell]] = []
    rates = list[float | None]()
    for system, size, gpus, *figures in TABLE6:
        printed: tuple[Value, ...] = (size, gpus, *figures)
        experts = ComputedCell(f"{experts_parameters(gpus) / 1e12:.2f}T")
        cases = [case6(system, size, gpus, batch) for batch in BATCHES6]
        found = best_batch(kept, cases, samples_of)
        rates.append(None if found is None else found.rate)
        cells = [*cells_of(found), None if found else why_not(kept, cases)]
        rows.append([system, *(PrintedCell(each, "table 6") for each in printed), experts, None, *cells])
    columns = [FigureColumn("system"), *(FigureColumn(name, "paper") for name in TABLE6_COLUMNS)]
    return table(
        "Angel-PTM table 6: T5-MoE with SSD",
        [
            *columns,
            FigureColumn("experts of 9 a GPU and layer", "computed"),
            FigureColumn("samples/s", "measured"),
            *(FigureColumn(name, "simulated") for name in ("samples/s", "batch a GPU", "why there is none")),
        ],
        rows,
        kept.remark("angel-table6"),
        error_remark(asked, "ours"),
        "Contradiction: 942.31 samples/s in the table, 962.31 in section 6.5; the 2.96x of section 6.5 is of 942.31 over "
        f"317.82 ({942.31 / 317.82:.2f}; 962.31 would be {962.31 / 317.82:.2f}).",
        "Contradiction: 317.82 samples/s on 576 GPUs in the table, 317.72 'with 64 GPUs' in section 6.5, then 317.82.",
        "Contradiction: with 9 experts a GPU and layer (section 6.4) of table 4's shape neither 1T on 64 nor 10T on 576 GPUs "
        f"follows; 1.2T on 256 does ({experts_parameters(256) / 1e12:.2f}T).",
        "simulated: 29 experts a GPU and mixture on 64 GPUs (1T) and 32 on 576 (10T), divided among all GPUs; optimizer states "
        f"on SSD, one of 3.5 GB/s a server; the faster of {BATCHES6[0]} and {BATCHES6[1]} sequences of 512 tokens a GPU, "
        "everything recomputed. The paper prints none of these.",
        *_ratios6(rates),
    )


def _ratios6(rates: list[float | None]) -> Iterator[str]:
    """rates: of the rows of table 6."""
    small, large, *_ = rates
    if small and large:
        exponent, printed = (math.log(more / less) / math.log(9) for more, less in ((large, small), (317.82, 37.26)))
        yield f"Exponent of samples/s over GPUs, 64 to 576: {exponent:.3f} simulated; {printed:.3f} of the printed numbers."


def _figure7(asked: FigureSpec) -> Iterator[PaperTable]:
    kept = simulated("angel-figure7", cases7(), fresh=asked.fresh, ask=ask_all)
    rows: list[list[FigureCell]] = []
    ratios = list[float]()
    for label, gpus in product(MODELS7, GPUS7):
        found = [best_batch(kept, [case7(system, label, gpus, batch) for batch in BATCHES7], samples_of) for system in HERE]
        ratio = over(found[1], found[0])
        ratios += [] if ratio is None else [ratio]
        rows.append([label.upper(), gpus, *(each for one in found for each in cells_of(one)), ratio_cell(found[1], found[0])])
    mean = SimulatedCell(gain(sum(ratios) / len(ratios), 1), PROFILES7) if ratios else None
    most = SimulatedCell(gain(max(ratios), 1), PROFILES7) if ratios else None
    place = "section 6.3, of figure 7"
    said = (
        Sentence("over DeepSpeed, on average", "35.4 %", place, simulated=mean),
        Sentence("over DeepSpeed, at most", "70 %", place, simulated=most),
        Sentence("over Megatron-LM, on average", "38.9 %", place),
        Sentence("over Megatron-LM, at most", "88.9 %", place),
        Sentence("slower than Megatron-LM, 1.7B on 8 GPUs", "2.4 %", place),
        Sentence("Megatron-LM, 30B on 8 GPUs", "out of memory", place),
        Sentence("bars of 1.7B to 120B, 8 and 32 GPUs; batches", None, place),
    )
    remarks = (kept.remark("angel-figure7"), error_remark(asked))
    yield sentences(
        "Angel-PTM figure 7: throughput", said, *remarks, "The bars are in an image alone.", "Megatron-LM is not here."
    )
    columns = [FigureColumn("model"), FigureColumn("GPUs")]
    for system in HERE:
        columns += [FigureColumn(f"{system}: samples/s", "simulated"), FigureColumn(f"{system}: batch a GPU", "simulated")]
    yield table(
        "Angel-PTM figure 7: forecasts",
        [*columns, FigureColumn("AngelPTM over DeepSpeed", "simulated")],
        rows,
        "The better of batches 4 and 32 a GPU, 2048 tokens a sequence, everything recomputed. An empty cell does not fit.",
    )
    yield work_table("Angel-PTM figure 7: records of one GPU", records(asked.results), _in_figure7)


def _in_figure7(run: Record) -> bool:
    """Of Angel-PTM, and of what did the same work beside it."""
    return run.spec.system == "angel-ptm" or run.spec.model.startswith("angel-")


def _figure8(kept: KeptForecasts, error: str) -> PaperTable:
    place = "section 6.4, of figure 8"
    best = [
        max((speed for batch in BATCHES if (speed := samples_per_s(kept, case8(gpus, batch)))), default=None) for gpus in GPUS
    ]
    speeds = [speed and SimulatedCell(speed, f"angel-a100-40g-x{gpus}") for gpus, speed in zip(GPUS, best, strict=True)]
    ratio = SimulatedCell(f"{best[1] / best[0]:.2f}x", "angel-a100-40g-x256 and -x768") if best[0] and best[1] else None
    said = (
        Sentence("GPT3-175B on 256 GPUs, samples/s", 11.68, place, simulated=speeds[0] or None),
        Sentence("GPT3-175B on 768 GPUs, samples/s", 36.46, place, simulated=speeds[1] or None),
        Sentence("speed-up", "3.12x", place, f"{36.46 / 11.68:.2f}x", "36.46 / 11.68, of 3 times the GPUs", simulated=ratio),
        Sentence("other numbers of GPUs", None, place),
    )
    return sentences("Angel-PTM figure 8: scaling of GPT3-175B", said, kept.remark("angel-figure8"), error, *FIGURE8)


def _figure9(asked: FigureSpec) -> Iterator[PaperTable]:
    kept = simulated("angel-figure9", cases9(), fresh=asked.fresh, ask=ask_all)
    found = {gpus: best_batch(kept, [case9(gpus, batch) for batch in BATCHES9], samples_of) for gpus in GPUS9}
    first, last = (found[gpus] for gpus in (min(GPUS9), max(GPUS9)))
    gained = over(last, first)
    linear = None if gained is None else SimulatedCell(f"{gained:.2f}x on 4 times the GPUs", "angel-a100-40g-x64 and -x256")
    place = "section 6.4, of figure 9"
    said = (
        Sentence("T5-MoE with more GPUs", "near-linear", place, simulated=linear),
        Sentence("beside GPT3-175B", "lower", place),
        Sentence("points", None, place),
    )
    remarks = (kept.remark("angel-figure9"), error_remark(asked, "ours"))
    yield sentences("Angel-PTM figure 9: scaling of T5-MoE", said, *remarks, "No number is printed.")
    rows: list[list[FigureCell]] = []
    for gpus, best in found.items():
        share = over(best, first)
        beside = None if share is None or best is None else SimulatedCell(f"{64 * share / gpus:.2f}", best.case.profile)
        why = None if best else why_not(kept, [case9(gpus, BATCHES9[0])])
        rows.append([gpus, ComputedCell(f"{9 * gpus}"), *cells_of(best), beside, why])
    names = ("samples/s", "batch a GPU", "of linear from 64 GPUs", "why it does not fit")
    yield table(
        "Angel-PTM figure 9: forecasts",
        [FigureColumn("GPUs"), FigureColumn("experts a mixture", "computed"), *(FigureColumn(n, "simulated") for n in names)],
        rows,
        f"9 experts a GPU and mixture, divided among all GPUs; the faster of {BATCHES9[0]} and {BATCHES9[1]} sequences of 512 "
        "tokens a GPU, everything recomputed, no SSD. The paper prints neither.",
        "Each rank sends every other a part of at least four slots of each of its experts, however few tokens there are.",
    )
