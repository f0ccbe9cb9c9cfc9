"""T5-MoE: a T5 in which every second feed-forward is a mixture of experts, as Angel-PTM trains it.

Source: Angel-PTM, table 4 and section 6.4: 16 layers, width 1024, feed-forward 16384, 9 experts a GPU and mixture on 64 to
256 GPUs. By 16 layers a stack, and a mixture in every second block of each as in Switch (Fedus et al. 2022), 2304 experts are
1.24T parameters, which the paper calls 1.2T. Table 6 prints 1T on 64 GPUs and 10T on 576 without experts: 29 and 32 a GPU come
nearest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from models import t5
from models.family import Family, with_fused_attention
from models.mixture_shape import FROM_ZERO, MixtureFields
from models.weights import InitialWeights, Law, Normal, Rule

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class T5MoeShape(t5.T5Shape, MixtureFields):
    """experts: of the mixture in every second block of each stack, the second block first."""

    fixed: ClassVar[frozenset[str]] = t5.T5Shape.fixed | FROM_ZERO
    from_zero: ClassVar[frozenset[str]] = t5.T5Shape.from_zero | FROM_ZERO

    family: str = "t5-moe"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_mixtures(self.name)

    @property
    def stacks(self) -> tuple[list[int | None], list[int | None]]:
        """Experts block by block, None where there is no mixture: of the encoder, and of the decoder."""
        decoder = self.num_layers if self.decoder_layers is None else self.decoder_layers
        encoder, decoding = ([self.experts if n % 2 else None for n in range(count)] for count in (self.num_layers, decoder))
        return encoder, decoding


def _angel(size: str, *, each: int, ranks: int, label: str = "", notes: str = "") -> T5MoeShape:
    """each: experts of a mixture on a GPU. ranks: GPUs that have others each."""
    return T5MoeShape(
        name=f"t5-moe-{size}",
        num_layers=16,
        hidden_size=1024,
        num_heads=16,
        ffn_size=16384,
        experts=each * ranks,
        expert_ranks=ranks,
        label=label,
        notes=notes or f"{each} experts a GPU and mixture on {ranks} GPUs",
    )


SIZES = (
    T5MoeShape(
        name="t5-moe-tiny",
        num_layers=4,
        hidden_size=128,
        num_heads=4,
        head_size=32,
        ffn_size=512,
        experts=4,
        vocab_size=384,  # 256 bytes and specials
        seq_len=16,
        batch_size=2,
        notes="small enough for any machine, with model states well above activations",
    ),
    _angel("5.6b", each=9, ranks=1, notes="one GPU's share of figure 9, alone: 9 experts a mixture"),
    _angel(
        "10.4b", each=18, ranks=1, notes="two GPUs' share of figure 9: 18 experts a mixture, --set expert_ranks=2 divides them"
    ),
    _angel("0.31t", each=9, ranks=64, label="Angel-PTM figure 9, 64 GPUs"),
    _angel("0.62t", each=9, ranks=128, label="Angel-PTM figure 9, 128 GPUs"),
    _angel("1.24t", each=9, ranks=256, label="Angel-PTM T5-MoE-1.2T"),
    _angel(
        "1t",
        each=29,
        ranks=64,
        label="Angel-PTM T5-MoE-1T",
        notes="the paper prints no experts: 29 a GPU and mixture on 64 GPUs come nearest to 1T",
    ),
    _angel(
        "10t",
        each=32,
        ranks=576,
        label="Angel-PTM T5-MoE-10T",
        notes="the paper prints no experts: 32 a GPU and mixture on 576 GPUs come nearest to 10T",
    ),
)


def law(shape: T5MoeShape) -> Law:
    """T5's, of which an expert is a feed-forward; a gate keeps the size of what it is given."""
    factor, narrow = shape.init_factor, shape.init_factor * shape.hidden_size**-0.5
    return (
        Rule(r"experts\.\d+\.wo\.weight$", Normal(factor * (shape.ffn_size or 1) ** -0.5)),
        Rule(r"(gate|experts\.\d+\.wi(_[01])?)\.weight$", Normal(narrow)),
        *t5.law(shape),
    )


def build(shape: T5MoeShape) -> nn.Module:
    from models.mixture_models import T5WithMixtures

    return T5WithMixtures(with_fused_attention(t5.config_of(shape)), shape, *shape.stacks, tied=shape.tied)


def parameters(shape: T5MoeShape) -> int:
    """Of all ranks: the dense model's, and for a mixture its experts but one, and its gate."""
    width = shape.hidden_size
    expert = (3 if shape.gated else 2) * width * shape.ffn_size
    counts = [count for stack in shape.stacks for count in stack if count is not None]
    return t5.parameters(shape) + sum((count - 1) * expert + count * width for count in counts)


FAMILY = Family(
    name="t5-moe",
    summary="Angel-PTM's T5-MoEs: T5 with a mixture of experts for every second feed-forward, one expert a token",
    sizes=SIZES,
    build=build,
    weights=lambda shape, seed: InitialWeights(law(shape), seed),
    parameters=parameters,
)
