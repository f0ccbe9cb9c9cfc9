"""The one count of floating-point operations, and every TFLOPS figure made from it.

The count runs the model's own forward on the meta device, where no arithmetic is done and no memory used, and adds up
2 m n k for each matrix product it sees. So it holds for any architecture, and counts what is really multiplied: the
output head, projections, both products of attention; not embedding look-ups, norms or element-wise work. A layer that is
run many times counts each time.

Note [What a step costs]
    Backward is twice forward (a product for each operand's gradient). A recomputed block adds its forward once more.
    Causal attention needs half of the score products; a count with that half left out is `causal`, without is `full`.
    Only a decoder's attention to itself is causal: an encoder's, and a decoder's to an encoder, count whole in both.
    Of experts a token passes those that it is sent to: they count as if none was dropped. An expert multiplies all of its slots
    (Note [Slots] in moe.py), and what of that no token needs is `padding`.
    model_tflops      3 x forward, recomputation not counted: what the mathematics needs
    hardware_tflops   the same plus recomputed forwards and padding: what the device was asked to do
    relative_tflops   Elixir's equation (1): 8 x tokens x parameters, whether or not anything is recomputed
    tflops_6n         6 x tokens x parameters
    Of a mixture of experts, parameters in both are those that a token uses (`activated.py`).
    All are per device: of one rank's tokens and step time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from models.activated import stand_for_experts
from models.moe import Mixture, capacity_of
from models.objective import OBJECTIVES
from models.registry import build
from models.shape import ModelShape, ObjectiveName
from systems.prediction.attention import FusedAttention
from systems.prediction.meta_copy import on_meta
from systems.prediction.products import BATCHED, PRODUCTS, STAND_INS
from systems.recipe.model.blocks import find_blocks

FORMULA_VERSION = "matmul-1"

Recompute = Literal["none", "full"] | tuple[int, ...]
_aten = torch.ops.aten


@dataclass(frozen=True)
class ForwardFlops:
    """One forward pass.

    scores: both products of attention, over all pairs of tokens. causal_scores: those that a causal mask leaves over.
    other: every other matrix product that a token needs. padding: what experts multiply beside, in slots that stay empty.
    """

    other: int = 0
    scores: int = 0
    causal_scores: int = 0
    padding: int = 0

    @property
    def full(self) -> int:
        return self.other + self.scores

    @property
    def causal(self) -> int:
        return self.other + self.causal_scores

    def without(self, padding: int) -> ForwardFlops:
        """The same, where so much of `other` is padding."""
        return replace(self, other=self.other - padding, padding=self.padding + padding)

    def __add__(self, more: ForwardFlops) -> ForwardFlops:
        return ForwardFlops(
            self.other + more.other,
            self.scores + more.scores,
            self.causal_scores + more.causal_scores,
            self.padding + more.padding,
        )


@dataclass(frozen=True)
class FlopCount:
    """One micro-batch on one rank. blocks: each block's share of `forward`, by block number."""

    forward: ForwardFlops
    blocks: tuple[ForwardFlops, ...]
    formula_version: str = FORMULA_VERSION

    def recomputed(self, recompute: Recompute) -> ForwardFlops:
        """Forwards run a second time: of no block, of all, or of the blocks given by number.

        Torch may stop recomputing a block once it has what backward needs, before its last product: not taken off here.
        """
        numbers = {"none": (), "full": range(len(self.blocks))}[recompute] if isinstance(recompute, str) else recompute
        return sum((self.blocks[i] for i in numbers), ForwardFlops())


def count(model: ModelShape | nn.Module, *, batch_size: int, seq_len: int, objective: ObjectiveName | None = None) -> FlopCount:
    """Count a micro-batch of token ids (batch_size, seq_len); a decoder beside an encoder sees as many again.

    A module may have real weights; it is left as it is. objective: what it is called with; None asks the shape or the
    module's config.
    Raises ValueError, one line, if the forward pass cannot run on ids alone or depends on computed values.
    """
    module = on_meta(build(model) if isinstance(model, ModelShape) else model).eval()
    ids = torch.zeros(batch_size, seq_len, dtype=torch.int64, device="meta")
    inputs = OBJECTIVES[objective or _objective_of(model)].inputs({"input_ids": ids, "labels": ids})
    counter = _Counter()
    blocks: dict[int, nn.Module] = {id(block): block for block in find_blocks(module).values()}
    for number, block in enumerate(blocks.values(), start=1):
        _stand_for(block, number, counter.block)
    stand_for_experts(module)
    for part in module.modules():
        if isinstance(part, Mixture):
            _count_slots(part, counter)
        if isinstance(causal := getattr(part, "is_causal", None), bool):
            _stand_for(part, causal, counter.causal)
    try:
        with torch.no_grad(), counter, FusedAttention(counter.attend):
            module(**inputs)
    except (RuntimeError, TypeError, NotImplementedError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"FLOPs of {type(module).__name__} cannot be counted on the meta device: {reason}") from error
    found = {number: spent.without(int(counter.empty.get(number, 0))) for number, spent in counter.spent.items()}
    per_block = tuple(found.get(number, ForwardFlops()) for number in range(1, len(blocks) + 1))
    return FlopCount(sum(found.values(), ForwardFlops()), per_block)


