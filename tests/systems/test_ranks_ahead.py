"""Updates that run ahead of the norm on several ranks: bits of waiting, whatever one of the ranks was wrong about."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from systems.device.emulated import EmulatedDevice
from systems.ranks.loopback import as_threads
from systems.ranks.ranks import Ranks
from tests.planning.races import find_races
from tests.systems.every import STRATEGIES
from tests.systems.models_plain import CASES
from tests.systems.models_small import tokens
from tests.systems.running import RESIDENT, Run, assert_equal, finished, managed, settings
from tests.systems.setups import in_turn
from tests.systems.test_ahead import STEPS, counted, ran_ahead
from tests.systems.test_ordering import as_issued, sleeps
from tests.systems.test_ranks import idle_in_part, make

LOSS = CASES["stack"].loss
SIZE = 2
TIGHT = 200_000  # bytes: a quarter of what resident needs in fp32
Change = Callable[[Any, int, int], None]  # of a rank's engine, its number and the step's


def nothing(engine: Any, rank: int, step: int) -> None:
    return


def trained(
    system: Any,
    *,
    before: Change = nothing,
    before_step: Change = nothing,
    accumulate: int = 1,
    began: Change = nothing,
    options: dict[str, Any] | None = None,
    **given: Any,
) -> list[Run]:
    """before: a step's forward. before_step: between backward and step(). began: once, before the first step."""
    limits = {} if system is RESIDENT else {"device_memory": TIGHT, "log_events": True}
    asked = settings(ranks=SIZE, accumulate=accumulate, **(limits | given))
    models, batches = [make("stack") for _ in range(SIZE)], tokens(STEPS, SIZE * accumulate)

    def work(ranks: Ranks) -> Run:
        torch.set_num_threads(1)
        more: dict[str, Any] = {}
        if limits:
            jitter = sleeps(ranks.rank, 2e-4)
            more["device"] = lambda log: EmulatedDevice(TIGHT, log, jitter=jitter)
        engine = system.initialize(models[ranks.rank], asked, system.Options(**(options or {})), ranks=ranks, **more)
        began(engine, ranks.rank, 0)
        losses = []
        for step, batch in enumerate(batches):
            before(engine, ranks.rank, step)
            total = 0.0
            for micro in batch[ranks.rank :: SIZE]:
                loss = LOSS(engine, micro, batch[:, :, 1:].numel())
                engine.backward(loss)
                total += loss.item()
            before_step(engine, ranks.rank, step)
            engine.step()
            losses.append(total)
        return finished(engine, losses)

    return as_threads(SIZE, work)


def assert_same(system: str, **given: Any) -> list[Run]:
    """As the reference on the same ranks, without a race; something ran ahead on each, of the same bundles."""
    found = trained(STRATEGIES[system], **given)
    given.pop("options", None)
    given.pop("began", None)
    for one, other in zip(trained(RESIDENT, **given), found, strict=True):
        assert_equal(one, other)
        engine = managed(other.engine)
        assert ran_ahead(engine), "void: nothing ran ahead"
        assert not find_races(as_issued(engine.log.operations))
    assert len({managed(run.engine).cursor.plan.ahead for run in found}) == 1
    return found


@pytest.mark.parametrize(
    ("system", "dtype", "accumulate"), in_turn(STRATEGIES, [("fp32", 1), ("bf16", 2), ("fp16", 1)], each=2), ids=str
)
@pytest.mark.one_in(8)
def test_they_do_by_default_and_change_no_bit(system: str, dtype: str, accumulate: int) -> None:
    found = assert_same(system, dtype=dtype, accumulate=accumulate, clip=1e6)
    assert all(counted(run) == (0, 0) for run in found)


@cache
def usual_norms() -> list[float]:
    return [norm for norm in trained(RESIDENT)[0].norms if norm is not None]


def gradient_times(factor: float) -> Change:
    """Of one weight, on the second rank and in the fourth step alone; on all and always there is a hook, which takes memory."""
    current = [0, 0]

    def change(engine: Any, rank: int, step: int) -> None:
        current[rank] = step
        if step == 0:
            weight = engine.module.blocks[2].up.weight
            weight.register_hook(lambda gradient: gradient * (factor if (rank, current[rank]) == (1, 3) else 1.0))

    return change


