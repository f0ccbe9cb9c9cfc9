"""The one rule of several ranks (Note [The one rule] in systems/ranks/ranks.py): nobody's memory, values or clock decide."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from systems.device.lanes.lane import Lane, LinkLane
from systems.device.lanes.ticket import DoneTicket, HostTicket
from systems.device.memory.granule import MANY, Granule
from systems.errors import OutOfMemoryError, UnsupportedError
from systems.planning.plan import LaneKind
from systems.planning.trace import Phase
from systems.ranks.loopback import as_threads
from systems.ranks.ranks import Ranks
from tests.planning.races import find_races
from tests.systems import rank_loops
from tests.systems.every import STRATEGIES
from tests.systems.models_small import tokens
from tests.systems.running import RESIDENT, Run, assert_equal, finished, managed, settings
from tests.systems.test_ordering import as_issued
from tests.systems.test_ranks import idle_in_part, loss_of, make, on_ranks, tight

Work = Callable[[Any, int], Any]  # with a rank's engine and its number
SHORT, LONG = 16, 60  # tokens
LEFT_OUT = (942, 1009, 1012, 1187)  # loops in which a rank leaves blocks out, one a strategy
MANY_LOOPS = tuple(pytest.param(seed, marks=pytest.mark.slow) for seed in range(100, 140))


def each_rank(
    system: Any, model: str, work: Work, options: dict[str, Any] | None = None, size: int = 2, **given: Any
) -> list[Any]:
    models, asked = [make(model) for _ in range(size)], settings(ranks=size, **given)

    def run(ranks: Ranks) -> Any:
        engine = system.initialize(models[ranks.rank], asked, system.Options(**(options or {})), ranks=ranks)
        return work(engine, ranks.rank)

    return as_threads(size, run)


def one_step(engine: Any, rank: int, model: str, step: int, length: int = 16, rows: int = 2) -> float:
    loss = loss_of(model)(engine, tokens(1, 1, batch=rows, length=length, seed=10 * step + rank)[0, 0], 60)
    engine.backward(loss)
    value: float = loss.item()
    engine.step()
    return value


def with_longer_batches(engine: Any, rank: int) -> Run:
    """On the second rank, from the third step on; for a pass without gradients too."""
    losses = []
    for step in range(5):
        longer = rank == 1 and step >= 2
        if step == 4:
            with torch.no_grad():
                losses.append(loss_of("gpt2")(engine, tokens(1, 1, length=LONG if rank else SHORT)[0, 0], 1).item())
        losses.append(one_step(engine, rank, "gpt2", step, LONG if longer else SHORT))
    return finished(engine, losses)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.one_in(4)
def test_a_batch_may_be_longer_on_one_rank(strategy: str) -> None:
    """All make room for it, and plan for it alike."""
    expected = each_rank(RESIDENT, "gpt2", with_longer_batches)
    budget = int(0.65 * (expected[1].memory.device_peak_bytes or 0))
    found = each_rank(STRATEGIES[strategy], "gpt2", with_longer_batches, device_memory=budget, log_events=True)
    for one, other in zip(expected, found, strict=True):
        assert_equal(one, other)
        assert other.counters["evictions"] == 0 < other.counters["fallbacks"]
        assert not find_races(as_issued(managed(other.engine).log.operations))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.one_in(4)
def test_a_batch_that_does_not_fit_names_its_rank(strategy: str) -> None:
    def work(engine: Any, rank: int) -> None:
        for step in range(4):
            one_step(engine, rank, "gpt2", step, *((LONG, 40) if rank == 1 and step == 3 else (SHORT, 2)))

    with pytest.raises(OutOfMemoryError, match="out of device memory on rank 1: an activation needs"):
        each_rank(STRATEGIES[strategy], "gpt2", work, device_memory=tight("gpt2", 2, 0.35))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_unit_ends_before_the_one_before_it_begins_whatever_gradients_come(strategy: str) -> None:
    def work(engine: Any, rank: int) -> Any:
        if rank == 1:
            idle_in_part(engine.module, block=2)
        one_step(engine, rank, "stack", 0)
        (moments,) = engine.planner.plans
        return [(m.phase, m.unit) for m in moments if m.phase in (Phase.BACKWARD_ENTER, Phase.BACKWARD_EXIT)]

    one, other = each_rank(STRATEGIES[strategy], "stack", work)
    assert one == other
    for (phase, unit), (after, next_unit) in zip(one[::2], one[1::2], strict=True):
        assert (phase, after, unit) == (Phase.BACKWARD_ENTER, Phase.BACKWARD_EXIT, next_unit)


def test_without_a_plan_only_what_is_held_is_on_the_device() -> None:
    def work(engine: Any, rank: int) -> None:
        loss = loss_of("stack")(engine, tokens(1, 1)[0, 0], 60)
        assert not engine.residency.room.evictable()
        engine.backward(loss)
        engine.step()
        kept = engine.residency.resident()
        with torch.no_grad():
            loss_of("stack")(engine, tokens(1, 1)[0, 0], 60)
        assert engine.residency.resident() == kept != frozenset(), "what is there comes back"
        engine.close()

    each_rank(STRATEGIES["elixir"], "stack", work)


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "h3t"])  # which has none there
def test_a_plan_s_states_that_do_not_fit_are_out_of_memory(strategy: str) -> None:
    def work(engine: Any, rank: int) -> None:
        if rank == 1:
            engine.tiers.to_device = lambda segment: False
        for step in range(4):
            one_step(engine, rank, "stack", step)

    with pytest.raises(OutOfMemoryError, match="on rank 1: what the plan keeps there"):
        each_rank(STRATEGIES[strategy], "stack", work)


def test_free_memory_is_joined_by_the_order_of_frees_alone() -> None:
    """Of two ranks whose copies are not as far as each other's."""

    def pieces(*, late: bool) -> list[tuple[int, int]]:
        granule = Granule("device1", torch.empty(1 << 20, dtype=torch.uint8), DoneTicket(0), by_clock=False)
        fit = granule.find(1 << 20, compute=True)
        assert fit is not None
        granule.take(fit, 1 << 20)
        for number in range(MANY + 4):
            ticket = HostTicket(number)
            if not late:
                ticket.finish()
            granule.give(256 * number, 256 * (number + 1), [ticket])
        assert late == any(piece.tickets for piece in granule._pieces)
        return [(piece.start, piece.stop) for piece in granule._pieces]

    assert pieces(late=True) == pieces(late=False)
    assert len(pieces(late=True)) < MANY


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.one_in(2)
def test_draining_is_each_rank_s_own(strategy: str) -> None:
    """With updates that do not wait for the norm too."""

    def work(engine: Any, rank: int) -> Run:
        losses = []
        for step in range(3):
            losses.append(one_step(engine, rank, "stack", step))
            if rank == step % 2:
                engine.drain()
        return finished(engine, losses)

    found = each_rank(STRATEGIES[strategy], "stack", work, {"nonfinite": "stop"}, device_memory=tight("stack", 2))
    for one, other in zip(each_rank(RESIDENT, "stack", work), found, strict=True):
        assert_equal(one, other)


