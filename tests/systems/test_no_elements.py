"""Parameters without elements, alone or beside others, and fewer elements than ranks: as resident has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from systems.ranks.loopback import as_threads
from systems.ranks.ranks import Ranks
from tests.systems.every import MANAGED
from tests.systems.running import RESIDENT, Run, angel_ptm, assert_equal, finished, settings

STEPS = 3


class Scaled(nn.Module):
    """All that is given is multiplied, and sums of nothing are added."""

    def __init__(self, *parameters: nn.Parameter) -> None:
        super().__init__()
        self.parts = nn.ParameterList(parameters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = x * part.sum() if part.numel() else x + part.sum()
        return x


def empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*(shape or (0,))))


MODELS: Mapping[str, Callable[[], nn.Module]] = MappingProxyType(
    {
        "nothing": lambda: Scaled(empty()),
        "nothings": lambda: nn.Sequential(Scaled(empty()), Scaled(empty(3, 0), empty(0, 2))),
        "nothing is trained": lambda: Scaled(nn.Parameter(torch.ones(3), requires_grad=False), empty()),
        "one": lambda: Scaled(nn.Parameter(torch.full((1,), 0.5))),
        "one and nothing": lambda: nn.Sequential(Scaled(empty()), Scaled(nn.Parameter(torch.full((1,), 0.5)))),
    }
)


def trained(
    system: Any, model: str, size: int, accumulate: int, options: Mapping[str, Any] = MappingProxyType({}), **more: Any
) -> list[Run]:
    asked = settings(**{"ranks": size, "accumulate": accumulate, "clip": 0.5, "device_memory": 1 << 20} | more)
    models = [MODELS[model]() for _ in range(size)]

    def work(ranks: Ranks) -> Run:
        engine = system.initialize(models[ranks.rank], asked, system.Options(**options), ranks=ranks)
        losses = []
        for step in range(STEPS):
            for micro in range(accumulate):
                loss = engine(torch.full((2,), 1.0 + step + micro + ranks.rank, requires_grad=True)).square().sum()
                engine.backward(loss)
                losses.append(loss.item())
            engine.step()
        return finished(engine, losses)

    return as_threads(size, work)


@pytest.mark.parametrize("system", MANAGED)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("size", "accumulate"), [(1, 2), (3, 1)])
@pytest.mark.one_in(6)
def test_few_elements_or_none(system: str, model: str, size: int, accumulate: int) -> None:
    expected = trained(RESIDENT, model, size, accumulate)
    for one, other in zip(expected, trained(MANAGED[system], model, size, accumulate), strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize("behind", [None, 0])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.one_in(2)
def test_their_states_on_a_disk(model: str, size: int, behind: int | None, tmp_path: Path) -> None:
    """Those of nothing are nowhere."""
    options = {"states": "disk", "cache": 0, "max_staleness": behind, "nonfinite": "stop"}
    found = trained(angel_ptm(), model, size, 2, options, clip=0.0, disk=tmp_path, disk_memory=1 << 20)
    for one, other in zip(trained(RESIDENT, model, size, 2, clip=0.0), found, strict=True):
        assert_equal(one, other)
        assert other.counters.get("disk_write_bytes", 0) == 0 or "one" in model
