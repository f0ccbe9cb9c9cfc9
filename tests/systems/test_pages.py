"""Parameters that go on from one segment into the next: no strategy does anything else for it, and no bit changes."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import torch

from systems.planning.layout import Bundle, FlatSpace, Layout, Placement, Segment
from systems.planning.plan import Tier
from systems.substrate.bundle.segments import joined
from tests.paged import paged
from tests.planning.races import find_races, issued_operations
from tests.systems import models_small
from tests.systems.every import MANAGED, STRATEGIES
from tests.systems.models_plain import CASES, build
from tests.systems.models_small import tokens
from tests.systems.running import (
    AMPLE,
    RANDOM,
    RESIDENT,
    assert_equal,
    elixir,
    evict_at_once,
    one_step,
    settings,
    start,
    train,
)
from tests.systems.setups import Setup, budget_of, reference
from tests.systems.test_memory import check_segments

LITTLE = 1_300_000  # bytes: about half of what resident takes
ROWS: list[tuple[str, int, dict[str, Any]]] = [
    ("elixir", AMPLE, {"accumulate": 2, "clip": 0.5}),
    ("elixir", LITTLE, {}),
    ("patrickstar", AMPLE, {"clip": 0.5}),
    ("patrickstar", LITTLE, {"dtype": "bf16", "accumulate": 2}),
    ("h3t", LITTLE, {"accumulate": 2, "clip": 0.5}),
    ("random", LITTLE, {}),
]
GIVEN: list[dict[str, Any]] = [{"accumulate": 2}, {"dtype": "bf16", "clip": 0.5}]
ROWS += [(s, LITTLE, GIVEN[n % 2]) for n, s in enumerate(MANAGED) if s not in {row[0] for row in ROWS}]


@pytest.mark.parametrize(("system", "budget", "given"), ROWS, ids=str)
@pytest.mark.one_in(4)
def test_pages_equal_resident(system: str, budget: int, given: dict[str, Any]) -> None:
    """Pages of 7 lines cut the matrices, and hold several of the small tensors; the embedding is shared."""
    ids = tokens(3, given.get("accumulate", 1))
    expected = train(start(RESIDENT, models_small.build("opt"), settings(**given)), ids)
    asked = settings(**given, device_memory=budget, log_events=True)
    engine: Any = start(paged(MANAGED[system], 7), models_small.build("opt"), asked)
    segments = engine.layout.segments
    assert any(p.start for s in segments for p in s.placements) and any(len(s.placements) > 1 for s in segments)
    if system == "random":
        evict_at_once(engine, seed=1)

    def check(step: int, _: object) -> None:
        engine.drain()
        check_segments(engine)

    assert_equal(expected, train(engine, ids, each_step=check))
    assert find_races(issued_operations(engine.log.operations)) == []


@pytest.mark.parametrize("page", [1, 100_000])
def test_any_size_of_page(page: int) -> None:
    """Half of the blocks are frozen."""
    setup = Setup("gpt2", "full", accumulate=2, sharing="half-frozen", clip=0.5)
    assert_equal(reference(setup), setup.run(paged(elixir(), page), budget_of(setup, "half")))


@pytest.mark.parametrize("model", ["called-twice", "late-leaf", "rounds", "silent", "unused-output"])
@pytest.mark.one_in(3)
def test_parameters_whose_gradients_are_late_or_missing(model: str) -> None:
    """Of a bundle with some gradients all segments are settled: none is left with a gradient in its slot."""
    ids = tokens(4, 1)
    expected = train(start(RESIDENT, build(model), settings()), ids, CASES[model].loss)
    engine: Any = start(paged(RANDOM, 1), build(model), settings(device_memory=400_000))

    def check(step: int, _: object) -> None:
        engine.drain()
        check_segments(engine)

    assert_equal(expected, train(engine, ids, CASES[model].loss, check))


TWICE = ("elixir", "patrickstar")  # in pages of their own and in gradients' place: also with accumulators


def work_of_a_step(page: int, accumulate: int, system: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, Counter[str]]:
    """Segments, and what the lanes do in a step: jobs, copies and calls of the host's kernel."""
    chosen = paged(STRATEGIES[system], page)
    timed = {"solver": "on"} if "solver" in chosen.Options.model_fields else {}  # else two runs' clocks choose
    asked = settings(device_memory=LITTLE, accumulate=accumulate)
    engine: Any = start(chosen, models_small.build("opt"), asked, chosen.Options(**timed))
    ids, found = tokens(4, accumulate), Counter[str]()
    with engine:
        for each in ids[:3]:
            one_step(engine, each)
        engine.drain()

        def count(owner: Any, name: str, *, jobs: bool = False) -> None:
            plain = getattr(owner, name)

            def counted(*args: Any, **more: Any) -> Any:
                lane = f"lane-{owner.kind.value}" if jobs else threading.current_thread().name
                if lane.startswith("lane-"):
                    found[f"{lane} {name}"] += 1
                return plain(*args, **more)

            monkeypatch.setattr(owner, name, counted)

        for lane in engine.device.lanes.values():
            count(lane, "submit", jobs=True)
        for name in ("update", "accumulate", "cast", "sum_squares_all"):
            count(engine.device.host_kernel, name)
        count(torch.Tensor, "copy_")
        one_step(engine, ids[3])
        engine.drain()
    monkeypatch.undo()
    return len(engine.layout.segments), found


