"""Mixtral over transformers' MixtralForCausalLM: Mistral's mixture of eight experts, and one that suits a single device.

Source: Jiang et al. 2024 (arXiv 2401.04088), table 1. The model is transformers' own: the experts of a layer are one tensor, a
token goes to two of them, none is dropped, and all ranks have all experts. The load-balancing loss, which transformers leaves
out unless asked, is not in the loss here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from models.family import Family, from_config
from models.shape import ModelShape
from models.weights import Constant, InitialWeights, Law, Normal, Rule

if TYPE_CHECKING:
    from torch import nn

INIT_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class MixtralShape(ModelShape):
    """key_value_heads: each is shared by as many query heads. experts: of a layer; a token goes to `choices` of them."""

    family: str = "mixtral"
    vocab_size: int = 32000
    max_positions: int | None = 32768
    seq_len: int = 4096
    batch_size: int = 4
    tied: bool = False
    key_value_heads: int = 8
    experts: int = 8
    choices: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_heads is not None and self.num_heads % self.key_value_heads:
            raise ValueError(
                f"{self.name}: key_value_heads {self.key_value_heads} does not divide num_heads {self.num_heads}: set it to a "
                "number that does"
            )
        if self.choices > self.experts:
            raise ValueError(f"{self.name}: choices {self.choices} are more than its experts ({self.experts})")


SIZES = (
    MixtralShape(
        name="mixtral-tiny",
        num_layers=6,
        hidden_size=128,
        num_heads=4,
        key_value_heads=2,
        ffn_size=256,
        experts=4,
        vocab_size=384,  # 256 bytes and specials
        max_positions=128,
        seq_len=16,
        batch_size=2,
        tied=True,
        notes="small enough for any machine, with model states well above activations",
    ),
    MixtralShape(
        name="mixtral-9b",
        num_layers=6,
        hidden_size=4096,
        num_heads=32,
        ffn_size=14336,
        notes="the first 6 layers of mixtral-8x7b: states of 117 GiB at 14 bytes a parameter",
    ),
    MixtralShape(name="mixtral-8x7b", num_layers=32, hidden_size=4096, num_heads=32, ffn_size=14336, label="Mixtral 8x7B"),
)

LAW: Law = (Rule(r"norm\.weight$", Constant(1.0)), Rule(r"", Normal(INIT_STD)))


def build(shape: MixtralShape) -> nn.Module:
    from transformers import MixtralConfig

    config = MixtralConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.key_value_heads,
        max_position_embeddings=shape.max_positions,
        num_local_experts=shape.experts,
        num_experts_per_tok=shape.choices,
        attention_dropout=shape.dropout,
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    return from_config("MixtralForCausalLM", config)


def parameters(shape: MixtralShape) -> int:
    """Of `build`: embedding and head, per layer two norms, attention without biases, a gate and gated experts, a last norm."""
    width, heads = shape.hidden_size, shape.num_heads or 1
    attention = 2 * width * width + 2 * width * (width // heads) * shape.key_value_heads
    layer = attention + 2 * width + shape.experts * (width + 3 * width * (shape.ffn_size or 0))
    return shape.vocab_size * width * (1 if shape.tied else 2) + shape.num_layers * layer + width


FAMILY = Family(
    name="mixtral",
    summary="Mixtral 8x7B, and its first layers: two experts of eight a token, rotary positions, gated SiLU",
    sizes=SIZES,
    build=build,
    weights=lambda shape, seed: InitialWeights(LAW, seed),
    parameters=parameters,
)
