"""PatrickStar's figures 11 to 17: throughput, breakdowns, scaling. The bars are images; what the text says of them is here."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from harness.figures import FigureSpec
from harness.paper_table import PaperTable, SimulatedCell
from harness.record import Record
from paper_figures import patrickstar_forecasts as forecasts
from paper_figures.best_batch import PRODUCTS, BestBatch, ratio_cell, spread
from paper_figures.forecast_errors import error_remark
from paper_figures.kept import KeptForecasts
from paper_figures.patrickstar_forecasts import ALL, FEW, best_of
from paper_figures.patrickstar_scale import BATCHES, SUPERPOD, YARD, Cluster
from paper_figures.recorded import records, work_table
from paper_figures.sentences import Sentence, sentences

SHOWS = {
    "patrickstar-figure11": "throughput on one GPU: nothing is printed",
    "patrickstar-figure12": "throughput on GPUs of YARD: what the text says",
    "patrickstar-figure13": "throughput on GPUs of SuperPod: what the text says",
    "patrickstar-figure14": "breakdown beside SpongeBob and DeepSpeed: what the text says",
    "patrickstar-figure15": "breakdown by optimization: what the text says",
    "patrickstar-figure16": "scaling from one GPU to eight: nothing is printed",
    "patrickstar-figure17": "scaling over nodes: what the text says",
}
REMARKS = (
    "The bars and points are in an image alone.",
    f"simulated: {PRODUCTS} operations a parameter and token, the better of batches {' and '.join(map(str, BATCHES))} a GPU.",
)
NODE = "simulated: on one GPU and on eight; PatrickStar alone also on 2 and 4: harness figure patrickstar-figure16."
BOTH = (YARD, SUPERPOD)
A100_FP16_TFLOPS = 312.0  # the data sheet's
MEASURED = ("patrickstar", "resident", "deepspeed-zero2-offload", "deepspeed-zero3-offload")


def _figure11(asked: FigureSpec) -> Iterator[PaperTable]:
    place = "section 8.2.2, of figure 11"
    kept, remarks = forecasts.speeds(asked)
    beside = [
        ratio_cell(*(best_of(kept, cluster, each, "ps-1b", 1) for each in ("PatrickStar", "PyTorch"))) for cluster in BOTH
    ]
    said = (
        Sentence("PatrickStar beside PyTorch, 1B, V100", "similar", place, simulated=beside[0]),
        Sentence("PatrickStar beside PyTorch, 1B, A100", "similar", place, simulated=beside[1]),
        Sentence("bars of both clusters, batches", None, place),
    )
    note = "The 47 and 33 Tflops of section 4 are ZeRO-Offload's, at 1B and 4B, and not of this figure."
    yield sentences("PatrickStar figure 11: one GPU", said, note, *REMARKS)
    yield forecasts.throughput(kept, "PatrickStar figure 11: forecasts of one GPU", BOTH, (1,), *remarks)
    yield work_table("PatrickStar figure 11: records of one GPU", records(asked.results), _on_one_gpu)


def _on_one_gpu(run: Record) -> bool:
    return run.spec.model.startswith("ps-") and run.spec.ranks == 1 and run.spec.system in MEASURED


def most_tflops(kept: KeptForecasts, cluster: Cluster, model: str) -> float | None:
    """Of eight GPUs together under PatrickStar, with the better of figure 10's batches. None: none fits, or none is kept."""
    found = best_of(kept, cluster, "PatrickStar", model, ALL)
    return None if found is None else ALL * found.rate


def _small_and_large(kept: KeptForecasts, cluster: Cluster, small: str, large: str) -> list[SimulatedCell | None]:
    """Tflops of a small model, of a large one, and the share."""
    found = [most_tflops(kept, cluster, model) for model in (small, large)]
    cells = [None if speed is None else SimulatedCell(speed, cluster.profile) for speed in found]
    share = f"{100 * found[1] / found[0]:.0f} %" if found[0] and found[1] else None
    return [*cells, None if share is None else SimulatedCell(share, cluster.profile)]


