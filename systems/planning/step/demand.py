"""What one traced step asks of device memory whatever the plan: who is held when, how long gradients live, what goes
stale.

Everything here follows from the trace and the layout alone, or from these and the optimizer's tier of each bundle. The
schedule, the timeline and the strategies read it, so that the rules below are written once.

Note [Lifetimes on the device]
    A bundle is held from the ENTER to the EXIT of any unit that reads it; holds nest (recomputation, wrapper modules).
    A gradient range opens at the first BACKWARD_ENTER of a unit that reads the bundle and closes at the flush: it
    leaves for the host, or is added to the fp32 accumulator (accumulate > 1, wherever that is). Updated on the device
    from one micro-step it stays until the update, at the flush or at STEP_END by the update rule. Such a gradient on
    one rank is adopted: it stays in autograd's own buffers and takes no pool bytes. A bundle updated on the host is
    stale after its flush in the last micro-step: its device copy goes. One that is still held then, or was flushed in
    an earlier micro-step only, goes at STEP_END.

Note [Gradients in place]
    A gradient written over its own parameters needs no range. Until the unit's BACKWARD_EXIT it is in autograd's buffers,
    beside the pool; then it is copied into the bundle's block, which nothing may evict from there to the flush, where the
    block itself leaves for the host. Only for bundles updated on the host from one micro-step, and only where every unit
    is done with its parameters once its backward ends (`reusable`); the others have ranges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from systems.planning.disk_layout import buffer_bytes
from systems.planning.layout import Layout
from systems.planning.plan import Tier, UpdateRule
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
    stale: bundles whose device copy goes there if the host updates them.
    gradient_spans: per bundle, from the first BACKWARD_ENTER to the flush, once a micro-step.
    hold_spans: per bundle, where it is held without a gap.
    """

    demanded: tuple[tuple[int, ...], ...]
    held: tuple[tuple[int, ...], ...]
    backward: tuple[tuple[int, ...], ...]
    stale: tuple[tuple[int, ...], ...]
    gradient_spans: dict[int, tuple[Span, ...]]
    hold_spans: dict[int, tuple[Span, ...]]

    def __len__(self) -> int:
        return len(self.demanded)

    @cached_property
    def next_use(self) -> NextUse:
        uses: dict[int, list[int]] = {}
        for moment, bundles in enumerate(self.demanded):
            for bundle in bundles:
                uses.setdefault(bundle, []).append(moment)
        return NextUse(uses, len(self))


def demand_of(layout: Layout, trace: Trace, context: PlanningContext, in_place: frozenset[int] = frozenset()) -> Demand:
    """Walk the trace. See Note [Lifetimes on the device]. in_place: held by their gradients too."""
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
        going = tuple(b for b in trace.flushes[number] if last_micro_step and not holds.get(b))
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


