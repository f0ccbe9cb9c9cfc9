"""variant=paper: Algorithm 1 as it is printed, beside the same spelt out line by line, which the default does not obey."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from systems.planning.layout import Layout
from systems.planning.plan import OpKind, PlannedOperation, UpdateRule
from systems.planning.step.demand import Demand, demand_of
from systems.planning.trace import Trace
from systems.strategies.angel_ptm import STRATEGY, gathering, scheduling
from systems.strategies.angel_ptm.gathering import schedule_on_ranks
from systems.strategies.angel_ptm.options import AngelPTMOptions
from systems.strategies.angel_ptm.popping import Popping
from systems.strategies.angel_ptm.scheduling import schedule
from tests.planning.synthetic import Case, cases, context, layout_of, trace_of, uneven_room

Triggers = set[tuple[int, int]]  # (trigger id, layer) of each move


def algorithm_1(demand: Demand, sizes: Mapping[int, int], room: Sequence[int]) -> Triggers:
    """Lines 1 to 15 over the trigger ids of a step, for layers whose pages are made anew by it. room: one entry a moment."""
    length, available = len(demand), [room[-1], *room[:-1]]
    tasks, wait_stack = sorted(sizes), list[int]()  # tasks: the layers whose pages are there, by their places in S
    triggers = {(0, layer) for layer in tasks}  # lines 3 to 5
    unused = dict.fromkeys(tasks, 0)  # of movements that no layer has been computed with yet, their triggers
    for i in range(length):
        computed = {b for b in sizes for span in demand.hold_spans[b] if span.begin + 1 <= i <= span.end}
        gone = set(demand.stale[i - 1]) if i else set[int]()
        tasks = [layer for layer in tasks if layer not in gone]
        wait_stack = [layer for layer in wait_stack if layer not in gone]
        for layer in [each for each in wait_stack if each in computed]:  # no line has it: what still waits at its layer
            wait_stack.remove(layer)
            tasks.append(layer)
            triggers.add((i, layer))
        unused = {layer: trigger for layer, trigger in unused.items() if layer not in computed}
        while available[i] < sum(sizes[layer] for layer in tasks):  # lines 7 to 9
            task = [layer for layer in tasks if layer not in computed][-1]
            tasks.remove(task)
            triggers.discard((unused.pop(task, -1), task))
            wait_stack.append(task)
        while wait_stack and available[i] >= sum(sizes[layer] for layer in tasks) + sizes[wait_stack[-1]]:  # lines 13 to 15
            page = wait_stack.pop()
            tasks.append(page)
            triggers.add((i, page))
            unused[page] = i
    return triggers


def moved(operations: Sequence[PlannedOperation], length: int, kind: OpKind = OpKind.FETCH) -> Triggers:
    return {((p.trigger + 1) % length, p.operation.bundle) for p in operations if p.operation.kind is kind}


def asked(case: Case) -> tuple[Demand, dict[int, int]]:
    """Of layers whose pages are made anew in each step, as all trained ones' are that nothing keeps."""
    demand = demand_of(case.layout, case.trace, case.context)
    anew = {bundle for bundles in demand.stale for bundle in bundles}
    used = {b.index: case.layout.bundle_bytes(b.index) for b in case.layout.bundles if demand.hold_spans.get(b.index)}
    assume(used.keys() <= anew and all(_goes_once(demand, bundle) for bundle in used))
    return demand, used


def _goes_once(demand: Demand, bundle: int) -> bool:
    """At the end of its last use, and not while something is still to use it."""
    (moment,) = [number for number, bundles in enumerate(demand.stale) if bundle in bundles][-1:]
    return moment >= demand.hold_spans[bundle][-1].end - 1 and sum(bundle in bundles for bundles in demand.stale) == 1


@settings(max_examples=300, deadline=None)
@given(cases(), st.integers(0, 12))
def test_moves_are_those_of_algorithm_1(case: Case, spare: int) -> None:
    demand, sizes = asked(case)
    room = uneven_room(demand, sizes, spare)
    found = schedule(demand, sizes, room, as_printed=True)
    assert moved(found.operations, len(demand)) == algorithm_1(demand, sizes, room)
    assert found.advanced == 0


def chain(units: int) -> tuple[Layout, Trace]:
    layout = layout_of([(1, [unit]) for unit in range(units)])
    return layout, trace_of(layout)


