"""Angel-PTM's tables 1 (what a layer takes, as formulas) and 2 (sizes of the tensors of a layer of GPT-3).

Nothing is measured. Table 1's totals are summed from its rows and evaluated beside the bytes of the block that is built here;
table 2's sizes and counts are worked out from the shape of GPT3-175B in GPT-3's own paper, width 12288.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from harness.figures import FigureSpec
from harness.paper_table import ComputedCell, FigureCell, FigureColumn, PaperTable, PrintedCell, table
from models import registry as models_registry

SHOWS = {
    "angel-table1": "what a transformer layer takes: parameters, activations, optimizer",
    "angel-table2": "sizes of the tensors of one layer of GPT-3",
}
MIB = 1 << 20
SEQ_LEN = 2048
TOKENS = 16 * SEQ_LEN  # b s: what table 2's sizes of activations say


@dataclass(frozen=True)
class Footprint:
    """Bytes as coefficients. params, optims: of (d_m squared, d_m d_ffn, d_m). acts: of (b s d_m, b s d_ffn, b s)."""

    block: str
    layer: str
    params: tuple[int, int, int]
    acts: tuple[int, int, int]
    optims: tuple[int, int, int]


NONE = (0, 0, 0)
TABLE1 = (
    Footprint("Attn", "Linear(Q,K,V)", (12, 0, 0), (12, 0, 0), (36, 0, 0)),
    Footprint("Attn", "MatMul", NONE, (0, 0, 4), NONE),
    Footprint("Attn", "Scaled-MaskSoftmax", NONE, (0, 0, 4), NONE),
    Footprint("Attn", "MatMul", NONE, (4, 0, 0), NONE),
    Footprint("Attn", "Linear", (4, 0, 0), (4, 0, 0), (12, 0, 0)),
    Footprint("Attn", "Add", NONE, (4, 0, 0), NONE),
    Footprint("Attn", "LayerNorm", (0, 0, 4), (4, 0, 0), (0, 0, 12)),
    Footprint("FFN", "Linear", (0, 4, 0), (0, 4, 0), (0, 12, 0)),
    Footprint("FFN", "GeLU", NONE, (0, 4, 0), NONE),
    Footprint("FFN", "Linear", (0, 4, 0), (4, 0, 0), (0, 12, 0)),
    Footprint("FFN", "Add", NONE, (4, 0, 0), NONE),
    Footprint("FFN", "LayerNorm", (0, 0, 4), (4, 0, 0), (0, 0, 12)),
)
TOTAL = Footprint("Total", "", (16, 8, 0), (40, 8, 0), (48, 24, 0))
"""As the paper prints it: without what is of one factor alone."""
WEIGHTS, TOKEN = ("d_m^2", "d_m d_ffn", "d_m"), ("b s d_m", "b s d_ffn", "b s")

TABLE2 = {3072: 4, 2304: 6, 1152: 4, 768: 20, 576: 12, 288: 8, 0.375: 4, 0.046875: 6, 0.0234375: 4}
"""MB to how many."""


def summed(name: str) -> tuple[int, ...]:
    """Of all rows of table 1: params, acts or optims."""
    return tuple(map(sum, zip(*(getattr(row, name) for row in TABLE1), strict=True)))


def formula(coefficients: tuple[int, ...], names: tuple[str, ...]) -> str:
    return " + ".join(f"{factor} {name}" for factor, name in zip(coefficients, names, strict=True) if factor) or "-"


def evaluated(coefficients: tuple[int, ...], *, width: int, inner: int, tokens: int | None = None) -> int:
    """Bytes. tokens: b s; None: of parameters."""
    of_weights = (width * width, width * inner, width)
    factors = of_weights if tokens is None else (tokens * width, tokens * inner, tokens)
    return sum(factor * value for factor, value in zip(coefficients, factors, strict=True))


def block_parameters(model: str) -> int:
    """Of one block of the model that is built here, biases included."""
    shape = models_registry.resolve(model)
    more, less = (models_registry.parameter_count(replace(shape, num_layers=layers)) for layers in (2, 1))
    assert more is not None and less is not None
    return more - less


def tensor_sizes(*, width: int, inner: int, tokens: int) -> dict[float, tuple[int, str]]:
    """MiB of each tensor of a layer by table 1: how many, and what. Weights and gradients in 16 bit, master and two moments in
    32; activations and their gradients in 16 bit. A norm counts as one vector, and biases not at all, as in table 1.
    """
    square, wide = width * width, width * inner
    found = [
        (2 * tokens * inner, 4, "activations of the FFN's first Linear and GeLU, and gradients"),
        (4 * wide, 6, "masters and moments of the FFN's two matrices"),
        (2 * wide, 4, "the FFN's two matrices, and gradients"),
        (2 * tokens * width, 20, "the other ten activations, and gradients"),
        (4 * square, 12, "masters and moments of attention's four matrices"),
        (2 * square, 8, "attention's four matrices, and gradients"),
        (2 * tokens, 4, "the two activations of 4 b s, and gradients"),
        (4 * width, 6, "masters and moments of two norms"),
        (2 * width, 4, "two norms, and gradients"),
    ]
    return {nbytes / MIB: (count, what) for nbytes, count, what in found}


def tables(name: str, asked: FigureSpec) -> Iterator[PaperTable]:
    yield _table1() if name == "angel-table1" else _table2()


def _table1() -> PaperTable:
    def printed(row: Footprint) -> list[FigureCell]:
        texts = (formula(row.params, WEIGHTS), formula(row.acts, TOKEN), formula(row.optims, WEIGHTS))
        return [row.block, row.layer, *(PrintedCell(text, "table 1") for text in texts)]

    shape = models_registry.resolve("gpt3-175b")
    size = {"width": shape.hidden_size, "inner": shape.ffn_size or 0}
    params, acts, optims = (summed(part) for part in ("params", "acts", "optims"))
    rows: list[list[FigureCell]] = [[*printed(row), None, None, None] for row in TABLE1]
    rows.append(
        [*printed(TOTAL), *map(ComputedCell, (formula(params, WEIGHTS), formula(acts, TOKEN), formula(optims, WEIGHTS)))]
    )
    figures = (
        evaluated(TOTAL.params, **size), evaluated(TOTAL.acts, tokens=TOKENS, **size), evaluated(TOTAL.optims, **size)
    )  # fmt: skip
    rows.append(["GPT-3 175B", f"b s = {TOKENS:,}: bytes", None, None, None, *map(ComputedCell, figures)])
    own = block_parameters("gpt3-175b")
    rows.append(["gpt3-175b", "as built here: bytes", None, None, None, ComputedCell(4 * own), None, ComputedCell(12 * own)])
    columns = [FigureColumn("block"), FigureColumn("layer")]
    columns += [FigureColumn(f"{what} (B)", "paper") for what in ("params", "acts", "optims")]
    columns += [FigureColumn(f"{what}", "computed") for what in ("params", "acts", "optims")]
    return table(
        "Angel-PTM table 1: memory footprints of a transformer layer",
        columns,
        rows,
        "computed: the sum of the rows. The printed total leaves out what is of d_m or b s alone.",
        "params are 4 bytes a parameter, weights and gradients in 16 bit; optims 12, master and two moments in 32.",
        "The scores' rows are printed as 4 b s; the tensors of attention that is not fused have b x heads x s x s elements.",
        "As built here a block has biases and norms of two vectors, which the formulas have not.",
    )


def _table2() -> PaperTable:
    ours = tensor_sizes(width=12288, inner=49152, tokens=TOKENS)
    rows: list[list[FigureCell]] = []
    for size in sorted({*TABLE2, *ours}, reverse=True):
        count = TABLE2.get(size)
        mine, what = ours.get(size, (None, None))
        printed = [None, None] if count is None else [PrintedCell(size, "table 2"), PrintedCell(count, "table 2")]
        rows.append(
            [*printed, None if mine is None else ComputedCell(size), mine and ComputedCell(mine), what and ComputedCell(what)]
        )
    columns = (
        FigureColumn("MB", "paper"), FigureColumn("count", "paper"),
        FigureColumn("MiB", "computed"), FigureColumn("count", "computed"), FigureColumn("what", "computed"),
    )  # fmt: skip
    return table(
        "Angel-PTM table 2: tensor sizes within one layer of GPT-3",
        columns,
        rows,
        "computed: by table 1's rows for width 12288 (GPT-3 175B) and b s = 32,768 tokens, which 768 and 3072 MB say (16 "
        "sequences of 2048); the paper prints neither. Its table 4 has width 14336 for GPT3-175B: not of that.",
        "0.375 MB is what 2 bytes x 96 heads x 2048 positions take; 2 bytes x b s, as table 1 has it, are 0.0625 MB.",
    )
