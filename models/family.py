"""What a model family is: a table of sizes, a builder and the law its weights start by.

Each family is one file beside this. Models are built without memory: parameters on the meta device, buffers for real
(they are small, and what is in them, such as position tables, cannot be had back from a meta tensor).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from models.shape import ModelShape

FillWeights = Callable[[str, torch.Tensor], None]


@dataclass(frozen=True, kw_only=True)
class Family:
    """sizes: the entries that `--model` knows by name.

    build: shape to module, called under `parameters_on_meta` by the registry.
    weights: (shape, seed) to what fills a parameter by name, or None for a model that brings its weights along.
    """

    name: str
    summary: str
    sizes: tuple[ModelShape, ...]
    build: Callable[[Any], nn.Module]
    weights: Callable[[Any, int], FillWeights | None]


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within, every parameter becomes a meta tensor as its module takes it up, before anything is written to it."""

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        handle.remove()


def from_config(model_class: str, config: Any) -> nn.Module:
    """The transformers model of that class, fp32, with torch's fused attention and no cache of keys and values."""
    import transformers  # takes seconds: only who builds a model waits for it

    config.use_cache = False
    model = getattr(transformers, model_class)._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    assert isinstance(model, nn.Module)
    return model
