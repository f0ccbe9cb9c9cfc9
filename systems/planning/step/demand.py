"""What one traced step asks of device memory whatever the plan: who is held when, how long gradients live, what goes
stale.

Everything here follows from the trace and the layout alone; what follows from the optimizer's tier of each bundle too is in
`residence`, and bytes are in `profiles`. The schedule, the timeline and the strategies read these, so that the rules below
are written once.

Note [Lifetimes on the device]
    A bundle is held from the ENTER to the EXIT of any unit that reads it; holds nest (recomputation, wrapper modules).
    A gradient range opens at the first BACKWARD_ENTER of a unit that reads the bundle and closes at the flush: it
    leaves for the host, or is added to the fp32 accumulator (accumulate > 1, wherever that is). Updated on the device
    from one micro-step it stays until the update, at the flush or at STEP_END by the update rule. Such a gradient on
    one rank is adopted: it stays in autograd's own buffers and takes no pool bytes. On several ranks what waits for
    STEP_END is this rank's shard of the sum, taken before the range is freed. A bundle updated on the host, or on the
    device as a shard, is stale after its flush in the last micro-step: its device copy goes. One that is still held
    then, or was flushed in an earlier micro-step only, goes at STEP_END.

Note [Gradients in place]
    A gradient written over its own parameters needs no range. Until the unit's BACKWARD_EXIT it is in autograd's buffers,
    beside the pool; then it is copied into the bundle's block, which nothing may evict from there to the flush, where the
    block itself leaves for the host, or stays (Plan.staying): then anything may evict it, which sends the gradient off, and
    what is there at STEP_END leaves there. Of several ranks it is summed over them in the block; and of a bundle that is
    updated on the device as a shard the block is a copy, which goes then: what waits for the norm is the shard of the sum.
    Only for such bundles, from one micro-step, and only where every unit is done with its parameters once its backward ends
    (`reusable`); the others have ranges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from systems.planning.layout import Layout
from systems.planning.step.belady import NextUse
from systems.planning.strategy import PlanningContext
from systems.planning.trace import ENTER, EXIT, NO_UNIT, Moment, Phase, Trace


@dataclass(frozen=True)
class Span:
    """Intervals [begin, end) of moments; end is the moment in whose processing it is over."""

    begin: int
    end: int


@dataclass(frozen=True)
class Demand:
    """Per moment unless said. Bundles are in ascending order.

    demanded: bundles of the unit that enters there. held: bundles held from there to the next moment.
    backward: units whose backward is open from there to the next moment.
    stale: bundles whose device copy goes there, unless it is what the update is made on.
    gradient_spans: per bundle, from the first BACKWARD_ENTER to the flush, once a micro-step.
    hold_spans: per bundle, where it is held without a gap.
    staying: bundles whose gradient stays in its place behind the flush (not a moment's). They are stale at STEP_END.
    """

    demanded: tuple[tuple[int, ...], ...]
    held: tuple[tuple[int, ...], ...]
    backward: tuple[tuple[int, ...], ...]
    stale: tuple[tuple[int, ...], ...]
    gradient_spans: dict[int, tuple[Span, ...]]
    hold_spans: dict[int, tuple[Span, ...]]
    staying: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.demanded)

    @cached_property
    def next_use(self) -> NextUse:
        uses: dict[int, list[int]] = {}
        for moment, bundles in enumerate(self.demanded):
            for bundle in bundles:
                uses.setdefault(bundle, []).append(moment)
        return NextUse(uses, len(self))

    @cached_property
    def next_wanted(self) -> NextUse:
        """The same, with the end of the step, where the update takes gradients that stay."""
        return self.next_use.also_at(self.staying, len(self) - 1) if self.staying else self.next_use


def demand_of(
    layout: Layout,
    trace: Trace,
    context: PlanningContext,
    in_place: frozenset[int] = frozenset(),
    staying: frozenset[int] = frozenset(),
) -> Demand:
    """Walk the trace. See Note [Lifetimes on the device]. in_place: held by their gradients too. staying: see Plan.staying."""
    carrying: set[int] = set()  # bundles whose block has gradients in it
    holds: dict[int, int] = {}
    open_backward: dict[int, int] = {}
    demanded: list[tuple[int, ...]] = []
    held: list[tuple[int, ...]] = []
    backward: list[tuple[int, ...]] = []
    stale: list[tuple[int, ...]] = []
    gone: set[int] = set()
    at_the_end: set[int] = set()  # flushed and on the device again, or still
    for number, moment in enumerate(trace.moments):
        bundles = layout.bundles_of_unit.get(moment.unit, ()) if moment.unit != NO_UNIT else ()
        entering = moment.phase in ENTER
        for bundle in bundles:
            holds[bundle] = max(0, holds.get(bundle, 0) + (1 if entering else -1))
        if moment.phase is Phase.BACKWARD_ENTER:
            open_backward[moment.unit] = open_backward.get(moment.unit, 0) + 1
        elif moment.phase is Phase.BACKWARD_EXIT:
            open_backward[moment.unit] = max(0, open_backward.get(moment.unit, 0) - 1)
        if moment.phase is Phase.BACKWARD_EXIT:
            carrying.update(in_place.intersection(bundles) - gone)
        carrying.difference_update(trace.flushes[number])
        at_the_end.update(gone.intersection(bundles) if entering else ())
        last_micro_step = moment.micro_step == context.accumulate - 1
        going = tuple(b for b in trace.flushes[number] if last_micro_step and not holds.get(b) and b not in staying)
        gone.update(going)
        at_the_end.update(trace.flushes[number])
        at_the_end.difference_update(going)
        stale.append(going if number < len(trace) - 1 else tuple(sorted(at_the_end)))
        demanded.append(bundles if entering else ())
        held.append(tuple(sorted(carrying.union(bundle for bundle, count in holds.items() if count))))
        backward.append(tuple(unit for unit, count in open_backward.items() if count))
    return Demand(
        demanded=tuple(demanded),
        held=tuple(held),
        backward=tuple(backward),
        stale=tuple(stale),
        gradient_spans=_gradient_spans(layout, trace),
        hold_spans=_hold_spans(held),
        staying=staying,
    )


def reusable(layout: Layout, trace: Trace, context: PlanningContext) -> frozenset[int]:
    """Bundles whose gradients can be written in place in a step like this one: of one micro-step, every unit's forward
    and backward at most once, nothing of it after the one flush. See Note [Gradients in place].
    """
    if context.accumulate > 1:
        return frozenset()
    times = Counter((m.phase, m.unit) for m in trace.moments)
    last = {m.unit: number for number, m in enumerate(trace.moments) if m.phase in EXIT}
    flushed: dict[int, list[int]] = {}
    for number, bundles in enumerate(trace.flushes):
        for bundle in bundles:
            flushed.setdefault(bundle, []).append(number)
    found = set()
    for index in layout.in_place & flushed.keys():
        units = layout.bundles[index].units
        once = all(times[phase, unit] <= 1 for phase in (*ENTER, *EXIT) for unit in units)
        even = all(times[a, unit] == times[b, unit] for a, b in zip(ENTER, EXIT, strict=True) for unit in units)
        over = len(flushed[index]) == 1 and all(last.get(unit, -1) <= flushed[index][0] for unit in units)
        if once and even and over:
            found.add(index)
    return frozenset(found)


def _gradient_spans(layout: Layout, trace: Trace) -> dict[int, tuple[Span, ...]]:
    """From the first BACKWARD_ENTER of a unit that reads the bundle to its flush, or to STEP_END without one.

    A unit that enters again after the flush opens the range again only if there is another flush in the micro-step.
    """
    coming = Counter((m.micro_step, b) for m, flushes in zip(trace.moments, trace.flushes, strict=True) for b in flushes)
    expected = Counter(coming)
    begun: dict[int, int] = {}
    spans: dict[int, list[Span]] = {}
    for number, moment in enumerate(trace.moments):
        if moment.phase is Phase.BACKWARD_ENTER:
            for bundle in layout.bundles_of_unit.get(moment.unit, ()):
                key = (moment.micro_step, bundle)
                if layout.bundles[bundle].trainable and (coming[key] or not expected[key]):
                    begun.setdefault(bundle, number)
        for bundle in trace.flushes[number]:
            coming[moment.micro_step, bundle] -= 1
            if bundle in begun:
                spans.setdefault(bundle, []).append(Span(begun.pop(bundle), number))
    for bundle, begin in begun.items():
        spans.setdefault(bundle, []).append(Span(begin, len(trace) - 1))
    return {bundle: tuple(found) for bundle, found in spans.items()}


def _hold_spans(held: Sequence[tuple[int, ...]]) -> dict[int, tuple[Span, ...]]:
    spans: dict[int, list[Span]] = {}
    begun: dict[int, int] = {}
    for number, bundles in enumerate((*held, ())):
        now = set(bundles)
        for bundle in [b for b in begun if b not in now]:
            spans.setdefault(bundle, []).append(Span(begun.pop(bundle), number))
        for bundle in now:
            begun.setdefault(bundle, number)
    return {bundle: tuple(found) for bundle, found in spans.items()}


def in_order_of_use(bundles: Iterable[int], demand: Demand) -> list[int]:
    """Bundles by their first use in the step: the order in which the next step needs them, and updates are issued."""
    return sorted(bundles, key=lambda bundle: (demand.next_use.after(bundle, -1), bundle))


def first_uses(layout: Layout, moments: Sequence[Moment]) -> dict[int, int]:
    """Bundle to the first moment at which a unit that reads it enters: Demand.next_use of such a step, from its begin."""
    found: dict[int, int] = {}
    for number, moment in enumerate(moments):
        if moment.phase in ENTER:
            for bundle in layout.bundles_of_unit.get(moment.unit, ()):
                found.setdefault(bundle, number)
    return found
