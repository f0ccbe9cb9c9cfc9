"""What a model family is: a table of sizes, a builder and the law its weights start by.

Each family is one file beside this. Models are built without memory: parameters on the meta device, buffers for real
(they are small, and what is in them, such as position tables, cannot be had back from a meta tensor).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from models.shape import ModelShape

if TYPE_CHECKING:  # torch takes seconds: who lists models does not wait for it
    import torch
    from torch import nn

FillWeights = Callable[[str, "torch.Tensor"], None]


@dataclass(frozen=True, kw_only=True)
class Family:
    """sizes: the entries that `--model` knows by name.

    build: shape to module, called under `parameters_on_meta` by the registry.
    weights: (shape, seed) to what fills a parameter by name, or None for a model that brings its weights along.
    parameters: shape to the exact number of parameters of what `build` makes, a tied one counted once; None: nobody knows
    without building it.
    """

    name: str
    summary: str
    sizes: tuple[ModelShape, ...]
    build: Callable[[Any], nn.Module]
    weights: Callable[[Any, int], FillWeights | None]
    parameters: Callable[[Any], int] | None = None


def with_fused_attention(config: Any) -> Any:
    """The config, for who makes parts of a transformers model: torch's fused attention, no cache of keys and values."""
    config.use_cache = False
    config._attn_implementation = "sdpa"
    return config


def from_config(model_class: str, config: Any) -> nn.Module:
    """The transformers model of that class, fp32, without a cache of keys and values, and with torch's fused attention, or
    attention written out where the class has no fused one.
    """
    import torch
    import transformers  # takes seconds: only who builds a model waits for it

    config.use_cache = False
    wanted = getattr(transformers, model_class)
    attention = "sdpa" if wanted._supports_sdpa else "eager"
    model = wanted._from_config(config, attn_implementation=attention, dtype=torch.float32)
    assert isinstance(model, torch.nn.Module)
    return model
