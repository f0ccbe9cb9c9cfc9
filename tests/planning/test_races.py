"""The race detector against reachability, on random logs, and its speed."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from systems.planning.step.operations import IssuedOperation
from tests.planning.races import find_races

LANES = ("compute", "h2d", "d2h")


@st.composite
def logs(draw: st.DrawFn) -> list[IssuedOperation]:
    names = st.lists(st.sampled_from("abc"), max_size=2, unique=True).map(tuple)
    operations = []
    for ticket in range(draw(st.integers(0, 10))):
        earlier = st.lists(st.integers(0, ticket - 1), max_size=2).map(tuple) if ticket else st.just(())
        lane = draw(st.sampled_from(LANES))
        operations.append(IssuedOperation(ticket, lane, draw(names), draw(names), draw(earlier)))
    return operations


def unordered_pairs(operations: list[IssuedOperation]) -> list[tuple[int, int]]:
    """By brute force: conflicting pairs of which the first is not among the second's ancestors."""
    ancestors: dict[int, set[int]] = {}
    tail: dict[str, int] = {}
    for o in operations:
        mine: set[int] = set()
        for other in (*o.waits, *([tail[o.lane]] if o.lane in tail else [])):
            mine |= ancestors[other] | {other}
        ancestors[o.ticket] = mine
        tail[o.lane] = o.ticket
    pairs = []
    for i, first in enumerate(operations):
        for second in operations[i + 1 :]:
            clash = set(first.writes) & {*second.reads, *second.writes} or set(first.reads) & set(second.writes)
            if clash and first.ticket not in ancestors[second.ticket]:
                pairs.append((first.ticket, second.ticket))
    return pairs


@settings(deadline=None)
@given(logs())
def test_finds_a_race_exactly_where_there_is_one(operations: list[IssuedOperation]) -> None:
    found, true = find_races(operations), unordered_pairs(operations)
    assert {(race.first, race.second) for race in found} <= set(true)
    assert bool(found) == bool(true)


def test_issue_order_alone_is_no_order() -> None:
    write = IssuedOperation(10, "h2d", writes=("block",))
    read = IssuedOperation(11, "compute", reads=("block",), waits=(10,))
    again = IssuedOperation(12, "h2d", writes=("block",), waits=(11,))
    assert find_races([write, read, again]) == []
    (race,) = find_races([write, replace(read, waits=()), again])
    assert (race.resource, race.first, race.second) == ("block", 10, 11)
    assert "block" in str(race)
    (race,) = find_races([write, read, replace(again, waits=())])
    assert (race.first, race.second) == (11, 12)


def test_waits_on_unknown_work() -> None:
    assert find_races([IssuedOperation(5, "h2d", waits=(2,))]) == []  # before the log began
    with pytest.raises(ValueError, match="operation 5 waits on 6"):
        find_races([IssuedOperation(5, "h2d", waits=(6,))])
    with pytest.raises(ValueError, match="issued twice"):
        find_races([IssuedOperation(5, "h2d"), IssuedOperation(5, "d2h")])


def test_fifty_thousand_operations_take_seconds() -> None:
    operations = [
        IssuedOperation(i, LANES[i % 3], (f"r{i % 97}",), (f"r{(i * 7) % 97}",), (i - 1,) if i else ()) for i in range(50_000)
    ]
    begin = time.perf_counter()
    assert find_races(operations) == []
    assert time.perf_counter() - begin < 5