def step_flops(
    flops: FlopCount, *, accumulate: int = 1, recompute: Recompute = "none", causal: bool = True, padded: bool = False
) -> int:
    """One optimizer step of one rank: `accumulate` micro-batches forward and backward, and what is recomputed.

    padded: with what experts multiply in empty slots.
    """
    again = flops.recomputed(recompute)
    forward, extra = (flops.forward.causal, again.causal) if causal else (flops.forward.full, again.full)
    padding = 3 * flops.forward.padding + again.padding if padded else 0
    return accumulate * (3 * forward + extra + padding)


def model_tflops(flops: FlopCount, *, step_time_s: float, accumulate: int = 1, causal: bool = True) -> float:
    return step_flops(flops, accumulate=accumulate, causal=causal) / 1e12 / step_time_s


def hardware_tflops(
    flops: FlopCount, *, recompute: Recompute, step_time_s: float, accumulate: int = 1, causal: bool = True
) -> float:
    spent = step_flops(flops, accumulate=accumulate, recompute=recompute, causal=causal, padded=True)
    return spent / 1e12 / step_time_s


def relative_tflops(*, parameters: int, tokens: int, step_time_s: float) -> float:
    """Elixir's equation (1). tokens: of one rank in one optimizer step (BS x SL)."""
    return 8 * tokens * parameters / 1e12 / step_time_s


def tflops_6n(*, parameters: int, tokens: int, step_time_s: float) -> float:
    """tokens: of one rank in one optimizer step."""
    return 6 * tokens * parameters / 1e12 / step_time_s


def _objective_of(model: ModelShape | nn.Module) -> ObjectiveName:
    if isinstance(model, ModelShape):
        return model.objective
    return "seq2seq" if getattr(getattr(model, "config", None), "is_encoder_decoder", False) else "causal"


def _stand_for(module: nn.Module, value: Any, stack: list[Any]) -> None:
    """Have `value` on top of `stack` while the module's forward runs."""

    def push(*_: Any) -> None:
        stack.append(value)

    def pop(*_: Any) -> None:
        stack.pop()

    module.register_forward_pre_hook(push)
    module.register_forward_hook(pop)


def _count_slots(mixture: Mixture, counter: _Counter) -> None:
    """Tell the counter, while an expert runs, which share of its slots tokens fill."""
    needed: list[Fraction] = [Fraction(1)]

    def look(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        tokens = args[0].numel() // mixture.width
        slots = mixture.expert_count * capacity_of(tokens=tokens, experts=mixture.expert_count, factor=mixture.factor)
        needed[0] = min(Fraction(1), Fraction(mixture.choices * tokens, slots))

    mixture.register_forward_pre_hook(look)
    for expert in mixture.experts.values():
        _stand_for(expert, needed, counter.needed)


class _Counter(TorchDispatchMode):
    """Adds up matrix products under the number of the block they run in, 0 outside.

    block, causal, needed: stacks of what the forward is in: block numbers; whether an attention module, as transformers marks
    it, is causal, None outside of one; and of an expert, in a list, the share of its products that tokens need.
    """

    def __init__(self) -> None:
        super().__init__()
        self.spent: dict[int, ForwardFlops] = {}
        self.empty: dict[int, Fraction] = {}  # of these, by experts whose slots are not all filled
        self.block: list[int] = [0]
        self.causal: list[bool | None] = [None]
        self.needed: list[list[Fraction]] = [[Fraction(1)]]

    def add(self, flops: ForwardFlops) -> None:
        self.spent[self.block[-1]] = self.spent.get(self.block[-1], ForwardFlops()) + flops

    def add_scores(self, scores: int, *, causal: bool) -> None:
        self.add(ForwardFlops(scores=scores, causal_scores=scores // 2 if causal else scores))

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, *, causal: bool
    ) -> torch.Tensor:
        """Grouped heads need no care: every query head multiplies with some key and value head.

        A position bias comes as a mask, with the causal one in it; then only the module knows that it is causal.
        """
        rows = math.prod(query.shape[:-1])
        scores = 2 * rows * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        self.add_scores(scores, causal=causal or (mask is not None and self.causal[-1] is True))
        return query.new_empty((*query.shape[:-1], value.shape[-1]))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _aten._local_scalar_dense.default and args[0].is_meta and args[0].dtype == torch.bool:
            # A model asks whether all is as usual (no padding, no packed sequences): in training here it is.
            return True
        if func in PRODUCTS:
            spent, causal = PRODUCTS[func](*args), self.causal[-1]
            if causal is not None and func in BATCHED:  # attention written out; its projections are no batched products
                self.add_scores(spent, causal=causal)
            else:
                self.add(ForwardFlops(other=spent))
                self.empty[self.block[-1]] = self.empty.get(self.block[-1], Fraction(0)) + spent * (1 - self.needed[-1][0])
        return STAND_INS.get(func, func)(*args, **(kwargs or {}))
