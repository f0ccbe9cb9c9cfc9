"""BERT over transformers' BertForMaskedLM: the published sizes and H3T's.

Sources: Devlin et al. 2019 (arXiv 1810.04805), section 3; H3T, table 2, whose shapes are those of T5's encoder and
decoder stacked on each other (1.8B, 6B, 13B) and of GPT-3 (100B).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from models.family import Family, from_config
from models.shape import ModelShape, ObjectiveName
from models.weights import Constant, InitialWeights, Law, Normal, Rule

if TYPE_CHECKING:
    from torch import nn

INIT_STD = 0.02
PADDING_TOKEN = 0


@dataclass(frozen=True, kw_only=True)
class BertShape(ModelShape):
    """token_types: kinds of sentence that have an embedding; all tokens here are of the first."""

    family: str = "bert"
    objective: ObjectiveName = "masked"
    vocab_size: int = 30522
    max_positions: int | None = 512
    seq_len: int = 512
    token_types: int = 2


def _h3t(size: str, num_layers: int, hidden_size: int, ffn_size: int, num_heads: int) -> BertShape:
    return BertShape(
        name=f"bert-{size.lower()}",
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        ffn_size=ffn_size,
        label=f"H3T BERT-{size}",
    )


SIZES = (
    BertShape(
        name="bert-tiny",
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
    BertShape(name="bert-base", num_layers=12, hidden_size=768, num_heads=12, ffn_size=3072, label="BERT base"),
    BertShape(name="bert-large", num_layers=24, hidden_size=1024, num_heads=16, ffn_size=4096, label="BERT large"),
    _h3t("1.8B", 48, 1024, 16384, 32),
    _h3t("6B", 48, 1024, 65536, 128),
    _h3t("13B", 48, 2048, 65536, 128),
    _h3t("100B", 56, 12288, 49152, 96),
)

LAW: Law = (
    Rule(r"LayerNorm\.weight$", Constant(1.0)),
    Rule(r"\.bias$", Constant(0.0)),
    Rule(r"word_embeddings\.weight$", Normal(INIT_STD, zero_row=PADDING_TOKEN)),
    Rule(r"\.weight$", Normal(INIT_STD)),
)


def build(shape: BertShape) -> nn.Module:
    from transformers import BertConfig

    config = BertConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        intermediate_size=shape.ffn_size,
        max_position_embeddings=shape.max_positions,
        type_vocab_size=shape.token_types,
        hidden_dropout_prob=shape.dropout,
        attention_probs_dropout_prob=shape.dropout,
        hidden_act="gelu",
        tie_word_embeddings=shape.tied,
        pad_token_id=PADDING_TOKEN,
    )
    model: Any = from_config("BertForMaskedLM", config)
    share_head_bias(model.cls.predictions)
    return model


def share_head_bias(head: Any) -> None:
    """Of the head's two biases only the decoder's is used; the library ties them where it ties the weights, here always.

    head: transformers' masked-language-model head of BERT or ALBERT.
    """
    head.bias = head.decoder.bias


def encoder_layer(width: int, inner: int) -> int:
    """Parameters: attention's four matrices, two of the feed-forward, with biases, and two norms."""
    return 4 * (width * width + width) + 2 * width * inner + inner + width + 4 * width


def parameters(shape: BertShape) -> int:
    """Of `build`: embeddings with a norm, layers, and a head of one matrix, a norm and a bias over the tied table."""
    width = shape.hidden_size
    embeddings = (shape.vocab_size + (shape.max_positions or 0) + shape.token_types) * width + 2 * width
    head = width * width + width + 2 * width + shape.vocab_size + (0 if shape.tied else shape.vocab_size * width)
    return embeddings + shape.num_layers * encoder_layer(width, shape.ffn_size or 0) + head


FAMILY = Family(
    name="bert",
    summary="BERT and H3T's BERTs up to 100B, bidirectional encoder, masked tokens, learned positions, GELU",
    sizes=SIZES,
    build=build,
    weights=lambda shape, seed: InitialWeights(LAW, seed),
    parameters=parameters,
)
