"""Elixir's figures 6 to 9. All bars are images: what the text says is here, beside records of OPT models and forecasts.

Figures 6 to 8 by forecast on the paper's server: OPT in 40 GB under Elixir's own rules (variant=paper) and DeepSpeed's ZeRO-3
with offloading, and OPT-2.7B resident in 80 GB, the paper's baseline. Batches are not printed: of those that are tried the
best counts, as the paper maximises its batch. Relative TFLOPS are its equation 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from harness.figures import FigureSpec
from harness.paper_table import FigureCell, FigureColumn, PaperTable, SimulatedCell, table
from harness.record import Record
from paper_figures.best_batch import BestBatch, best_batch, cells_of, over, ratio_cell, samples_per_s, together, why_not
from paper_figures.forecast_errors import error_remark
from paper_figures.kept import ForecastCase, KeptForecasts, MixtureCase, ask_all, simulated
from paper_figures.recorded import records, work_table
from paper_figures.sentences import Sentence, sentences

SHOWS = {
    "elixir-figure6": "OPT on one GPU beside PyTorch and DeepSpeed: printed, simulated, measured",
    "elixir-figure7": "several GPUs: what the text says",
    "elixir-figure8": "a GPT of 20B: what the text says",
    "elixir-figure9": "mixtures of experts: what the text says",
}
PROFILE = "elixir-a100-80g-pcie"
GB = 10**9
LIMIT = 40 * GB
MODELS = ("opt-1.3b", "opt-2.7b", "opt-6.7b", "opt-13b", "opt-30b")
BASELINE = "opt-2.7b"
BATCHES = (4, 8, 16, 32, 64)
BLOCK = ("cache=3GiB",)  # one of its blocks and its gradients are more than the 2 GiB of the paper
CACHE = {"gpt-20b": BLOCK, "pr-moe-8.2b": BLOCK}
FEW_BATCHES = (8, 32)  # of several GPUs
RANKS = (1, 4)
SYSTEMS = ("elixir", "deepspeed-zero3-offload")
MIXTURES = {"pr-moe-1.3b": "gpt3-1.3b", "pr-moe-8.2b": "ps-8b"}  # and what is dense and of as many parameters
RANKS9 = (1, 2, 4)
ZERO2 = "deepspeed-zero2"
PLACE = "section Experimental Results, of figure 6"
LINKS = "How many GPUs is in an image alone. Theirs are taken to be linked by PCIe: the paper names no NVLink."
MEASURED = ("elixir", "resident", "deepspeed-zero3-offload")


def case(system: str, model: str, batch: int, *, memory: int = LIMIT) -> ForecastCase:
    option = ("variant=paper", *CACHE.get(model, ())) if system == "elixir" else ()
    return ForecastCase(
        system=system, model=model, profile=PROFILE, ranks=1, batch_size=batch, option=option, device_memory=memory
    )


def cases() -> list[ForecastCase]:
    limited = [case(system, model, batch) for system in SYSTEMS for model in MODELS for batch in BATCHES]
    return [*limited, *(case("resident", BASELINE, batch, memory=0) for batch in BATCHES)]


def best(kept: KeptForecasts, system: str, model: str, *, memory: int = LIMIT) -> BestBatch | None:
    """Relative TFLOPS of figure 6, its equation 1, at the batch that has the most. None: no batch fits, or none is kept."""
    return best_batch(kept, [case(system, model, batch, memory=memory) for batch in BATCHES])


def case_of(system: str, model: str, ranks: int, batch: int, *, memory: int = LIMIT) -> ForecastCase:
    """Of figures 7 and 8."""
    profile = PROFILE if ranks == 1 else f"{PROFILE}-x{ranks}"
    return replace(case(system, model, batch, memory=memory), profile=profile, ranks=ranks)


def cases7() -> list[ForecastCase]:
    """One GPU is figure 6."""
    work = product(SYSTEMS, MODELS, RANKS[1:], FEW_BATCHES)
    found = [case_of(system, model, ranks, batch) for system, model, ranks, batch in work]
    return [*found, *(case_of("resident", BASELINE, ranks, batch, memory=0) for ranks in RANKS[1:] for batch in FEW_BATCHES)]


def cases8() -> list[ForecastCase]:
    return [case_of(system, "gpt-20b", ranks, batch) for system in SYSTEMS for ranks in RANKS for batch in FEW_BATCHES]


def case9(system: str, model: str, ranks: int, batch: int) -> ForecastCase:
    """In all of the device. Elixir's experts are divided among all ranks."""
    plain = case_of(system, model, ranks, batch, memory=0)
    return MixtureCase(**vars(plain), expert_ranks=ranks) if system == "elixir" and model in MIXTURES else plain


def cases9() -> list[ForecastCase]:
    work = [pair for mixture, dense in MIXTURES.items() for pair in (("elixir", mixture), ("elixir", dense), (ZERO2, mixture))]
    return [case9(*pair, ranks, batch) for pair in work for ranks in RANKS9 for batch in FEW_BATCHES]


