"""Angel-PTM's paper variant with parts of layers on the device: bits of plain training, runs that are their plans to the byte.

A layer is in part on the device where a plan moves or leaves pages; at half of what resident takes all layers of these models
have room, at a quarter they have not.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from systems.planning.plan import OpKind, Plan, pages_bytes
from systems.planning.step.demand import demand_of
from systems.planning.step.operations import LaneOperation, Work
from systems.substrate.bundle.bundle import ManagedBundle
from systems.substrate.engine import ManagedEngine
from systems.substrate.moves.pages import PageMoves
from tests.planning.races import find_races
from tests.systems.running import RESIDENT, Run, angel_ptm, managed
from tests.systems.test_angel_ptm_paper import MODELS, assert_as_alone, half
from tests.systems.test_ordering import as_issued
from tests.systems.test_ranks import STEPS, assert_is_one_rank, on_one_rank, on_ranks
from tests.systems.test_shards import Last, plan_of, schedule_of

KIB = 1 << 10
PAGES = {"4KiB": 4 * KIB, "64KiB": 64 * KIB, "4MiB": 4 * KIB * KIB}


def trained(model: str, page: int, share: float, last: Last, accumulate: int = 1) -> Run:
    """share: of resident's peak."""
    options, memory = {"variant": "paper", "page": page}, int(2 * half(model) * share)
    (run,) = on_ranks(angel_ptm(), model, 1, accumulate, options, before=last.note, device_memory=memory, log_events=True)
    assert run.counters["fallbacks"] == run.counters["departures"] == 0
    assert (run.memory.device_peak_bytes or 0) <= memory
    return run


def parts(plan: Plan) -> int:
    """Operations that leave a layer in part on the device."""
    return sum(bool(p.operation.pages) for p in plan.operations)


def h2d_bytes(run: Run, last: Last) -> int:
    """Of the last step."""
    return run.counters["h2d_bytes"] - last.counters[0]["h2d_bytes"]


