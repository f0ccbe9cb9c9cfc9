"""What one rank alone cannot do while an engine is built is refused on all of them, before any waits for it in a collective."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from systems.baselines import resident
from systems.device.emulated import EmulatedDevice
from systems.errors import BudgetError, UnsupportedError
from systems.ranks.beginnings import FirstValuesAlike
from systems.ranks.loopback import as_threads
from systems.ranks.ranks import Ranks
from systems.recipe.step import optimizer_states
from systems.substrate import assembly, engine
from systems.substrate.bundle.first_values import FirstValues
from systems.substrate.bundle.store import Store
from systems.substrate.moves.residency import Residency
from systems.substrate.plan_in_force import PlanInForce
from tests.systems.every import STRATEGIES
from tests.systems.running import AMPLE, RESIDENT, settings
from tests.systems.test_ranks import make
from tests.systems.test_ranks_rules import one_step

SHORT = BudgetError("no room on purpose", tier="host", need=3, have=2)
HERE = threading.local()  # rank: of the thread
Place = tuple[Any, str]
OF_ALL: list[Place] = [(optimizer_states, "_digest"), (FirstValuesAlike, "fill")]
OF_STRATEGIES: list[Place] = [(assembly, name) for name in ("find_units", "Store", "Poison", "adopt_parameters", "UnitHooks")]
OF_STRATEGIES += [(assembly, "within_host"), (assembly, "ParameterWatch"), (FirstValues, "fill"), (PlanInForce, "begin")]
OF_STRATEGIES += [(engine, "take"), (Store, "take_rest"), (Residency, "settle")]
OF_RESIDENT: list[Place] = [(resident, name) for name in ("find_units", "make_device", "StepControl", "ParameterWatch", "take")]


def on_each(system: Any, size: int = 2, options: dict[str, Any] | None = None, **more: Any) -> list[BaseException | None]:
    """What each rank raises as it initializes, takes a step and closes. more: of each rank, beside its engine's settings."""
    models = [make("stack") for _ in range(size)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    for optimizer in optimizers:
        for parameter in optimizer.param_groups[0]["params"]:
            zeros = torch.zeros_like(parameter)
            optimizer.state[parameter] = {"step": torch.tensor(2.0), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}

    def work(ranks: Ranks) -> BaseException | None:
        HERE.rank = ranks.rank
        asked = settings(ranks=size, device_memory=AMPLE, optimizer=optimizers[ranks.rank])
        own = {name: given(ranks.rank) for name, given in more.items()}
        try:
            made = system.initialize(models[ranks.rank], asked, system.Options(**(options or {})), ranks=ranks, **own)
        except (BudgetError, UnsupportedError) as error:
            return error
        with made:
            one_step(made, ranks.rank, "stack", 0)
        return None

    return as_threads(size, work)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("system", "place"),
    [(STRATEGIES["elixir"], place) for place in [*OF_ALL, *OF_STRATEGIES]]
    + [(RESIDENT, place) for place in [*OF_ALL, *OF_RESIDENT]],
    ids=lambda value: value[1] if isinstance(value, tuple) else value.name,
)
@pytest.mark.one_in(4)
def test_one_rank_s_refusal_is_everybody_s(system: Any, place: Place, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it comes."""
    owner, name = place
    real = getattr(owner, name)

    def fails(*given: Any, **more: Any) -> Any:
        if HERE.rank == rank:
            raise SHORT
        return real(*given, **more)

    options = {"offload": False, "scatter": False} if place == (Residency, "settle") else {}  # so that some never move
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails)
        told = on_each(system, 3, options)
    for each in told:
        assert isinstance(each, BudgetError) and (each.tier, each.need, each.have) == ("host", 3, 2)
        assert str(each) == f"rank {rank}: no room on purpose" or each is told[rank] is SHORT


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_smaller_device_on_one_rank_is_no_trap(strategy: str) -> None:
    """All are told that it does not hold the model, or that it would have other plans."""
    for share, words in (
        (0.00002, "needs"),
        (0.5, "ranks 0 and 1 do not plan alike: device_budget is 1073741824 on rank 0 and"),
    ):
        sizes = [AMPLE, int(share * AMPLE)]
        first, second = on_each(
            STRATEGIES[strategy], device=lambda rank, sizes=sizes: lambda log: EmulatedDevice(sizes[rank], log)
        )
        assert isinstance(first, BudgetError if words == "needs" else UnsupportedError) and words in str(first)
        assert str(first) == (f"rank 1: {second}" if words == "needs" else str(second))


def test_ranks_that_lay_the_model_out_otherwise_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real = assembly.within_host

    def other(layout: Any, *given: Any) -> Any:
        found = real(layout, *given)
        return replace(found, in_place=found.in_place ^ {0}) if HERE.rank else found

    monkeypatch.setattr(assembly, "within_host", other)
    for each in on_each(STRATEGIES["elixir"]):
        assert isinstance(each, UnsupportedError) and "ranks 0 and 1 do not plan alike: layout is" in str(each)
