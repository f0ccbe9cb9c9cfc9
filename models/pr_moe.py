"""PR-MoE: a GPT with a mixture in every second block, a pyramid of experts, and a dense branch beside each mixture.

Sources: DeepSpeed-MoE, Rajbhandari et al. 2022 (arXiv 2201.05596), section 4.1: the last two mixtures have twice the experts,
and each token passes a dense feed-forward and one expert, joined by a learned two-way softmax. Elixir, figure 9, trains it and
prints no shape: sizes are this project's. Over transformers' GPT-2 blocks, otherwise as `models.gpt` builds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from models import gpt
from models.family import Family, with_fused_attention
from models.mixture_shape import FROM_ZERO, MixtureFields
from models.weights import InitialWeights

if TYPE_CHECKING:
    from torch import nn

WIDER = 2  # mixtures at the end that have twice the experts


@dataclass(frozen=True, kw_only=True)
class PrMoeShape(gpt.GptShape, MixtureFields):
    """experts: of all mixtures but the last two, which have twice as many."""

    fixed: ClassVar[frozenset[str]] = gpt.GptShape.fixed | FROM_ZERO
    from_zero: ClassVar[frozenset[str]] = gpt.GptShape.from_zero | FROM_ZERO

    family: str = "pr-moe"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_mixtures(self.name)

    def experts_of(self, block: int) -> int | None:
        """Of the mixture in that block, counted from 0; None for one that has none."""
        if block % 2 == 0:
            return None
        mixtures, mine = self.num_layers // 2, block // 2
        return self.experts * (2 if mine >= mixtures - WIDER else 1)


def _sized(size: str, num_layers: int, hidden_size: int, num_heads: int, *, experts: int, twin: str) -> PrMoeShape:
    return PrMoeShape(
        name=f"pr-moe-{size}",
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        ffn_size=4 * hidden_size,
        experts=experts,
        max_positions=2048,
        notes=f"sizes are ours; within 2% of the parameters of {twin}, which is dense",
    )


SIZES = (
    PrMoeShape(
        name="pr-moe-tiny",
        num_layers=6,
        hidden_size=128,
        num_heads=4,
        ffn_size=512,
        experts=4,
        vocab_size=384,  # 256 bytes and specials
        max_positions=128,
        seq_len=16,
        batch_size=2,
        notes="small enough for any machine, with model states well above activations",
    ),
    _sized("1.3b", 24, 1024, 16, experts=8, twin="gpt3-1.3b"),
    _sized("8.2b", 22, 2048, 16, experts=16, twin="ps-8b"),
)


def build(shape: PrMoeShape) -> nn.Module:
    from models.mixture_models import GptWithMixtures

    config = with_fused_attention(gpt.config_of(shape))
    return GptWithMixtures(config, shape, [shape.experts_of(block) for block in range(shape.num_layers)], tied=shape.tied)


def parameters(shape: PrMoeShape) -> int:
    """Of all ranks: the dense model's, and for a mixture its experts, its gate and the two-way softmax."""
    width, inner = shape.hidden_size, shape.ffn_size or 4 * shape.hidden_size
    expert = 2 * width * inner + inner + width
    counts = [shape.experts_of(block) for block in range(shape.num_layers)]
    return gpt.parameters(shape) + sum(n * (expert + width) + 2 * width + 2 for n in counts if n is not None)


FAMILY = Family(
    name="pr-moe",
    summary="GPTs with a mixture of experts in every second block, a dense branch beside it, twice the experts at the end",
    sizes=SIZES,
    build=build,
    weights=lambda shape, seed: InitialWeights(gpt.law(shape), seed),
    parameters=parameters,
)
