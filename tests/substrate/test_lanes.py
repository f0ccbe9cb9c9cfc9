"""A lane with a stream: whoever submits queues the work himself if nothing is in its way, and order is kept.

The CPU lane keeps what it promises with one thread and with two.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from systems.device.lanes.compute import HostCompute
from systems.device.lanes.lane import Lane, UpdateLane
from systems.device.lanes.ticket import CudaTicket, HostTicket
from systems.device.lanes.transfers import TrackedMemory, Transfers
from systems.device.watch.events import EventLog, Extent
from systems.device.watch.stopwatch import HostStopwatch
from systems.planning.plan import LaneKind
from systems.planning.step.operations import LaneOperation, Work

PATIENCE_S = 20  # for what comes within milliseconds on a machine that is not busy


class FakeStream:
    """Keeps the events it was told to wait for."""

    def __init__(self) -> None:
        self.waited: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.waited.append(event)

    def synchronize(self) -> None:
        return


class FakeEvent:
    def __init__(self, *, blocking: bool = False) -> None:
        self.blocking = blocking

    def record(self, stream: FakeStream) -> None:
        self.recorded_on = stream

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lane]:
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    stream: Any = FakeStream()
    made = Lane(LaneKind.H2D, stream=stream)
    made.drain()  # its thread has come to rest
    yield made
    made.close()


def where(seen: list[str]) -> Any:
    return lambda: seen.append(threading.current_thread().name)


def test_work_that_need_not_wait_is_queued_by_the_caller(lane: Lane) -> None:
    seen: list[str] = []
    first = lane.submit(where(seen), [], id=1)
    second = lane.submit(where(seen), [first], id=2)
    assert seen == [threading.current_thread().name] * 2
    assert first.done() and second.done()
    assert isinstance(first, CudaTicket) and isinstance(lane.stream, FakeStream)
    assert len(lane.stream.waited) == 1, "the stream waits, not the host"


def test_work_behind_the_host_is_the_threads_and_so_is_what_follows(lane: Lane) -> None:
    seen: list[str] = []
    gate = HostTicket(1)
    behind = lane.submit(where(seen), [gate], id=2)
    after = lane.submit(where(seen), [], id=3)
    assert not behind.done() and not after.done() and seen == []
    gate.finish()
    lane.drain()
    assert seen == ["lane-h2d"] * 2
    lane.submit(where(seen), [gate, after], id=4)
    assert seen[-1] == threading.current_thread().name, "the way is free again"


def test_order_is_that_of_submission(lane: Lane) -> None:
    order: list[int] = []
    gates = {n: HostTicket(n) for n in range(0, 40, 7)}
    for n in range(40):
        lane.submit(lambda n=n: order.append(n), [gates[n]] if n in gates else [], id=n)  # type: ignore[misc]
    for gate in gates.values():
        gate.finish()
    lane.drain()
    assert order == list(range(40))


def test_an_error_in_the_callers_hands_is_the_tickets(lane: Lane) -> None:
    def broken() -> None:
        raise RuntimeError("the copy failed")

    ticket = lane.submit(broken, [], id=1)
    with pytest.raises(RuntimeError, match="the copy failed"):
        ticket.wait()
    with pytest.raises(RuntimeError, match="the copy failed"):
        lane.drain()


def test_an_interrupt_in_the_callers_hands_is_his(lane: Lane) -> None:
    """And no error of the lane's, which does what it is given next."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lane.submit(interrupted, [], id=1)
    done: list[int] = []
    lane.submit(lambda: done.append(2), [], id=2)
    lane.drain()
    assert done == [2]


def test_a_job_of_which_ctrl_c_took_the_word_is_done() -> None:
    """It came between the queue and those who wait for it."""
    lane = Lane(LaneKind.CPU)
    done: list[int] = []
    time.sleep(0.02)  # it sleeps

    def told() -> None:
        raise KeyboardInterrupt

    notify, lane._changed.notify_all = lane._changed.notify_all, told  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        lane.submit(lambda: done.append(1), [], id=1)
    lane._changed.notify_all = notify  # type: ignore[method-assign]
    lane.drain()
    assert done == [1]
    lane.close()


