"""PatrickStar's figures 11 to 17: throughput, breakdowns, scaling. The bars are images; what the text says of them is here."""

from __future__ import annotations

from collections.abc import Iterator

from harness.figures import FigureSpec
from harness.paper_table import PaperTable, SimulatedCell
from paper_figures.kept import KeptForecasts, ask_all, simulated
from paper_figures.patrickstar_scale import BATCHES, PRODUCTS, SUPERPOD, YARD, Cluster, case, cases, tflops
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
GPUS = 8
REMARKS = (
    "The other points are in an image alone.",
    f"simulated: {PRODUCTS} operations a parameter and token, the better of batches {' and '.join(map(str, BATCHES))} a GPU.",
)
A100_FP16_TFLOPS = 312.0  # the data sheet's


def _figure11() -> PaperTable:
    place = "section 8.2.2, of figure 11"
    said = (
        Sentence("PatrickStar beside PyTorch, 1B", "similar", place),
        Sentence("bars of both clusters, batches", None, place),
    )
    note = "The 47 and 33 Tflops of section 4 are ZeRO-Offload's, at 1B and 4B, and not of this figure."
    return sentences("PatrickStar figure 11: one GPU", said, "The bars are in an image alone.", note)


def most_tflops(kept: KeptForecasts, cluster: Cluster, model: str) -> float | None:
    """Of eight GPUs together under PatrickStar, with the better of figure 10's batches. None: none fits, or none is kept."""
    asked = [case(cluster, "PatrickStar", model, GPUS, batch) for batch in BATCHES]
    seen = [(each, kept.of(each)) for each in asked]
    speeds = [GPUS * tflops(each, one.step_s) for each, one in seen if one is not None and one.step_s is not None]
    return max(speeds, default=None)


def _simulated(cluster: Cluster, small: str, large: str) -> tuple[list[SimulatedCell | None], str]:
    """Tflops of a small model, of a large one, and the share; and the remark."""
    kept = simulated("patrickstar-figure10", list(cases()), fresh=False, ask=ask_all)
    speeds = [most_tflops(kept, cluster, model) for model in (small, large)]
    cells = [None if speed is None else SimulatedCell(speed, cluster.profile) for speed in speeds]
    share = f"{100 * speeds[1] / speeds[0]:.0f} %" if speeds[0] and speeds[1] else None
    return [*cells, None if share is None else SimulatedCell(share, cluster.profile)], kept.remark("patrickstar-figure10")


def _figure12() -> PaperTable:
    place = "section 8.2.3, of figure 12"
    (small, large, share), remark = _simulated(YARD, "ps-1b", "ps-18b")
    said = (
        Sentence("over PyTorch, 1B, 8 GPUs", "1.37x", place),
        Sentence("over PyTorch, 1B, 1, 2 and 4 GPUs", "similar", place),
        Sentence("largest batch, 1B, 8 GPUs: PyTorch", 4, place),
        Sentence("largest batch, 1B, 8 GPUs: PatrickStar", 64, place),
        Sentence("over DeepSpeed-DP, least", "1.08x", place),
        Sentence("over DeepSpeed-DP, most", "1.47x", place),
        Sentence("over DeepSpeed-DP, on average", "1.23x", place),
        Sentence("1B on 8 GPUs, Tflops in all", 444, place, simulated=small),
        Sentence("18B on 8 GPUs, Tflops in all", 419, place, simulated=large),
        Sentence("18B beside 1B", "94 %", place, f"{100 * 419 / 444:.0f} %", "419 / 444", simulated=share),
        Sentence("points", None, place),
    )
    return sentences("PatrickStar figure 12: several GPUs of YARD", said, remark, *REMARKS)


def _figure13() -> PaperTable:
    place = "section 8.2.3, of figure 13"
    (small, large, share), remark = _simulated(SUPERPOD, "ps-6b", "ps-68b")
    said = (
        Sentence("over DeepSpeed, least", "1.07x", place),
        Sentence("over DeepSpeed, most", "2.43x", place),
        Sentence("over DeepSpeed, on average", "1.53x", place),
        Sentence("6B on 8 GPUs, Tflops in all", 1180, place, simulated=small),
        Sentence("68B on 8 GPUs, Tflops in all", 857, place, simulated=large),
        Sentence("68B beside 6B", "73 %", place, f"{100 * 857 / 1180:.0f} %", "857 / 1180", simulated=share),
        Sentence("points", None, place),
    )
    return sentences("PatrickStar figure 13: several GPUs of SuperPod", said, remark, *REMARKS)


def _figure14() -> PaperTable:
    place = "section 8.2.4, of figure 14"
    speeds = (
        ("4B", "1.4x", "1.3x"),
        ("10B", "1.5x", "1.4x"),
        ("12B", "1.3x", "1.1x"),
        ("20B", "1.25x", None),
        ("30B", "1.25x", None),
    )
    shorter = (("4B", "54 %"), ("10B", "50 %"), ("12B", "50 %"), ("20B", "51 %"), ("30B", "55 %"))
    said = [Sentence(f"{model}: over SpongeBob", faster, place) for model, faster, _ in speeds]
    said += [Sentence(f"{model}: over DeepSpeed", faster or "out of memory", place) for model, _, faster in speeds]
    said += [Sentence(f"{model}: communication shorter than SpongeBob's by", share, place) for model, share in shorter]
    return sentences(
        "PatrickStar figure 14: breakdown on 8 GPUs of HAI-PCIe",
        [*said, Sentence("times of the parts, batches", None, place)],
        "Times and batches are in an image alone.",
    )


def _figure15() -> PaperTable:
    place = "section 8.2.4, of figure 15"
    said = (
        Sentence("base over static partition, SuperPod 10B, 8 GPUs", "6.9x", place),
        Sentence("base over optimizer on the CPU, YARD 12B, 8 GPUs", "1.3x", place),
        Sentence("communication's share, SuperPod 10B, 8 GPUs", "5 %", place),
        Sentence("communication's share, SuperPod 50B, 8 GPUs", "11 %", place),
        Sentence("communication's share, YARD 12B, 8 GPUs", "9 %", place),
        Sentence("times of the parts", None, place),
    )
    return sentences("PatrickStar figure 15: breakdown by optimization", said, "Times are in an image alone.")


def _figure16() -> PaperTable:
    place = "section 8.2.4, of figure 16"
    said = (Sentence("with more GPUs", "superlinear", place), Sentence("points", None, place))
    return sentences("PatrickStar figure 16: one to eight GPUs", said, "No number is printed.")


def _figure17() -> PaperTable:
    place = "section 8.3, of figure 17"
    share = f"{100 * 7611.5 / 64 / A100_FP16_TFLOPS:.0f} %"
    said = (
        Sentence("175B on 64 GPUs, Tflops in all", 7611.5, place),
        Sentence("of the peak", "38 %", place, share, "7611.5 / 64 of the data sheet's 312 Tflops"),
        Sentence("175B trains on as few GPUs as", 32, place),
        Sentence("batch a GPU", 8, place),
        Sentence("points", None, place),
    )
    return sentences("PatrickStar figure 17: several nodes of SuperPod", said, "Points are in an image alone.")


MADE = {11: _figure11, 12: _figure12, 13: _figure13, 14: _figure14, 15: _figure15, 16: _figure16, 17: _figure17}


def tables(name: str, asked: FigureSpec) -> Iterator[PaperTable]:
    yield MADE[int(name.removeprefix("patrickstar-figure"))]()
