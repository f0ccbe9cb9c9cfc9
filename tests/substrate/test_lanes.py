"""A lane with a stream: whoever submits queues the work himself if nothing is in its way, and order is kept."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from systems.planning.plan import LaneKind
from systems.substrate.lanes import CudaTicket, HostTicket, Lane, UpdateLane


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
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lane.submit(interrupted, [], id=1)
    with pytest.raises(KeyboardInterrupt):
        lane.drain()


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


def test_an_input_that_failed_ends_its_update_and_no_other() -> None:
    lane, order = UpdateLane(LaneKind.CPU), []
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


def test_an_input_may_arrive_while_the_lane_looks() -> None:
    lane, order = UpdateLane(LaneKind.CPU), []
    for n in range(50):
        lane.submit(lambda n=n: order.append(n), [ArrivesOnceAsked(), ArrivesOnceAsked()], id=n)  # type: ignore[misc]
    lane.drain()
    assert order == list(range(50))
    lane.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kind", [Lane, UpdateLane])
def test_a_lane_that_cannot_go_on_tells_whoever_waits(kind: type[Lane], monkeypatch: pytest.MonkeyPatch) -> None:
    lane = kind(LaneKind.CPU)
    monkeypatch.setattr(lane, "_take", lambda: (_ for _ in ()).throw(RuntimeError("lost its way")))
    first = lane.submit(lambda: None, [], id=1)
    with pytest.raises(RuntimeError, match="lost its way"):
        first.wait()
    with pytest.raises(RuntimeError, match="lost its way"):
        lane.submit(lambda: None, [], id=2).wait()
    with pytest.raises(RuntimeError, match="lost its way"):
        lane.drain()
    lane.close()
