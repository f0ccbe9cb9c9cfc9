"""Ranks that wait for each other for ever, beside those that wait for one that works."""

from __future__ import annotations

import threading
from contextlib import ExitStack

from systems.ranks.stuck import Board, StuckWatch, Waits

STUCK_S = 0.1
FAR_S = 10.0


class Watched:
    """Ranks that share a board, each with its waits and a watch."""

    def __init__(self, size: int) -> None:
        self.told: list[str] = []
        self.some_told = threading.Event()
        self._words = [""] * size
        self.waits = [Waits() for _ in range(size)]
        self.watches = [StuckWatch(waits, self._board(rank), STUCK_S, self._tell) for rank, waits in enumerate(self.waits)]

    def _board(self, rank: int) -> Board:
        def write(text: str) -> None:
            self._words[rank] = text

        return Board(write=write, read=lambda: list(self._words))

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