def edit(engine: Any, rank: int) -> None:
    with torch.no_grad():
        engine.module.head.bias.add_(1.0)


def write_poison(engine: Any, rank: int) -> None:
    engine.poison._made().page.zero_()


@pytest.mark.parametrize("nonfinite", ["skip", "stop"])
@pytest.mark.parametrize(
    ("harm", "told"), [(edit, "rank 1: .*head.bias"), (write_poison, "rank 1: a released parameter was written")]
)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.one_in(5)
def test_what_one_rank_finds_all_are_told(strategy: str, harm: Work, told: str, nonfinite: str) -> None:
    """Nobody waits for the one that does not come."""

    def work(engine: Any, rank: int) -> None:
        one_step(engine, rank, "stack", 0)
        engine.backward(loss_of("stack")(engine, tokens(1, 1)[0, 0], 60))
        if rank == 1:
            harm(engine, rank)
        with pytest.raises((UnsupportedError, RuntimeError), match=told):
            engine.step()

    each_rank(STRATEGIES[strategy], "stack", work, {"nonfinite": nonfinite}, device_memory=tight("stack", 2))


@pytest.mark.parametrize("system", [RESIDENT, STRATEGIES["elixir"]], ids=["resident", "elixir"])
def test_hyperparameters_are_the_same_on_all_ranks(system: Any) -> None:
    """Else nothing is done, and the step can be taken once they are."""

    def work(engine: Any, rank: int) -> Run:
        losses = [one_step(engine, rank, "stack", 0)]
        engine.backward(loss_of("stack")(engine, tokens(1, 1)[0, 0], 60))
        engine.set_lr(1e-3 * (1 + rank))
        with pytest.raises(UnsupportedError, match="step: lr is 0.001 on rank 0 and 0.002 on rank 1: give all ranks the same"):
            engine.step()
        engine.set_lr(1e-3)
        engine.step()
        return finished(engine, losses)

    one, other = each_rank(system, "stack", work)
    assert one.norms == other.norms and len(one.norms) == 2


def test_groups_of_an_optimizer_are_the_same_on_all_ranks() -> None:
    models = [make("stack") for _ in range(2)]

    def work(ranks: Ranks) -> None:
        parameters = list(models[ranks.rank].parameters())
        groups: list[dict[str, Any]] = [
            {"params": parameters[:3]},
            {"params": parameters[3:], "weight_decay": 0.1 * ranks.rank},
        ]
        asked = settings(ranks=2, optimizer=torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.0))
        engine: Any = STRATEGIES["elixir"].initialize(models[ranks.rank], asked, STRATEGIES["elixir"].Options(), ranks=ranks)
        with pytest.raises(UnsupportedError, match="weight_decay of parameter group 1 is 0.0 on rank 0 and 0.1 on rank 1"):
            one_step(engine, ranks.rank, "stack", 0)

    as_threads(2, work)


