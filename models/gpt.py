"""GPT-2 and GPT-3 shapes over transformers' GPT2LMHeadModel: the sizes of both papers and of the systems' papers.

Sources: GPT-2, Radford et al. 2019, table 2; GPT-3, Brown et al. 2020 (arXiv 2005.14165), table 2.1; Angel-PTM, table 4;
PatrickStar, table 2; Elixir, figure 8. GPT-3's alternating sparse attention is dense here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from models.family import Family, from_config
from models.shape import ModelShape
from models.weights import Constant, InitialWeights, Law, Normal, Rule

if TYPE_CHECKING:
    from torch import nn

INIT_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class GptShape(ModelShape):
    family: str = "gpt"
    vocab_size: int = 50257
    max_positions: int | None = 1024


def _gpt3(name: str, num_layers: int, hidden_size: int, num_heads: int, *, label: str, notes: str = "") -> GptShape:
    return GptShape(
        name=name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        ffn_size=4 * hidden_size,
        max_positions=2048,
        label=label,
        notes=notes,
    )


def _angel(
    size: str, num_layers: int, hidden_size: int, num_heads: int, *, ffn_size: int | None = None, notes: str = ""
) -> GptShape:
    return GptShape(
        name=f"angel-{size.lower()}",
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        ffn_size=ffn_size or 4 * hidden_size,
        max_positions=2048,
        label=f"Angel-PTM GPT3-{size}",
        notes=notes,
    )


def _patrickstar(size: str, num_layers: int, hidden_size: int, *, notes: str = "") -> GptShape:
    return GptShape(
        name=f"ps-{size.lower()}",
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=16,
        ffn_size=4 * hidden_size,
        vocab_size=50304,  # GPT-2's 50257 rounded up to what matrix units like; the paper prints none
        label=f"PatrickStar {size}",
        notes=notes,
    )


def _exchanged(printed: int, meant: int, other: str) -> str:
    return f"table 2 prints {printed} layers here and {meant} for {other}: exchanged, the label decides"


SIZES = (
    GptShape(
        name="gpt-tiny",
        num_layers=6,
        hidden_size=128,
        num_heads=4,
        ffn_size=512,
        vocab_size=384,  # 256 bytes and specials
        max_positions=128,
        seq_len=16,
        batch_size=2,
        notes="small enough for any machine, with model states well above activations",
    ),
    GptShape(name="gpt2", num_layers=12, hidden_size=768, num_heads=12, ffn_size=3072, label="GPT-2 117M"),
    GptShape(name="gpt2-medium", num_layers=24, hidden_size=1024, num_heads=16, ffn_size=4096, label="GPT-2 345M"),
    GptShape(name="gpt2-large", num_layers=36, hidden_size=1280, num_heads=20, ffn_size=5120, label="GPT-2 762M"),
    GptShape(name="gpt2-xl", num_layers=48, hidden_size=1600, num_heads=25, ffn_size=6400, label="GPT-2 1542M"),
    _gpt3("gpt3-125m", 12, 768, 12, label="GPT-3 Small"),
    _gpt3("gpt3-350m", 24, 1024, 16, label="GPT-3 Medium"),
    _gpt3("gpt3-760m", 24, 1536, 16, label="GPT-3 Large"),
    _gpt3("gpt3-1.3b", 24, 2048, 16, label="GPT-3 XL", notes="printed with 24 heads, which do not divide 2048: 16 of 128"),
    _gpt3("gpt3-2.7b", 32, 2560, 32, label="GPT-3 2.7B"),
    _gpt3("gpt3-6.7b", 32, 4096, 32, label="GPT-3 6.7B"),
    _gpt3("gpt3-13b", 40, 5120, 40, label="GPT-3 13B", notes="printed with width 5140, which 40 heads do not divide: 5120"),
    _gpt3("gpt3-175b", 96, 12288, 96, label="GPT-3 175B"),
    _angel("1.7B", 24, 2304, 24),
    _angel("13B", 40, 5120, 40, ffn_size=20506, notes="printed with width 5140, which 40 heads do not divide: 5120"),
    _angel("28B", 26, 8192, 128, notes="counts 21.4B by the shape of table 4"),
    _angel("30B", 64, 8192, 32, notes="counts 52.0B by the shape of table 4; its 36 heads do not divide the width 8192: 32"),
    _angel("55B", 68, 8192, 128),
    _angel("120B", 64, 12288, 96),
    _angel("175B", 70, 14336, 112),
    _patrickstar("1B", 20, 2048),
    _patrickstar("2B", 40, 2048),
    _patrickstar("4B", 64, 2304),
    _patrickstar("6B", 53, 3072),
    _patrickstar("8B", 72, 3072),
    _patrickstar("10B", 50, 4096, notes=_exchanged(78, 50, "15B")),
    _patrickstar("12B", 60, 4096, notes=_exchanged(90, 60, "18B")),
    _patrickstar("15B", 78, 4096, notes=_exchanged(50, 78, "10B")),
    _patrickstar("18B", 90, 4096, notes=_exchanged(60, 90, "12B")),
    _patrickstar("20B", 25, 8192),
    _patrickstar("30B", 37, 8192),
    _patrickstar("40B", 50, 8192),
    _patrickstar("50B", 62, 8192),
    _patrickstar("60B", 75, 8192),
    _patrickstar("68B", 66, 9120, notes="printed with width 9126, which 16 heads do not divide: 9120"),
    GptShape(
        name="gpt-20b",
        num_layers=24,
        hidden_size=8192,
        num_heads=64,
        ffn_size=32768,
        label="Elixir GPT 20B",
        notes="the paper prints no shape: this is the one of its authors' public benchmark",
    ),
)


def law(shape: ModelShape) -> Law:
    """GPT-2's: weights that write into the residual stream are scaled down by the square root of their number."""
    return (
        Rule(r"ln_\w+\.weight$", Constant(1.0)),
        Rule(r"\.bias$", Constant(0.0)),
        Rule(r"c_proj\.weight$", Normal(INIT_STD / math.sqrt(2 * max(1, shape.num_layers)))),
        Rule(r"\.weight$", Normal(INIT_STD)),
    )


def config_of(shape: GptShape) -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=shape.vocab_size,
        n_positions=shape.max_positions,
        n_embd=shape.hidden_size,
        n_layer=shape.num_layers,
        n_head=shape.num_heads,
        n_inner=shape.ffn_size,
        activation_function="gelu_pytorch_tanh",  # gelu_new by its fused kernel: the same function in one pass
        resid_pdrop=shape.dropout,
        embd_pdrop=shape.dropout,
        attn_pdrop=shape.dropout,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=shape.tied,
    )


def build(shape: GptShape) -> nn.Module:
    return from_config("GPT2LMHeadModel", config_of(shape))


def parameters(shape: GptShape) -> int:
    """Of `build`: token and position embeddings, per block two norms, attention and feed-forward with biases, a last norm."""
    width, inner = shape.hidden_size, shape.ffn_size or 4 * shape.hidden_size
    block = 4 * width + 4 * (width * width + width) + 2 * width * inner + inner + width
    table = shape.vocab_size * width
    return table * (1 if shape.tied else 2) + (shape.max_positions or 0) * width + shape.num_layers * block + 2 * width


FAMILY = Family(
    name="gpt",
    summary="GPT-2 and GPT-3 shapes, PatrickStar's and Elixir's GPTs, decoder-only, learned positions, GELU",
    sizes=SIZES,
    build=build,
    weights=lambda shape, seed: InitialWeights(law(shape), seed),
    parameters=parameters,
)
