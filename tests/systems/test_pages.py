"""Parameters that go on from one segment into the next: no strategy does anything else for it, and no bit changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from systems.planning.layout import Bundle, FlatSpace, Layout, Placement, Segment
from systems.planning.races import find_races
from systems.substrate.events import issued_operations
from systems.substrate.updates import joined
from tests.paged import paged
from tests.systems import models_small
from tests.systems.models_small import tokens
from tests.systems.running import (
    AMPLE,
    RANDOM,
    RESIDENT,
    assert_equal,
    elixir,
    evict_at_once,
    h3t,
    patrickstar,
    settings,
    start,
    train,
)
from tests.systems.setups import Setup, budget_of, reference
from tests.systems.test_memory import check_segments

SYSTEMS = {"elixir": elixir(), "patrickstar": patrickstar(), "h3t": h3t(), "random": RANDOM}
LITTLE = 1_300_000  # bytes: about half of what resident takes
ROWS: list[tuple[str, int, dict[str, Any]]] = [
    ("elixir", AMPLE, {"accumulate": 2, "clip": 0.5}),
    ("elixir", LITTLE, {}),
    ("patrickstar", AMPLE, {"clip": 0.5}),
    ("patrickstar", LITTLE, {"dtype": "bf16", "accumulate": 2}),
    ("h3t", LITTLE, {"accumulate": 2, "clip": 0.5}),
    ("random", LITTLE, {}),
]


@pytest.mark.parametrize(("system", "budget", "given"), ROWS, ids=str)
def test_pages_equal_resident(system: str, budget: int, given: dict[str, Any]) -> None:
    """Pages of 7 lines cut the matrices, and hold several of the small tensors; the embedding is shared."""
    ids = tokens(4, given.get("accumulate", 1))
    expected = train(start(RESIDENT, models_small.build("opt"), settings(**given)), ids)
    asked = settings(**given, device_memory=budget, log_events=True)
    engine: Any = start(paged(SYSTEMS[system], 7), models_small.build("opt"), asked)
    segments = engine.parts.layout.segments
    assert any(p.start for s in segments for p in s.placements) and any(len(s.placements) > 1 for s in segments)
    if system == "random":
        evict_at_once(engine, seed=1)

    def check(step: int, _: object) -> None:
        engine.drain()
        check_segments(engine.parts)

    assert_equal(expected, train(engine, ids, each_step=check))
    assert find_races(issued_operations(engine.log.operations)) == []


@pytest.mark.parametrize("page", [1, 100_000])
def test_any_size_of_page(page: int) -> None:
    """Half of the blocks are frozen."""
    setup = Setup("gpt2", "full", accumulate=2, sharing="half-frozen", clip=0.5)
    assert_equal(reference(setup), setup.run(paged(SYSTEMS["elixir"], page), budget_of(setup, "half")))


def test_a_summons_reads_and_writes_all_pieces() -> None:
    engine = start(paged(elixir(), 1), models_small.build("opt"), settings())
    plain = start(RESIDENT, models_small.build("opt"), settings())
    with engine, plain:
        for each in (engine, plain):
            with each.summon(write=True) as values:
                for value in values.values():
                    value.copy_(torch.arange(value.numel()).view(value.shape) / value.numel())
        ids = tokens(2, 1)
        assert_equal(train(plain, ids), train(engine, ids))


def test_pieces_become_one_tensor() -> None:
    whole = torch.arange(10.0)
    assert joined([whole[2:5], whole[5:6], whole[6:10]]).data_ptr() == whole[2:].data_ptr()
    assert torch.equal(joined([whole[2:5], whole[5:6], whole[6:10]]), whole[2:])
    for apart in ([whole[:3], whole[4:6]], [whole[:3], whole[3:5].clone()]):
        assert torch.equal(joined(apart), torch.cat(apart))
    assert joined([whole]).data_ptr() == whole.data_ptr()


@pytest.mark.parametrize(
    "pieces",
    [
        [[Placement(0, 0, 64)], [Placement(0, 64, 64, 64)]],  # a gap
        [[Placement(0, 0, 128)], [Placement(0, 0, 64, 64)]],  # elements 64 to 127 twice
        [[Placement(0, 0, 128, 128)], [Placement(0, 0, 128)]],  # in the wrong order
    ],
)
def test_pieces_must_follow_each_other(pieces: list[list[Placement]]) -> None:
    space = FlatSpace("all", 1, True)
    segments = tuple(Segment(k, space, 128, tuple(each)) for k, each in enumerate(pieces))
    layout = Layout(4, segments, (Bundle(0, (0, 1), (0,), 256, True),))
    with pytest.raises(ValueError, match="parameter 0 does not go on where it ended, in segment"):
        _ = layout.places