@pytest.mark.parametrize(
    ("system", "accumulate"),
    [*((name, 1 + (name in TWICE)) for name in STRATEGIES), *(pytest.param(name, 1, marks=pytest.mark.slow) for name in TWICE)],
)
@pytest.mark.one_in(3)
def test_pages_cost_no_more_than_chunks(system: str, accumulate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (few, chunks), (many, pages) = (work_of_a_step(page, accumulate, system, monkeypatch) for page in (100_000, 3))
    assert few < 20 and many > 1000
    assert chunks == pages
    for kind in ("h2d submit", "h2d copy_", "d2h submit", "d2h copy_", "cpu submit", "cpu update"):
        assert chunks[f"lane-{kind}"], f"void: no {kind}"


def test_a_bundle_is_fetched_from_slots_and_masters() -> None:
    """Where some of its slots hold a gradient; the segments between them are copied together all the same."""
    engine: Any = start(paged(elixir(), 1), models_small.build("opt"), settings(dtype="bf16"))
    with engine:
        residency = engine.residency
        bundle = max(engine.bundles, key=lambda each: len(each.segments))
        index, mine = bundle.index, list(bundle.segments)
        residency.drop(index)
        for each in mine[2:5] + mine[-1:]:
            each.slot_holds_gradient = True
            each.slot.fill_(torch.nan)
        assert [len(stretch.stored) for stretch in bundle.stretches_of(lambda each: each.slot_holds_gradient)] == [3, 1]
        others = [len(stretch.stored) for stretch in bundle.stretches_of(lambda each: not each.slot_holds_gradient)]
        assert others == [2, len(mine) - 6]
        residency.fetch(index)
        engine.drain()
        for each, piece in zip(mine, bundle.pieces(bundle.block), strict=True):
            assert torch.equal(piece, each.state.master.bfloat16())
        engine.tiers.restore_slots(bundle, lambda each: each.slot_holds_gradient)
        engine.drain()
        check_segments(engine)


@pytest.mark.parametrize("fits", [0, 3])
def test_a_bundle_whose_state_does_not_fit_leaves_none_of_it_on_the_device(fits: int) -> None:
    ids = tokens(4, 1)
    expected = train(start(RESIDENT, models_small.build("opt"), settings()), ids)
    engine: Any = start(paged(elixir(), 7), models_small.build("opt"), settings())
    store, tiers, moved = engine.store, engine.tiers, []
    move = tiers.to_device

    def limited(index: int) -> bool:
        moved.append(index)
        return len(moved) % (fits + 1) != 0 and move(index)

    tiers.to_device = limited

    def check(step: int, _: object) -> None:
        engine.drain()
        check_segments(engine)
        settled = {s for b in engine.layout.bundles if not b.movable for s in b.segments}
        assert all(each.tier is Tier.HOST or each.segment.index in settled for each in store.segments)

    assert_equal(expected, train(engine, ids, each_step=check))
    assert moved, "void: no state was to be moved"


def test_a_summons_reads_and_writes_all_pieces() -> None:
    engine = start(paged(elixir(), 7), models_small.build("opt"), settings())
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
