"""Small models for the substrate's tests, with values, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY, WIDTH, LAYERS = 256, 64, 4
Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def opt(*, tied: bool = True, positions: int = 62) -> nn.Module:
    return transformers.OPTForCausalLM(
        transformers.OPTConfig(
            hidden_size=WIDTH,
            word_embed_proj_dim=WIDTH,
            ffn_dim=4 * WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            vocab_size=VOCABULARY,
            max_position_embeddings=positions,
            dropout=0.0,
            use_cache=False,
            tie_word_embeddings=tied,
            attn_implementation="sdpa",
        )
    )


def gpt2(*, tied: bool = True) -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_embd=WIDTH,
            n_layer=LAYERS,
            n_head=4,
            vocab_size=VOCABULARY,
            n_positions=64,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            tie_word_embeddings=tied,
            attn_implementation="sdpa",
        )
    )


BUILDERS = {"opt": opt, "gpt2": gpt2}


def build(name: str, seed: int = 0, **kwargs: Any) -> Any:
    """In training mode. Any: tests reach into models by attribute."""
    torch.manual_seed(seed)
    return BUILDERS[name](**kwargs).train()


def tokens(steps: int, accumulate: int, batch: int = 2, length: int = 16, seed: int = 1) -> torch.Tensor:
    """Random token numbers, shape [steps, accumulate, batch, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (steps, accumulate, batch, length), generator=generator)


def next_token_loss(model: Callable[..., object], ids: torch.Tensor, count: int) -> torch.Tensor:
    """Sum of the shifted cross entropy over the global label count."""
    logits = model(input_ids=ids).logits  # type: ignore[attr-defined]
    shifted = logits[:, :-1].float().flatten(0, 1)
    return nn.functional.cross_entropy(shifted, ids[:, 1:].flatten(), reduction="sum") / count
