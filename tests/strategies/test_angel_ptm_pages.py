"""variant=paper on one rank: Algorithm 1 page by page, beside the same spelt out, and laws of what it plans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from systems.planning.layout import Bundle, Layout, Placement, Segment
from systems.planning.plan import Operation, OpKind, Pages, Plan, UpdateRule
from systems.planning.policy.division import Division
from systems.planning.step.demand import Demand, demand_of
from systems.planning.step.operations import Work
from systems.planning.step.profiles import minimum_need
from systems.planning.step.schedule import expand
from systems.planning.step.validator import PlanError, validate
from systems.strategies.angel_ptm.paging import LayerPages, PagedLife, schedule_pages
from systems.strategies.angel_ptm.paging import _PageScheduler as PageScheduler
from systems.strategies.angel_ptm.scheduling import Moves, schedule
from tests.planning.races import find_races
from tests.planning.synthetic import Case, cases, context, layout_of, trace_of, uneven_room
from tests.strategies.test_angel_ptm_paper import asked

PIECE = 128  # elements of a segment of 256 bytes, as small as one can be
Arrivals = set[tuple[int, int]]  # (trigger id, segment) of each move of a page


def in_pieces(case: Case) -> Case:
    """The same layers, each of as many segments as can be."""
    segments, bundles = list[Segment](), list[Bundle]()
    for bundle in case.layout.bundles:
        (whole,) = (case.layout.segments[s] for s in bundle.segments)
        first, parameter = len(segments), whole.placements[0].parameter
        for start in range(0, whole.numel, PIECE):
            piece = Placement(parameter, 0, PIECE, start)
            segments.append(replace(whole, index=len(segments), numel=PIECE, placements=(piece,)))
        bundles.append(replace(bundle, segments=tuple(range(first, len(segments)))))
    return replace(case, layout=Layout(case.layout.itemsize, tuple(segments), tuple(bundles)))


def layers_of(layout: Layout, page: int) -> dict[int, LayerPages]:
    return {b.index: LayerPages.of(layout, b.index, page) for b in layout.bundles}


def algorithm_1(demand: Demand, layers: Mapping[int, LayerPages], room: Sequence[int], merging: Sequence[int]) -> Arrivals:
    """Lines 1 to 15 page by page over the trigger ids of a step, for layers whose pages are made anew by it.

    A task is (layer, number of the page in it). came: of each page that is there, at which trigger, or from which use on. What
    a layer that is computed with finds apart lies beside it as its trigger begins.
    """
    length, available, then = len(demand), [room[-1], *room[:-1]], [merging[-1], *merging[:-1]]
    size = {(b, n): int(bytes_) for b, layer in layers.items() for n, bytes_ in enumerate(np.diff(layer.ends))}
    tasks, wait_stack = sorted(size), list[tuple[int, int]]()

    def taken(pages: Iterable[tuple[int, int]]) -> int:
        return sum(size[page] for page in pages)

    triggers, unused = {(0, page) for page in tasks}, dict.fromkeys(tasks, 0)
    came = dict.fromkeys(tasks, 0)
    for i in range(length):
        computed = {b for b in layers for span in demand.hold_spans[b] if span.begin + 1 <= i <= span.end}
        begun = {b for b in computed for span in demand.hold_spans[b] if span.begin + 1 == i}
        gone = set(demand.stale[i - 1]) if i else set[int]()
        tasks = [page for page in tasks if page[0] not in gone]
        wait_stack = [page for page in wait_stack if page[0] not in gone]
        apart = set[tuple[int, int]]()
        for b in begun:
            mine = [page for page in tasks if page[0] == b]
            if len(mine) < len(layers[b].pages) or len({came[page] for page in mine}) > 1:
                apart.update(mine)
        late = [page for page in wait_stack if page[0] in computed]  # no line has it: what still waits at its layer
        wait_stack = [page for page in wait_stack if page not in late]
        tasks += late
        unused = {page: trigger for page, trigger in unused.items() if page[0] not in computed or page in apart}

        while available[i] < taken(tasks) or then[i] < taken(tasks) + taken(apart):  # lines 7 to 9
            own = apart if available[i] >= taken(tasks) else ()  # else it would not help to take back what is merged
            page = [each for each in tasks if each[0] not in computed or each in own][-1]
            triggers.discard((unused.pop(page, -1), page))
            tasks.remove(page)
            if page in apart:  # it waits no time, for it is used
                apart.remove(page)
                tasks.append(page)
                late.append(page)
            else:
                wait_stack.append(page)
        for b in dict.fromkeys(b for b, _ in late):
            mine = sorted(page for page in late if page[0] == b)
            tasks = [page for page in tasks if page not in mine] + mine
            triggers.update((i, page) for page in mine)
        unused = {page: trigger for page, trigger in unused.items() if page[0] not in computed}
        came |= {page: i for page in tasks if page[0] in computed}
        while wait_stack and available[i] >= taken(tasks) + size[wait_stack[-1]]:  # lines 13 to 15
            page = wait_stack.pop()
            tasks.append(page)
            triggers.add((i, page))
            unused[page] = came[page] = i
    return {(i, s) for i, (b, n) in triggers for s in range(*layers[b].pages[n])}


def arrivals(moves: Moves, demand: Demand, layout: Layout) -> Arrivals:
    """Of each segment, as the operations bring it."""
    found: Arrivals = set()
    of = {b.index: set(b.segments) for b in layout.bundles}
    there = {s for b in moves.resident for s in of[b]} | {s for run in moves.pages for s in range(*run)}
    for moment in range(len(demand)):
        there -= {s for b in demand.stale[moment] for s in of[b]}
        for planned in moves.operations:
            if planned.trigger != moment:
                continue
            bundle, kind = planned.operation.bundle, planned.operation.kind
            named = {s for run in planned.operation.pages for s in range(*run)}
            if kind in (OpKind.FETCH, OpKind.MOVE):
                coming = (named or of[bundle]) - there
                found |= {((moment + 1) % len(demand), s) for s in coming}
                there |= coming
            else:
                there -= of[bundle] - named
    return found


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(0, 12))
def test_a_page_as_large_as_a_layer_gives_whole_layers(case: Case, spare: int) -> None:
    demand = demand_of(case.layout, case.trace, case.context)
    sizes = {b.index: case.layout.bundle_bytes(b.index) for b in case.layout.bundles}
    room = uneven_room(demand, sizes, spare)
    layers = layers_of(in_pieces(case).layout, max(sizes.values()))
    found, whole = schedule_pages(demand, layers, room, room), schedule(demand, sizes, room, as_printed=True)
    fetched = sum(sizes[p.operation.bundle] for p in whole.operations if p.operation.kind is OpKind.FETCH)
    assert found == replace(whole, fetched_bytes=fetched)


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(0, 12), st.integers(1, 3), st.integers(0, 4))
def test_moves_of_pages_are_those_of_algorithm_1(case: Case, spare: int, page: int, more: int) -> None:
    case = in_pieces(case)
    demand, sizes = asked(case)
    room = uneven_room(demand, sizes, spare)
    merging = [each + 256 * more for each in room]
    layers = {b: layer for b, layer in layers_of(case.layout, 256 * page).items() if b in sizes}
    found = schedule_pages(demand, layers, room, merging)
    assert arrivals(found, demand, case.layout) == algorithm_1(demand, layers, room, merging)


def planned(case: Case, page: int, spare: int) -> tuple[Division, Plan]:
    """In the least memory and a little more."""
    least = minimum_need(case.trace, *_base(case)).total_bytes
    division = _division(case, least + 256 * spare)
    base = division.base
    layers = {b: layer for b, layer in layers_of(case.layout, page).items() if b in division.sizes(base)}
    moves = schedule_pages(division.demand, layers, division.room(base), division.room_for_merging(base))
    return division, division.plan(moves.operations, base, moves.resident, pages=moves.pages)


def _division(case: Case, memory: int) -> Division:
    asked = replace(case.context, device_budget=memory)
    return Division(case.layout, case.trace, asked, UpdateRule.WHEN_REDUCED, "test", str)


def _base(case: Case) -> Any:
    division = _division(case, case.context.device_budget)
    return division.demand, division.base


def slack(division: Division, plan: Plan) -> int:
    """Bytes of the device that no moment of the step needs."""
    memory = validate(division.layout, division.trace, plan, division.context)
    return division.context.device_budget - max(memory.device_total_bytes)


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(0, 40), st.integers(1, 3))
def test_plans_are_valid_race_free_and_move_no_byte_for_nothing(case: Case, spare: int, page: int) -> None:
    case = in_pieces(case)
    division, plan = planned(case, 256 * page, spare)
    assert slack(division, plan) >= 0
    schedule = expand(case.layout, case.trace, plan, division.context)
    assert not find_races(schedule.issued())
    come = [o for o in schedule.bare if o.kind in (Work.FETCH, Work.MOVE)]
    moves = Moves(plan.operations, plan.resident_at_start - division.base.whole, 0, 0, 0, pages=plan.pages_at_start)
    found = arrivals(moves, division.demand, case.layout)
    assert sum(o.bytes for o in come) == len(found) * 256, "bytes of pages that were not there"
    uses = {b: len(spans) for b, spans in division.demand.hold_spans.items() if b not in division.base.whole}
    assert len(found) <= sum(uses[b] * len(case.layout.bundles[b].segments) for b in uses)


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(0, 40), st.integers(1, 3))
def test_the_fullest_moment_has_less_than_a_page_left(case: Case, spare: int, page: int) -> None:
    """Where anything at all had no room."""
    case = in_pieces(case)
    demand, sizes = asked(case)
    room = uneven_room(demand, sizes, spare)
    layers = {b: layer for b, layer in layers_of(case.layout, 256 * page).items() if b in sizes}
    scheduler = PageScheduler(demand, layers, room, [1 << 50] * len(room))
    scheduler.prioritise_moves()
    popped = any((paged.triggers > life.begin).any() for life, paged in scheduler._of.items() if not life.is_tail)
    assume(popped)
    left = np.min(scheduler._room - scheduler._used)
    assert 0 <= left < 256 * page


def chain(pages: int) -> Case:
    """Four layers of as many pages."""
    layout = layout_of([(pages, [unit]) for unit in range(4)])
    return in_pieces(Case(layout, trace_of(layout), context()))


def test_by_hand_a_part_of_a_layer_rests_while_the_rest_streams() -> None:
    """Layers 0 to 3 of four pages, 0 to 3, 4 to 7 and so on, and room for seven. Ids: F0 is 2, F1 4, F2 6, F3 8, B3 10, B2 12,
    B1 14, B0 16. For the layer that is computed with all of 3 and 2 and a page of 1 are popped, the last first, and 1 is merged
    at its use of its three pages and the one. Behind it 7 and then the pages of 2 are pushed.
    """
    case = chain(4)
    demand, layers, room = demand_of(case.layout, case.trace, context()), layers_of(case.layout, 256), [256 * 7] * 19
    found = schedule_pages(demand, layers, room, [1 << 50] * 19)
    assert {(0, 0), (0, 3), (0, 4), (0, 6), (4, 7)} <= arrivals(found, demand, case.layout)
    at_end = [p.operation for p in found.operations if p.trigger == 18]
    assert at_end == [Operation(OpKind.FETCH, 0), Operation(OpKind.MOVE, 1, (Pages(4, 7),))]
    assert found.resident == {0} and found.pages == {Pages(4, 7)}


def whole_layers(layout: Layout, bundle: int, page_bytes: int) -> LayerPages:
    del page_bytes
    segments = layout.bundles[bundle].segments
    return LayerPages((Pages(segments[0], segments[-1] + 1),), np.array([0, layout.bundle_bytes(bundle)]))


def first_popped(self: PageScheduler, count: int) -> Any:
    self._end -= count
    return np.arange(self._end, self._end + count)


def all_goes(self: PageScheduler, moment: int, paged: PagedLife, kept: Any) -> Any:
    if not kept.all():
        yield moment, 0, paged.life.bundle, Operation(OpKind.DROP, paged.life.bundle)


def no_merging_room(self: PageScheduler, position: int) -> tuple[int, bool]:
    return int(self._used[position] + self._merged[position] - self._room[position]), True


MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "the pages of a layer go together": (LayerPages, "of", staticmethod(whole_layers)),
    "the first movement of S is popped": (PageScheduler, "_behind", first_popped),
    "a page that is pushed keeps its place in S": (PageScheduler, "_pushed", lambda self, run: run),
    "what is merged takes no memory": (PagedLife, "merged", property(lambda self: 0)),
    "what is merged lies beside gradients": (PageScheduler, "_short", no_merging_room),
    "no page stays as the rest of its layer goes": (PageScheduler, "_going", all_goes),
}


CHAINS = [(pages, spare) for pages in (2, 5) for spare in range(3 * pages + 1)]


def rooms(case: Case, spare: int) -> tuple[Demand, list[int], list[int]]:
    """Of which there is now and then more; as pages are merged there are two pages more than that."""
    demand = demand_of(case.layout, case.trace, case.context)
    pages = [len(case.layout.bundles[0].segments) + spare + 3 * (moment // 3 % 2) for moment in range(len(demand))]
    return demand, [256 * each for each in pages], [256 * (each + 2) for each in pages]


def expectations() -> list[Arrivals]:
    found = []
    for pages, spare in CHAINS:
        demand, room, merging = rooms(chain(pages), spare)
        found.append(algorithm_1(demand, layers_of(chain(pages).layout, 256), room, merging))
    return found


def flaws(expected: Sequence[Arrivals]) -> int:
    """Of schedules for chains in several rooms, those that are not Algorithm 1's, or make a plan that is none."""
    wrong = 0
    for (pages, spare), tasks in zip(CHAINS, expected, strict=True):
        case = chain(pages)
        demand, room, merging = rooms(case, spare)
        found = schedule_pages(demand, layers_of(case.layout, 256), room, merging)
        try:
            fits = slack(*planned(case, 256, spare)) >= 0
        except PlanError:
            fits = False
        wrong += not fits or arrivals(found, demand, case.layout) != tasks
    return wrong


@pytest.mark.parametrize("mutation", [None, *MUTATIONS])
def test_each_rule_shows(mutation: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = expectations()
    if mutation is not None:
        monkeypatch.setattr(*MUTATIONS[mutation])
    assert (flaws(expected) > 0) is (mutation is not None)
