"""Decoders of transformers as an nn.Sequential, for packages that pipeline layers: embeddings, blocks, norm and head.

The modules and parameters are the model's own. Masks are left out: a causal model without padding needs none, and its
fused attention is then the same kernel as in the model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from systems.errors import UnsupportedError


class OptPrefix(nn.Module):
    """Token numbers to the first block's input."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.embed_tokens, self.embed_positions = decoder.embed_tokens, decoder.embed_positions
        self.project_in = decoder.project_in

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        hidden = self.embed_tokens(input_ids)
        if self.project_in is not None:
            hidden = self.project_in(hidden)
        return hidden + self.embed_positions(None, 0, position_ids=positions)


class GptPrefix(nn.Module):
    """Token numbers to the first block's input."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = decoder.wte, decoder.wpe, decoder.drop

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        return self.drop(self.wte(input_ids) + self.wpe(positions))


class PlainBlock(nn.Module):
    """A block from hidden states to hidden states and nothing else."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output = self.block(hidden, attention_mask=None)
        return output[0] if isinstance(output, tuple) else output


class Postfix(nn.Module):
    """The last block's output to logits. norm, project: None where the model has none."""

    def __init__(self, norm: nn.Module | None, project: nn.Module | None, head: nn.Module) -> None:
        super().__init__()
        self.norm, self.project, self.head = norm, project, head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for part in (self.norm, self.project):
            hidden = hidden if part is None else part(hidden)
        return self.head(hidden)


def _opt(model: Any) -> nn.Sequential:
    decoder = model.model.decoder
    postfix = Postfix(decoder.final_layer_norm, decoder.project_out, model.lm_head)
    return nn.Sequential(OptPrefix(decoder), *map(PlainBlock, decoder.layers), postfix)


def _gpt(model: Any) -> nn.Sequential:
    decoder = model.transformer
    return nn.Sequential(GptPrefix(decoder), *map(PlainBlock, decoder.h), Postfix(decoder.ln_f, None, model.lm_head))


CUTS: Mapping[str, Callable[[Any], nn.Sequential]] = MappingProxyType({"OPTForCausalLM": _opt, "GPT2LMHeadModel": _gpt})


def cut(model: nn.Module, system: str) -> nn.Sequential:
    """UnsupportedError for a model that nobody here has cut."""
    name = type(model).__name__
    if name not in CUTS:
        raise UnsupportedError(f"{system} runs a sequence of layers, and {name} is not cut into one: take one of {list(CUTS)}")
    return CUTS[name](model)
