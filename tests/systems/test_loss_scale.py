"""The loss scale of fp16 does not leave the engine: gradients of leaves that are not its own are those of the loss."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.systems.models_plain import DIM, build
from tests.systems.running import RESIDENT, settings, start
from tests.systems.setups import SYSTEMS

ALL = {"resident": (RESIDENT, RESIDENT.Options()), **SYSTEMS}


def gradients(system: str, dtype: str, recompute: str) -> list[torch.Tensor]:
    """Of an input, of a module before the engine, and of one behind it; two micro-batches."""
    chosen, options = ALL[system]
    engine = start(chosen, build("stack"), settings(dtype=dtype, recompute=recompute, accumulate=2), options)
    torch.manual_seed(1)
    before, behind = nn.Linear(DIM, DIM), nn.Linear(DIM, 1)
    given = torch.randn(4, DIM, requires_grad=True)
    for rows in given.split(2):
        engine.backward(behind(engine(before(rows)).float()).square().mean())
    engine.step()
    engine.close()
    return [leaf.grad for leaf in (given, *before.parameters(), *behind.parameters()) if leaf.grad is not None]


@pytest.mark.parametrize("system", ALL)
def test_it_stays_inside(system: str) -> None:
    expected = gradients("resident", "fp32", "none")
    found = gradients(system, "fp16", "full" if system == "elixir" else "none")
    assert len(found) == len(expected) == 5
    for one, other in zip(expected, found, strict=True):
        # halves have 11 bits, and a dozen roundings lie on the way
        assert float((one - other).norm()) <= 12 * 2.0**-11 * float(one.norm())
