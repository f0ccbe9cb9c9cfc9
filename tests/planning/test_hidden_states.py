"""Inputs that wait on the host: when each comes back, in a schedule and in what a trace's memory becomes."""

from __future__ import annotations

from dataclasses import replace

from systems.planning.plan import Plan, Tier
from systems.planning.policy.windows import under
from systems.planning.step.operations import Work
from systems.planning.step.schedule import expand
from systems.planning.trace import Moment, Phase, Trace
from tests.planning.synthetic import context, layout_of, trace_of

LAYERS, HEADS = (0, 1, 2), (3, 4)  # the heads run after the layers, and their backward before
SIZE = 1000
LAYOUT = layout_of([(1, [unit]) for unit in (*LAYERS, *HEADS)])


def step(*, accumulate: int = 1, order: tuple[int, ...] = (*LAYERS, *HEADS)) -> Trace:
    trace = trace_of(LAYOUT, order=order, accumulate=accumulate, activation=10 * SIZE)
    sizes = tuple((unit, SIZE + unit) for unit in LAYERS)
    return replace(trace, input_bytes=sizes, recomputed=frozenset(LAYERS))


def fetched(trace: Trace, accumulate: int = 1) -> list[tuple[Moment, int]]:
    tiers = (Tier.HOST,) * len(LAYOUT.segments)
    resident = frozenset(b.index for b in LAYOUT.bundles)
    plan = Plan(trace.signature, (), tiers, resident, offload_inputs=frozenset(LAYERS), rematerialise=frozenset(LAYERS))
    schedule = expand(LAYOUT, trace, plan, context(accumulate=accumulate))
    found = [o for o in schedule.operations if o.kind is Work.FETCH_INPUT]
    sizes = dict(trace.input_bytes)
    units = [next(u for u, size in sizes.items() if size == o.bytes) for o in found]
    return [(trace.moments[o.moment], unit) for o, unit in zip(found, units, strict=True)]


def backward(unit: int, micro_step: int = 0) -> Moment:
    return Moment(Phase.BACKWARD_ENTER, unit, micro_step)


def test_the_last_input_comes_with_the_first_backward_and_each_other_with_that_of_the_layer_behind_it() -> None:
    """Two heads do not bring two inputs: one at a time is ahead, as at run time."""
    once = [(4, 2), (2, 1), (1, 0)]
    for accumulate in (1, 2):
        expected = [(backward(at, micro), unit) for micro in range(accumulate) for at, unit in once]
        assert fetched(step(accumulate=accumulate), accumulate) == expected


def test_a_layer_between_two_others_brings_no_input_early() -> None:
    assert fetched(step(order=(0, 1, 3, 2))) == [(backward(2), 2), (backward(2), 1), (backward(1), 0)]


def test_memory_without_an_input_is_less_only_until_it_is_fetched() -> None:
    trace = step()
    found = under(trace, {}, recomputed=frozenset(LAYERS), offloaded=frozenset(LAYERS))
    less = [a - b for a, b in zip(trace.non_model_bytes, found.non_model_bytes, strict=True)]
    place = {(m.phase, m.unit): number for number, m in enumerate(trace.moments)}
    for number in range(place[Phase.BACKWARD_ENTER, 4], place[Phase.BACKWARD_ENTER, 2]):
        assert less[number] == 2 * SIZE + 1, "the last layer's input is back, the two others are not"
    assert less[place[Phase.BACKWARD_ENTER, 2]] == SIZE
    assert less[place[Phase.BACKWARD_ENTER, 1]] == 0
