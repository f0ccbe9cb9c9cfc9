"""Blocks never overlap, and a new owner waits for the last users of its own bytes and of no others."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from systems.device.lanes.ticket import DoneTicket, HostTicket, Ticket
from systems.device.memory.granule import MANY, Granule

SIZE = 64


def granule(size: int = SIZE) -> Granule:
    return Granule("device1", torch.empty(size, dtype=torch.uint8), DoneTicket(0))


def placed(granule: Granule, nbytes: int, *, compute: bool = False) -> tuple[int, list[Ticket]] | None:
    fit = granule.find(nbytes, compute=compute)
    return None if fit is None else granule.take(fit, nbytes)


def starts_of(granule: Granule, count: int) -> list[int]:
    """Of blocks of 10 bytes."""
    return [found[0] for found in (placed(granule, 10) for _ in range(count)) if found is not None]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20), st.integers(0, 30)), max_size=80))
def test_any_order_of_blocks(steps: list[tuple[bool, int, int]]) -> None:
    memory, live = granule(), dict[int, int]()  # start to stop
    last: list[Ticket | None] = [None] * SIZE  # of each byte
    for number, (free, size, which) in enumerate(steps):
        if free and live:
            start = sorted(live)[which % len(live)]
            stop = live.pop(start)
            ticket = HostTicket(number)
            memory.give(start, stop, [ticket])
            last[start:stop] = [ticket] * (stop - start)
            continue
        found = placed(memory, size)
        free_bytes = [not any(a <= byte < b for a, b in live.items()) for byte in range(SIZE)]
        fits = any(all(free_bytes[at : at + size]) for at in range(SIZE - size + 1))
        assert (found is not None) == fits
        if found is None:
            continue
        start, tickets = found
        assert all(free_bytes[start : start + size])
        live[start] = start + size
        wanted = {id(t) for t in last[start : start + size] if t is not None}
        assert {id(t) for t in tickets if isinstance(t, HostTicket)} == wanted
    assert memory.empty == (not live)


def test_what_was_freed_last_is_taken_last() -> None:
    """A gradient on its way out and the weights beside it: the block that comes first gets the older of both."""
    memory = granule(40)
    assert starts_of(memory, 4) == [0, 10, 20, 30]
    for start in (20, 0, 30):
        memory.give(start, start + 10, [HostTicket(start)])
    assert starts_of(memory, 3) == [20, 0, 30]


def test_compute_takes_what_was_copied_longest_ago() -> None:
    """A gradient on its way out was freed before the weights beside it, which nobody copies any more."""
    memory = granule(40)
    starts_of(memory, 4)
    memory.give(20, 30, [DoneTicket(8), HostTicket(9)])
    memory.give(0, 10, [HostTicket(1), DoneTicket(10)])
    memory.give(30, 40, [DoneTicket(11)])
    fit = memory.find(10, compute=False)
    assert fit is not None and memory.take(fit, 10)[0] == 20
    memory.give(20, 30, [HostTicket(9)])
    found = [placed(memory, 10, compute=True) for _ in range(3)]
    assert [start for start, _ in filter(None, found)] == [30, 0, 20]


def test_a_block_of_just_the_right_size_is_not_cut_from_a_larger_one() -> None:
    memory = granule(60)
    for size in (20, 5, 10, 25):
        placed(memory, size)
    memory.give(0, 20, [])
    memory.give(25, 35, [])
    found = placed(memory, 10)
    assert found is not None and found[0] == 25


def test_idle_neighbours_are_joined_when_pieces_are_many() -> None:
    memory = granule(4 * MANY)
    for _ in range(2 * MANY):
        placed(memory, 2)
    busy = HostTicket(1)
    for start in range(0, 4 * MANY, 2):
        memory.give(start, start + 2, [busy] if start == 6 else [DoneTicket(0)])
    assert len(memory._pieces) <= MANY
    assert not memory.idle and memory.empty
    busy.finish()
    assert memory.idle and memory.find(4 * MANY, compute=False) is not None


def test_tickets_of_joined_pieces_do_not_pile_up() -> None:
    """Over many steps, each of which places and frees more blocks than there are pieces."""
    memory, most = granule(40 * MANY), 0
    for step in range(40):
        blocks = []
        for number in range(MANY + 40):
            found = placed(memory, size := 10 + number % 3)
            assert found is not None
            most = max(most, len(found[1]))
            blocks.append((found[0], found[0] + size))
        for start, stop in blocks:
            memory.give(start, stop, [DoneTicket(step)])
    assert most <= 4
