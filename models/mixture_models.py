"""Models with mixtures of experts: transformers' blocks, some of whose feed-forwards are mixtures, and who calls them.

Blocks hand on what mixtures tell beside the hidden states (Note [What a mixture tells] in moe.py), so the stacks are run here
and not by transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.utils import ModelOutput

from models.mixture_shape import MixtureShape
from models.moe import ROUTING, TOLD, Mixture


@dataclass
class MixtureOutput(ModelOutput):
    """auxiliary_loss: what is added to the mean loss of a token in training, weight and all; None in evaluation."""

    logits: torch.Tensor | None = None
    auxiliary_loss: torch.Tensor | None = None


class BesideDense(nn.Module):
    """A dense feed-forward and a mixture, joined by a learned two-way softmax: the residual mixture of DeepSpeed-MoE."""

    def __init__(self, dense: nn.Module, mixture: Mixture) -> None:
        super().__init__()
        self.dense, self.mixture = dense, mixture
        self.coefficient = nn.Linear(mixture.width, 2)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        shares = self.coefficient(hidden).softmax(-1, dtype=torch.float32).to(hidden.dtype)
        out: torch.Tensor = self.dense(hidden) * shares[..., :1] + self.mixture(hidden) * shares[..., 1:]
        return out


class MixtureBlock(nn.Module):
    """A block of transformers', which may have a mixture: (hidden, told) and what the block takes to (its output, told)."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self._mixtures = [module for module in block.modules() if isinstance(module, Mixture)]

    def forward(self, hidden: torch.Tensor, told: torch.Tensor, **taken: Any) -> tuple[Any, torch.Tensor]:
        output = self.block(hidden, **taken)
        for mixture in self._mixtures:
            assert mixture.told is not None
            told, mixture.told = told + mixture.told, None
        return output, told


class WithMixtures(nn.Module):
    """What models with mixtures have in common. blocks: counted for mixtures after `self` has all of them."""

    def __init__(self, config: Any, shape: MixtureShape) -> None:
        super().__init__()
        self.config, self._balance_weight = config, shape.balance_weight
        self.register_buffer(ROUTING, torch.zeros(1 + len(TOLD)), persistent=False)

    def mixture(self, make: Any, shape: MixtureShape, experts: int) -> Mixture:
        return Mixture(
            shape.hidden_size,
            make,
            experts=experts,
            here=shape.here(experts),
            choices=shape.choices,
            factor=shape.capacity_factor,
        )

    def nothing_told(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.new_zeros(len(TOLD), dtype=torch.float32)

    def output(self, logits: torch.Tensor, told: torch.Tensor, mixtures: int) -> MixtureOutput:
        if not self.training:
            return MixtureOutput(logits=logits)
        with torch.no_grad():
            self.get_buffer(ROUTING).add_(torch.cat([told.new_full((1,), mixtures), told.detach()]))
        return MixtureOutput(logits=logits, auxiliary_loss=told[0] * self._balance_weight)


class GptWithMixtures(WithMixtures):
    """GPT-2 with mixtures beside the dense feed-forward of some blocks. experts: block by block, None: no mixture there."""

    def __init__(self, config: Any, shape: MixtureShape, experts: Sequence[int | None]) -> None:
        super().__init__(config, shape)
        from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2Block

        def block(number: int, count: int | None) -> MixtureBlock:
            made = GPT2Block(config, layer_idx=number)
            if count is not None:
                made.mlp = BesideDense(made.mlp, self.mixture(lambda: GPT2MLP(config.n_inner, config), shape, count))
            return MixtureBlock(made)

        self._mixtures = sum(count is not None for count in experts)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList(block(number, count) for number, count in enumerate(experts))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if shape.tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, input_ids: torch.Tensor) -> MixtureOutput:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.drop(self.wte(input_ids) + self.wpe(places))
        told = self.nothing_told(hidden)
        for block in self.h:
            hidden, told = block(hidden, told)
        return self.output(self.lm_head(self.ln_f(hidden)), told, self._mixtures)
