"""Which of H3T's layers have their optimizer states on the device: the fastest share of them, as the step will run."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest

from models import registry as models_registry
from models.loss import token_loss
from systems import registry
from systems.planning import hardware
from systems.planning.allowance import CUDA
from systems.planning.plan import Tier
from systems.planning.policy.ahead import weighed_s
from systems.prediction import forecast as forecasts
from systems.prediction.forecast import Observations, Question, fits, forecast
from systems.prediction.meta_step import Unfilled
from systems.sizes import parse_size
from systems.strategies.h3t import search
from systems.strategies.h3t.candidates import Candidate, fastest

PROFILE = hardware.load("h200-141g-x1")
BUDGETS = ("4GiB", "9GiB", "13GiB", "40GiB")


@cache
def observed() -> Observations:
    with Unfilled():
        model = models_registry.build(models_registry.resolve("ps-4b", {"num_layers": "8"}))
    return Observations(model, partial(token_loss, objective="causal"))


def planned(budget: str, *, any_plan: bool = False, ranks: int = 1, **options: Any) -> forecasts._Planned:
    system = registry.get("h3t")
    sizes: dict[str, Any] = dict(device_memory=parse_size(budget), host_memory=110 << 30, ranks=ranks)
    about = Question(profile=PROFILE, batch_size=16, seq_len=1024, allowance=CUDA, **sizes)
    planner = forecasts._PlansByBudget(system, system.Options(**options), about, observed())
    found = planner.at(about.device_memory, any_plan=any_plan)
    assert isinstance(found, forecasts._Planned)
    return found


def on_device(found: forecasts._Planned) -> int:
    return sum(tier is Tier.DEVICE for tier in found.plan.optimizer_tier)


def as_run_s(found: forecasts._Planned) -> float:
    choice = replace(found.choice, context=replace(found.context, hardware=PROFILE, host_budget=110 << 30))
    return weighed_s(choice)


@pytest.mark.parametrize("more", [{}, {"nonfinite": "stop"}, {"run_ahead": False}], ids=str)
@pytest.mark.one_in(3)
def test_no_share_is_slower_than_none_as_the_step_will_run(more: dict[str, Any]) -> None:
    shares = []
    for budget in BUDGETS:
        placed, none = planned(budget, **more), planned(budget, variant="global-offload", **more)
        assert on_device(none) == 0
        if on_device(placed):
            assert as_run_s(placed) < 1.01 * as_run_s(none)  # observed again under the plan's switches
        else:
            assert placed.plan == none.plan, "the search has the old one in it"
        shares.append(on_device(placed))
    assert shares[0] == 0 < max(shares), "void: one of the two is never best"


def test_what_runs_ahead_decides_between_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """By steps in which all updates wait, all states are on the device, activations have less room and the step is longer."""
    ours = planned("13GiB")

    def waiting(_: Any, layout: Any, found: list[Candidate]) -> Candidate:
        return fastest(layout, found)

    monkeypatch.setattr(search, "fastest_placement", waiting)
    slower = planned("13GiB")
    assert 0 < on_device(ours) < on_device(slower) and as_run_s(ours) < 0.95 * as_run_s(slower)


def test_dynamic_programming_sees_one_share_beside_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, solve = list[int](), search.pruned_dp

    def counted(*given: Any, **more: Any) -> Any:
        asked.append(1)
        return solve(*given, **more)

    monkeypatch.setattr(search, "pruned_dp", counted)
    with monkeypatch.context() as patch:
        patch.setattr(search, "ROUNDS", 1)
        planned("13GiB", variant="global-offload")
        old = len(asked)
        planned("13GiB")
    assert 0 < len(asked) - old <= old + 1


def test_a_plan_that_is_only_asked_for_is_made_without_solving(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("it solves")

    for name in ("pruned_dp", "greedy_solver", "manual_solver"):
        monkeypatch.setattr(search, name, refused)
    assert on_device(planned("13GiB", any_plan=True)) == 0


@pytest.mark.parametrize(("device", "host", "enough"), [(7_212_658_921, 2_183_588_314, True), (3 << 30, 1 << 28, False)])
def test_whether_it_fits_is_what_a_forecast_says_where_inputs_overflow_the_host(device: int, host: int, enough: bool) -> None:
    """The plan that is quickly made has the inputs of all layers there, and states; the one that runs has neither."""
    with Unfilled():
        model = models_registry.build(models_registry.resolve("ps-1b", {"num_layers": "5"}))
    about = Question(
        profile=hardware.load("elixir-a100-80g-pcie"),
        device_memory=device,
        host_memory=host,
        ranks=1,
        batch_size=16,
        seq_len=512,
        allowance=CUDA,
    )
    system, seen = registry.get("h3t"), Observations(model, partial(token_loss, objective="causal"))
    found = forecast(system, system.Options(), about, seen)
    assert fits(system, system.Options(), about, seen) is found.fits is enough