def _figure12(asked: FigureSpec) -> Iterator[PaperTable]:
    place = "section 8.2.3, of figure 12"
    kept, remarks = forecasts.speeds(asked)
    small, large, share = _small_and_large(kept, YARD, "ps-1b", "ps-18b")
    ours, theirs = (best_of(kept, YARD, system, "ps-1b", ALL) for system in ("PatrickStar", "PyTorch"))
    least, most, mean = spread(forecasts.ratios(kept, YARD, "DeepSpeed-DP", YARD.models, FEW), YARD.profile)
    fewer = spread(forecasts.ratios(kept, YARD, "PyTorch", ("ps-1b",), (1,)), YARD.profile)[2]
    said = (
        Sentence("over PyTorch, 1B, 8 GPUs", "1.37x", place, simulated=ratio_cell(ours, theirs)),
        Sentence("over PyTorch, 1B, 1, 2 and 4 GPUs", "similar", place, simulated=fewer),
        Sentence("largest batch, 1B, 8 GPUs: PyTorch", 4, place),
        Sentence("largest batch, 1B, 8 GPUs: PatrickStar", 64, place),
        Sentence("over DeepSpeed-DP, least", "1.08x", place, simulated=least),
        Sentence("over DeepSpeed-DP, most", "1.47x", place, simulated=most),
        Sentence("over DeepSpeed-DP, on average", "1.23x", place, simulated=mean),
        Sentence("1B on 8 GPUs, Tflops in all", 444, place, simulated=small),
        Sentence("18B on 8 GPUs, Tflops in all", 419, place, simulated=large),
        Sentence("18B beside 1B", "94 %", place, f"{100 * 419 / 444:.0f} %", "419 / 444", simulated=share),
        Sentence("points", None, place),
    )
    yield sentences("PatrickStar figure 12: several GPUs of YARD", said, *remarks, *REMARKS, NODE)
    yield forecasts.throughput(kept, "PatrickStar figure 12: forecasts", (YARD,), FEW)


def _figure13(asked: FigureSpec) -> Iterator[PaperTable]:
    place = "section 8.2.3, of figure 13"
    kept, remarks = forecasts.speeds(asked)
    small, large, share = _small_and_large(kept, SUPERPOD, "ps-6b", "ps-68b")
    least, most, mean = spread(forecasts.ratios(kept, SUPERPOD, "DeepSpeed-DP", SUPERPOD.models, FEW), SUPERPOD.profile)
    said = (
        Sentence("over DeepSpeed, least", "1.07x", place, simulated=least),
        Sentence("over DeepSpeed, most", "2.43x", place, simulated=most),
        Sentence("over DeepSpeed, on average", "1.53x", place, simulated=mean),
        Sentence("6B on 8 GPUs, Tflops in all", 1180, place, simulated=small),
        Sentence("68B on 8 GPUs, Tflops in all", 857, place, simulated=large),
        Sentence("68B beside 6B", "73 %", place, f"{100 * 857 / 1180:.0f} %", "857 / 1180", simulated=share),
        Sentence("points", None, place),
    )
    yield sentences("PatrickStar figure 13: several GPUs of SuperPod", said, *remarks, *REMARKS, NODE)
    yield forecasts.throughput(kept, "PatrickStar figure 13: forecasts", (SUPERPOD,), FEW)


def _figure14(asked: FigureSpec) -> Iterator[PaperTable]:
    place = "section 8.2.4, of figure 14"
    kept = forecasts.kept14(asked)
    speeds = (
        ("4B", "1.4x", "1.3x"),
        ("10B", "1.5x", "1.4x"),
        ("12B", "1.3x", "1.1x"),
        ("20B", "1.25x", None),
        ("30B", "1.25x", None),
    )
    shorter = (("4B", "54 %"), ("10B", "50 %"), ("12B", "50 %"), ("20B", "51 %"), ("30B", "55 %"))
    found = {
        (label, system): forecasts.best14(kept, system, f"ps-{label.lower()}")
        for label, *_ in speeds
        for system in forecasts.SYSTEMS14
    }
    said = list[Sentence]()
    for other, column in (("SpongeBob", 1), ("DeepSpeed", 2)):
        for numbers in speeds:
            ours, theirs = found[numbers[0], "PatrickStar"], found[numbers[0], other]
            faster = numbers[column] or "out of memory"
            said.append(Sentence(f"{numbers[0]}: over {other}", faster, place, simulated=ratio_cell(ours, theirs)))
    said += [
        Sentence(
            f"{model}: communication shorter than SpongeBob's by",
            share,
            place,
            simulated=_shorter(kept, found[model, "PatrickStar"], found[model, "SpongeBob"]),
        )
        for model, share in shorter
    ]
    yield sentences(
        "PatrickStar figure 14: breakdown on 8 GPUs of HAI-PCIe",
        [*said, Sentence("times of the parts, batches", None, place)],
        kept.remark("patrickstar-figure14"),
        error_remark(asked),
        *REMARKS,
    )
    yield forecasts.table14(kept)
    yield work_table("PatrickStar figure 14: records beside SpongeBob", records(asked.results), _variant("spongebob"))


