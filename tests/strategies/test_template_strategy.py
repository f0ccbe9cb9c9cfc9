"""The template of a strategy: short, found by the registry as one new file, planned, and bit-equal to `resident`."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path
from typing import Any

import pytest

import systems.strategies
from systems import registry
from systems.planning.plan import OpKind
from systems.planning.policy.options import StrategyStatistics
from systems.planning.step.validator import validate
from systems.substrate.system import ManagedSystem
from tests.planning.synthetic import context, trace_of, transformer
from tests.strategies import template_strategy
from tests.systems.running import assert_equal
from tests.systems.setups import Setup, budget_of, reference

MOST_LINES = 80
SETUPS = {
    "fp32": Setup(),
    "bf16, clipped": Setup(dtype="bf16", clip=0.5),
    "recomputed, half of it frozen": Setup(recompute="full", sharing="half-frozen"),
    "two micro-batches": Setup(accumulate=2, sharing="untied"),
}


def source() -> Path:
    return Path(template_strategy.__file__)


@pytest.fixture
def streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ManagedSystem:
    """From a folder of strategies in which the template is the only file."""
    folder = tmp_path / "systems" / "strategies"
    folder.mkdir(parents=True)
    shutil.copy(source(), folder / "streamed.py")
    monkeypatch.setattr(systems.strategies, "__path__", [*systems.strategies.__path__, str(folder)])
    entries = registry.find(tmp_path, {"systems.strategies": "STRATEGY"})
    assert list(entries) == ["streamed"]
    found: Any = registry.get("streamed", entries)
    assert isinstance(found, ManagedSystem) and found.name == "streamed"
    return found


def test_it_is_short() -> None:
    text = source().read_text(encoding="utf-8")
    code = ast.unparse(ast.parse(text)).splitlines()
    assert len([line for line in code if line.strip()]) < MOST_LINES
    assert len(text.splitlines()) < MOST_LINES


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS.keys())
def test_it_trains_as_resident_does(streamed: ManagedSystem, setup: Setup) -> None:
    options = streamed.Options.model_validate({"activations": "host" if setup.recompute == "full" else "device"})
    run = setup.run(streamed, budget_of(setup, "half"), options)
    assert_equal(run, reference(setup))
    told = statistics_of(run.engine)
    assert run.counters.get("steps_without_plan", 0) == 1, "only the first step is without a plan"
    assert told.fetches_per_step and told.optimizer_share_on_device == 0


def statistics_of(engine: Any) -> StrategyStatistics:
    found = engine.strategy.statistics()
    assert isinstance(found, StrategyStatistics)
    return found


@pytest.mark.parametrize("ahead", [0, 3])
def test_its_plans_are_valid_at_every_budget_from_the_least(ahead: int) -> None:
    index = transformer(4, 64)
    strategy = template_strategy.Streamed(template_strategy.StreamedOptions(ahead=ahead), context())
    layout = strategy.layout(index)
    trace = trace_of(layout, activation=500)
    least = strategy.division(layout, trace, context()).least().total_bytes
    for budget in (least, 2 * least, 4 * least):
        given = context(device=budget)
        fitting = template_strategy.Streamed(template_strategy.StreamedOptions(ahead=ahead), given)
        found = fitting.plan(fitting.layout(index), trace)
        assert validate(layout, trace, found, given).total_peak <= budget
        assert any(p.operation.kind is OpKind.FETCH for p in found.operations)
