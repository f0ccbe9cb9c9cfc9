"""T5 over transformers' T5ForConditionalGeneration: the published sizes and Angel-PTM's.

Sources: Raffel et al. 2020 (arXiv 1910.10683), section 3.1.2 and the published checkpoints; Angel-PTM, table 4. Angel's
T5-MoE is in `models.t5_moe`. Attention is torch's fused one; the learned relative bias reaches it as a mask
to be added, which keeps torch from its fastest kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from models.family import Family, from_config
from models.shape import ModelShape, ObjectiveName
from models.weights import Constant, InitialWeights, Law, Normal, Rule

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class T5Shape(ModelShape):
    """num_layers: blocks of the encoder, and of the decoder unless decoder_layers says otherwise.

    head_size: width of a head (the library's d_kv); num_heads x head_size need not be hidden_size.
    gated: feed-forward of T5 v1.1, GELU(x a) * (x b), three matrices instead of two; otherwise ReLU(x a).
    relative_buckets, relative_distance: of the learned position bias; distances from relative_distance on share a bucket.
    init_factor: multiplies the spread of every initial weight. tied: also scales logits by hidden_size ** -0.5.
    """

    heads_divide_width: ClassVar[bool] = False

    family: str = "t5"
    objective: ObjectiveName = "seq2seq"
    vocab_size: int = 32128
    max_positions: int | None = None
    seq_len: int = 512
    num_heads: int
    ffn_size: int
    decoder_layers: int | None = None
    head_size: int = 64
    gated: bool = False
    relative_buckets: int = 32
    relative_distance: int = 128
    init_factor: float = 1.0


_PER_STACK = "its layers taken as those of each stack"

SIZES = (
    T5Shape(
        name="t5-tiny",
        num_layers=3,
        hidden_size=128,
        num_heads=4,
        head_size=32,
        ffn_size=512,
        vocab_size=384,  # 256 bytes and specials
        seq_len=16,
        batch_size=2,
        notes="small enough for any machine, with model states well above activations",
    ),
    T5Shape(name="t5-small", num_layers=6, hidden_size=512, num_heads=8, ffn_size=2048, label="T5 Small"),
    T5Shape(name="t5-base", num_layers=12, hidden_size=768, num_heads=12, ffn_size=3072, label="T5 Base"),
    T5Shape(name="t5-large", num_layers=24, hidden_size=1024, num_heads=16, ffn_size=4096, label="T5 Large"),
    T5Shape(name="t5-3b", num_layers=24, hidden_size=1024, num_heads=32, head_size=128, ffn_size=16384, label="T5 3B"),
    T5Shape(name="t5-11b", num_layers=24, hidden_size=1024, num_heads=128, head_size=128, ffn_size=65536, label="T5 11B"),
    T5Shape(
        name="t5-1.4b",
        num_layers=16,
        hidden_size=1024,
        num_heads=16,
        ffn_size=16384,
        label="Angel-PTM T5-1.4B",
        notes=_PER_STACK,
    ),
    T5Shape(
        name="t5-27b",
        num_layers=28,
        hidden_size=4096,
        num_heads=64,
        ffn_size=16384,
        label="Angel-PTM T5-27B",
        notes=f"counts 13.3B by the shape of table 4, {_PER_STACK}",
    ),
    T5Shape(
        name="t5-58b",
        num_layers=60,
        hidden_size=4096,
        num_heads=64,
        ffn_size=16384,
        label="Angel-PTM T5-58B",
        notes=f"counts 28.3B by the shape of table 4, {_PER_STACK}",
    ),
)


def law(shape: T5Shape) -> Law:
    """T5's: each product keeps the size of what it is given, and attention has no scale of its own to need one."""
    factor, narrow = shape.init_factor, shape.init_factor * shape.hidden_size**-0.5
    return (
        Rule(r"layer_norm\.weight$", Constant(factor)),
        Rule(r"(shared|lm_head)\.weight$", Normal(factor)),
        Rule(r"DenseReluDense\.wo\.weight$", Normal(factor * shape.ffn_size**-0.5)),
        Rule(r"Attention\.q\.weight$", Normal(factor * (shape.hidden_size * shape.head_size) ** -0.5)),
        Rule(r"Attention\.o\.weight$", Normal(factor * (shape.num_heads * shape.head_size) ** -0.5)),
        Rule(r"(Attention\.(k|v|relative_attention_bias)|DenseReluDense\.wi(_[01])?)\.weight$", Normal(narrow)),
    )


def config_of(shape: T5Shape) -> Any:
    from transformers import T5Config

    from models.objective import START_TOKEN

    return T5Config(
        vocab_size=shape.vocab_size,
        d_model=shape.hidden_size,
        d_kv=shape.head_size,
        d_ff=shape.ffn_size,
        num_layers=shape.num_layers,
        num_decoder_layers=shape.decoder_layers,
        num_heads=shape.num_heads,
        relative_attention_num_buckets=shape.relative_buckets,
        relative_attention_max_distance=shape.relative_distance,
        dropout_rate=shape.dropout,
        initializer_factor=shape.init_factor,
        feed_forward_proj="gated-gelu_pytorch_tanh" if shape.gated else "relu",
        tie_word_embeddings=shape.tied,
        pad_token_id=START_TOKEN,
        decoder_start_token_id=START_TOKEN,
    )


def build(shape: T5Shape) -> nn.Module:
    from torch import nn

    model: Any = from_config("T5ForConditionalGeneration", config_of(shape))
    if not shape.tied:
        # The library reads the setting as a matter of scale alone and ties whatever it says.
        model.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        model._tied_weights_keys = {k: v for k, v in model._tied_weights_keys.items() if k != "lm_head.weight"}
        model.all_tied_weights_keys = model.get_expanded_tied_weights_keys()
    return model


def parameters(shape: T5Shape) -> int:
    """Of `build`: one embedding, two stacks without biases, the first layer of each with the position bias."""
    width, inner = shape.hidden_size, shape.num_heads * shape.head_size
    attention = 4 * width * inner + width  # with its norm, as below
    feed_forward = (3 if shape.gated else 2) * width * shape.ffn_size + width
    encoder, decoder = shape.num_layers, shape.num_layers if shape.decoder_layers is None else shape.decoder_layers
    layers = encoder * (attention + feed_forward) + decoder * (2 * attention + feed_forward)
    bias = shape.relative_buckets * shape.num_heads
    tables = shape.vocab_size * width * (1 if shape.tied else 2)
    return tables + layers + bias * ((encoder > 0) + (decoder > 0)) + 2 * width


FAMILY = Family(
    name="t5",
    summary="T5 and Angel-PTM's T5s, encoder and decoder, one text from another, relative positions, ReLU or gated GELU",
    sizes=SIZES,
    build=build,
    weights=lambda shape, seed: InitialWeights(law(shape), seed),
    parameters=parameters,
)