def test_a_stream_does_not_wait_for_its_own_work() -> None:
    stream: Any = FakeStream()
    event: Any = FakeEvent()
    CudaTicket(1, event, stream).order(stream)
    assert stream.waited == []
    CudaTicket(1, event, stream).order(other := FakeStream())  # type: ignore[arg-type]
    assert other.waited == [event]


def test_updates_run_lowest_first_among_those_whose_inputs_are_there() -> None:
    lane, order = UpdateLane(LaneKind.CPU), []
    busy, gates = threading.Event(), [HostTicket(n) for n in range(4)]

    def occupy() -> None:
        busy.wait()
        order.append(-1)

    lane.submit(occupy, [], id=9)
    for n in (3, 2, 1, 0):
        lane.submit(lambda n=n: order.append(n), [gates[n]], id=10 + n, priority=n)  # type: ignore[misc]
    for n in (3, 2, 1):
        gates[n].finish()
    busy.set()
    gates[0].finish()
    lane.drain()
    assert order[0] == -1
    assert sorted(order[1:]) == [0, 1, 2, 3] and order[1:].index(1) < order[1:].index(2) < order[1:].index(3)
    lane.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_an_input_that_failed_ends_its_update_and_no_other(threads: int) -> None:
    lane, order = UpdateLane(LaneKind.CPU, threads=threads), []
    failed = HostTicket(1)
    one = lane.submit(lambda: order.append(1), [failed], id=2)
    two = lane.submit(lambda: order.append(2), [], id=3)
    failed.finish(RuntimeError("the copy failed"))
    two.wait()
    with pytest.raises(RuntimeError, match="the copy failed"):
        one.wait()
    assert order == [2]
    with pytest.raises(RuntimeError, match="the copy failed"):
        lane.drain()
    lane.close()


class ArrivesOnceAsked:
    """Finished between one question and the next, as work on a device may."""

    id = 1
    compute = False

    def __init__(self) -> None:
        self.asked = 0

    def done(self) -> bool:
        self.asked += 1
        return self.asked > 1

    def wait(self) -> None:
        return

    def order(self, stream: Any) -> None:
        return

    def at_once(self) -> bool:
        return True


@pytest.mark.parametrize("threads", [1, 2])
def test_an_input_may_arrive_while_the_lane_looks(threads: int) -> None:
    lane, order = UpdateLane(LaneKind.CPU, threads=threads), []
    for n in range(50):
        lane.submit(lambda n=n: order.append(n), [ArrivesOnceAsked(), ArrivesOnceAsked()], id=n)  # type: ignore[misc]
    lane.drain()
    assert (order if threads == 1 else sorted(order)) == list(range(50))
    lane.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("kind", "threads"), [(Lane, 1), (UpdateLane, 1), (UpdateLane, 2)])
