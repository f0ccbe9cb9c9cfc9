"""Steps of several ranks unlike the step before: units skipped, repeated, swapped or added, on one of them or on all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from systems.ranks.loopback import as_threads
from systems.ranks.ranks import Ranks
from tests.planning.races import find_races
from tests.systems.every import STRATEGIES
from tests.systems.models_plain import squared_error
from tests.systems.models_small import tokens
from tests.systems.running import RESIDENT, Run, assert_equal, finished, managed, settings
from tests.systems.test_departures import Route
from tests.systems.test_ordering import as_issued

Way = Callable[[int, int], Sequence[int]]  # the blocks that a rank goes through in a step
ALL = (0, 1, 2, 3)
STEPS = 6


class Unused(Route):
    """Runs all blocks, and uses what those of the given order make."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            y = block(x)
            x = y if number in self.order else x
        return self.head(x)


def routes(system: Any, way: Way, size: int, model: Callable[[], Route], options: dict[str, Any], **given: Any) -> list[Run]:
    torch.manual_seed(0)
    models, asked = [model()], settings(ranks=size, **given)
    while len(models) < size:
        models.append(model())
        models[-1].load_state_dict(models[0].state_dict())
    batches = tokens(STEPS, size * asked.accumulate, seed=3)

    def work(ranks: Ranks) -> Run:
        mine = models[ranks.rank]
        engine: Any = system.initialize(mine, asked, system.Options(**options), ranks=ranks)
        losses = []
        for step, batch in enumerate(batches):
            mine.order = way(ranks.rank, step)
            for micro in batch[ranks.rank :: size]:
                loss = squared_error(engine, micro, 60)
                engine.backward(loss)
                losses.append(loss.item())
            engine.step()
        return finished(engine, losses)

    return as_threads(size, work)


def check(
    strategy: str,
    way: Way,
    share: float = 0.5,
    size: int = 2,
    model: Callable[[], Route] = Route,
    options: dict[str, Any] | None = None,
    **given: Any,
) -> list[Run]:
    """The bits of resident on the same ranks, and no race."""
    expected = routes(RESIDENT, way, size, model, {}, **given)
    budget = int(share * max(run.memory.device_peak_bytes or 0 for run in expected))
    found = routes(STRATEGIES[strategy], way, size, model, options or {}, device_memory=budget, log_events=True, **given)
    for one, other in zip(expected, found, strict=True):
        assert_equal(one, other)
        assert not find_races(as_issued(managed(other.engine).log.operations))
        assert not other.counters["evictions"]
    return found


def without(*blocks: int) -> Way:
    """On the last rank, from the third step on."""
    return lambda rank, step: [b for b in ALL if rank == 0 or step < 2 or b not in blocks]


@pytest.mark.parametrize("nonfinite", ["skip", "stop"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("skipped", [(0,), (1,), (3,), (1, 2), ALL], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_blocks_left_out_on_one_rank(strategy: str, skipped: tuple[int, ...], accumulate: int, nonfinite: str) -> None:
    found = check(strategy, without(*skipped), options={"nonfinite": nonfinite}, accumulate=accumulate)
    for run in found:
        assert run.counters["departures"] == STEPS - 2
        assert run.counters["steps_without_plan"] <= 2
    assert found[0].counters["fallbacks"] == 0 and found[1].counters["fallbacks"] == STEPS - 2


@pytest.mark.parametrize("skipped", [(0,), (1, 2), ALL], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_blocks_whose_outputs_are_not_used_on_one_rank(strategy: str, skipped: tuple[int, ...]) -> None:
    """Their backward never comes there."""
    for run in check(strategy, without(*skipped), model=Unused):
        assert run.counters["departures"] == STEPS - 2
