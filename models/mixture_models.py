"""Models with mixtures of experts: transformers' blocks, some of whose feed-forwards are mixtures, and who calls them.

Blocks hand on what mixtures tell beside the hidden states (Note [What a mixture tells] in moe.py), so the stacks are run here
and not by transformers.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.utils import ModelOutput

from models.mixture_shape import MixtureFields
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


class WithMixtures(nn.Module, ABC):
    """What models with mixtures have in common. mixtures: how many there are. tied: the head is the token embedding."""

    lm_head: nn.Linear

    def __init__(self, config: Any, balance_weight: float, mixtures: int, *, tied: bool) -> None:
        super().__init__()
        self.config, self._balance_weight, self._count, self.tied = config, balance_weight, mixtures, tied
        self.register_buffer(ROUTING, torch.zeros(1 + len(TOLD)), persistent=False)

    @abstractmethod
    def get_input_embeddings(self) -> nn.Embedding:
        """Of tokens."""

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def tie_weights(self) -> None:
        """These three by transformers' names, for who treats all models alike."""
        if self.tied:
            self.lm_head.weight = self.get_input_embeddings().weight

    def nothing_told(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.new_zeros(len(TOLD), dtype=torch.float32)

    def output(self, hidden: torch.Tensor, told: torch.Tensor) -> MixtureOutput:
        logits = self.lm_head(hidden)
        if not self.training:
            return MixtureOutput(logits=logits)
        with torch.no_grad():
            self.get_buffer(ROUTING).add_(torch.cat([told.new_full((1,), self._count), told.detach()]))
        return MixtureOutput(logits=logits, auxiliary_loss=told[0] * self._balance_weight)


def mixture_of(fields: MixtureFields, width: int, experts: int, make: Callable[[], nn.Module]) -> Mixture:
    """experts: of all ranks; those of `fields.expert_rank` are built."""
    here, choices = fields.here(experts), fields.choices
    return Mixture(width, make, experts=experts, here=here, choices=choices, factor=fields.capacity_factor)


class GptWithMixtures(WithMixtures):
    """GPT-2 with mixtures beside the dense feed-forward of some blocks. experts: block by block, None: no mixture there."""

    def __init__(self, config: Any, fields: MixtureFields, experts: Sequence[int | None], *, tied: bool) -> None:
        super().__init__(config, fields.balance_weight, sum(count is not None for count in experts), tied=tied)
        from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2Block

        def block(number: int, count: int | None) -> MixtureBlock:
            made = GPT2Block(config, layer_idx=number)
            if count is not None:
                mixture = mixture_of(fields, config.n_embd, count, lambda: GPT2MLP(config.n_inner, config))
                made.mlp = BesideDense(made.mlp, mixture)
            return MixtureBlock(made)

        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList(block(number, count) for number, count in enumerate(experts))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.tie_weights()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.wte

    def forward(self, input_ids: torch.Tensor) -> MixtureOutput:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.drop(self.wte(input_ids) + self.wpe(places))
        told = self.nothing_told(hidden)
        for block in self.h:
            hidden, told = block(hidden, told)
        return self.output(self.ln_f(hidden), told)


class T5Stack(nn.Module):
    """An encoder, or with `encoded` a decoder. experts: as in GptWithMixtures, here instead of the dense feed-forward."""

    def __init__(self, config: Any, fields: MixtureFields, experts: Sequence[int | None]) -> None:
        super().__init__()
        from transformers.models.t5.modeling_t5 import T5Block, T5LayerNorm

        def block(number: int, count: int | None) -> MixtureBlock:
            made = T5Block(config, has_relative_attention_bias=number == 0, layer_idx=number)
            if count is not None:
                part: Any = made.layer[-1]
                kind = type(part.DenseReluDense)
                part.DenseReluDense = mixture_of(fields, config.d_model, count, lambda: kind(config))
            return MixtureBlock(made)

        self.block = nn.ModuleList(block(number, count) for number, count in enumerate(experts))
        self.final_layer_norm = T5LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(
        self, hidden: torch.Tensor, told: torch.Tensor, encoded: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(batch, tokens, width), and what mixtures told so far. The first block's position bias is every block's."""
        hidden = self.dropout(hidden)
        bias = across = None
        for block in self.block:
            (hidden, bias, across), told = block(
                hidden,
                told,
                position_bias=bias,
                encoder_hidden_states=encoded,
                encoder_decoder_position_bias=across,
            )
        return self.dropout(self.final_layer_norm(hidden)), told


class T5WithMixtures(WithMixtures):
    """T5 with mixtures instead of some feed-forwards. experts: block by block, of the encoder and of the decoder."""

    def __init__(
        self,
        config: Any,
        fields: MixtureFields,
        encoder: Sequence[int | None],
        decoder: Sequence[int | None],
        *,
        tied: bool,
    ) -> None:
        mixtures = sum(count is not None for count in (*encoder, *decoder))
        super().__init__(config, fields.balance_weight, mixtures, tied=tied)
        self.shared = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = T5Stack(_stack_config(config, decoder=False), fields, encoder)
        self.decoder = T5Stack(_stack_config(config, decoder=True), fields, decoder)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.tie_weights()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.shared

    def forward(self, input_ids: torch.Tensor, decoder_input_ids: torch.Tensor) -> MixtureOutput:
        hidden = self.shared(input_ids)
        encoded, told = self.encoder(hidden, self.nothing_told(hidden))
        hidden, told = self.decoder(self.shared(decoder_input_ids), told, encoded)
        if self.tied:
            hidden = hidden * self.config.d_model**-0.5
        return self.output(hidden, told)


def _stack_config(config: Any, *, decoder: bool) -> Any:
    found = copy.deepcopy(config)
    found.is_decoder = decoder
    return found
