"""Copy and update rates of H3T's variant=paper: those of the steps that its profiler measures, not a hardware profile's."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import pytest
import torch

from systems.device.watch import lane_times
from systems.planning.clock.rates import Rates
from systems.planning.plan import LaneKind
from systems.planning.step.operations import LaneOperation, Work
from systems.planning.trace import LaneTime, Trace
from systems.strategies.h3t.rates import summed, with_measured
from tests.planning.machines import machine
from tests.planning.synthetic import context, layout_of
from tests.systems.running import h3t, managed
from tests.systems.test_ranks import STEPS, on_ranks

FP32 = 24 + 4 + 4  # bytes that an update of an element reads and writes: master and two moments both ways, gradient, parameter
PAPER: dict[str, Any] = {"variant": "paper", "profile_steps": STEPS}


def profiled(options: dict[str, Any], size: int) -> list[tuple[Any, Trace]]:
    """(statistics, what was measured) of each rank, solved behind three steps, of which two have a plan that asks."""
    found = on_ranks(h3t(), "stack", size, 1, options, device_memory=1 << 20)
    strategies = [managed(run.engine).strategy for run in found]
    return [(each.statistics(), next(iter(each._profiler._known.values())).base) for each in strategies]


class Ticking(threading.local):
    """A clock by which everything takes a second."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.mark.parametrize("size", [1, 2])
def test_copy_and_update_rates_are_those_of_the_profiled_steps(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_times.time, "perf_counter", Ticking())
    found = profiled(PAPER, size)
    for told, measured in found:
        lanes = {each.lane: each for each in measured.lane_times}
        assert {"h2d", "d2h", "cpu"} == set(lanes)
        assert told.measured_bytes_per_s == {
            lane: pytest.approx(each.nbytes / each.seconds * (FP32 / 4 if lane == "cpu" else 1)) for lane, each in lanes.items()
        }
        assert lanes["d2h"].seconds >= 2 * 5 - 1, "four layers and a head, in two steps"
    assert all(measured.lane_times == found[0][1].lane_times for _, measured in found), "ranks plan by the same"


@pytest.mark.parametrize("options", [{"profile_steps": STEPS}, {"variant": "paper", "profile_steps": 1}])
def test_nothing_is_timed_where_nobody_asks(options: dict[str, Any]) -> None:
    ((told, measured),) = profiled(options, 1)
    assert (told.measured_bytes_per_s, measured.lane_times) == ({}, ())


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_solvers_and_simulator_reckon_with_what_was_measured(ranks: int, factor: float) -> None:
    """Slower or faster than the profile says, and whatever the node's devices share."""
    before: dict[str, Any] = {"h2d_bytes_per_s": 4e9, "d2h_bytes_per_s": 4e9, "both_ways_bytes_per_s": 6e9}
    profile = machine(devices=ranks, node_copy_bytes_per_s=8e9, host_dram_bytes_per_s=3e10, cpu_adam_bytes_per_s=2e10, **before)
    nbytes = int(4e9 * factor)
    times = (LaneTime("h2d", nbytes, 1.0), LaneTime("d2h", 2 * nbytes, 4.0), LaneTime("cpu", nbytes, 2.0))
    rates = Rates(with_measured(profile, times, context(ranks=ranks, itemsize=4)), ranks)
    assert rates.h2d == pytest.approx(nbytes) and rates.d2h == pytest.approx(nbytes / 2)
    assert rates.cpu_adam == pytest.approx(nbytes / 2 * FP32 / 4)
    assert with_measured(profile, (), context(ranks=ranks)) == profile


def test_steps_add_up_by_lane() -> None:
    found = summed((LaneTime("h2d", 1, 1.0),), (LaneTime("d2h", 5, 2.0), LaneTime("h2d", 2, 0.5)))
    assert found == (LaneTime("h2d", 3, 1.5), LaneTime("d2h", 5, 2.0))


def test_jobs_that_overlap_take_what_they_take_together() -> None:
    assert lane_times._together([(1, 0.0, 2.0), (1, 1.0, 3.0), (1, 5.0, 6.0), (1, 5.2, 5.4)]) == pytest.approx(4.0)


class FakeEvent:
    """Of a stream on which each event lies two milliseconds behind the one before; ended once it is told so."""

    made: ClassVar[list[FakeEvent]] = []

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at_ms, self.ended = 0.0, False

    def record(self) -> None:
        self.made.append(self)
        self.at_ms = 2.0 * len(self.made)

    def query(self) -> bool:
        return self.ended

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.at_ms - self.at_ms


def test_on_a_stream_events_tell_the_time_and_what_has_not_ended_is_told_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "made", [])
    layout, ran = layout_of([(2, [0]), (6, [1])]), list[int]()
    times = lane_times.LaneTimes(layout, torch.device("cuda"))
    for bundle in (0, 1):
        times.around(LaneOperation(Work.FETCH, LaneKind.H2D, bundle=bundle), lambda: ran.append(1))()
    first, second = layout.shard_bytes(0), layout.shard_bytes(1)
    assert times.take() == () and len(ran) == 2
    for event in FakeEvent.made[:2]:
        event.ended = True
    assert times.take() == (LaneTime("h2d", first, 2.0 / 1000),)
    for event in FakeEvent.made:
        event.ended = True
    assert times.take() == (LaneTime("h2d", second, 2.0 / 1000),)
    assert times.take() == ()
