"""Qwen3-MoE over transformers' Qwen3MoeForCausalLM: Qwen3-30B-A3B, of many small experts.

Source: Qwen3 technical report (arXiv 2505.09388), table 2, and the model's published configuration. As Mixtral's here: the
experts of a layer are one tensor, none of a token's eight is dropped, all ranks have all experts, and the load-balancing loss
is not in the loss. Heads have a size of their own, and a norm for queries and for keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from models.family import Family, from_config
from models.mixtral import LAW, MixtralShape
from models.weights import InitialWeights

if TYPE_CHECKING:
    from torch import nn

ROTATION = 1e6  # the base of rotary positions


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeShape(MixtralShape):
    """ffn_size: of an expert. head_size: of a query, a key and a value, whatever the width."""

    family: str = "qwen3-moe"
    vocab_size: int = 151936
    max_positions: int | None = 40960
    key_value_heads: int = 4
    head_size: int = 128
    experts: int = 128
    choices: int = 8


SIZES = (
    Qwen3MoeShape(
        name="qwen3-moe-tiny",
        num_layers=6,
        hidden_size=128,
        num_heads=4,
        key_value_heads=2,
        ffn_size=128,
        experts=8,
        choices=2,
        vocab_size=384,  # 256 bytes and specials
        max_positions=128,
        seq_len=16,
        batch_size=2,
        notes="small enough for any machine, with model states well above activations",
    ),
    Qwen3MoeShape(name="qwen3-30b-a3b", num_layers=48, hidden_size=2048, num_heads=32, ffn_size=768, label="Qwen3-30B-A3B"),
)


def build(shape: Qwen3MoeShape) -> nn.Module:
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        moe_intermediate_size=shape.ffn_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.key_value_heads,
        head_dim=shape.head_size,
        max_position_embeddings=shape.max_positions,
        num_experts=shape.experts,
        num_experts_per_tok=shape.choices,
        norm_topk_prob=True,
        attention_dropout=shape.dropout,
        rope_parameters={"rope_type": "default", "rope_theta": ROTATION},
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    return from_config("Qwen3MoeForCausalLM", config)


def parameters(shape: Qwen3MoeShape) -> int:
    """Of `build`: embedding and head, per layer two norms, attention with two norms of a head, a gate and gated experts, a last
    norm.
    """
    width, size = shape.hidden_size, shape.head_size
    attention = 2 * width * size * ((shape.num_heads or 1) + shape.key_value_heads) + 2 * size
    layer = attention + 2 * width + shape.experts * (width + 3 * width * (shape.ffn_size or 0))
    return shape.vocab_size * width * (1 if shape.tied else 2) + shape.num_layers * layer + width


FAMILY = Family(
    name="qwen3-moe",
    summary="Qwen3-30B-A3B: eight experts of 128 a token in every layer, rotary positions, gated SiLU",
    sizes=SIZES,
    build=build,
    weights=lambda shape, seed: InitialWeights(LAW, seed),
    parameters=parameters,
)
