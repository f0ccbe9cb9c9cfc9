"""Elixir's figures 6 to 9. All bars are images: what the text says is here, beside records of OPT models and forecasts.

Figure 6 by forecast on the paper's server: OPT in 40 GB under Elixir's own rules (variant=paper) and DeepSpeed's ZeRO-3 with
offloading, and OPT-2.7B resident in 80 GB, the paper's baseline. Batches are not printed: of those that are tried the best
counts, as the paper maximises its batch. Relative TFLOPS are its equation 1.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.figures import FigureSpec
from harness.paper_table import FigureCell, FigureColumn, PaperTable, SimulatedCell, table
from harness.record import Record
from models import registry as models_registry
from paper_figures.kept import ForecastCase, KeptForecasts, ask_all, simulated
from paper_figures.recorded import cells, measured, records
from paper_figures.sentences import Sentence, sentences
from systems.sizes import format_size

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
SYSTEMS = ("elixir", "deepspeed-zero3-offload")
PLACE = "section Experimental Results, of figure 6"
MEASURED = ("elixir", "resident", "deepspeed-zero3-offload")


def case(system: str, model: str, batch: int, *, memory: int = LIMIT) -> ForecastCase:
    option = ("variant=paper",) if system == "elixir" else ()
    return ForecastCase(
        system=system, model=model, profile=PROFILE, ranks=1, batch_size=batch, option=option, device_memory=memory
    )


def cases() -> list[ForecastCase]:
    limited = [case(system, model, batch) for system in SYSTEMS for model in MODELS for batch in BATCHES]
    return [*limited, *(case("resident", BASELINE, batch, memory=0) for batch in BATCHES)]


def relative_tflops(asked: ForecastCase, step_s: float) -> float:
    """Equation 1: 8 x batch x sequence x model's size a second."""
    size = models_registry.parameter_count(models_registry.resolve(asked.model))
    assert size is not None
    return 8 * asked.batch_size * asked.seq_len * size / step_s / 1e12


def best(kept: KeptForecasts, system: str, model: str, *, memory: int = LIMIT) -> tuple[float, int] | None:
    """Relative TFLOPS and the batch that has the most. None: no batch fits, or none is kept."""
    found = []
    for batch in BATCHES:
        one = case(system, model, batch, memory=memory)
        seen = kept.of(one)
        if seen is not None and seen.step_s is not None:
            found.append((relative_tflops(one, seen.step_s), batch))
    return max(found, default=None)


def tables(name: str, asked: FigureSpec) -> Iterator[PaperTable]:
    if name == "elixir-figure6":
        kept = simulated(name, cases(), fresh=asked.fresh, ask=ask_all)
        yield _printed(kept)
        yield _forecasts(kept)
        yield _measured(asked)
    else:
        yield {"elixir-figure7": _figure7, "elixir-figure8": _figure8, "elixir-figure9": _figure9}[name]()


def _printed(kept: KeptForecasts) -> PaperTable:
    baseline, large = best(kept, "resident", BASELINE, memory=0), best(kept, "elixir", "opt-30b")
    share = None if baseline is None or large is None else SimulatedCell(f"{100 * large[0] / baseline[0]:.0f} %", PROFILE)
    pairs = [(best(kept, "elixir", model), best(kept, "deepspeed-zero3-offload", model)) for model in MODELS]
    gains = [ours[0] / theirs[0] for ours, theirs in pairs if ours is not None and theirs is not None]
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
        "DeepSpeed by its rules alone, without what the package takes beyond them, which makes it too fast here.",
    )


def _forecasts(kept: KeptForecasts) -> PaperTable:
    rows: list[list[FigureCell]] = []
    asked = [("resident", BASELINE, 0), *((system, model, LIMIT) for model in MODELS for system in SYSTEMS)]
    for system, model, memory in asked:
        found = best(kept, system, model, memory=memory)
        row: list[FigureCell] = [model, system, f"{(memory or 80 * GB) // GB} GB", None]
        rows.append([*row, *([None, None] if found is None else (SimulatedCell(each, PROFILE) for each in found))])
    columns = [FigureColumn("model"), FigureColumn("system"), FigureColumn("device"), FigureColumn("relative TFLOPS", "paper")]
    columns += [FigureColumn("relative TFLOPS", "simulated"), FigureColumn("batch", "simulated")]
    return table("Elixir figure 6: forecasts, 1024 tokens a sequence", columns, rows, "The bars are in an image alone.")


def _measured(asked: FigureSpec) -> PaperTable:
    found = records(asked.results)
    rows: list[list[FigureCell]] = []
    for runs in cells(found, _compared):
        run = runs[-1]
        budget = "" if run.spec.device_memory is None else format_size(run.spec.device_memory)
        shape = f"{run.resolved.batch_size} x {run.resolved.seq_len}"
        row: list[FigureCell] = [run.spec.model, run.spec.system, " ".join(run.spec.option), budget, shape]
        rows.append([*row, measured(runs, _tflops), measured(runs, _step_s)])
    columns = [FigureColumn(each) for each in ("model", "system", "options", "device budget", "batch")]
    columns += [FigureColumn("relative TFLOPS", "measured"), FigureColumn("step s", "measured")]
    return table(
        "Elixir figure 6: records of OPT on one GPU",
        columns,
        rows,
        "Neither the paper's machine nor its batches: no ratio of figure 6 follows from rows of different work.",
    )


def _compared(run: Record) -> bool:
    return (
        run.spec.model.startswith("opt-")
        and run.spec.model != "opt-125m"
        and run.spec.ranks == 1
        and run.spec.system in MEASURED
    )


def _tflops(run: Record) -> float | None:
    return run.metrics.relative_tflops


def _step_s(run: Record) -> float | None:
    return run.metrics.mean_step_time_s


def _figure7() -> PaperTable:
    said = (
        Sentence("beside PyTorch on several GPUs", "the same training efficiency", "section Experimental Results, of figure 7"),
        Sentence("with two or more GPUs, beside normal training", "surpasses it", "section 1"),
        Sentence("bars", None, "section Experimental Results, of figure 7"),
    )
    return sentences("Elixir figure 7: several GPUs", said, "No number is printed; the two sentences do not say the same.")


def _figure8() -> PaperTable:
    place = "section Experimental Results, of figure 8"
    said = (Sentence("Elixir and DeepSpeed", "great efficiency, Elixir's the better", place), Sentence("bars", None, place))
    return sentences("Elixir figure 8: GPT 20B", said, "No number is printed, nor the model's shape.")


def _figure9() -> PaperTable:
    place = "section Experimental Results, of figure 9"
    said = (
        Sentence("over DeepSpeed, PR-MoE", "1.5x to 4.2x", place),
        Sentence("mixtures over dense models of the same size", "5.3x", "section 1"),
        Sentence("mixtures over dense models", "5x", place),
        Sentence("sizes, bars", None, place),
    )
    return sentences(
        "Elixir figure 9: PR-MoE",
        said,
        "The first version of the paper defines no mixture: the sizes of pr-moe are ours, and have no record.",
    )
