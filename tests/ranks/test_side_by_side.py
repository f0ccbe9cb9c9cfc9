"""What one rank could not do alone, all ranks are told in its words."""

from __future__ import annotations

from typing import Any

import pytest

from systems.checkpoint import CheckpointError, SaveError
from systems.errors import BudgetError, DivergedError, UnavailableError, UnsupportedError
from systems.ranks.link import RanksDifferError
from systems.ranks.loopback import as_threads
from systems.ranks.ranks import Ranks, SingleRank
from systems.ranks.side_by_side import side_by_side


class StrangeError(Exception):
    """Of somebody else's, which no other process can be told of as it is."""

    def __init__(self) -> None:
        super().__init__("strange things")
        self.file = open("/dev/null")  # noqa: SIM115 - it cannot be pickled

    def __del__(self) -> None:
        self.file.close()


class StrangeValueError(StrangeError, ValueError):
    """One of a kind that is told."""


def told(error: BaseException) -> list[BaseException | None]:
    """By rank, where rank 1 of three raises it."""

    def work(ranks: Ranks) -> BaseException | None:
        try:
            with side_by_side(ranks, "work"):
                if ranks.rank == 1:
                    raise error
        except BaseException as raised:  # noqa: BLE001 - looked at
            return raised
        return None

    return as_threads(3, work)


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (ValueError("a b"), ValueError, "rank 1: a b"),
        (UnsupportedError("leave it"), UnsupportedError, "rank 1: leave it"),
        (BudgetError("no room", tier="disk", need=3, have=2, final=True), BudgetError, "rank 1: no room"),
        (DivergedError("far"), DivergedError, "rank 1: far"),
        (CheckpointError("damaged"), CheckpointError, "rank 1: damaged"),
        (SaveError(28, "not written", "there"), SaveError, "rank 1: not written"),
        (FileNotFoundError(2, "No such file", "there"), FileNotFoundError, "[Errno 2] rank 1: No such file: 'there'"),
        (OSError("odd"), OSError, "rank 1: odd"),
        (KeyboardInterrupt(), RuntimeError, "rank 1: KeyboardInterrupt: KeyboardInterrupt"),
        (UnavailableError("none", install="pip"), RuntimeError, "rank 1: UnavailableError: none: pip"),
        (UnicodeDecodeError("utf8", b"", 0, 1, "why"), RuntimeError, None),
        (StrangeError(), RuntimeError, "rank 1: StrangeError: strange things"),
        (StrangeValueError(), ValueError, "rank 1: strange things"),
        (KeyError("x"), RuntimeError, "rank 1: KeyError: 'x'"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_an_error_is_told_on_all_ranks_as_what_it_is(error: BaseException, kind: Any, words: str | None) -> None:
    first, mine, last = told(error)
    assert mine is error
    for other in (first, last):
        assert type(other) is kind and (words is None or str(other) == words)
        if isinstance(error, BudgetError):
            assert isinstance(other, BudgetError) and (other.tier, other.need, other.have, other.final) == ("disk", 3, 2, True)
        if isinstance(error, OSError):
            assert isinstance(other, OSError) and (other.errno, other.filename) == (error.errno, error.filename)


def test_two_errors_and_none() -> None:
    def work(ranks: Ranks) -> str:
        try:
            with side_by_side(ranks, "work"):
                if ranks.rank:
                    raise ValueError(f"of {ranks.rank}")
        except ValueError as error:
            return str(error)
        return "none"

    assert as_threads(3, work) == ["rank 1: of 1", "of 1", "of 2"]

    def fine(ranks: Ranks) -> None:
        with side_by_side(ranks, "work"):
            pass

    assert as_threads(2, fine) == [None, None]


def test_one_rank_raises_what_it_raises() -> None:
    with pytest.raises(KeyError, match="x"), side_by_side(SingleRank(), "work"):
        raise KeyError("x")


def test_an_error_of_its_own_stands_where_ranks_do_different_things() -> None:
    def work(ranks: Ranks) -> str:
        try:
            with side_by_side(ranks, f"work of {ranks.rank}"):
                if ranks.rank:
                    raise ValueError("mine")
        except (ValueError, RanksDifferError) as error:
            return type(error).__name__
        return "none"

    assert as_threads(2, work) == ["RanksDifferError", "ValueError"]