@pytest.mark.parametrize("page", ["4KiB", "64KiB"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.one_in(4)
def test_parts_of_layers_hold_the_bits(model: str, page: str) -> None:
    """Predicted peak is measured peak, bytes of lanes are the schedule's, nothing races, and less than a page has no use."""
    last = Last()
    run = trained(model, PAGES[page], 0.25, last)
    assert_is_one_rank(on_one_rank(model, 1, 0.0, "fp32"), [run])
    assert_as_alone(run, last)
    plan = plan_of(run)
    assert parts(plan), "void: no part of a layer is on the device"
    assert 0 <= int(2 * half(model) * 0.25) - (plan.predicted_device_peak_bytes or 0) < PAGES[page]
    assert run.memory.device_peak_bytes == plan.predicted_device_peak_bytes


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.one_in(12)
def test_half_of_resident_s_memory_holds_the_bits_with_any_page(model: str, page: str) -> None:
    last = Last()
    run = trained(model, PAGES[page], 0.5, last)
    assert_is_one_rank(on_one_rank(model, 1, 0.0, "fp32"), [run])
    assert_as_alone(run, last)


def test_micro_batches_with_parts_of_layers() -> None:
    last = Last()
    run = trained("opt-tiny", PAGES["64KiB"], 0.27, last, accumulate=2)
    assert_is_one_rank(on_one_rank("opt-tiny", 2, 0.0, "fp32"), [run])
    assert_as_alone(run, last)
    assert parts(plan_of(run)), "void: no part of a layer is on the device"


@cache
def opt(page: str) -> tuple[Run, Last]:
    last = Last()
    return trained("opt-tiny", PAGES[page], 0.25, last), last


def test_sizes_of_pages_differ_in_plan_peak_and_traffic() -> None:
    runs = {page: opt(page) for page in PAGES}
    for told in (
        lambda run, last: plan_of(run).operations,
        lambda run, last: plan_of(run).predicted_device_peak_bytes,
        h2d_bytes,
    ):
        assert len({told(run, last) for run, last in runs.values()}) == len(PAGES)
    assert not parts(plan_of(runs["4MiB"][0])), "a page that is larger than a layer has all of it"


@pytest.mark.parametrize("page", PAGES)
def test_traffic_is_the_bytes_of_pages_not_there_at_each_use(page: str) -> None:
    """Of each use of a layer that comes and goes, less what stays from the use before; over its update none does."""
    run, last = opt(page)
    schedule, plan = schedule_of(run), plan_of(run)
    layout, demand = schedule.residence.layout, demand_of(schedule.residence.layout, _trace(run), schedule.residence.context)
    uses, goes = dict[int, int](), dict[int, int]()
    for bundle, spans in demand.hold_spans.items():
        if bundle not in schedule.residence.whole:
            uses[bundle], goes[bundle] = len(spans), 1
    stayed = {bundle: (uses[bundle] - 1) * layout.bundle_bytes(bundle) for bundle in uses}
    for p in plan.operations:
        if p.operation.kind in (OpKind.DROP, OpKind.SHRINK):
            left = sum(pages_bytes(layout, run) for run in p.operation.pages)
            stayed[p.operation.bundle] -= layout.bundle_bytes(p.operation.bundle) - left
    expected = sum(uses[b] * layout.bundle_bytes(b) - stayed[b] for b in uses)
    assert h2d_bytes(run, last) == expected
    assert managed(run.engine).strategy.statistics().fetched_bytes_per_step == expected


def _trace(run: Run) -> Any:
    engine, plan = managed(run.engine), plan_of(run)
    (trace,) = (trace for trace, known in engine.planner.plans.values() if known is plan)
    return trace


def test_a_layer_in_part_on_the_device_is_in_the_event_log() -> None:
    """A move of some of a layer's bytes, and a merge of what was apart, the one before the other."""
    run, last = opt("4KiB")
    log = managed(run.engine).log
    issued = log.operations[last.issued[0] :]
    layout = schedule_of(run).residence.layout
    moves = [op for op in issued if isinstance(op.what, LaneOperation) and op.what.kind is Work.MOVE]
    assert moves
    for op in moves:
        size = sum(extent.stop - extent.start for extent in op.writes)
        assert 0 < size < layout.bundle_bytes(op.what.bundle)
        merged = f"merge bundle {op.what.bundle} begins"
        assert merged in [other.label for other in issued[issued.index(op) :]]


def races(run: Run) -> int:
    return len(find_races(as_issued(managed(run.engine).log.operations)))


def test_a_merge_that_waits_for_nothing_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the pages that are on their way."""
    original = PageMoves.merge

    def merge(self: PageMoves, managed: ManagedBundle) -> None:
        for each in managed.pages:
            each.block.memory.writer = None
        original(self, managed)

    monkeypatch.setattr(PageMoves, "merge", merge)
    last = Last()
    assert races(trained("opt-tiny", PAGES["64KiB"], 0.25, last))


def test_pages_at_rest_take_over_what_is_edited() -> None:
    """Of every layer, between two steps, as pages of one lie on the device without the rest."""
    there = list[int]()

    def edit(engine: Any, _rank: int, step: int) -> None:
        if step == STEPS - 1:
            with engine.summon(write=True) as values:
                for name in sorted(values):
                    values[name].mul_(1.25)
            there.append(
                sum(bool(bundle.pages) for bundle in engine.residency.bundles) if isinstance(engine, ManagedEngine) else 0
            )

    memory, options = int(2 * half("opt-tiny") * 0.22), {"variant": "paper", "page": PAGES["4KiB"]}
    expected = on_ranks(RESIDENT, "opt-tiny", 1, before=edit)
    found = on_ranks(angel_ptm(), "opt-tiny", 1, 1, options, before=edit, device_memory=memory)
    assert there[1], "void: no pages are at rest on the device between steps"
    assert_is_one_rank(expected[0], found)
