"""Angel-PTM on several ranks as threads, where moves of pages and gathers of layers are tasks of their own: bits of the
reference, runs as their plans say, and the bytes of the layout."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from systems.planning.plan import LaneKind, OpKind
from systems.planning.policy.base import moved
from systems.planning.step.operations import Work
from tests.systems.every import STRATEGIES
from tests.systems.running import Run, managed
from tests.systems.test_ranks import Asked, assert_is_one_rank, on_one_rank, on_ranks
from tests.systems.test_shards import plan_of, reference, schedule_of, trained

ANGEL = STRATEGIES["angel-ptm"]
TIGHT = [  # share: of the reference's peak, in which pages are moved, stay, and come again
    Asked("stack", 2, clip=0.5, share=0.25),
    Asked("stack", 4, share=0.24),
    Asked("opt", 3, share=0.34),
    Asked("opt", 2, 2, share=0.3),
    Asked("gpt2", 3, 2, "bf16", share=0.24),
    Asked("frozen-middle", 2, share=0.4),
    Asked("called-twice", 3, clip=0.5, share=0.3),
]
FROM_HOST = (Work.FETCH, Work.MOVE)


def budget(asked: Asked) -> int:
    return int(asked.share * (reference(asked)[0].memory.device_peak_bytes or 0))


def check_bytes(run: Run) -> None:
    """What passes PCIe and the link is the layout's: a rank's part of each layer that comes from the host, and all of each that
    is gathered, of which the link has all but that part. `trained` has compared the run with its schedule.
    """
    plan, layout, schedule = plan_of(run), managed(run.engine).layout, schedule_of(run)
    kinds = {kind: moved(plan, kind) for kind in OpKind}
    moves = [o.bundle for o in schedule.bare if o.kind in FROM_HOST]
    assert set(kinds[OpKind.MOVE]) <= set(moves)
    assert sum(o.bytes for o in schedule.bare if o.lane is LaneKind.H2D) == sum(map(layout.shard_bytes, moves))
    gathers = [o for o in schedule.bare if o.kind is Work.GATHER]
    assert sum(o.bytes for o in gathers) == sum(map(layout.bundle_bytes, kinds[OpKind.FETCH]))
    statistics: Any = managed(run.engine).strategy.statistics()
    assert statistics.moved_at_start + statistics.moved_later == len(moves)
    assert plan.predicted_device_peak_bytes == run.memory.device_peak_bytes


OPTIONS: tuple[dict[str, Any], ...] = ({}, {"nonfinite": "stop"}, {"run_ahead": False})


PAIRS = [*zip(TIGHT, itertools.cycle(OPTIONS), strict=False), *((TIGHT[0], each) for each in OPTIONS[1:])]


@pytest.mark.parametrize(("asked", "options"), PAIRS, ids=str)
@pytest.mark.one_in(7)
def test_moves_and_gathers_have_the_reference_s_bits_and_do_as_planned(asked: Asked, options: dict[str, Any]) -> None:
    if "nonfinite" in options:
        asked = asked._replace(clip=0.0)
    for run in trained(ANGEL, asked, {"cache": "0", **options}, budget(asked)):
        assert OpKind.MOVE in {p.operation.kind for p in plan_of(run).operations}
        check_bytes(run)


@pytest.mark.parametrize("asked", [TIGHT[0], TIGHT[2], TIGHT[5]], ids=str)
@pytest.mark.one_in(2)
def test_ranks_that_move_pages_are_one_rank_that_accumulates(asked: Asked) -> None:
    found = on_ranks(ANGEL, asked.model, asked.size, options={"cache": "0"}, clip=0.5, device_memory=budget(asked))
    assert_is_one_rank(on_one_rank(asked.model, asked.size, 0.5, "fp32"), found)
    assert all(moved(plan_of(run), OpKind.MOVE) for run in found)


def test_pages_stay_from_forward_to_backward_and_are_gathered_twice() -> None:
    """Moved once, though there is no room for all layers between their uses."""
    asked = Asked("opt", 2, 2, share=0.33)
    for run in trained(ANGEL, asked, {"cache": "0"}, budget(asked)):
        plan = plan_of(run)
        kinds = {kind: moved(plan, kind) for kind in OpKind}
        twice = {b for b in kinds[OpKind.SHRINK] if kinds[OpKind.FETCH].count(b) > 1}
        assert twice and not kinds[OpKind.DROP]
        moves = [o.bundle for o in schedule_of(run).bare if o.kind in FROM_HOST]
        assert all(moves.count(b) == 1 for b in twice)


@pytest.mark.parametrize("asked", [Asked("stack", 2, share=0.34), Asked("opt", 3, share=0.4)], ids=str)
def test_beside_a_cache_of_states_pages_at_home_are_gathered_alone(asked: Asked) -> None:
    """Moves of some layers, and optimizer states of others."""
    for run in trained(ANGEL, asked, {"cache": "90KiB"}, budget(asked)):
        plan = plan_of(run)
        assert plan.sharded and not plan.sharded & set(moved(plan, OpKind.MOVE))
        assert plan.predicted_device_peak_bytes == run.memory.device_peak_bytes