def _shorter(kept: KeptForecasts, ours: BestBatch | None, theirs: BestBatch | None) -> SimulatedCell | None:
    """By how much our collectives are shorter, at the same batch."""
    seconds = [forecasts.communication_s(kept, one) for one in (ours, theirs)]
    if ours is None or theirs is None or ours.case.batch_size != theirs.case.batch_size or not all(seconds):
        return None
    assert seconds[0] is not None and seconds[1] is not None
    return SimulatedCell(f"{100 * (1 - seconds[0] / seconds[1]):.0f} %", ours.case.profile)


def _variant(*names: str) -> Callable[[Record], bool]:
    """Whether a run is of one of these variants of PatrickStar, or of the paper's own."""
    wanted = {f"variant={name}" for name in (*names, "paper")}

    def keep(run: Record) -> bool:
        return run.spec.system == "patrickstar" and not wanted.isdisjoint(run.spec.option)

    return keep


def _figure15(asked: FigureSpec) -> Iterator[PaperTable]:
    place = "section 8.2.4, of figure 15"
    kept = forecasts.kept15(asked)
    base = {(c.name, m): forecasts.best15(kept, c, m, ALL, "Base") for c, m in forecasts.CASES15}
    static = forecasts.best15(kept, SUPERPOD, "ps-10b", ALL, "SP")
    on_cpu = forecasts.best15(kept, YARD, "ps-12b", ALL, "OSC")
    said = [
        Sentence(
            "base over static partition, SuperPod 10B, 8 GPUs",
            "6.9x",
            place,
            simulated=ratio_cell(base["SuperPod", "ps-10b"], static),
        ),
        Sentence(
            "base over optimizer on the CPU, YARD 12B, 8 GPUs",
            "1.3x",
            place,
            simulated=ratio_cell(base["YARD", "ps-12b"], on_cpu),
        ),
    ]
    shares = (("SuperPod", "10B", "5 %"), ("SuperPod", "50B", "11 %"), ("YARD", "12B", "9 %"))
    said += [
        Sentence(
            f"communication's share, {cluster} {model}, 8 GPUs",
            share,
            place,
            simulated=forecasts.communication_share(kept, base[cluster, f"ps-{model.lower()}"]),
        )
        for cluster, model, share in shares
    ]
    yield sentences(
        "PatrickStar figure 15: breakdown by optimization",
        [*said, Sentence("times of the parts", None, place)],
        kept.remark("patrickstar-figure15"),
        error_remark(asked, "ours"),
        *REMARKS,
    )
    yield forecasts.table15(kept)
    yield work_table(
        "PatrickStar figure 15: records by optimization", records(asked.results), _variant("osc", "static-partition")
    )


def _figure16(asked: FigureSpec) -> Iterator[PaperTable]:
    place = "section 8.2.4, of figure 16"
    said = (Sentence("with more GPUs", "superlinear", place), Sentence("points", None, place))
    kept, remarks = forecasts.speeds(asked)
    yield sentences("PatrickStar figure 16: one to eight GPUs", said, "No number is printed.", REMARKS[1])
    yield forecasts.scaling(kept, *remarks)


def _figure17(asked: FigureSpec) -> Iterator[PaperTable]:
    place = "section 8.3, of figure 17"
    kept = forecasts.kept17(asked)
    share = f"{100 * 7611.5 / 64 / A100_FP16_TFLOPS:.0f} %"
    total, profile = forecasts.total17(kept, "gpt3-175b", 64), forecasts.case17("gpt3-175b", 64).profile
    fits = forecasts.total17(kept, "gpt3-175b", 32) is not None
    fewest = SimulatedCell("fits on 32" if fits else "does not fit on 32", forecasts.case17("gpt3-175b", 32).profile)
    reached = f"{100 * total / 64 / A100_FP16_TFLOPS:.0f} %" if total else None
    said = (
        Sentence(
            "175B on 64 GPUs, Tflops in all", 7611.5, place, simulated=None if total is None else SimulatedCell(total, profile)
        ),
        Sentence(
            "of the peak",
            "38 %",
            place,
            share,
            "7611.5 / 64 of the data sheet's 312 Tflops",
            simulated=None if reached is None else SimulatedCell(reached, profile),
        ),
        Sentence("175B trains on as few GPUs as", 32, place, simulated=fewest),
        Sentence("batch a GPU", 8, place),
        Sentence("points", None, place),
    )
    yield sentences(
        "PatrickStar figure 17: several nodes of SuperPod",
        said,
        kept.remark("patrickstar-figure17"),
        error_remark(asked, "ours"),
        REMARKS[0],
    )
    yield forecasts.table17(kept)


MADE = {11: _figure11, 12: _figure12, 13: _figure13, 14: _figure14, 15: _figure15, 16: _figure16, 17: _figure17}


def tables(name: str, asked: FigureSpec) -> Iterator[PaperTable]:
    yield from MADE[int(name.removeprefix("patrickstar-figure"))](asked)
