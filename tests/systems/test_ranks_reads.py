"""Weights that another module reads than the one that owns them: all ranks read it, or are told which does."""

from __future__ import annotations

import random
import re
from typing import Any, NamedTuple

import pytest
import torch

from systems.errors import HiddenUseError
from systems.ranks.link import RanksDifferError
from systems.ranks.loopback import as_threads
from systems.ranks.ranks import Ranks
from systems.substrate.agreement import Agreement
from tests.planning.races import find_races
from tests.systems.every import STRATEGIES
from tests.systems.models_plain import Stack, squared_error
from tests.systems.models_small import tokens
from tests.systems.running import AMPLE, RESIDENT, Run, assert_equal, finished, managed, settings
from tests.systems.test_ordering import as_issued

STEPS = 6


class Read(NamedTuple):
    """block: whose weight the root reads, from that step on. aside: in an evaluation before that step too."""

    block: int
    step: int
    aside: bool


class Reader(Stack):
    """now: the blocks whose weights are read."""

    def __init__(self) -> None:
        super().__init__()
        self.now: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        for block in self.now:
            x = x * self.blocks[block].up.weight[0].sum()
        return x


def runs(system: Any, reads: dict[int, list[Read]], options: dict[str, Any] | None = None, **given: Any) -> list[Run]:
    """reads: by rank."""
    models = []
    for _ in reads:
        torch.manual_seed(0)
        models.append(Reader())
    asked = settings(ranks=len(reads), **given)

    def work(ranks: Ranks) -> Run:
        model, mine = models[ranks.rank], reads[ranks.rank]
        engine = system.initialize(model, asked, system.Options(**(options or {})), ranks=ranks)
        losses = []
        for step, batch in enumerate(tokens(STEPS, ranks.size)):
            model.now = [read.block for read in mine if read.step < step or (read.step == step and read.aside)]
            with torch.no_grad():
                losses.append(squared_error(engine, batch[ranks.rank], 60).item())
            model.now = [read.block for read in mine if read.step <= step]
            loss = squared_error(engine, batch[ranks.rank], 60)
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        return finished(engine, losses)

    return as_threads(len(reads), work)


def drawn(luck: random.Random) -> list[Read]:
    """In the order in which they come; no weight twice."""
    reads = [Read(block, luck.randrange(STEPS), luck.random() < 0.3) for block in luck.sample(range(4), luck.choice((1, 1, 2)))]
    return sorted(reads, key=lambda read: (read.step, not read.aside))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.one_in(10)
def test_what_all_ranks_read_alike_all_plan_for(strategy: str, seed: int) -> None:
    """In the middle of a plan, without one, and in an evaluation first."""
    reads = drawn(random.Random(f"alike {seed} {strategy}"))
    given: dict[str, Any] = {"options": {"nonfinite": "stop"}} if seed == 2 else {"clip": 0.5}
    expected = runs(RESIDENT, {0: reads, 1: reads}, **(given | {"options": {}}))
    found = runs(STRATEGIES[strategy], {0: reads, 1: reads}, device_memory=AMPLE, log_events=True, **given)
    for one, other in zip(expected, found, strict=True):
        assert_equal(one, other)
        engine = managed(other.engine)
        assert not find_races(as_issued(engine.log.operations))
        root = next(unit.index for unit in engine.index.units if unit.name == "<root>")
        bundles = engine.layout.bundles_of_unit
        assert all(set(bundles[root]) & set(bundles[unit.index]) for unit in engine.index.units if unit.name in named(reads))


def named(reads: list[Read]) -> set[str]:
    return {f"blocks.{read.block}" for read in reads}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.one_in(14)
def test_what_one_rank_alone_reads_is_told_with_rank_module_and_parameter(strategy: str, seed: int) -> None:
    """Whenever it does so first, in a step: every rank is told, by the next collective or as the step ends. But for what lies
    beside a weight that it reads anyway, as a neighbour may: that changes no collective.
    """
    luck = random.Random(f"alone {seed} {strategy}")
    alike = drawn(luck)[:1] if seed % 3 == 2 else []
    free = [block for block in range(4) if all(abs(block - read.block) > 1 for read in alike)]
    own, reader, size = Read(luck.choice(free), seed, False), luck.randrange(2), 2 + seed % 2
    reads = {rank: sorted([*alike, *([own] if rank == reader else [])], key=lambda read: read.step) for rank in range(size)}
    with pytest.raises((RanksDifferError, HiddenUseError)) as told:
        runs(STRATEGIES[strategy], reads, device_memory=AMPLE)
    assert re.search(rf"rank {reader}[^;]* module <root> reads parameter blocks\.{own.block}\.up\.weight", str(told.value))


def test_what_needs_no_collective_is_told_as_the_step_ends() -> None:
    """By each rank, be it one rank's alone or in another order; and once all have told the same, it is no news any more."""
    first, second = "module a reads parameter b.weight", "module a reads parameter c.weight"

    def told(*reads: list[str]) -> list[str]:
        def work(ranks: Ranks) -> str:
            layout: Any = None
            agreement = Agreement(ranks, layout)
            for what in reads[ranks.rank]:
                agreement.reads(what)
            try:
                agreement.fired([], [], frozenset())
            except HiddenUseError as error:
                return str(error)
            assert ranks.link.issue("gather") == "gather"
            return "nothing"

        return as_threads(len(reads), work)

    assert told([], []) == told([first], [first]) == ["nothing"] * 2
    (one, *others) = told([first], [first, second], [first])
    assert one.startswith(f"rank 1: {second}, and rank 0 does not") and others == [one, one]
    assert told([first], [])[1].startswith(f"rank 0: {first}, and rank 1 does not")
    assert told([first, second], [second, first])[0].startswith(f"rank 1: {second}, and rank 0 does so in another order")
