"""A plan's barriers at run time: order as promised and as scheduled, no bit changed, no wait of the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest

from systems.device.lanes.ticket import Ticket
from systems.device.lanes.transfers import TrackedMemory, Transfers
from systems.device.watch.events import EventLog, Extent, LoggedOperation
from systems.planning.plan import DEVICE_LANES, LaneKind, Plan
from systems.planning.step.operations import LaneOperation, Work
from systems.planning.step.schedule import Schedule, expand
from systems.planning.step.validator import circular_wait, validate
from systems.planning.trace import Phase
from systems.strategies.h3t.options import H3TOptions
from systems.strategies.h3t.strategy import H3T
from systems.substrate.engine import ManagedEngine
from tests.planning.races import find_races
from tests.systems.models_small import tokens
from tests.systems.running import Run, assert_equal, h3t, one_step, settings, start
from tests.systems.setups import Setup, budget_of, reference
from tests.systems.test_ordering import as_issued, sleeps

SETUPS = [Setup("opt", clip=0.5), Setup("gpt2", "full", 2, "untied", "bf16")]
MOVES = (Work.FETCH, Work.OFFLOAD, Work.FETCH_INPUT, Work.OFFLOAD_INPUT)


class Logged:
    """The last step of a run with every switch on, as logged. begin: place of its first operation in the log."""

    def __init__(self, setup: Setup, jitter: bool) -> None:
        asked: dict[str, Any] = dict(dtype=setup.dtype, clip=setup.clip, recompute=setup.recompute, log_events=True)
        asked |= dict(device_memory=budget_of(setup, "tight"), accumulate=setup.accumulate)
        options = H3TOptions(profile_steps=1, solver="on")
        engine = start(h3t(), setup.build(), settings(**asked), options, sleeps() if jitter else None)
        assert isinstance(engine, ManagedEngine)
        begin = 0
        for batch in tokens(3, setup.accumulate):
            begin = len(engine.log.operations)
            one_step(engine, batch)
        engine.drain()
        ((trace, plan),) = engine.planner.plans.values()
        assert plan is not None
        self.plan: Plan = plan
        self.trace = trace
        self.operations: Sequence[LoggedOperation] = tuple(engine.log.operations)
        self.last_step = self.operations[begin:]
        strategy = engine.strategy
        assert isinstance(strategy, H3T)
        self.context, self.layout = strategy._context, engine.layout
        self.host_syncs = engine.counters()["host_syncs"]
        self.barriers_told = strategy.statistics().barriers_per_step  # type: ignore[attr-defined]
        engine.close()

    @property
    def schedule(self) -> Schedule:
        return expand(self.layout, self.trace, self.plan, self.context)


@cache
def logged(setup: Setup, jitter: bool = False) -> Logged:
    return Logged(setup, jitter)


def runs(setup: Setup) -> Run:
    return setup.run(h3t(), budget_of(setup, "tight"), H3TOptions(profile_steps=1, solver="on"))


@pytest.mark.parametrize("setup", SETUPS, ids=lambda s: s.model)
def test_barriers_are_where_the_segments_of_layers_end(setup: Setup) -> None:
    """Four layers forward and backward in each micro-step, and the short segments before, between and after."""
    found = logged(setup)
    phases = Counter(found.trace.moments[m].phase for m in found.plan.barriers)
    per_step = {
        Phase.FORWARD_EXIT: 4,
        Phase.BACKWARD_EXIT: 4,
        Phase.FORWARD_ENTER: 1,
        Phase.BACKWARD_ENTER: 1,
        Phase.BACKWARD_END: 1,
    }
    assert phases == {phase: count * setup.accumulate for phase, count in per_step.items()}
    assert found.barriers_told == len(found.plan.barriers)
    names = [o.label for o in found.last_step if o.label.startswith("barrier")]
    assert names == [f"barrier at moment {m}" for m in sorted(found.plan.barriers)]


@pytest.mark.parametrize("jitter", [False, True])
@pytest.mark.parametrize("setup", SETUPS, ids=lambda s: s.model)
def test_what_a_lane_is_given_after_a_barrier_waits_for_all_that_came_before(setup: Setup, jitter: bool) -> None:
    operations = logged(setup, jitter).operations
    device = {lane.value for lane in DEVICE_LANES}
    last: dict[str, int] = {}
    owed: dict[str, int] = {}
    barriers = copies = 0
    for o in operations:
        if o.label.startswith("barrier"):
            barriers += 1
            assert o.lane == "compute"
            assert set(o.waits) == {ticket for lane, ticket in last.items() if lane != "compute"}
            owed = dict.fromkeys(device - {"compute"}, o.ticket)
        elif o.lane in owed:
            copies += 1
            assert owed.pop(o.lane) in o.waits
        if o.lane in device:
            last[o.lane] = o.ticket
    assert barriers >= 11 and copies >= 11
    assert find_races(as_issued(operations)) == []


def between_barriers(moves: Iterator[LaneOperation | None]) -> list[Counter[LaneOperation]]:
    """What moves before, between and after the barriers (None)."""
    found: list[Counter[LaneOperation]] = [Counter()]
    for move in moves:
        if move is None:
            found.append(Counter())
        elif move.kind in MOVES:
            found[-1][move] += 1
    return found


def logged_moves(operations: Sequence[LoggedOperation]) -> Iterator[LaneOperation | None]:
    for o in operations:
        if isinstance(o.what, LaneOperation):
            yield o.what
        elif o.what.startswith("barrier"):
            yield None


def scheduled_moves(schedule: Schedule) -> Iterator[LaneOperation | None]:
    for o in schedule.operations:
        if o.kind is Work.BARRIER:
            yield None
        elif o.lane is not None:
            yield LaneOperation(o.kind, o.lane, o.name, o.bundle, o.segment)


@pytest.mark.parametrize("setup", SETUPS, ids=lambda s: s.model)
def test_the_schedule_has_the_same_work_between_the_same_barriers(setup: Setup) -> None:
    """So what the simulator times is what the runtime does."""
    found = logged(setup)
    validate(found.layout, found.trace, found.plan, found.context)
    assert circular_wait(found.schedule.operations) == []
    theirs = between_barriers(scheduled_moves(found.schedule))
    assert between_barriers(logged_moves(found.last_step)) == theirs
    assert sum(bool(moves) for moves in theirs) > 8, "void: hardly anything moves"


@pytest.mark.parametrize("setup", SETUPS, ids=lambda s: s.model)
def test_no_bit_changes_and_the_host_reads_the_device_once_a_step(setup: Setup) -> None:
    run = runs(setup)
    assert_equal(reference(setup), run)
    assert [step["host_syncs"] for step in run.per_step] == [1, 1, 1]
    assert not run.per_step[-1]["on_demand_fetches"] and not run.per_step[-1]["fallbacks"]


class StubTicket:
    """Work that is never done: a host that waited for it would stand still."""

    compute = False

    def __init__(self, id: int) -> None:
        self.id = id

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        raise AssertionError("the host waits")

    def order(self, stream: Any) -> None:
        raise AssertionError("only the compute lane orders here")

    def at_once(self) -> bool:
        return False


class StubLane:
    def __init__(self) -> None:
        self.jobs: list[tuple[int, list[int]]] = []

    def submit(self, work: Any, after: Sequence[Ticket], *, id: int, priority: int = 0, operation: Any) -> Ticket:
        self.jobs.append((id, [t.id for t in after]))
        return StubTicket(id)


class StubCompute:
    def __init__(self) -> None:
        self.ordered: list[int] = []

    def order(self, ticket: Ticket) -> None:
        self.ordered.append(ticket.id)

    def mark(self, id: int) -> Ticket:
        return StubTicket(id)


def test_streams_wait_for_each_other_and_the_host_for_none() -> None:
    """The way on CUDA: compute is ordered behind the last copies, and the next copy of each lane behind compute."""
    lanes: Any = {kind: StubLane() for kind in (LaneKind.H2D, LaneKind.D2H, LaneKind.CPU)}
    compute = StubCompute()
    transfers = Transfers(lanes, compute, EventLog(keep=True))
    places = iter(range(100))

    def issue(kind: LaneKind) -> int:
        place = next(places)
        operation = LaneOperation(Work.FETCH, kind)
        return transfers.issue(operation, lambda: None, writes=[TrackedMemory(Extent("x", place, place + 1))]).id

    issue(LaneKind.H2D)
    up, down, update = issue(LaneKind.H2D), issue(LaneKind.D2H), issue(LaneKind.CPU)
    transfers.barrier(label="barrier")
    assert compute.ordered == [up, down] and update not in compute.ordered
    mark = down + 2
    for kind in (LaneKind.H2D, LaneKind.D2H, LaneKind.H2D, LaneKind.CPU):
        issue(kind)
    assert [waits for _, waits in lanes[LaneKind.H2D].jobs] == [[], [], [mark], []]
    assert [waits for _, waits in lanes[LaneKind.D2H].jobs] == [[], [mark]]
    assert [waits for _, waits in lanes[LaneKind.CPU].jobs] == [[], []]
