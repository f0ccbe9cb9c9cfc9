"""ALBERT over transformers' AlbertForMaskedLM: an encoder whose layers share their weights.

Source: Lan et al. 2020 (arXiv 1909.11942), table 1. None of the systems' papers trains one; it is here because a unit that
is called many times a step is what offloading most easily gets wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from models.bert import INIT_STD, PADDING_TOKEN, encoder_layer, share_head_bias
from models.family import Family, from_config
from models.shape import ModelShape, ObjectiveName
from models.weights import Constant, InitialWeights, Law, Normal, Rule

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class AlbertShape(ModelShape):
    """num_layers: applications of a layer group. num_groups: groups with weights of their own, each applied in a row.

    layers_per_group: layers, each with its own weights, that one application runs through.
    embedding_size: width of the token embedding, projected to hidden_size and back.
    token_types: kinds of sentence that have an embedding; all tokens here are of the first.
    """

    family: str = "albert"
    objective: ObjectiveName = "masked"
    vocab_size: int = 30000
    max_positions: int | None = 512
    seq_len: int = 512
    embedding_size: int = 128
    num_groups: int = 1
    layers_per_group: int = 1
    token_types: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_groups > self.num_layers:
            raise ValueError(
                f"{self.name}: num_layers {self.num_layers} leaves some of num_groups {self.num_groups} unused: "
                f"set num_groups to at most {self.num_layers}"
            )


SIZES = (
    AlbertShape(
        name="albert-tiny",
        num_layers=6,
        num_groups=3,
        hidden_size=128,
        num_heads=4,
        ffn_size=512,
        vocab_size=384,  # 256 bytes and specials
        max_positions=128,
        seq_len=16,
        batch_size=2,
        notes="small enough for any machine; three groups, twice each, for model states well above activations",
    ),
    AlbertShape(name="albert-base", num_layers=12, hidden_size=768, num_heads=12, ffn_size=3072, label="ALBERT base"),
    AlbertShape(name="albert-large", num_layers=24, hidden_size=1024, num_heads=16, ffn_size=4096, label="ALBERT large"),
    AlbertShape(name="albert-xlarge", num_layers=24, hidden_size=2048, num_heads=16, ffn_size=8192, label="ALBERT xlarge"),
    AlbertShape(name="albert-xxlarge", num_layers=12, hidden_size=4096, num_heads=64, ffn_size=16384, label="ALBERT xxlarge"),
)

LAW: Law = (
    Rule(r"(LayerNorm|layer_norm)\.weight$", Constant(1.0)),
    Rule(r"\.bias$", Constant(0.0)),
    Rule(r"word_embeddings\.weight$", Normal(INIT_STD, zero_row=PADDING_TOKEN)),
    Rule(r"\.weight$", Normal(INIT_STD)),
)


def build(shape: AlbertShape) -> nn.Module:
    from transformers import AlbertConfig

    config = AlbertConfig(
        vocab_size=shape.vocab_size,
        embedding_size=shape.embedding_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_hidden_groups=shape.num_groups,
        inner_group_num=shape.layers_per_group,
        num_attention_heads=shape.num_heads,
        intermediate_size=shape.ffn_size,
        max_position_embeddings=shape.max_positions,
        type_vocab_size=shape.token_types,
        hidden_dropout_prob=shape.dropout,
        attention_probs_dropout_prob=shape.dropout,
        classifier_dropout_prob=shape.dropout,
        hidden_act="gelu_pytorch_tanh",
        tie_word_embeddings=shape.tied,
        pad_token_id=PADDING_TOKEN,
    )
    model: Any = from_config("AlbertForMaskedLM", config)
    share_head_bias(model.predictions)
    return model


def parameters(shape: AlbertShape) -> int:
    """Of `build`: narrow embeddings with a norm, their projection, one layer for each of a group's, and the head."""
    width, narrow = shape.hidden_size, shape.embedding_size
    embeddings = (shape.vocab_size + (shape.max_positions or 0) + shape.token_types) * narrow + 2 * narrow
    layers = shape.num_groups * shape.layers_per_group * encoder_layer(width, shape.ffn_size or 0)
    head = width * narrow + narrow + 2 * narrow + shape.vocab_size + (0 if shape.tied else shape.vocab_size * narrow)
    return embeddings + narrow * width + width + layers + head


FAMILY = Family(
    name="albert",
    summary="ALBERT, a bidirectional encoder that runs one layer many times, masked tokens, learned positions, GELU",
    sizes=SIZES,
    build=build,
    weights=lambda shape, seed: InitialWeights(LAW, seed),
    parameters=parameters,
)
