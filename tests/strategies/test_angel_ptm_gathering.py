"""Algorithm 1 on several ranks: moves of pages and gathers of layers are tasks of their own. What the runtime makes of them:
tests/systems/test_ranks_angel_ptm.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from systems.errors import BudgetError
from systems.planning import hardware
from systems.planning.layout import Layout, ModelIndex
from systems.planning.plan import LaneKind, OpKind, Plan, optimizer_tiers
from systems.planning.step.demand import Demand, demand_of
from systems.planning.step.schedule import expand
from systems.planning.step.validator import validate
from systems.planning.trace import Phase, Trace
from systems.strategies.angel_ptm.gathering import schedule_on_ranks
from systems.strategies.angel_ptm.scheduling import Moves, schedule
from tests.planning.machines import simulate
from tests.planning.races import find_races
from tests.planning.reference import ReferenceRuntime
from tests.planning.synthetic import PLENTY, Case, cases, context, layout_of, models, trace_of, uneven_room
from tests.strategies.test_angel_ptm_policy import angel, told

RANKS = (2, 3, 4)


def chain(units: int, *, ranks: int = 2, pages: int = 1, seconds: float = 1e-3) -> tuple[Layout, Trace]:
    """A layer a unit, of which each rank has `pages` pages of 256 bytes."""
    layout = layout_of([(pages * ranks, [unit]) for unit in range(units)], ranks=ranks)
    return layout, trace_of(layout, seconds=seconds)


def scheduled(layout: Layout, trace: Trace, room: int | Sequence[int], sharded: frozenset[int] = frozenset()) -> Moves:
    ranks = layout.segments[0].space.ranks
    demand = demand_of(layout, trace, context(ranks=ranks))
    sizes = {b.index: layout.bundle_bytes(b.index) for b in layout.bundles}
    rooms = [room] * len(trace) if isinstance(room, int) else room
    return schedule_on_ranks(demand, sizes, {b: layout.shard_bytes(b) for b in sizes}, rooms, sharded)


def tasks(trace: Trace, found: Moves) -> list[str]:
    """`after B3 fetch 1`: behind the backward of unit 3. `start`: before the step."""

    def when(trigger: int) -> str:
        moment = trace.moments[trigger]
        if moment.phase is Phase.STEP_END:
            return "start"
        way = "F" if moment.phase in (Phase.FORWARD_ENTER, Phase.FORWARD_EXIT) else "B"
        return ("after " if moment.phase in (Phase.FORWARD_EXIT, Phase.BACKWARD_EXIT) else "at ") + f"{way}{moment.unit}"

    named = [f"{when(p.trigger)} {p.operation.kind.value} {p.operation.bundle}" for p in found.operations]
    return [each for each in named if each.startswith("start")] + [each for each in named if not each.startswith("start")]


def test_algorithm_1_by_hand_on_two_ranks() -> None:
    """Four layers of two pages, one of them each rank's, and room for seven pages.

    Phase 1: a layer that is computed with has its two, the next one is to be gathered into two more, and three lie beside.
    Those of 0, 1 and 2 are moved before the step. Page 0 is needed last, so it goes with its layer, and 3 comes; page 1 stays
    until backward, and page 0 comes again once the update of 3 has made room.
    Phase 2: 0 and 1 are gathered before the step, 0 as one with its move, for its page does not stay after it. There is no
    room for 2 beside those until 0 is let go of, and no page of it is needed where it is then: it stays until its backward, as
    3 does. 1 and 0 are gathered when the layer two before is let go of.
    """
    layout, trace = chain(4)
    found = scheduled(layout, trace, 7 * 256)
    assert tasks(trace, found) == [
        "start fetch 0",
        "start move 1",
        "start fetch 1",
        "start move 2",
        "after F0 drop 0",
        "after F0 fetch 2",
        "after F0 move 3",
        "after F1 shrink 1",
        "after F1 fetch 3",
        "after B3 fetch 1",
        "after B3 move 0",
        "after B2 fetch 0",
    ]
    assert (sorted(found.resident), sorted(found.shards)) == ([0, 1], [1, 2])
    assert (found.at_start, found.later) == (3, 2)


def test_pages_that_have_room_all_the_time_are_moved_once() -> None:
    """Four pages beside the layer that is computed with and the one that is gathered for the next: eight in all."""
    layout, trace = chain(4)
    found = scheduled(layout, trace, 8 * 256)
    assert [each for each in tasks(trace, found) if "start" in each] == [
        "start move 0",
        "start fetch 0",
        "start move 1",
        "start fetch 1",
        "start move 2",
        "start move 3",
    ]
    assert [each for each in tasks(trace, found) if "start" not in each] == [
        "after F0 shrink 0",
        "after F0 fetch 2",
        "after F1 shrink 1",
        "after F1 fetch 3",
        "after B3 fetch 1",
        "after B2 fetch 0",
    ]
    assert (sorted(found.resident), sorted(found.shards)) == ([0, 1], [0, 1, 2, 3])


def test_where_everything_fits_every_layer_comes_whole_before_the_step() -> None:
    layout, trace = chain(4)
    found = scheduled(layout, trace, 5 * 512)
    assert tasks(trace, found) == [f"start fetch {layer}" for layer in range(4)]
    assert (sorted(found.resident), sorted(found.shards)) == ([0, 1, 2, 3], [])


def test_pages_at_home_on_the_device_are_gathered_alone() -> None:
    layout, trace = chain(4)
    found = scheduled(layout, trace, 2 * 512, frozenset(range(4)))
    assert {p.operation.kind for p in found.operations} == {OpKind.FETCH, OpKind.SHRINK}
    assert not found.shards and not found.at_start + found.later


def test_pages_are_not_left_where_there_is_no_room_for_a_copy_of_them() -> None:
    """All would stay, but while layer 0 is computed with in forward nothing else fits."""
    layout, trace = chain(4)
    size = layout.bundle_bytes(0)
    alone = [moment.phase is Phase.FORWARD_ENTER and moment.unit == 0 for moment in trace.moments]
    room = [size if only else 4 * size for only in alone]
    found = scheduled(layout, trace, room)
    assert "after F0 shrink 0" not in tasks(trace, found)
    demand, bundles = demand_of(layout, trace, context(ranks=2)), range(4)
    sizes, parts = {b: layout.bundle_bytes(b) for b in bundles}, {b: layout.shard_bytes(b) for b in bundles}
    check_tasks(demand, sizes, parts, room, found, frozenset())


# ---- any layers, any room


def check_tasks(
    demand: Demand,
    sizes: Mapping[int, int],
    parts: Mapping[int, int],
    room: Sequence[int],
    found: Moves,
    sharded: frozenset[int],
) -> None:
    """A step's tasks never pass the room, have there what is held, and end the step as it began."""
    resident, pages = set(found.resident), set(found.shards)

    def used() -> int:
        return sum(sizes[b] for b in resident) + sum(parts[b] for b in pages)

    before = room[-1]
    for moment, least in enumerate(room):
        resident -= set(demand.stale[moment])
        pages -= set(demand.stale[moment])
        comes = False
        for p in (p for p in found.operations if p.trigger == moment):
            bundle, kind = p.operation.bundle, p.operation.kind
            if kind is OpKind.MOVE:
                assert bundle not in resident | pages | sharded
                pages.add(bundle)
            elif kind is OpKind.FETCH:
                assert bundle not in resident
                resident.add(bundle)
            else:
                assert not comes, "what goes makes room for what comes"
                if kind is OpKind.SHRINK and bundle not in sharded:
                    pages.add(bundle)
                assert used() <= before, "a copy of the pages lies beside the layer"
                resident.remove(bundle)
                if kind is OpKind.DROP:
                    pages.discard(bundle)
            comes = kind in (OpKind.MOVE, OpKind.FETCH)
            assert not comes or used() <= least
        assert set(demand.held[moment]) <= resident
        assert used() <= least
        before = least
    assert resident == set(found.resident) and pages == set(found.shards)


