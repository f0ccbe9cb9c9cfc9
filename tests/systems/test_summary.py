"""`engine.summary()` and its line, at any time of an engine's life, and with what is there to compare it with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import systems
from systems.reports import MemoryReport, PlanReport, Summary
from systems.sizes import format_size
from systems.substrate.engine import ManagedEngine
from tests.systems.every import STRATEGIES
from tests.systems.models_plain import Stack, squared_error
from tests.systems.models_small import tokens

SYSTEMS = ("resident", *STRATEGIES)
BUDGET = 400_000


def begin(system: str, **given: Any) -> Any:
    torch.manual_seed(0)
    model = Stack()
    model.blocks[0].norm.weight.requires_grad_(False)
    asked: dict[str, Any] = {"device": "cpu", "dtype": "fp32", "device_memory": 1 << 20 if system == "resident" else BUDGET}
    return systems.initialize(model, system=system, **(asked | given))


def train(engine: Any, steps: int = 3) -> None:
    for batch in tokens(steps, 1):
        engine.backward(squared_error(engine, batch[0], 30))
        engine.step()
    engine.drain()


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_engine_says_what_it_is_and_has_come_to(system: str) -> None:
    engine = begin(system)
    count, trained = (sum(p.numel() for p in Stack().parameters()) - less for less in (0, 48))
    line = f"{system} on cpu: {count:,} parameters in fp32, "
    assert repr(engine) == f"<{line}0 steps>"
    assert engine.summary().plan == PlanReport()
    train(engine)
    found = engine.summary()
    assert (found.parameters, found.trained, found.steps, found.ranks) == (count, trained, 3, 1)
    assert found.memory == engine.memory() and found.plan == engine.plan_report()
    lines = str(found).splitlines()
    assert lines[0] == f"{line}3 steps" and repr(engine) == f"<{lines[0]}>"
    peak, budget = engine.memory().device_peak_bytes, engine.memory().device_budget_bytes
    assert f"  device  {format_size(peak)} at the peak, of {format_size(budget)}" in lines
    assert any(each.startswith("  plan    ") for each in lines) == (system != "resident")
    engine.close()
    assert repr(engine) == f"<{line}3 steps, closed>"
    assert engine.summary().parameters == count


@pytest.mark.parametrize("system", STRATEGIES)
def test_shares_are_those_of_the_plan_in_force(system: str) -> None:
    """Of elements, whatever segments and bundles they are cut into: all, where there is room, and few where there is not."""
    shares = []
    for budget in (BUDGET, 1 << 24):
        with begin(system, device_memory=budget) as engine:
            train(engine)
            plan = engine.plan_report()
            assert 0 <= plan.on_device <= 1 and 0 <= plan.ahead <= 1 - plan.on_device + 1e-9
            second = engine.memory().host_second_version_bytes
            assert bool(plan.ahead) == ("second versions" in str(engine.summary())) == bool(second)
            shares.append(plan.on_device)
    assert shares[0] < 1
    assert shares[1] == 1 or system == "h3t"  # which leaves on the host what costs no time there
    assert shares[0] <= shares[1]


def told(**memory: Any) -> Summary:
    return Summary(
        system="a", parameters=1, trained=1, dtype="fp32", device="cpu", rank=1, ranks=2, steps=1, closed=False,
        memory=MemoryReport(**memory), plan=PlanReport(),
    )  # fmt: skip


def test_what_bounds_an_engine_is_the_memory_nearest_to_its_budget() -> None:
    assert told().bounded_by is None and "bounded" not in str(told())
    both = told(device_peak_bytes=5, device_budget_bytes=10, host_peak_bytes=9, host_budget_bytes=10)
    assert both.bounded_by == ("host", 0.9)
    assert str(both).splitlines()[-1] == "  bounded by host memory: 90% of its budget at the peak"
    assert told(device_peak_bytes=5, device_budget_bytes=10, host_peak_bytes=9).bounded_by == ("device", 0.5)
    assert told().line == "a on cpu, rank 1 of 2: 1 parameters in fp32, 1 step"
    assert "  host    not known" in str(told()) and "disk" not in str(told())
    assert "  disk    7B at the peak" in str(told(disk_peak_bytes=7))


def test_an_engine_that_is_half_made_has_a_name_all_the_same() -> None:
    """A debugger shows it."""
    half = ManagedEngine.__new__(ManagedEngine)
    assert repr(half) == "<ManagedEngine: AttributeError>"
