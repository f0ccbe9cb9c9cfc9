"""Steps of several ranks unlike the step before: units skipped, repeated, swapped or added, on one of them or on all."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from systems.ranks.loopback import as_threads
from systems.ranks.ranks import Ranks
from tests.planning.races import find_races
from tests.systems.every import STRATEGIES
from tests.systems.models_plain import Block, squared_error
from tests.systems.models_small import tokens
from tests.systems.running import AMPLE, RESIDENT, Run, assert_equal, finished, managed, settings
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


def backward(engine: Any, loss: Callable[[], torch.Tensor], rank: int, step: int) -> None:
    engine.backward(loss())


def routes(
    system: Any,
    way: Way,
    size: int,
    model: Callable[[], Route],
    options: dict[str, Any],
    between: Callable[..., None] = backward,
    **given: Any,
) -> list[Run]:
    """between: makes the losses of a micro-batch, and goes through one of them backward."""
    torch.manual_seed(0)
    models, asked = [model()], settings(ranks=size, **given)
    while len(models) < size:
        models.append(model())
        models[-1].load_state_dict(models[0].state_dict())
    batches = tokens(STEPS, size * asked.accumulate, seed=3)

    def work(ranks: Ranks) -> Run:
        mine = models[ranks.rank]
        engine: Any = system.initialize(mine, asked, system.Options(**options), ranks=ranks)
        losses: list[float] = []

        def loss(micro: torch.Tensor) -> torch.Tensor:
            value = squared_error(engine, micro, 60)
            losses.append(value.item())
            return value

        for step, batch in enumerate(batches):
            mine.order = way(ranks.rank, step)
            for micro in batch[ranks.rank :: size]:
                between(engine, partial(loss, micro), ranks.rank, step)
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


@pytest.mark.parametrize(
    ("skipped", "accumulate", "nonfinite"),
    [((0,), 1, "skip"), ((1,), 1, "stop"), ((3,), 2, "skip"), ((1, 2), 2, "stop"), (ALL, 1, "skip")],
    ids=str,
)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.one_in(20)
def test_blocks_left_out_on_one_rank(strategy: str, skipped: tuple[int, ...], accumulate: int, nonfinite: str) -> None:
    found = check(strategy, without(*skipped), options={"nonfinite": nonfinite}, accumulate=accumulate)
    for run in found:
        assert run.counters["departures"] == STEPS - 2
        assert run.counters["steps_without_plan"] <= 2
    assert found[0].counters["fallbacks"] == 0 and found[1].counters["fallbacks"] == STEPS - 2


@pytest.mark.parametrize("skipped", [(0,), (1, 2), ALL], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.one_in(12)
def test_blocks_whose_outputs_are_not_used_on_one_rank(strategy: str, skipped: tuple[int, ...]) -> None:
    """Their backward never comes there."""
    for run in check(strategy, without(*skipped), model=Unused):
        assert run.counters["departures"] == STEPS - 2


class Opening(Block):
    """Runs another block within its own call, when told to."""

    then: tuple[torch.nn.Module, ...] = ()  # no submodule

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        for other in self.then:
            x = other(x)
        return x


class Within(Route):
    """Its order may have 10 a + b: block b - 1 within the call of block a."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Opening() for _ in self.blocks])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order, self.order = self.order, [number // 10 if number > 9 else number for number in self.order]
        for outer, inner in (divmod(number, 10) for number in order if number > 9):
            self.blocks[outer].then = (self.blocks[inner - 1],)
        try:
            return super().forward(x)
        finally:
            self.order = order
            for block in self.blocks:
                block.then = ()


def nested(rank: int, step: int) -> Sequence[int]:
    """On the last rank, from the third step on: block 2 within block 1, whose weights go, by plan, before it begins."""
    return ALL if rank == 0 or step < 2 else (0, 13, 3)


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5, 0.4])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.one_in(14)
def test_a_block_within_another_on_one_rank(strategy: str, share: float) -> None:
    """What the plan drops meanwhile, and cannot, goes as the outer one ends: the others fetch it again together."""
    check(strategy, nested, share, model=Within)


def at_odds(rank: int, step: int) -> Sequence[int]:
    """Each rank leaves out others, some of them in the same steps."""
    luck = random.Random(10 * step + rank)
    return ALL if step == 0 else [b for b in ALL if luck.random() < 0.6]