@pytest.mark.parametrize("system", [RESIDENT, STRATEGIES["elixir"]], ids=["resident", "elixir"])
def test_running_averages_are_refused(system: Any) -> None:
    models = [nn.Sequential(nn.Linear(48, 48), nn.BatchNorm1d(48)) for _ in range(2)]

    def work(ranks: Ranks) -> None:
        with pytest.raises(UnsupportedError, match=r"rank 0: module 1 \(BatchNorm1d\) keeps running averages"):
            system.initialize(models[ranks.rank], settings(ranks=2), system.Options(), ranks=ranks)

    as_threads(2, work)


def test_zeros_over_parameters_are_told_as_written() -> None:
    """Of a gradient in place, where nothing came on this rank: what runs next must not overtake them."""

    def differ(engine: Any, rank: int, step: int) -> None:
        if (rank, step) == (1, 1):
            idle_in_part(engine.module)

    found = on_ranks(
        STRATEGIES["patrickstar"], "stack", 2, before=differ, device_memory=tight("stack", 2, 0.45), log_events=True
    )
    for run in found:
        engine = managed(run.engine)
        in_place = engine.cursor.plan.in_place
        assert in_place, "void: no gradient was written over its parameters"
        labels = {f"gradient of bundle {index} ends" for index in in_place}
        ended = [each for each in engine.log.operations if each.what in labels]
        assert ended and all(each.writes for each in ended)


def test_what_waits_for_a_collective_that_nobody_comes_to_is_told_so() -> None:
    never, ended = threading.Event(), list[str]()
    lane = LinkLane(LaneKind.GATHER, lambda: ended.append("on the device"))
    lane.patience_s, left = 0.2, list(lane._threads)
    under_way = lane.submit(lambda: _wait(never), [], id=1)
    queued = lane.submit(lambda: None, [], id=2)
    began = time.monotonic()
    lane.abandon()
    assert ended == ["on the device"]
    for ticket in (under_way, queued, lane.submit(lambda: None, [], id=3)):
        with pytest.raises(RuntimeError, match="did not come to a collective"):
            ticket.wait()
    (thread,) = (each for each in threading.enumerate() if each in left)
    lane.rest()
    lane.close()
    assert time.monotonic() - began < 5
    never.set()
    thread.join(5)
    with pytest.raises(RuntimeError, match="did not come to a collective"):  # what comes of it later is told nobody
        under_way.wait()


@pytest.mark.parametrize("first", ["fails", "is kept away"])
def test_behind_a_collective_that_was_none_no_other_is_begun(first: str) -> None:
    """Other ranks, which wait for the first, would take the second for it."""
    lane, begun, before = LinkLane(LaneKind.GATHER, lambda: None), list[int](), Lane(LaneKind.H2D)
    copied = before.submit(_fail if first == "is kept away" else lambda: None, [], id=1)
    failed = lane.submit(_fail if first == "fails" else lambda: begun.append(2), [copied], id=2)
    behind = lane.submit(lambda: begun.append(3), [], id=3)
    for ticket in (failed, behind):
        with pytest.raises(OSError, match="on purpose"):
            ticket.wait()
    assert not begun
    for each in (lane, before):
        each.close()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.one_in(3)
def test_an_engine_closes_where_another_rank_is_gone(strategy: str) -> None:
    """A lane's thread is inside a collective that nobody ends; memory is free all the same, and no step may follow."""
    gone = threading.Event()

    def work(engine: Any, rank: int) -> float:
        one_step(engine, rank, "stack", 0)
        link: Any = engine.device.lanes[LaneKind.GATHER]
        link.patience_s = 0.2
        engine.store.ranks.link.reduce = lambda tag, *wholes: _wait(gone)
        loss = loss_of("stack")(engine, tokens(1, 1)[0, 0], 60)
        engine.module.blocks[3].up.weight.register_hook(_fail)
        with pytest.raises(OSError, match="on purpose"):
            engine.backward(loss)
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="other ranks did not come|others may be anywhere"):
            engine.close()
        assert engine.device.account.pool == 0
        return time.monotonic() - began

    try:
        assert all(seconds < 5 for seconds in each_rank(STRATEGIES[strategy], "stack", work))
    finally:
        gone.set()


def _wait(until: threading.Event) -> None:
    until.wait()


def _fail(*_: Any) -> None:
    raise OSError("on purpose")


@pytest.mark.parametrize("seed", [0, 1, 2, 7, *LEFT_OUT, *MANY_LOOPS])
@pytest.mark.one_in(8)
def test_a_random_loop_of_several_ranks_equals_resident(seed: int) -> None:
    rank_loops.check(seed)