@pytest.mark.parametrize(("system", "accumulate"), in_turn(STRATEGIES, [(1,), (2,)]))
@pytest.mark.one_in(4)
def test_a_step_that_is_clipped_for_what_one_rank_got(system: str, accumulate: int) -> None:
    found = assert_same(system, accumulate=accumulate, clip=10 * max(usual_norms()), before=gradient_times(1e4))
    assert [each.clip_factor < 1 for each in found[0].engine.outcomes] == [step == 3 for step in range(STEPS)]
    assert all(counted(run)[0] == 1 for run in found)


@pytest.mark.parametrize(("system", "accumulate"), in_turn(STRATEGIES, [(1,), (2,)]))
@pytest.mark.one_in(4)
def test_an_overflow_on_one_rank_drops_them_on_all(system: str, accumulate: int) -> None:
    found = assert_same(system, accumulate=accumulate, before=gradient_times(torch.inf))
    assert all(run.skipped == [step == 3 for step in range(STEPS)] for run in found)


def asleep_but_in(awake: Callable[[int, int], bool]) -> Change:
    """One parameter of a block has a gradient on those ranks and in those steps."""

    def change(engine: Any, rank: int, step: int) -> None:
        up = engine.module.blocks[1].up
        up.__dict__.pop("forward", None)
        if not awake(rank, step):
            idle_in_part(engine.module)

    return change


@pytest.mark.parametrize(("system", "accumulate"), in_turn(STRATEGIES, [(1,), (2,)]))
@pytest.mark.one_in(4)
def test_a_parameter_that_gets_a_gradient_on_one_rank_alone(system: str, accumulate: int) -> None:
    """In one step, after it had none on any: the others' updates ran ahead without it, and are dropped."""
    found = assert_same(system, accumulate=accumulate, before=asleep_but_in(lambda rank, step: (rank, step) == (1, 4)))
    one, other = (counted(run)[0] for run in found)
    assert (one, other) == (1, 0), "the rank that has it knew that it was expected by nobody, and waited"


@pytest.mark.parametrize("system", STRATEGIES)
@pytest.mark.one_in(3)
def test_a_parameter_that_never_gets_one_on_one_rank(system: str) -> None:
    """There its bundle waits to hear of it, and nothing is dropped."""
    found = assert_same(system, before=asleep_but_in(lambda rank, step: rank == 0))
    assert all(counted(run) == (0, 0) for run in found)
    one, other = (set(ran_ahead(managed(run.engine))) for run in found)
    assert one > other


@pytest.mark.parametrize(("system", "accumulate"), in_turn(STRATEGIES, [(1,), (2,)]))
@pytest.mark.one_in(4)
def test_hyperparameters_that_change_behind_backward(system: str, accumulate: int) -> None:
    def change(engine: Any, rank: int, step: int) -> None:
        engine.set_lr(1e-3 if step == 3 else 1e-4)

    found = assert_same(system, accumulate=accumulate, before_step=change)
    assert all(counted(run)[0] >= 1 for run in found)


@pytest.mark.parametrize("system", STRATEGIES)
@pytest.mark.one_in(3)
def test_a_host_that_has_room_on_one_rank_alone(system: str) -> None:
    """What ran ahead on the one counts, and the other waits: each has the update of its own shards."""

    def no_room(engine: Any, rank: int, step: int) -> None:
        if rank == 1:
            engine.versions.make = lambda wanted: None

    given: dict[str, Any] = {"began": no_room}
    one, other = trained(STRATEGIES[system], **given)
    for expected, found in zip(trained(RESIDENT), (one, other), strict=True):
        assert_equal(expected, found)
    assert ran_ahead(managed(one.engine)) and not ran_ahead(managed(other.engine))


@pytest.mark.parametrize(("system", "accumulate"), in_turn(STRATEGIES, [(1,), (2,)]))
@pytest.mark.one_in(4)
def test_memory_that_one_rank_wants_back(system: str, accumulate: int) -> None:
    """Between backward and step(), as where states come home: its updates wait then, the other's count."""

    def give_back(engine: Any, rank: int, step: int) -> None:
        if (rank, step) == (1, 3) and hasattr(engine, "ahead"):
            assert engine.ahead.assumed, "void: nothing ran ahead"
            engine.ahead.release()

    assert_same(system, accumulate=accumulate, before_step=give_back)
