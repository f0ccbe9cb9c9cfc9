"""Experts that ranks share, as the harness asks for them: whose they are, what does not divide, and what a plan knows."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from harness import cli
from harness.plan import question_of
from harness.plan_spec import PlanSpec
from harness.request import of_rank
from models import registry
from models.mixture_shape import divided_among
from models.shape import ModelShape
from systems import registry as systems_registry
from systems.errors import UnsupportedError
from systems.prediction.forecast import Forecast, forecast
from tests.systems.every import STRATEGIES

EXPERT_RANKS = (1, 4)


def shape(expert_ranks: int) -> ModelShape:
    return registry.resolve("pr-moe-tiny", {"expert_ranks": str(expert_ranks)})


def test_each_rank_builds_its_own_experts() -> None:
    names = [{name for name, _ in registry.build(of_rank(shape(2), rank, 4)).named_parameters()} for rank in range(4)]
    whole = {name for name, _ in registry.build(shape(1)).named_parameters()}
    assert names[0] == names[2] and names[1] == names[3]
    assert names[0] | names[1] == whole
    assert all(".experts." in name for name in names[0] ^ names[1]) and names[0] != names[1]


def test_a_model_without_experts_is_every_rank_s() -> None:
    dense = registry.resolve("gpt-tiny")
    assert divided_among(dense) == 1
    assert of_rank(dense, 1, 2) is dense


@pytest.mark.parametrize(("expert_ranks", "ranks"), [(2, 3), (2, 1), (4, 2)])
def test_ranks_are_a_whole_number_of_sets(expert_ranks: int, ranks: int) -> None:
    with pytest.raises(ValueError, match=f"--set expert_ranks={expert_ranks} does not divide --ranks {ranks}: .* change one"):
        of_rank(shape(expert_ranks), 0, ranks)


@cache
def asked(expert_ranks: int) -> Any:
    return question_of(
        PlanSpec(system="elixir", model="pr-moe-tiny", hardware="h100-80g-x4", set=[f"expert_ranks={expert_ranks}"])
    )


def planned(system: str, expert_ranks: int) -> Forecast:
    chosen = systems_registry.get(system)
    return forecast(chosen, chosen.Options(), *asked(expert_ranks))


@pytest.mark.parametrize("system", STRATEGIES)
@pytest.mark.one_in(4)
def test_a_plan_knows_who_holds_experts(system: str) -> None:
    """All of them lie on a node once; of a device they take the less, and of its link, the fewer it has."""
    found = [planned(system, expert_ranks) for expert_ranks in EXPERT_RANKS]
    hosts = [each.tiers["host"].parts["weights"] for each in found]
    assert max(hosts) < 1.1 * min(hosts)
    moved = [each.simulation.bytes for each in found]
    for name in ("gather", "reduce"):
        sizes = [sum(size for lane, size in each.items() if getattr(lane, "value", lane) == name) for each in moved]
        assert sizes[1] < 0.6 * sizes[0]


def test_who_has_no_forecast_of_them_says_so() -> None:
    for system in ("resident", "torch-ddp", "deepspeed-zero3-offload"):
        with pytest.raises(UnsupportedError, match="no baseline has a forecast for experts that ranks share: leave"):
            planned(system, 2)


def test_a_plan_says_what_tokens_move_and_leaves_out_nothing_of_theirs(capsys: pytest.CaptureFixture[str]) -> None:
    work = ("--model", "pr-moe-tiny", "--hardware", "h100-80g-x4", "--ranks", "4")
    assert cli.main(["plan", "--system", "elixir", *work, "--set", "expert_ranks=2"]) == 0
    told = capsys.readouterr()
    shown, found = " ".join((told.out + told.err).split()), json.loads(told.out.splitlines()[-1])
    assert found["bytes"]["exchange"] > 0 and "of tokens to experts of other ranks and back" in shown
    assert not any("expert" in what for what in found["left_out"])