@dataclass(frozen=True)
class Residence:
    """Where each bundle lives and is updated: the part of a plan that lifetimes depend on.

    on_device: bundles whose segments are updated on the device (or that never move); they stay resident for good.
    in_place: see Note [Gradients in place].
    """

    layout: Layout
    context: PlanningContext
    on_device: frozenset[int]
    update_rule: UpdateRule
    in_place: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls,
        layout: Layout,
        context: PlanningContext,
        optimizer_tier: Sequence[Tier],
        update_rule: UpdateRule,
        in_place: frozenset[int] = frozenset(),
    ) -> Residence:
        """A bundle is on the device if its first segment is: all segments of a bundle share their tier."""
        on_device = frozenset(b.index for b in layout.bundles if optimizer_tier[b.segments[0]] is Tier.DEVICE)
        return cls(layout, context, on_device, update_rule, in_place)

    def reuses(self, bundle: int) -> bool:
        """True if the gradient takes the parameters' place."""
        return bundle in self.in_place and bundle not in self.on_device

    def adopted(self, bundle: int) -> bool:
        """True if the gradient stays in autograd's own buffers until the update."""
        return bundle in self.on_device and self.context.accumulate == 1 and self.context.ranks == 1

    def gradient_freed_at_flush(self, bundle: int) -> bool:
        """Else the gradient waits for its update at STEP_END."""
        if bundle not in self.on_device or self.context.accumulate > 1:
            return True
        return self.update_rule is UpdateRule.WHEN_REDUCED

    def gradient_spans(self, demand: Demand, bundle: int) -> tuple[Span, ...]:
        """Intervals in which the bundle's gradient takes device memory, in a range or in autograd's buffers.

        One that waits for the update is there when STEP_END begins: an adopted one counts in the interval behind it
        too, a range, whose bytes are known exactly, only until there.
        """
        spans = demand.gradient_spans.get(bundle, ())
        if self.gradient_freed_at_flush(bundle):
            return spans
        end = len(demand) if self.adopted(bundle) else len(demand) - 1
        return tuple(Span(span.begin, end) for span in spans[:1])

    def state_bytes(self, bundle: int) -> int:
        """Bytes of master weight, moments and accumulator of this rank's shards if they are on the device, else 0."""
        return self.optimizer_bytes(bundle) if bundle in self.on_device else 0

    def optimizer_bytes(self, bundle: int) -> int:
        """The same wherever they are. Frozen segments have none."""
        segments = (self.layout.segments[s] for s in self.layout.bundles[bundle].segments)
        return sum(s.shard_numel for s in segments if s.space.trainable) * self.context.optimizer_itemsize

    @cached_property
    def host_bytes(self) -> int:
        """Of slots of all segments, states that have their home there and are not on the device (their pages go back then), and
        buffers for those on the disk."""
        slots = sum(segment.shard_numel for segment in self.layout.segments) * self.layout.itemsize
        return slots + sum(map(self.host_state_bytes, range(len(self.layout.bundles)))) + buffer_bytes(self.layout)

    def host_state_bytes(self, bundle: int) -> int:
        """Of a bundle's states, on the host; of those on the disk the accumulators are there."""
        if bundle in self.on_device:
            return 0
        size, each = self.optimizer_bytes(bundle), self.context.optimizer_itemsize
        return size // each * self.context.accumulator_itemsize if bundle in self.layout.on_disk else size

    @property
    def static_bytes(self) -> int:
        """Pool bytes that are there at every moment: parameters and optimizer state of the bundles on the device."""
        return sum(self.layout.bundle_bytes(b) + self.state_bytes(b) for b in self.on_device)


def gradient_profile(demand: Demand, residence: Residence) -> list[int]:
    """Pool bytes per moment of gradient ranges."""
    profile = Profile(len(demand))
    for bundle in demand.gradient_spans:
        if not residence.adopted(bundle) and not residence.reuses(bundle):
            for span in residence.gradient_spans(demand, bundle):
                profile.add(span, residence.layout.bundle_bytes(bundle))
    return profile.values()


class Profile:
    """Bytes over moments, built from spans."""

    def __init__(self, length: int) -> None:
        self._steps = [0] * (length + 1)

    def add(self, span: Span, size: int) -> None:
        self._steps[span.begin] += size
        self._steps[span.end] -= size

    def values(self) -> list[int]:
        total, values = 0, []
        for step in self._steps[:-1]:
            total += step
            values.append(total)
        return values


def non_model_profile(trace: Trace, demand: Demand, residence: Residence) -> list[int]:
    """Device bytes per moment beside the pool's: activations, temporaries, adopted gradients. Never too low.

    The lower of the two bounds of `non_model_bounds`. If all gradients are adopted and the trace measured that case it
    is exact: those of earlier intervals by their running sum, those of this interval within the measured peak.
    """
    bounds = [min(pair) for pair in zip(*non_model_bounds(trace, demand, residence), strict=True)]
    if not trace.measured_adopted or not all(map(residence.adopted, demand.gradient_spans)):
        return bounds
    exact, earlier = [], 0
    for peak, produced in zip(trace.adopted_peak_bytes, trace.gradient_bytes, strict=True):
        exact.append(earlier + peak)
        earlier += produced
    return [min(pair) for pair in zip(bounds, exact, strict=True)]