@settings(max_examples=300, deadline=None)
@given(cases(ranks=RANKS), st.integers(0, 16), st.frozensets(st.integers(0, 12)), st.booleans())
def test_tasks_keep_to_the_room_and_repeat(case: Case, spare: int, home: frozenset[int], as_printed: bool) -> None:
    layout, trace = case.layout, case.trace
    demand = demand_of(layout, trace, case.context)
    sizes = {b.index: layout.bundle_bytes(b.index) for b in layout.bundles}
    parts = {b: layout.shard_bytes(b) for b in sizes}
    room, sharded = uneven_room(demand, sizes, spare), home & sizes.keys()
    found = schedule_on_ranks(demand, sizes, parts, room, sharded, as_printed=as_printed)
    check_tasks(demand, sizes, parts, room, found, sharded)
    moves = {p.operation.bundle for p in found.operations if p.operation.kind is OpKind.MOVE}
    assert not moves & sharded
    last, gathers = len(trace) - 1, [p for p in found.operations if p.operation.kind is OpKind.FETCH]
    begins = [(0, p) for p in gathers if p.trigger == last] + [(p.trigger, p) for p in gathers if p.trigger < last]
    uses = [demand.next_use.after(p.operation.bundle, begin - 1) for begin, p in begins]
    assert uses == sorted(uses), "the link has them in the order in which they are needed"


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("units", [2, 4, 9])
@pytest.mark.parametrize("layers", [2, 2.5, 3, 4.5])
def test_every_gather_is_beside_the_computation_before(units: int, layers: float, ranks: int) -> None:
    """With room for two layers and more: issued before the unit before begins."""
    layout, trace = chain(units, ranks=ranks, pages=2)
    found = scheduled(layout, trace, int(layers * 2 * ranks) * 256)
    enters = [m for m, moment in enumerate(trace.moments) if moment.phase in (Phase.FORWARD_ENTER, Phase.BACKWARD_ENTER)]
    for p in found.operations:
        if p.operation.kind is OpKind.FETCH and p.trigger < len(trace) - 1:
            use = next(n for n, m in enumerate(enters) if m >= p.trigger and trace.moments[m].unit == p.operation.bundle)
            assert p.trigger < enters[use - 1]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("units", [6, 9])
