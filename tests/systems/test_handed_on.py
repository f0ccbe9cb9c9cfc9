"""What a model is called with reaches it as it was given, where nothing in it has another dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import systems
from systems.errors import DivergedError
from tests.systems.every import STRATEGIES, with_option

OURS = ["resident", *STRATEGIES]


class Told(nn.Module):
    """Leaves something in the containers that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, x: torch.Tensor, log: list[float], more: dict[str, Any]) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
            log.append(float(x.detach().float().sum()))
        more["seen"] = more["scale"].dtype
        return x.square().mean()


@pytest.mark.parametrize("system", OURS)
def test_a_container_is_the_caller_s_own(system: str) -> None:
    log: list[float] = []
    kept: dict[str, Any] = {"scale": torch.ones(1, dtype=torch.bfloat16)}
    cast = {"scale": torch.ones(1)}
    with systems.initialize(Told(), system=system, device="cpu", device_memory="4MiB", dtype="bf16") as engine:
        engine.backward(engine(torch.ones(2, 8), log, kept))
        engine.discard()
        engine.backward(engine(torch.ones(2, 8), log, more=cast))
        engine.step()
    assert len(log) == 4 and kept.get("seen") is torch.bfloat16
    assert cast["scale"].dtype is torch.float32


@pytest.mark.parametrize("system", [name for name in with_option("nonfinite", "stop", STRATEGIES) if name != "h3t"])
def test_a_last_step_that_is_not_finite_is_told_by_close(system: str) -> None:
    asked: dict[str, Any] = {"device": "cpu", "device_memory": "4MiB", "dtype": "fp32", "options": {"nonfinite": "stop"}}
    engine = systems.initialize(nn.Sequential(nn.Linear(8, 8)), system=system, **asked)
    engine.backward(engine(torch.full((2, 8), torch.inf)).sum())
    engine.step()
    with pytest.raises(DivergedError):
        engine.close()


@pytest.mark.parametrize("system", OURS)
def test_a_start_that_breaks_off_at_the_end_says_so(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the model's own values are gone already; the optimizer keeps its state."""
    model = nn.Sequential(nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()

    def broken(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("systems.recipe.step.optimizer_states._fp32", broken)
    with pytest.raises(KeyboardInterrupt):
        systems.initialize(model, system=system, optimizer=optimizer, device="cpu", device_memory="4MiB", dtype="fp32")
    assert len(optimizer.state) == 2
    with pytest.raises(RuntimeError, match="its engine could not start"):
        model(torch.ones(2, 8))