def tables(name: str, asked: FigureSpec) -> Iterator[PaperTable]:
    yield from {"6": _figure6, "7": _figure7, "8": _figure8, "9": _figure9}[name[-1]](asked)


def _figure6(asked: FigureSpec) -> Iterator[PaperTable]:
    kept = simulated("elixir-figure6", cases(), fresh=asked.fresh, ask=ask_all)
    yield _printed(kept, error_remark(asked))
    yield _forecasts(kept)
    yield work_table("Elixir figure 6: records of OPT on one GPU", records(asked.results), _compared)


def _printed(kept: KeptForecasts, error: str) -> PaperTable:
    baseline, large = best(kept, "resident", BASELINE, memory=0), best(kept, "elixir", "opt-30b")
    share = None if baseline is None or large is None else SimulatedCell(f"{100 * large.rate / baseline.rate:.0f} %", PROFILE)
    pairs = [(best(kept, "elixir", model), best(kept, "deepspeed-zero3-offload", model)) for model in MODELS]
    gains = [gain for pair in pairs if (gain := over(*pair)) is not None]
    ratio = SimulatedCell(f"{min(gains):.2f} to {max(gains):.2f}x", PROFILE) if gains else None
    said = (
        Sentence("OPT-30B in 40 GB under Elixir, beside PyTorch with OPT-2.7B in 80 GB", "84 %", PLACE, simulated=share),
        Sentence("Elixir over DeepSpeed ZeRO-3, one GPU, 40 GB", "1.4x to 1.6x", PLACE, simulated=ratio),
        Sentence("largest that PyTorch trains in 80 GB", "2.7B", PLACE),
        Sentence("bars, batches, sequence length", None, PLACE),
    )
    return sentences(
        "Elixir figure 6: OPT on one GPU, what the text says",
        said,
        kept.remark("elixir-figure6"),
        error,
        "DeepSpeed by its rules alone, without what the package takes beyond them, which makes it too fast here.",
    )


def _forecasts(kept: KeptForecasts) -> PaperTable:
    rows: list[list[FigureCell]] = []
    asked = [("resident", BASELINE, 0), *((system, model, LIMIT) for model in MODELS for system in SYSTEMS)]
    for system, model, memory in asked:
        found = best(kept, system, model, memory=memory)
        row: list[FigureCell] = [model, system, f"{(memory or 80 * GB) // GB} GB", None]
        rows.append([*row, *cells_of(found)])
    columns = [FigureColumn("model"), FigureColumn("system"), FigureColumn("device"), FigureColumn("relative TFLOPS", "paper")]
    columns += [FigureColumn("relative TFLOPS", "simulated"), FigureColumn("batch", "simulated")]
    return table("Elixir figure 6: forecasts, 1024 tokens a sequence", columns, rows, "The bars are in an image alone.")


def _compared(run: Record) -> bool:
    return (
        run.spec.model.startswith("opt-")
        and run.spec.model != "opt-125m"
        and run.spec.ranks == 1
        and run.spec.system in MEASURED
    )


def _figure7(asked: FigureSpec) -> Iterator[PaperTable]:
    place = "section Experimental Results, of figure 7"
    said = (
        Sentence("beside PyTorch on several GPUs", "the same training efficiency", place),
        Sentence("with two or more GPUs, beside normal training", "surpasses it", "section 1"),
        Sentence("bars", None, place),
    )
    yield sentences("Elixir figure 7: several GPUs", said, "No number is printed; the two sentences do not say the same.")
    one = simulated("elixir-figure6", cases(), fresh=False, ask=ask_all)
    kept = simulated("elixir-figure7", cases7(), fresh=asked.fresh, ask=ask_all)
    yield _several(
        together(kept, one), "Elixir figure 7: forecasts", MODELS, kept.remark("elixir-figure7"), error_remark(asked)
    )
    yield work_table("Elixir figure 7: records of OPT on several GPUs", records(asked.results), _on_several)


def _on_several(run: Record) -> bool:
    return run.spec.model.startswith("opt-") and run.spec.ranks > 1


