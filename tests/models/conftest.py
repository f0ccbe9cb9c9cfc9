"""Small models with real weights, for tests that must compute."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from models import registry

M0 = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "ffn_size": 256, "vocab_size": 257, "max_positions": 32}


def materialise(name: str, overrides: dict[str, object], *, seed: int = 0) -> nn.Module:
    """The model on the CPU in fp32, started as every system starts it."""
    shape = registry.resolve(name, overrides)
    module = registry.build(shape).to_empty(device="cpu")
    module.tie_weights()  # type: ignore[operator]  # to_empty parts what was tied
    fill = registry.initial_weights(shape, seed)
    assert fill is not None
    for parameter_name, parameter in module.named_parameters():
        fill(parameter_name, parameter.data)
    return module


@pytest.fixture
def make_m0() -> Callable[[str], nn.Module]:
    """Makes the small model of the field cases in one of the families, by its tiny size's name."""
    torch.manual_seed(0)
    return lambda name: materialise(name, dict(M0))
