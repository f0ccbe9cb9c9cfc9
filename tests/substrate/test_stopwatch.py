"""Intervals of compute, without the waits in them, by either clock."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch

from systems.device.watch.stopwatch import CudaStopwatch, HostStopwatch

ROOM = 0.02


def test_the_host_does_not_count_its_waits() -> None:
    watch = HostStopwatch()
    watch.start()
    time.sleep(ROOM)
    watch.lap()
    with watch.waiting():
        time.sleep(5 * ROOM)
    watch.lap()
    first, second = watch.stop()
    assert first >= ROOM and second < ROOM
    assert watch.stop() == ()


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Events that happen a millisecond after one another. Returns all that were made."""
    clock, made = itertools.count(), []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing
            made.append(self)

        def record(self) -> None:
            self.at = next(clock)

        def synchronize(self) -> None:
            return

        def elapsed_time(self, end: Any) -> float:
            return float(end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    return made


def test_a_device_is_timed_by_its_own_events(ticks: list[Any]) -> None:
    watch = CudaStopwatch()
    with watch.waiting():
        assert not ticks, "nothing is recorded while it is stopped"
    watch.start()
    watch.lap()
    with watch.waiting():
        pass
    with watch.waiting():
        pass
    watch.lap()
    watch.lap()
    assert watch.stop() == pytest.approx((0.001, 0.003, 0.001))  # 5 ticks less two waits of one each
    made = len(ticks)
    with watch.waiting():
        assert len(ticks) == made
    assert watch.stop() == ()