def _several(kept: KeptForecasts, title: str, models: Sequence[str], *remarks: str) -> PaperTable:
    """Relative TFLOPS a GPU in 40 GB, and beside OPT-2.7B resident on as many GPUs of 80 GB."""
    rows: list[list[FigureCell]] = []
    for model, ranks in product(models, RANKS):
        baseline = best_batch(kept, [case_of("resident", BASELINE, ranks, batch, memory=0) for batch in FEW_BATCHES])
        found = [best_batch(kept, [case_of(system, model, ranks, batch) for batch in FEW_BATCHES]) for system in SYSTEMS]
        share = over(found[0], baseline)
        beside = None if share is None or baseline is None else SimulatedCell(f"{100 * share:.0f} %", baseline.case.profile)
        cells = [each for one in found for each in cells_of(one)]
        why = None if found[0] else why_not(kept, [case_of("elixir", model, ranks, FEW_BATCHES[0])])
        rows.append([model, ranks, *cells, ratio_cell(*found), beside, why])
    columns = [FigureColumn("model"), FigureColumn("GPUs")]
    for system in ("Elixir", "DeepSpeed ZeRO-3"):
        columns += [
            FigureColumn(f"{system}: relative TFLOPS a GPU", "simulated"),
            FigureColumn(f"{system}: batch", "simulated"),
        ]
    columns += [FigureColumn("Elixir over DeepSpeed", "simulated")]
    columns += [FigureColumn("Elixir beside PyTorch with OPT-2.7B in 80 GB", "simulated")]
    columns += [FigureColumn("why Elixir does not fit", "simulated")]
    return table(title, columns, rows, *remarks, f"The better of batches {FEW_BATCHES[0]} and {FEW_BATCHES[1]} a GPU.", LINKS)


def _figure8(asked: FigureSpec) -> Iterator[PaperTable]:
    place = "section Experimental Results, of figure 8"
    said = (Sentence("Elixir and DeepSpeed", "great efficiency, Elixir's the better", place), Sentence("bars", None, place))
    yield sentences("Elixir figure 8: GPT 20B", said, "No number is printed, nor the model's shape.")
    kept = simulated("elixir-figure8", cases8(), fresh=asked.fresh, ask=ask_all)
    one = simulated("elixir-figure6", cases(), fresh=False, ask=ask_all)
    more = simulated("elixir-figure7", cases7(), fresh=False, ask=ask_all)
    shape = (
        "gpt-20b: 24 layers of 8192, the shape of the authors' public benchmark, whose blocks need an R cache of 3 GiB: the "
        "paper says that 1 to 2 GB are commonly enough."
    )
    remarks = (kept.remark("elixir-figure8"), error_remark(asked), shape)
    yield _several(together(kept, more, one), "Elixir figure 8: forecasts", ("gpt-20b",), *remarks)


def _figure9(asked: FigureSpec) -> Iterator[PaperTable]:
    kept = simulated("elixir-figure9", cases9(), fresh=asked.fresh, ask=ask_all)
    rows: list[list[FigureCell]] = []
    faster, denser = list[float](), list[float]()
    for (mixture, dense), ranks in product(MIXTURES.items(), RANKS9):
        ours, theirs, plain = (
            best_batch(kept, [case9(*pair, ranks, batch) for batch in FEW_BATCHES], samples_per_s)
            for pair in (("elixir", mixture), (ZERO2, mixture), ("elixir", dense))
        )
        faster += [] if (ratio := over(ours, theirs)) is None else [ratio]
        denser += [] if (ratio := over(ours, plain)) is None else [ratio]
        why = None if theirs else why_not(kept, [case9(ZERO2, mixture, ranks, FEW_BATCHES[0])])
        cells = [*cells_of(ours), *cells_of(plain), ratio_cell(ours, plain), *cells_of(theirs), ratio_cell(ours, theirs), why]
        rows.append([mixture, dense, ranks, *cells])
    place = "section Experimental Results, of figure 9"
    said = (
        Sentence("over DeepSpeed, PR-MoE", "1.5x to 4.2x", place, simulated=_range(faster)),
        Sentence("mixtures over dense models of the same size", "5.3x", "section 1", simulated=_range(denser)),
        Sentence("mixtures over dense models", "5x", place, simulated=_range(denser)),
        Sentence("sizes, bars", None, place),
    )
    hole = "The first version of the paper defines no mixture: the sizes of pr-moe are ours, and have no record."
    yield sentences("Elixir figure 9: PR-MoE", said, kept.remark("elixir-figure9"), error_remark(asked), hole)
    names = ["Elixir: samples/s", "Elixir: batch", "dense: samples/s", "dense: batch", "mixture over dense"]
    names += ["ZeRO-2: samples/s", "ZeRO-2: batch", "Elixir over ZeRO-2", "why ZeRO-2 does not fit"]
    yield table(
        "Elixir figure 9: forecasts",
        [*map(FigureColumn, ("mixture", "dense", "GPUs")), *(FigureColumn(name, "simulated") for name in names)],
        rows,
        f"The better of batches {FEW_BATCHES[0]} and {FEW_BATCHES[1]} a GPU, 1024 tokens a sequence, everything recomputed, in "
        "80 GB. Elixir's experts are divided among all GPUs, and it trains the dense model too. An R cache of 3 GiB for the "
        "mixture of 8.2B, of which a block with all experts and its gradients take 2.38 GiB.",
        "DeepSpeed is its ZeRO-2 by its rules alone, with all experts on each GPU; the paper's had Megatron's parallelism too.",
        LINKS,
    )


def _range(ratios: Sequence[float]) -> SimulatedCell | None:
    return SimulatedCell(f"{min(ratios):.2f} to {max(ratios):.2f}x", f"{PROFILE}, -x2 and -x4") if ratios else None