def of_chain(units: int, room: int, *, more: int = 0, **how: bool) -> tuple[Triggers, Triggers]:
    """(what is moved, what the algorithm moves) where `room` layers have room, and now and then some more."""
    layout, trace = chain(units)
    demand, sizes = demand_of(layout, trace, context()), dict.fromkeys(range(units), 256)
    there = [256 * (room + more * (moment // 3 % 2)) for moment in range(len(demand))]
    return moved(schedule(demand, sizes, there, **how).operations, len(demand)), algorithm_1(demand, sizes, there)


def test_by_hand_the_first_layers_stay_and_the_last_come_at_their_own_triggers() -> None:
    """Four layers, room for two, so that layer 0 stays to its backward: 3, 2 and 1 are popped for those computed with. Ids: F0
    is 2, F1 4, F2 6, F3 8, B3 10, B2 12, B1 14, B0 16.
    """
    found, printed = of_chain(4, 2, as_printed=True)
    assert found == printed
    assert {(0, 0), (0, 1), (6, 2), (8, 3)} <= found and (0, 3) not in found
    assert not any(layer == 0 for trigger, layer in found if trigger)


def in_use(self: Popping, bundle: int, key: tuple[int, ...]) -> tuple[int, ...]:
    return key


def sorted_by_use(self: Popping, waiting: Sequence[Any], key: Callable[[Any], tuple[int, int]]) -> list[Any]:
    return sorted(waiting, key=key, reverse=True)


def nothing(self: Popping, bundle: int) -> None:
    pass


RULES: Mapping[str, tuple[Any, str, Any]] = {
    "the last of S is popped (line 8)": (Popping, "last", in_use),
    "the last popped is pushed (line 15)": (Popping, "in_turn", sorted_by_use),
    "what is pushed is the last of S (line 16)": (Popping, "pushed", nothing),
}


@pytest.mark.parametrize("rule", [None, *RULES])
def test_each_rule_is_seen_where_it_is_switched_off(rule: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if rule is not None:
        monkeypatch.setattr(*RULES[rule])
    alike = [of_chain(8, room, more=more, as_printed=True) for room in range(1, 6) for more in range(4)]
    assert all(found == printed for found, printed in alike) is (rule is None)


def test_the_default_is_another_where_memory_is_short_and_the_same_where_it_is_not() -> None:
    assert all(of_chain(units, room)[0] != of_chain(units, room)[1] for units in range(4, 9) for room in range(2, units - 1))
    assert all(of_chain(units, units)[0] == of_chain(units, units)[1] for units in range(2, 9))


# ---- several ranks


@settings(max_examples=200, deadline=None)
@given(cases(ranks=[2, 3]), st.integers(0, 12))
def test_phase_2_leaves_moves_where_phase_1_has_put_them(case: Case, spare: int) -> None:
    """Of layers that it keeps from one use to the next there is none."""
    demand = demand_of(case.layout, case.trace, case.context)
    sizes = {b.index: case.layout.bundle_bytes(b.index) for b in case.layout.bundles}
    parts, room = {b: case.layout.shard_bytes(b) for b in sizes}, uneven_room(demand, sizes, spare)
    found = schedule_on_ranks(demand, sizes, parts, room, frozenset(), as_printed=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathering._GatherScheduler, "advance_gathers", lambda self: 0)
        before = schedule_on_ranks(demand, sizes, parts, room, frozenset(), as_printed=True)
    moves, moves_before = (moved(each.operations, len(demand), OpKind.MOVE) for each in (found, before))
    assert moves <= moves_before, "a move was brought forward"


@pytest.mark.parametrize("lines", [5, 6, 7, 8])
def test_phase_1_fills_the_room_with_moves_and_leaves_none_for_the_next_gather(lines: int) -> None:
    """Six layers of two lines each on two ranks. The default keeps room for the layer that comes next."""
    layout = layout_of([(2, [unit]) for unit in range(6)], ranks=2)
    trace = trace_of(layout)
    demand, sizes = demand_of(layout, trace, context(ranks=2)), dict.fromkeys(range(6), 512)
    parts, room = dict.fromkeys(range(6), 256), [256 * lines] * len(trace)
    printed, default = (schedule_on_ranks(demand, sizes, parts, room, frozenset(), as_printed=how) for how in (True, False))
    assert printed.at_start == lines - 2 > default.at_start


# ---- options


def test_what_the_variant_sets() -> None:
    paper = AngelPTMOptions.model_validate({"variant": "paper"})
    assert (paper.cache, paper.nonfinite, paper.run_ahead) == ("auto", "stop", False)
    assert STRATEGY(paper, context()).update_rule is UpdateRule.WHEN_REDUCED
    assert AngelPTMOptions.model_validate({"variant": "paper", "cache": "auto", "page": "64KiB"}).page == 1 << 16


@pytest.mark.parametrize("given_options", [{"nonfinite": "skip"}, {"run_ahead": "true"}, {"cache": "0"}])
def test_what_it_sets_is_not_given_otherwise(given_options: dict[str, str]) -> None:
    (name,) = given_options
    with pytest.raises(ValidationError, match=f"variant=paper has {name}=.* is given: leave {name} out"):
        AngelPTMOptions.model_validate({"variant": "paper"} | given_options)


def test_phase_2_is_of_gathers_alone() -> None:
    """Switched on for moves, one rank's plan is another."""
    layout, trace = chain(6)
    demand, sizes = demand_of(layout, trace, context()), dict.fromkeys(range(6), 256)
    room = [256 * 3] * len(demand)
    scheduler = scheduling.Scheduler(demand, sizes, room, as_printed=True)
    scheduler.prioritise_moves()
    as_printed = scheduler.operations()
    scheduler._popping.as_printed = False
    assert scheduler.advance() > 0 and moved(scheduler.operations(), len(demand)) != moved(as_printed, len(demand))