def test_a_lane_that_cannot_go_on_tells_whoever_waits(kind: type[Lane], threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = kind(LaneKind.CPU, threads=threads)
    monkeypatch.setattr(lane, "_take", lambda: (_ for _ in ()).throw(RuntimeError("lost its way")))
    first = lane.submit(lambda: None, [], id=1)
    with pytest.raises(RuntimeError, match="lost its way"):
        first.wait()
    with pytest.raises(RuntimeError, match="lost its way"):
        lane.submit(lambda: None, [], id=2).wait()
    with pytest.raises(RuntimeError, match="lost its way"):
        lane.drain()
    lane.close()


# --- the CPU lane with two threads ---


@pytest.fixture
def pair() -> Iterator[UpdateLane]:
    made = UpdateLane(LaneKind.CPU, threads=2)
    yield made
    made.close()
    assert not any(thread.is_alive() for thread in made._threads)


class Held:
    """A job that says that it began, and ends when it may."""

    def __init__(self) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.began.set()
        assert self.may_end.wait(PATIENCE_S)


def held(lane: UpdateLane, id: int) -> Held:
    job = Held()
    lane.submit(job, [], id=id)
    assert job.began.wait(PATIENCE_S)
    return job


def draining(lane: Lane) -> threading.Thread:
    """A thread that is in drain(), and ends with it, whatever that raises."""

    def drain() -> None:
        with contextlib.suppress(RuntimeError):
            lane.drain()

    thread = threading.Thread(target=drain)
    thread.start()
    time.sleep(0.01)
    return thread


def test_two_updates_are_in_hand_at_once(pair: UpdateLane) -> None:
    meeting, gate = threading.Barrier(2), HostTicket(1)
    met: list[int] = []

    def meet() -> None:
        met.append(meeting.wait(PATIENCE_S))

    for n in (2, 3):  # both threads sleep for the same input
        pair.submit(meet, [gate], id=n)
    time.sleep(0.01)
    gate.finish()
    pair.drain()
    assert sorted(met) == [0, 1], "each waited for the other"


def test_each_thread_takes_the_lowest_that_is_there(pair: UpdateLane) -> None:
    order: list[int] = []
    first, second = held(pair, 1), held(pair, 2)
    for n in (3, 0, 2, 1):
        pair.submit(lambda n=n: order.append(n), [], id=10 + n, priority=n)  # type: ignore[misc]
    first.may_end.set()  # its thread does the rest alone
    drained = draining(pair)
    while len(order) < 4:
        time.sleep(0.001)
    assert drained.is_alive(), "the other thread is at work"
    second.may_end.set()
    drained.join(PATIENCE_S)
    assert order == [0, 1, 2, 3] and not drained.is_alive()


def test_an_update_waits_for_one_that_the_other_thread_has_in_hand(pair: UpdateLane) -> None:
    order: list[str] = []
    first = Held()
    writer = pair.submit(first, [], id=1, priority=9)
    pair.submit(lambda: order.append("reader"), [writer], id=2, priority=0)
    behind = pair.submit(lambda: order.append("behind"), [], id=3, priority=1)
    assert first.began.wait(PATIENCE_S)
    time.sleep(0.01)
    assert order == [] and not behind.done(), "as with one thread, which looks no further than its oldest job"
    first.may_end.set()
    pair.drain()
    assert sorted(order) == ["behind", "reader"]


def test_closing_finishes_what_is_queued() -> None:
    lane, order, gate = UpdateLane(LaneKind.CPU, threads=2), [], HostTicket(1)
    job = held(lane, 2)
    for n in range(10):
        lane.submit(lambda n=n: order.append(n), [gate], id=3 + n)  # type: ignore[misc]
    closing = threading.Thread(target=lane.close)
    closing.start()
    time.sleep(0.01)
    assert closing.is_alive() and order == []
    gate.finish()
    job.may_end.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive() and sorted(order) == list(range(10))
    with pytest.raises(RuntimeError, match="closed"):
        lane.submit(lambda: None, [], id=20).wait()


def test_an_error_in_one_thread_is_told_and_stops_neither(pair: UpdateLane) -> None:
    done: list[int] = []

    def work(n: int) -> None:
        if n % 3 == 0:
            raise RuntimeError(f"update {n} failed")
        done.append(n)

    tickets = [pair.submit(lambda n=n: work(n), [], id=n) for n in range(30)]  # type: ignore[misc]
    with pytest.raises(RuntimeError, match="failed"):
        pair.drain()
    assert sorted(done) == [n for n in range(30) if n % 3]
    for n in range(0, 30, 3):
        with pytest.raises(RuntimeError, match=f"update {n} failed"):
            tickets[n].wait()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("asleep", [False, True])
def test_a_thread_that_dies_takes_nobody_with_it(asleep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one finishes the job it has in hand, or sleeps for a job that is failed meanwhile."""
    lane, gate = UpdateLane(LaneKind.CPU, threads=2), HostTicket(1)
    one, other = held(lane, 2), held(lane, 3)
    queued = [lane.submit(lambda: None, [gate], id=n) for n in range(4, 9)]
    if asleep:
        other.may_end.set()
        time.sleep(0.01)
    monkeypatch.setattr(lane, "_take", lambda: (_ for _ in ()).throw(RuntimeError("lost its way")))
    one.may_end.set()
    for ticket in queued:
        with pytest.raises(RuntimeError, match="lost its way"):
            ticket.wait()
    drained = draining(lane)
    assert asleep or drained.is_alive(), "a job in hand is waited for, a sleeper is not"
    other.may_end.set()
    drained.join(PATIENCE_S)
    assert not drained.is_alive()
    gate.finish()
    lane.close()
    assert not any(thread.is_alive() for thread in lane._threads)


operations = st.tuples(
    st.sampled_from([LaneKind.CPU, LaneKind.CPU, LaneKind.CPU, LaneKind.D2H]),
    st.sets(st.integers(0, 4), max_size=2),  # memories it reads
    st.sets(st.integers(0, 4), min_size=1, max_size=2),  # and writes
    st.integers(-1, 5),  # priority
)


@given(issued=st.lists(operations, max_size=40), threads=st.sampled_from([2, 3]), seed=st.integers(0, 1 << 30))
@settings(max_examples=60, deadline=None)
def test_operations_leave_what_they_leave_one_after_another(issued: list[Any], threads: int, seed: int) -> None:
    """Note [Derived waits] is all that orders those of one lane: whoever comes too early reads another number."""
    luck = random.Random(seed)

    def sleep() -> None:
        if luck.random() < 0.5:
            time.sleep(luck.random() * 2e-4)

    lanes: dict[LaneKind, Lane] = {
        LaneKind.CPU: UpdateLane(LaneKind.CPU, jitter=sleep, threads=threads),
        LaneKind.D2H: Lane(LaneKind.D2H, jitter=sleep),
    }
    transfers = Transfers(lanes, HostCompute(HostStopwatch()), EventLog(keep=False))
    memories = [TrackedMemory(Extent("x", place, place + 1)) for place in range(5)]

    def operation(numbers: list[int], runs: list[int], id: int, reads: set[int], writes: set[int]) -> Callable[[], None]:
        def work() -> None:
            runs.append(id)
            seen = [numbers[place] for place in sorted(reads | writes)]
            sleep()
            for place in writes:
                numbers[place] = hash((id, place, *seen))

        return work

    found, right, runs = [0] * 5, [0] * 5, list[int]()
    for id, (kind, reads, writes, priority) in enumerate(issued):
        operation(right, [], id, reads, writes)()
        transfers.issue(
            LaneOperation(Work.UPDATE, kind),
            operation(found, runs, id, reads, writes),
            reads=[memories[place] for place in reads],
            writes=[memories[place] for place in writes],
            priority=priority,
        )
    for lane in lanes.values():
        lane.drain()
    assert found == right and sorted(runs) == list(range(len(issued)))
    for lane in lanes.values():
        lane.close()


PROGRAM = """
import time, torch
from systems.device.lanes.lane import Lane
from systems.planning.plan import LaneKind

def work():
    until = time.monotonic() + {seconds}
    while time.monotonic() < until:
        into.copy_(out)
        if {pause}:
            time.sleep({pause})

into, out = torch.zeros(1 << 16), torch.zeros(1 << 16)
lane = Lane(LaneKind.H2D)
for number in range({jobs}):
    lane.submit(work, (), id=number)
time.sleep(0.1)  # the first one has begun
"""


@pytest.mark.parametrize(
    ("seconds", "pause", "jobs"),
    [
        pytest.param(0.3, 0, 3, id="all end in time"),
        pytest.param(1.5, 0, 20, id="one does, and the others are not begun"),
        pytest.param(1000.0, 1000.0, 2, id="one never ends"),
    ],
)
@pytest.mark.one_in(3)
def test_a_program_may_end_without_closing_what_works(seconds: float, pause: float, jobs: int) -> None:
    """A thread that Python ends inside a library would end the process by a signal."""
    script = PROGRAM.format(seconds=seconds, pause=pause, jobs=jobs)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=4 * PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")