@pytest.mark.parametrize(("model", "accumulate"), [(Route, 2), (Unused, 1)])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.one_in(8)
def test_each_rank_leaves_out_others(strategy: str, model: Callable[[], Route], accumulate: int) -> None:
    """C02, C06: what ran on no rank is not stepped, what ran on some gets the others' zeros."""
    for run in check(strategy, at_odds, size=3, model=model, accumulate=accumulate, clip=0.5):
        assert run.counters["departures"] > 0 == run.counters["retraces"]


def only_now_and_then(rank: int, step: int) -> Sequence[int]:
    return (0, 2, 3) if step % 2 else ALL


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.one_in(3)
def test_a_block_left_out_on_all_ranks_leaves_the_plan_in_force(strategy: str) -> None:
    """Which has a place for it when it comes again, on one of them alone."""
    for run in check(strategy, lambda rank, step: ALL if step in (4, 5) and rank else only_now_and_then(rank, step)):
        assert run.counters["steps_without_plan"] <= 2 and not run.counters["on_demand_fetches"] > len(ALL) * 4


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (3, 2, 1, 0), (0, 1, 1, 2, 3), (0, 1, 2, 3, 0, 2)], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.one_in(15)
def test_another_order_on_all_ranks(strategy: str, order: tuple[int, ...]) -> None:
    """Swapped and repeated blocks: a new plan is made for them."""
    for run in check(strategy, lambda rank, step: ALL if step < 2 else order, share=0.85):
        assert run.counters["fallbacks"] == run.counters["retraces"] == 1
        assert managed(run.engine).cursor.plan is not None


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (3, 2, 1, 0), (0, 1, 2, 3, 0, 2)], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.one_in(8)
def test_another_order_on_one_rank_alone_is_right_or_told(strategy: str, order: tuple[int, ...]) -> None:
    """Where all that it takes is there it needs nobody; else ranks are told which of them are where."""
    try:
        check(strategy, lambda rank, step: order if rank and step > 2 else ALL, share=0.85)
    except RuntimeError as error:
        if "rank 0" not in str(error) or "rank 1" not in str(error):
            raise


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.one_in(4)
def test_a_block_repeated_on_one_rank_that_is_there(strategy: str) -> None:
    """Nobody has to bring it together."""
    check(strategy, lambda rank, step: (0, 1, 2, 3, 3) if rank and step > 2 else ALL, share=4.0)


class HeadFirst(Route):
    """Its blocks are its last units."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(x)
        for number in self.order:
            x = self.blocks[number](x)
        return x


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.one_in(4)
def test_an_evaluation_or_a_discard_where_one_rank_left_the_last_blocks_out(strategy: str) -> None:
    """What it left out is passed before anything else moves bundles."""

    def between(engine: Any, loss: Callable[[], torch.Tensor], rank: int, step: int) -> None:
        order = engine.module.order
        loss()
        engine.discard()
        value = loss()
        engine.module.order = ALL
        with torch.no_grad():
            loss()
        engine.module.order = order
        engine.backward(value)

    check(strategy, without(2, 3), model=HeadFirst, between=between)


def reached_from(owner: Any) -> int:
    """Objects in what it has of its own, through containers and moments."""
    left, found = list(vars(owner).values()), set[int]()
    while left:
        each = left.pop()
        if id(each) not in found and isinstance(each, list | tuple | dict | set | frozenset | int):
            found.add(id(each))
            left += gc.get_referents(each) if not isinstance(each, int) else []
    return len(found)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.one_in(4)
def test_a_long_run_of_unlike_steps_keeps_no_more_than_its_plans_need(strategy: str) -> None:
    """Each step is another one, on each rank, and its batch of another size."""
    steps = 40

    def work(ranks: Ranks) -> list[int]:
        mine = models[ranks.rank]
        engine: Any = STRATEGIES[strategy].initialize(mine, asked, STRATEGIES[strategy].Options(), ranks=ranks)
        sizes, luck = list[int](), random.Random(ranks.rank)
        for step in range(steps):
            mine.order = ALL if step < 3 else [b for b in ALL if luck.random() < 0.6]
            rows = 8 if step < 3 else luck.randrange(1, 9)
            engine.backward(squared_error(engine, batch[:rows], 60))
            engine.step()
            sizes.append(reached_from(engine.cursor))
        assert engine.counters()["departures"] > steps // 2
        return sizes

    torch.manual_seed(0)
    models, batch = [Route(), Route()], tokens(1, 1, batch=8)[0, 0]
    models[1].load_state_dict(models[0].state_dict())
    asked = settings(ranks=2, device_memory=AMPLE)
    for sizes in as_threads(2, work):
        assert max(sizes[-10:]) <= max(sizes[5:15]) + 5, sizes
