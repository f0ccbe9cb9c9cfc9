"""Small models with real weights, for tests that must compute, and every size on the meta device, built once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import nn

from models import registry

M0: dict[str, object] = {
    "num_layers": 2, "hidden_size": 64, "num_heads": 4, "ffn_size": 256, "vocab_size": 257, "max_positions": 32,
}  # fmt: skip
M0_BESIDE: dict[str, dict[str, object]] = {"albert-tiny": {"num_groups": 1}}


def in_memory(module: nn.Module) -> nn.Module:
    """`module` with its parameters on the CPU, unwritten, and its buffers as they were."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.to_empty(device="cpu")
    for name, buffer in module.named_buffers():
        buffer.copy_(buffers[name])
    module.tie_weights()  # type: ignore[operator]  # to_empty parts what was tied
    return module


def materialise(name: str, overrides: dict[str, object], *, seed: int = 0) -> nn.Module:
    """The model on the CPU in fp32, started as every system starts it."""
    shape = registry.resolve(name, overrides)
    module = in_memory(registry.build(shape))
    fill = registry.initial_weights(shape, seed)
    assert fill is not None
    for parameter_name, parameter in module.named_parameters():
        fill(parameter_name, parameter.data)
    return module


@pytest.fixture
def make_m0() -> Callable[[str], nn.Module]:
    """Makes the small model of the field cases in one of the families, by its tiny size's name."""
    torch.manual_seed(0)
    return lambda name: materialise(name, M0 | M0_BESIDE.get(name, {}))


@pytest.fixture(scope="session")
def on_meta() -> Callable[..., nn.Module]:
    """A size by name and what is set of it, as it is built; not to be changed."""
    return cache(lambda name, **given: registry.build(registry.resolve(name, given)))


@pytest.fixture(scope="session", name="in_memory")
def in_memory_fixture() -> Callable[[nn.Module], nn.Module]:
    return in_memory
