"""Collectives by size: what is counted, with ranks as threads; real processes over gloo; and what is told when one fails."""

from __future__ import annotations

import time

import pytest

from harness.roofs import collectives as roofs
from harness.roofs.collectives import CollectiveSizes, collectives, measured
from harness.spec import BadInputError
from systems.ranks.loopback import as_threads
from systems.ranks.ranks import Ranks

SMALL = CollectiveSizes(wholes=(1 << 10, 1 << 14), over_s=0.0, rounds=2, told=3, patience_s=60.0)


def test_what_passes_a_port_and_as_many_calls_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of N bytes over 3 ranks two thirds, of a tensor that all can share; the slowest rank's time counts."""
    found = as_threads(3, lambda ranks: measured(ranks, "cpu", SMALL))
    sizes = [1026 * 2 // 3, 16386 * 2 // 3]
    for mine in found:
        assert [size for size, _ in mine.gathers] == [size for size, _ in mine.reductions] == sizes
        assert mine.native is None and mine.exchange_s > 0
    assert len({one.gathers for one in found}) == 1

    def slow(ranks: Ranks) -> float:
        return roofs._seconds(ranks, lambda: time.sleep(0.002 * ranks.rank), lambda: None, SMALL)

    assert all(seconds >= 0.004 for seconds in as_threads(3, slow))


def test_processes_over_gloo() -> None:
    found = collectives(2, "cpu", SMALL)
    assert [size for size, _ in found.gathers] == [1 << 9, 1 << 13]
    assert all(rate > 0 for _, rate in (*found.gathers, *found.reductions)) and found.native is None


def test_a_rank_that_fails_is_told() -> None:
    with pytest.raises(BadInputError, match=r"--ranks 2: rank \d: RuntimeError: .*negative"):
        collectives(2, "cpu", CollectiveSizes(wholes=(-1024,)))


def test_a_rank_that_says_nothing_is_waited_for_no_longer_than_is_said() -> None:
    with pytest.raises(BadInputError, match="--ranks 2: nothing was heard of rank 0, 1 for 0.01 s"):
        collectives(2, "cpu", CollectiveSizes(patience_s=0.01))
