"""OPT (Zhang et al. 2022, arXiv 2205.01068, table 1), over transformers' OPTForCausalLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from models.family import Family, from_config
from models.shape import ModelShape
from models.weights import Constant, InitialWeights, Law, Normal, Rule

if TYPE_CHECKING:
    from torch import nn

PADDING_TOKEN = 1


@dataclass(frozen=True, kw_only=True)
class OptShape(ModelShape):
    """embedding_size: width of the token embedding, projected to hidden_size and back; None means hidden_size.

    norm_first: LayerNorm before attention and feed-forward (all sizes but 350m) rather than after.
    """

    family: str = "opt"
    vocab_size: int = 50272
    max_positions: int | None = 2048
    embedding_size: int | None = None
    norm_first: bool = True


SIZES = (
    OptShape(
        name="opt-tiny",
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
    OptShape(name="opt-125m", num_layers=12, hidden_size=768, num_heads=12, ffn_size=3072),
    OptShape(
        name="opt-350m",
        num_layers=24,
        hidden_size=1024,
        num_heads=16,
        ffn_size=4096,
        embedding_size=512,
        norm_first=False,
        notes="as published: embedding of width 512, LayerNorm after each sub-layer, none at the end",
    ),
    OptShape(name="opt-1.3b", num_layers=24, hidden_size=2048, num_heads=32, ffn_size=8192),
    OptShape(name="opt-2.7b", num_layers=32, hidden_size=2560, num_heads=32, ffn_size=10240),
    OptShape(name="opt-6.7b", num_layers=32, hidden_size=4096, num_heads=32, ffn_size=16384),
    OptShape(name="opt-13b", num_layers=40, hidden_size=5120, num_heads=40, ffn_size=20480),
    OptShape(name="opt-30b", num_layers=48, hidden_size=7168, num_heads=56, ffn_size=28672),
    OptShape(name="opt-66b", num_layers=64, hidden_size=9216, num_heads=72, ffn_size=36864),
    OptShape(name="opt-175b", num_layers=96, hidden_size=12288, num_heads=96, ffn_size=49152),
)

LAW: Law = (
    Rule(r"layer_norm\.weight$", Constant(1.0)),
    Rule(r"\.bias$", Constant(0.0)),
    Rule(r"embed_tokens\.weight$", Normal(0.02, zero_row=PADDING_TOKEN)),
    Rule(r"\.weight$", Normal(0.02)),
)


def build(shape: OptShape) -> nn.Module:
    from transformers import OPTConfig

    config = OPTConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        ffn_dim=shape.ffn_size,
        max_position_embeddings=shape.max_positions,
        word_embed_proj_dim=shape.embedding_size or shape.hidden_size,
        do_layer_norm_before=shape.norm_first,
        dropout=shape.dropout,
        attention_dropout=shape.dropout,
        layerdrop=0.0,
        activation_function="relu",
        tie_word_embeddings=shape.tied,
        pad_token_id=PADDING_TOKEN,
    )
    return from_config("OPTForCausalLM", config)


def parameters(shape: OptShape) -> int:
    """Of `build`: embeddings (two positions more than are used), a projection each way where widths differ, blocks, a norm."""
    width, inner, narrow = shape.hidden_size, shape.ffn_size or 0, shape.embedding_size or shape.hidden_size
    block = 4 * width + 4 * (width * width + width) + 2 * width * inner + inner + width
    tables = shape.vocab_size * narrow * (1 if shape.tied else 2) + ((shape.max_positions or 0) + 2) * width
    projections = 0 if narrow == width else 2 * narrow * width
    return tables + projections + shape.num_layers * block + (2 * width if shape.norm_first else 0)


FAMILY = Family(
    name="opt",
    summary="OPT 125M to 175B, decoder-only, learned positions, ReLU",
    sizes=SIZES,
    build=build,
    weights=lambda shape, seed: InitialWeights(LAW, seed),
    parameters=parameters,
)
