"""Ranks that wait for each other for ever, beside those that wait for one that works."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from systems.ranks import gloo, nccl
from systems.ranks.gloo import GlooLink
from systems.ranks.nccl import NcclLink
from systems.ranks.stuck import Board, StuckWatch, Waits

STUCK_S = 0.1
FAR_S = 10.0


class Stream:
    """Of a device that does nothing of itself."""

    def __init__(self) -> None:
        self._given: deque[str] = deque()
        self._behind = 0

    def give(self, work: str) -> None:
        self._given.append(work)

    def mark(self) -> Callable[[], bool]:
        """As an event that is recorded."""
        at = self._behind + len(self._given)
        return lambda: self._behind >= at

    def end(self, work: str) -> None:
        """What it is at."""
        assert self._given.popleft() == work
        self._behind += 1


class OnDevice(torch.Tensor):
    """One that says so."""

    is_cuda = True


class Watched:
    """Ranks that share a board, each with its waits and a watch."""

    def __init__(self, size: int) -> None:
        self.told: list[str] = []
        self.some_told = threading.Event()
        self.words = [""] * size
        self.waits = [Waits() for _ in range(size)]
        self.watches = [StuckWatch(waits, self._board(rank), STUCK_S, self._tell) for rank, waits in enumerate(self.waits)]

    def _board(self, rank: int) -> Board:
        def write(text: str) -> None:
            self.words[rank] = text

        return Board(write=write, read=lambda: list(self.words))

    def _tell(self, told: str) -> None:
        self.told.append(told)
        self.some_told.set()

    def close(self) -> None:
        for watch in self.watches:
            watch.close()


def test_waits_that_cannot_end_are_told_with_each_rank_s() -> None:
    ranks = Watched(3)
    with ExitStack() as waiting:
        for rank, what in enumerate(("gather bundle 3", "gather bundle 3", "reduce bundle 2")):
            waiting.enter_context(ranks.waits[rank].of("link", what))
        assert ranks.some_told.wait(FAR_S)
    ranks.close()
    assert ranks.told[0] == (
        "ranks wait for each other: rank 0 in 'gather bundle 3' (number 1 of link); rank 1 in 'gather bundle 3' (number 1 of "
        "link); rank 2 in 'reduce bundle 2' (number 1 of link): does the model do the same on all of them?"
    )


def test_the_same_collective_of_another_time_is_another() -> None:
    ranks = Watched(2)
    with ranks.waits[1].of("control", "step"):
        pass
    with ranks.waits[0].of("control", "step"), ranks.waits[1].of("control", "step"):
        assert ranks.some_told.wait(FAR_S)
    ranks.close()


def test_one_that_works_is_waited_for() -> None:
    ranks = Watched(2)
    with ranks.waits[0].of("link", "gather bundle 3"):
        assert not ranks.some_told.wait(10 * STUCK_S)
    ranks.close()


def test_what_all_are_in_goes_on() -> None:
    """It is slow, or a peer is gone: nobody is at another place."""
    ranks = Watched(2)
    with ranks.waits[0].of("link", "gather bundle 3"), ranks.waits[1].of("link", "gather bundle 3"):
        assert not ranks.some_told.wait(10 * STUCK_S)
    ranks.close()


def test_short_waits_are_nobody_s_business() -> None:
    ranks = Watched(2)
    for _ in range(20):
        with ranks.waits[0].of("link", "one"), ranks.waits[1].of("control", "other"):
            assert not ranks.some_told.wait(STUCK_S / 4)
    ranks.close()


def linked(waits: Waits, monkeypatch: pytest.MonkeyPatch, stream: Stream) -> NcclLink:
    """The first of two ranks, whose collectives a stream is given and does not carry out."""
    host: Any = GlooLink.__new__(GlooLink)
    host.rank, host.size = 0, 2
    monkeypatch.setattr(nccl, "_mark", stream.mark)
    monkeypatch.setattr(nccl, "_gather", lambda *_, **__: stream.give("gather"))
    monkeypatch.setattr(nccl, "_reduce_scatter", lambda *_, **__: stream.give("reduce"))
    monkeypatch.setattr(nccl.dist, "all_to_all", lambda *_, **__: stream.give("exchange"))
    group: Any = None
    return NcclLink(group, host, waits)


@pytest.mark.parametrize("sum_by", ["ordered", "native"])
def test_a_device_that_computes_has_not_come_to_its_collectives(sum_by: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it does; once it has, it waits in them one after the other."""
    waits, stream, whole = Waits(), Stream(), torch.zeros(4).as_subclass(OnDevice)
    link = linked(waits, monkeypatch, stream)
    link.sum_by(sum_by)
    stream.give("forward")
    link.gather("gather bundle 1", whole)
    link.reduce("reduce bundle 2", whole)
    stream.give("backward")
    link.gather("gather bundle 3", whole)
    now = -1.0  # older than nothing
    assert waits.older_than(now) == ""
    stream.end("forward")
    assert waits.older_than(now) == "'gather bundle 1' (number 1 of devices)"
    stream.end("gather")
    assert waits.older_than(now) == "'reduce bundle 2' (number 2 of devices)"
    stream.end("reduce" if sum_by == "native" else "exchange")
    assert waits.older_than(now) == ""
    stream.end("backward")
    assert waits.older_than(now) == "'gather bundle 3' (number 3 of devices)"
    stream.end("gather")
    assert waits.older_than(now) == ""


def test_one_whose_device_computes_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its link, and where its host waits, are not the others'."""
    ranks, stream = Watched(2), Stream()
    link = linked(ranks.waits[0], monkeypatch, stream)
    stream.give("forward")
    link.gather("gather bundle 3", torch.zeros(4).as_subclass(OnDevice))
    with ranks.waits[1].of("link", "gather bundle 3"):
        assert not ranks.some_told.wait(10 * STUCK_S)
        stream.end("forward")
        assert ranks.some_told.wait(FAR_S)
    ranks.close()
    assert "rank 0 in 'gather bundle 3' (number 1 of devices)" in ranks.told[0]


@pytest.mark.parametrize("what", ["gather", "reduce"])
def test_what_goes_through_the_host_is_no_wait_before_the_device_is_there(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waits, seen = Waits(), list[str]()
    link: Any = GlooLink.__new__(GlooLink)
    link.rank, link.size, link._waits = 0, 2, waits

    class Current:
        def synchronize(self) -> None:
            seen.append(waits.older_than(-1.0))

    monkeypatch.setattr(gloo.torch.cuda, "current_stream", lambda device: Current())
    monkeypatch.setattr(link, f"_{what}", lambda tag, *wholes: seen.append(waits.older_than(-1.0)))
    getattr(link, what)("bundle 3", torch.zeros(4).as_subclass(OnDevice))
    assert seen == ["", "'bundle 3' (number 1 of link)"]


@pytest.mark.parametrize("gone", [False, True])
def test_what_a_watch_wrote_goes_with_it(gone: bool) -> None:
    """Else a rank that has closed looks as if it waited for ever. Who keeps the board may be gone by then."""
    ranks = Watched(2)
    with ranks.waits[0].of("link", "gather bundle 3"):
        for _ in range(100):
            if ranks.words[0]:
                break
            threading.Event().wait(STUCK_S)
        assert ranks.words[0]
        if gone:
            ranks.watches[0]._board = Board(write=_refuse, read=_refuse)
        ranks.watches[0].close()
        assert bool(ranks.words[0]) is gone
    ranks.watches[1].close()


def _refuse(*_: Any) -> Any:
    raise RuntimeError("the store is gone")