def non_model_bounds(trace: Trace, demand: Demand, residence: Residence) -> tuple[list[int], list[int]]:
    """Two bounds that hold for every plan, per moment. Adopted gradients count with their whole bundle once it has
    begun, and those written in place likewise until the backward of its units ends.

    The peak measured with ranges, plus the adopted gradients of bundles begun by now; and the peak measured with all
    gradients of the interval kept, plus those of bundles begun in earlier intervals.
    """
    begun, earlier = Profile(len(demand)), Profile(len(demand))
    for bundle in filter(residence.adopted, demand.gradient_spans):
        size = residence.layout.bundle_bytes(bundle)
        for span in residence.gradient_spans(demand, bundle):
            begun.add(span, size)
            earlier.add(Span(span.begin + 1, span.end), size)
    open_before: set[int] = set()
    for moment, units in enumerate(demand.backward if residence.in_place else ()):
        now = {b for unit in units for b in residence.layout.bundles_of_unit.get(unit, ()) if residence.reuses(b)}
        for profile, bundles in ((begun, now), (earlier, now & open_before)):
            profile.add(Span(moment, moment + 1), sum(map(residence.layout.bundle_bytes, bundles)))
        open_before = now
    ranged = [sum(pair) for pair in zip(trace.non_model_bytes, begun.values(), strict=True)]
    if not trace.measured_adopted:
        return ranged, ranged
    return ranged, [sum(pair) for pair in zip(trace.adopted_peak_bytes, earlier.values(), strict=True)]


@dataclass(frozen=True)
class Need:
    """The least device memory a step can run in, with the moment that sets it. All sizes in bytes.

    total_bytes is the sum of the others. unit: the unit entering there, NO_UNIT at an exit or at the step's ends.
    """

    moment: int
    unit: int
    total_bytes: int
    static_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    non_model_bytes: int


def minimum_need(trace: Trace, demand: Demand, residence: Residence) -> Need:
    """Only what is held is resident, nothing is fetched ahead. The moment that needs most, the first of equals."""
    layout, static = residence.layout, residence.static_bytes
    gradients = gradient_profile(demand, residence)
    non_model = non_model_profile(trace, demand, residence)
    held = held_profile(demand, residence)
    totals = [static + sum(parts) for parts in zip(held, gradients, non_model, strict=True)]
    moment = max(range(len(totals)), key=lambda m: (totals[m], -m), default=0)
    entering = trace.moments[moment]
    unit = entering.unit if layout.bundles_of_unit.get(entering.unit) else NO_UNIT
    return Need(moment, unit, totals[moment], static, held[moment], gradients[moment], non_model[moment])


def held_profile(demand: Demand, residence: Residence) -> list[int]:
    """Bytes per moment of held parameters that are not on the device for good."""
    sizes = [0 if b.index in residence.on_device else residence.layout.bundle_bytes(b.index) for b in residence.layout.bundles]
    return [sum(sizes[bundle] for bundle in bundles) for bundles in demand.held]


def pool_profile(demand: Demand, residence: Residence) -> list[int]:
    """Pool bytes per moment beside bundles that come and go: what is there for good, and gradient ranges."""
    static = residence.static_bytes
    return [static + g for g in gradient_profile(demand, residence)]


def room_beside(fixed: Sequence[int], pool: Sequence[int], held: Sequence[int], context: PlanningContext) -> list[int]:
    """Bytes per moment for bundles that come and go, beside what is fixed: within the device's budget, and, as far as what
    is held allows, within the pool's.

    pool: the pool's part of what is fixed. held: bytes of those bundles that must be there.
    """
    device, most = context.device_budget, context.pool_budget
    return [min(device - f, max(most - p, h)) for f, p, h in zip(fixed, pool, held, strict=True)]


def pool_with(need: Sequence[int], bundle: int, demand: Demand, base: Residence, there: Residence) -> list[int]:
    """Pool bytes per moment once a bundle lives and is updated on the device. need: those before, with what is held.

    base, there: without the bundle on the device, and with it.
    """
    size = there.layout.bundle_bytes(bundle)
    constant = size + there.state_bytes(bundle)
    changes = [(span, -size) for span in demand.hold_spans.get(bundle, ())]
    if not base.reuses(bundle):
        changes += [(span, -size) for span in base.gradient_spans(demand, bundle)]
    if not there.adopted(bundle):
        changes += [(span, size) for span in there.gradient_spans(demand, bundle)]
    grown = [n + constant for n in need]
    for span, change in changes:
        for moment in range(span.begin, span.end):
            grown[moment] += change
    return grown


def unmovable(layout: Layout) -> frozenset[int]:
    return frozenset(b.index for b in layout.bundles if not b.movable)


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