def test_more_room_never_moves_more_from_the_host(units: int, ranks: int) -> None:
    """Nor are there ever more movements than of layers that come and go whole; of some rooms there are fewer."""
    layout, trace = chain(units, ranks=ranks)
    demand = demand_of(layout, trace, context(ranks=ranks))
    sizes = {b.index: layout.bundle_bytes(b.index) for b in layout.bundles}
    ours, whole = [], []
    for pages in range(2 * ranks, units * ranks + 2):
        found, other = scheduled(layout, trace, pages * 256), schedule(demand, sizes, [pages * 256] * len(trace))
        ours.append(found.at_start + found.later)
        whole.append(other.at_start + other.later)
    assert ours == sorted(ours, reverse=True)
    assert all(a <= b for a, b in zip(ours, whole, strict=True)) and sum(ours) < sum(whole)


@pytest.mark.parametrize("profile", ["h200-141g-x2", "superpod-a100-40g-x8"])
@pytest.mark.parametrize("share", [0.1, 0.2, 0.35, 0.6])
@pytest.mark.parametrize("seconds", [2e-4, 1e-3, 5e-3])
def test_steps_are_as_short_as_with_layers_that_come_whole(profile: str, share: float, seconds: float) -> None:
    """Layers of 50 MB, on machines whose link is faster than their PCIe; 0.5 % are for copies of pages out of layers."""
    machine = hardware.load(profile)
    ranks = machine.devices
    layout = layout_of([(200_000, [unit]) for unit in range(16)], ranks=ranks)
    trace, given_context = trace_of(layout, seconds=seconds), context(ranks=ranks)
    demand = demand_of(layout, trace, given_context)
    sizes = {b.index: layout.bundle_bytes(b.index) for b in layout.bundles}
    room = [int(share * layout.param_bytes)] * len(trace)

    def seconds_of(moves: Moves) -> float:
        plan = Plan(
            signature=trace.signature,
            operations=moves.operations,
            optimizer_tier=optimizer_tiers(layout, frozenset()),
            resident_at_start=moves.resident,
            shards_at_start=moves.shards,
        )
        validate(layout, trace, plan, given_context)
        return simulate(layout, trace, plan, given_context, machine).step_time_s

    two_tasks = scheduled(layout, trace, room)
    assert seconds_of(two_tasks) <= 1.005 * seconds_of(schedule(demand, sizes, room))


def test_a_deep_model_is_scheduled_in_seconds() -> None:
    layout, trace = chain(300, ranks=4)
    found = scheduled(layout, trace, 120 * 256)
    assert found.later and found.shards


# ---- plans


@settings(max_examples=150, deadline=None)
@given(
    models(largest=6000),
    st.sampled_from(RANKS),
    st.sampled_from([1, 2]),
    st.sampled_from(["auto", "0", "20KiB"]),
    st.floats(0.05, 1.1),
    st.integers(0, 4),
    st.sampled_from(["skip", "stop"]),
)
def test_every_plan_is_valid_and_within_budget_or_refused(
    index: ModelIndex, ranks: int, accumulate: int, cache: str, share: float, activation: int, nonfinite: str
) -> None:
    """Its bytes are those of the plainer runtime, and of the layout: a move and a fetch from the host bring a rank's part."""
    asked = angel(context(accumulate=accumulate, ranks=ranks))
    layout, least = asked.layout(index), told(asked).minimum_bytes
    trace = trace_of(layout, accumulate=accumulate, activation=activation * 700)
    most = PLENTY if share > 1 else least + int(share * (layout.param_bytes + 4 * activation * 700))
    given_context = context(device=most, accumulate=accumulate, ranks=ranks)
    refusal = None
    try:
        strategy = angel(given_context, cache=cache, nonfinite=nonfinite)
        plan = strategy.plan(strategy.layout(index), trace)
    except BudgetError as error:
        refusal = error
    if refusal is not None:
        assert refusal.need > refusal.have == most
        return
    memory = validate(layout, trace, plan, given_context)
    assert plan.predicted_device_peak_bytes == memory.total_peak <= most
    found, spelt_out = ReferenceRuntime(layout, trace, plan, given_context).run(), expand(layout, trace, plan, given_context)
    assert found.peak == plan.predicted_model_peak_bytes == memory.pool_peak
    assert find_races(spelt_out.issued()) == []
    moved = {lane: sum(o.bytes for o in spelt_out.bare if o.lane is lane) for lane in LaneKind}
    assert moved[LaneKind.H2D] == found.h2d_bytes
    from_host = (told(strategy).moved_at_start or 0) + (told(strategy).moved_later or 0)
    assert from_host == sum(o.lane is LaneKind.H2D for o in spelt_out.bare)
    gathered = [p.operation.bundle for p in plan.operations if p.operation.kind is OpKind.FETCH]
    gathered += [b for b in spelt_out.residence.whole if b in spelt_out.demand.gradient_spans]
    assert moved[LaneKind.GATHER] == sum(map(layout.bundle_bytes, gathered))
