"""A plan spelt out: every operation of one steady step in issue order, with what the mechanism adds to the plan.

`expand` follows the runtime's rules to the letter (see the notes below and in `demand`), so whatever is proved, drawn
or timed from a schedule holds for the run: the timeline adds up its bytes, the validator walks its graph, the race
detector replays its waits, the simulator gives its lanes a clock.

Note [What happens at a moment]
    first   a barrier, if the plan has one there
    ENTER   planned operations; holds (a bundle that is missing is fetched on demand); gradient ranges at BACKWARD_ENTER
    EXIT    holds end; at BACKWARD_EXIT and BACKWARD_END the flushes: reduce, sum of squares, offload or accumulate,
            update if the rule allows; stale device copies go; planned operations
    STEP_END  updates on the device, then on the host, first-used bundles first; gradients that waited for them go;
    stale
            copies go; planned operations (fetches for the next step, which wait for the host's updates)
    Between two moments the compute lane runs what the model does there.

Note [Resources]
    device:param:B  device:grad:B  one bundle's device copy and gradient (in place, the first is both)
    host:slot:S     the host's 16-bit parameters of a segment, which take its gradient between flush and update; what
                    is used again in between is fetched from the master in state:S
    state:S         master weight, moments and accumulator of a segment, on whatever tier
    host:buffer:N   through which states on the disk go
    hidden:U        the input of a unit that waits on the host (host:hidden:U) for its backward
    norm:B, norm    a bundle's sum of squares; the step's norm
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from systems.planning.demand import Demand, Residence, demand_of, in_order_of_use
from systems.planning.disk import PARTS, buffer_of
from systems.planning.layout import Layout
from systems.planning.plan import DEVICE_LANES, LaneKind, OpKind, Plan, UpdateRule
from systems.planning.races import IssuedOperation
from systems.planning.strategy import PlanningContext
from systems.planning.trace import ENTER, NO_UNIT, Phase, Trace
from systems.planning.waits import Accesses, Barriers, Room, Waits, merge


class Work(Enum):
    """Kinds of scheduled operations. The second group is bookkeeping: on no lane, taking no time."""

    COMPUTE = "compute"  # the model, from one moment to the next
    FETCH = "fetch"  # host slots to the device
    GATHER = "gather"  # a bundle's shards to all ranks of its group
    WRITE_BACK = "write-back"  # device copy to the host slots
    REDUCE = "reduce"  # a bundle's gradient over its group
    SQUARES = "squares"  # a gradient's partial sum of squares
    OFFLOAD = "offload"  # gradient to the host slots of its own parameters
    ACCUMULATE = "accumulate"  # gradient into the fp32 accumulator; restores the host slot from the master
    NORM = "norm"  # the one host wait of a step
    UPDATE = "update"  # Adam on a bundle, or on one segment of it whose state is on the disk
    READ_STATE, WRITE_STATE = "read-state", "write-state"  # a segment's master and moments between the disk and its buffer

    OFFLOAD_INPUT = "offload-input"  # a recomputed unit's input to the host, behind what made it (plans that say whose)
    FETCH_INPUT = "fetch-input"  # its own, and the one needed next, when a unit's backward begins

    HOLD = "hold"
    RELEASE = "release"
    DROP = "drop"
    ALLOCATE = "allocate"  # a gradient range
    FREE = "free"
    BARRIER = "barrier"  # the device's lanes wait for each other


class ScheduledOperation(NamedTuple):
    """ticket: place in issue order. lane None: bookkeeping. bundle: -1 where none; segment: -1 for all of the bundle's.

    bytes: payload moved by this rank. device_delta: bytes the device pool grows by. seconds: known compute time.
    waits, room_waits: tickets of this step, for data and for memory; previous_waits: the same of the step before.
    planned: False for what the plan should have asked for and did not (an on-demand fetch).
    """

    ticket: int
    moment: int
    kind: Work
    lane: LaneKind | None
    bundle: int = -1
    segment: int = -1
    bytes: int = 0
    device_delta: int = 0
    seconds: float = 0.0
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    waits: tuple[int, ...] = ()
    room_waits: tuple[int, ...] = ()
    previous_waits: tuple[int, ...] = ()
    planned: bool = True


@dataclass(frozen=True)
class Flaw:
    """Something a plan must not ask for. The runtime survives it; the validator refuses it."""

    moment: int
    bundle: int
    what: str


@dataclass(frozen=True)
class Schedule:
    """bare: the operations without their waits. late: see `with_waits`. initial_device_bytes: the pool at the step's start,
    states included. resident_at_end: bundles there then.
    """

    bare: tuple[ScheduledOperation, ...]
    late: tuple[tuple[int, int], ...]
    flaws: tuple[Flaw, ...]
    initial_device_bytes: int
    resident_at_end: frozenset[int]
    demand: Demand
    residence: Residence

    @cached_property
    def operations(self) -> tuple[ScheduledOperation, ...]:
        """With their waits, which take longer to find than all else, and which bytes do not depend on. The pool is as large as
        its peak: what is left of the budget is for activations."""
        live = accumulate((o.device_delta for o in self.bare), initial=0)
        return tuple(with_waits(self.bare, max(live), self.late))

    def issued(self, *, steps: int = 2) -> list[IssuedOperation]:
        """Several steady steps in a row as the race detector reads them. Only for schedules without flaws."""
        offset, found = len(self.operations), []
        for step in range(steps):
            for o in self.operations:
                if o.lane is not None:
                    waits = [step * offset + t for t in (*o.waits, *o.room_waits)]
                    waits += [(step - 1) * offset + t for t in o.previous_waits]
                    found.append(IssuedOperation(step * offset + o.ticket, o.lane.value, o.reads, o.writes, tuple(waits)))
        return found


def param(bundle: int) -> str:
    return f"device:param:{bundle}"


def grad(bundle: int) -> str:
    return f"device:grad:{bundle}"


def slot(segment: int) -> str:
    return f"host:slot:{segment}"


def state(segment: int) -> str:
    return f"state:{segment}"


def expand(layout: Layout, trace: Trace, plan: Plan, context: PlanningContext) -> Schedule:
    """All operations of one steady step. Flaws of the plan are noted, not raised. O(operations x lanes)."""
    residence = Residence.of(layout, context, plan.optimizer_tier, plan.update_rule, plan.in_place)
    expansion = _Expansion(trace, plan, residence, demand_of(layout, trace, context, plan.in_place))
    for moment in range(len(trace)):
        expansion.step(moment)
    initial = residence.static_bytes + sum(layout.bundle_bytes(b) for b in plan.resident_at_start - residence.on_device)
    return Schedule(
        bare=tuple(expansion.operations),
        late=tuple(expansion.late),
        flaws=tuple(expansion.flaws),
        initial_device_bytes=initial,
        resident_at_end=frozenset(expansion.resident),
        demand=expansion.demand,
        residence=residence,
    )


class _Expansion:
    """The runtime's bookkeeping, moment by moment."""

    def __init__(self, trace: Trace, plan: Plan, residence: Residence, demand: Demand) -> None:
        self.trace, self.plan, self.residence, self.demand = trace, plan, residence, demand
        self.layout, self.context = residence.layout, residence.context
        self.resident = set(plan.resident_at_start) | residence.on_device
        self.gradients: set[int] = set()
        self.flushed: dict[int, None] = {}  # bundles whose update is due at STEP_END, in order of flushing
        self.operations: list[ScheduledOperation] = []
        self.flaws: list[Flaw] = []
        self.outdated: set[int] = set()  # bundles flushed in the last micro-step
        self.late: list[tuple[int, int]] = []  # (ticket of a fetch, bundle) that needs an update issued after it
        self.moment = 0
        self._buffers = buffer_of(self.layout)
        leaving = plan.offload_inputs or frozenset()
        self._input_bytes = {unit: size for unit, size in trace.input_bytes if unit in leaving and size}
        self._inputs: list[list[int]] = []  # [unit, 1 if fetched] of inputs that no backward has taken, in order of forward
        self._opening: dict[int, list[int]] = {}
        for bundle, spans in demand.gradient_spans.items():
            for span in spans:
                self._opening.setdefault(span.begin, []).append(bundle)
        self._planned: dict[int, list[tuple[int, OpKind, int]]] = {}
        for p in plan.operations:
            self._planned.setdefault(p.trigger, []).append((p.priority, p.operation.kind, p.operation.bundle))
        for operations in self._planned.values():
            operations.sort(key=lambda operation: operation[0])

    def step(self, moment: int) -> None:
        """See Note [What happens at a moment]."""
        self.moment = moment
        entering = self.trace.moments[moment]
        bundles = self.layout.bundles_of_unit.get(entering.unit, ()) if entering.unit != NO_UNIT else ()
        if moment in self.plan.barriers:
            self._add(Work.BARRIER, None)
        if entering.phase in ENTER:
            if entering.phase is Phase.BACKWARD_ENTER and self._input_bytes:
                self._fetch_inputs(entering.unit)
            self._planned_operations()
            for bundle in bundles:
                if bundle not in self.resident:
                    self._flaw(bundle, "is used before it is fetched")
                    self._fetch(bundle, planned=False)
                self._add(Work.HOLD, None, bundle)
            if entering.phase is Phase.BACKWARD_ENTER:
                self._open_gradients()
            elif entering.unit in self._input_bytes:
                self._offload_input(entering.unit)
        else:
            for bundle in bundles:
                self._add(Work.RELEASE, None, bundle)
            last_micro_step = entering.micro_step == self.context.accumulate - 1
            for bundle in self.trace.flushes[moment]:
                self._flush(bundle, last_micro_step=last_micro_step)
            if entering.phase is Phase.STEP_END:
                self._update_all()
            for bundle in self.demand.stale[moment]:
                if bundle in self.resident and bundle not in self.residence.on_device:
                    self._drop(bundle)
            self._planned_operations()
        if moment < len(self.trace) - 1:
            self._compute()

    def _offload_input(self, unit: int) -> None:
        self._inputs.append([unit, 0])
        size, reads, writes = self._input_bytes[unit], (f"hidden:{unit}",), (f"host:hidden:{unit}",)
        self._add(Work.OFFLOAD_INPUT, LaneKind.D2H, bytes=size, reads=reads, writes=writes)

    def _fetch_inputs(self, unit: int) -> None:
        """Its own, then the one before it; of another unit, the last. Those that are there, or on their way, are not again."""
        mine = max((place for place, (each, _) in enumerate(self._inputs) if each == unit), default=len(self._inputs))
        for entry in reversed(self._inputs[max(mine - 1, 0) : mine + 1]):
            if not entry[1]:
                each, entry[1] = entry[0], 1
                size, reads, writes = self._input_bytes[each], (f"host:hidden:{each}",), (f"hidden:{each}",)
                self._add(Work.FETCH_INPUT, LaneKind.H2D, bytes=size, reads=reads, writes=writes)
        del self._inputs[mine : mine + 1]

    def _planned_operations(self) -> None:
        entering = self.trace.moments[self.moment].phase in ENTER  # then its own holds come after the plan's operations
        held = self.demand.held[self.moment - 1 if entering else self.moment]
        for _, kind, bundle in self._planned.get(self.moment, ()):
            if bundle in self.residence.on_device:
                self._flaw(bundle, f"stays on the device, yet the plan has a {kind.value} of it")
            elif kind is OpKind.FETCH:
                if bundle in self.resident:
                    self._flaw(bundle, "is fetched though it is on the device")
                else:
                    self._fetch(bundle, planned=True)
            elif bundle not in self.resident:
                self._flaw(bundle, f"has a {kind.value} though it is not on the device")
            elif bundle in held:
                self._flaw(bundle, f"has a {kind.value} while a unit holds it")
            elif kind is OpKind.DROP or bundle in self.outdated:
                self._drop(bundle)  # an outdated bundle is never written: its slot holds the gradient
            else:
                slots = tuple(slot(s) for s in self.layout.bundles[bundle].segments)
                size = self._shard_bytes(bundle)
                self._add(Work.WRITE_BACK, LaneKind.D2H, bundle, bytes=size, reads=(param(bundle),), writes=slots)
                self._drop(bundle)

    def _fetch(self, bundle: int, *, planned: bool) -> None:
        segments = self.layout.bundles[bundle].segments
        reads = tuple(slot(s) for s in segments)
        if bundle in self.outdated and self.moment < len(self.trace) - 1:
            used_again = self.demand.next_use.after(bundle, self.moment - 1) < len(self.trace)
            if used_again and self.plan.update_rule is UpdateRule.AFTER_NORM:
                reads = tuple(state(s) for s in segments)
            else:
                self._flaw(bundle, "is fetched between its flush and STEP_END, when its parameters are outdated")
                self.late.append((len(self.operations), bundle))
        self.resident.add(bundle)
        size = self.layout.bundle_bytes(bundle)
        payload, writes = self._shard_bytes(bundle), (param(bundle),)
        self._add(
            Work.FETCH,
            LaneKind.H2D,
            bundle,
            bytes=payload,
            device_delta=size,
            reads=reads,
            writes=writes,
            planned=planned,
        )
        self._gather(bundle)

    def _gather(self, bundle: int) -> None:
        if self.context.ranks > 1:
            size = self.layout.bundle_bytes(bundle)
            self._add(Work.GATHER, LaneKind.GATHER, bundle, bytes=size, reads=(param(bundle),), writes=(param(bundle),))

    def _drop(self, bundle: int) -> None:
        self.resident.discard(bundle)
        self._add(Work.DROP, None, bundle, device_delta=-self.layout.bundle_bytes(bundle))

    def _open_gradients(self) -> None:
        for bundle in self._opening.get(self.moment, ()):
            if bundle not in self.gradients:
                self.gradients.add(bundle)
                if self._ranged(bundle):
                    self._add(Work.ALLOCATE, None, bundle, device_delta=self.layout.bundle_bytes(bundle))

    def _free_gradient(self, bundle: int) -> None:
        if bundle in self.gradients:
            self.gradients.remove(bundle)
            if self._ranged(bundle):
                self._add(Work.FREE, None, bundle, device_delta=-self.layout.bundle_bytes(bundle))

    def _ranged(self, bundle: int) -> bool:
        """True if the gradient takes pool bytes of its own."""
        return not self.residence.adopted(bundle) and not self.residence.reuses(bundle)

    def _gradient(self, bundle: int) -> str:
        return param(bundle) if self.residence.reuses(bundle) else grad(bundle)

    def _flush(self, bundle: int, *, last_micro_step: bool) -> None:
        """The gradient of one micro-step is complete: it leaves for where its optimizer is."""
        gradient = (self._gradient(bundle),)
        on_device, several = bundle in self.residence.on_device, self.context.accumulate > 1
        segments = self.layout.bundles[bundle].segments
        states, slots = tuple(state(s) for s in segments), tuple(slot(s) for s in segments)
        norm = (f"norm:{bundle}",) if last_micro_step else ()
        reduce_lane = LaneKind.COMPUTE
        if self.context.ranks > 1:
            reduce_lane, size = LaneKind.REDUCE, self.layout.bundle_bytes(bundle)
            self._add(Work.REDUCE, reduce_lane, bundle, bytes=size, reads=gradient, writes=gradient)
        if not several:
            self._add(Work.SQUARES, reduce_lane, bundle, reads=gradient, writes=norm)
        if not on_device:
            size = self._shard_bytes(bundle)
            self._add(Work.OFFLOAD, LaneKind.D2H, bundle, bytes=size, reads=gradient, writes=slots)
            if several:
                self._add(Work.ACCUMULATE, LaneKind.CPU, bundle, reads=slots, writes=(*slots, *states, *norm))
        elif several:
            self._add(Work.ACCUMULATE, LaneKind.COMPUTE, bundle, reads=gradient, writes=(*states, *norm))
        update_now = not several and self.plan.update_rule is UpdateRule.WHEN_REDUCED
        self.flushed[bundle] = None
        if last_micro_step:
            self.outdated.add(bundle)
        if update_now:
            self._update(bundle)
            del self.flushed[bundle]
        if self.residence.gradient_freed_at_flush(bundle):
            self._free_gradient(bundle)
        if self.residence.reuses(bundle) and bundle in self.resident:
            self._drop(bundle)  # the block was the gradient

    def _update_all(self) -> None:
        due = in_order_of_use(self.flushed, self.demand)
        if due and self.plan.update_rule is UpdateRule.AFTER_NORM:
            self._add(Work.NORM, LaneKind.CPU, reads=tuple(f"norm:{bundle}" for bundle in due), writes=("norm",))
        on_device = [bundle for bundle in due if bundle in self.residence.on_device]
        for bundle in on_device:
            self._update(bundle)
        for bundle in sorted(self.gradients):
            self._free_gradient(bundle)
        for bundle in due:
            if bundle not in self.residence.on_device:
                self._update(bundle)
        self.flushed.clear()
        for bundle in in_order_of_use(self.residence.on_device & set(self.demand.gradient_spans), self.demand):
            self._gather(bundle)  # each rank has updated its shard

    def _update(self, bundle: int) -> None:
        norm = ("norm",) if self.plan.update_rule is UpdateRule.AFTER_NORM else ()
        segments = self.layout.bundles[bundle].segments
        states = tuple(state(s) for s in segments)
        if bundle in self.residence.on_device:
            reads = norm if self.context.accumulate > 1 else (grad(bundle), *norm)
            self._add(Work.UPDATE, LaneKind.COMPUTE, bundle, reads=reads, writes=(*states, param(bundle)))
        elif bundle in self.layout.on_disk:
            for s in segments:
                self._update_on_disk(bundle, s, norm)
        else:
            writes = (*states, *(slot(s) for s in segments))
            self._add(Work.UPDATE, LaneKind.CPU, bundle, reads=norm, writes=writes)

    def _update_on_disk(self, bundle: int, segment: int, norm: tuple[str, ...]) -> None:
        buffer, home = (f"host:buffer:{self._buffers[segment]}",), (state(segment),)
        size = PARTS * 4 * self.layout.segments[segment].shard_numel
        self._add(Work.READ_STATE, LaneKind.DISK_READ, bundle, segment=segment, bytes=size, reads=home, writes=buffer)
        writes = (*buffer, slot(segment), *(home if self.context.accumulate > 1 else ()))
        self._add(Work.UPDATE, LaneKind.CPU, bundle, segment=segment, reads=norm, writes=writes)
        self._add(Work.WRITE_STATE, LaneKind.DISK_WRITE, bundle, segment=segment, bytes=size, reads=buffer, writes=home)

    def _compute(self) -> None:
        reads = tuple(param(bundle) for bundle in self.demand.held[self.moment])
        writes = tuple(
            self._gradient(bundle)
            for unit in self.demand.backward[self.moment]
            for bundle in self.layout.bundles_of_unit.get(unit, ())
            if bundle in self.gradients
        )
        if self._input_bytes:
            now, then = self.trace.moments[self.moment], self.trace.moments[self.moment + 1]
            if now.phase is Phase.BACKWARD_ENTER and now.unit in self._input_bytes:
                reads = (*reads, f"hidden:{now.unit}")
            if then.phase is Phase.FORWARD_ENTER and then.unit in self._input_bytes:
                writes = (*writes, f"hidden:{then.unit}")
        seconds = self.trace.compute_time_s[self.moment]
        self._add(Work.COMPUTE, LaneKind.COMPUTE, reads=reads, writes=tuple(dict.fromkeys(writes)), seconds=seconds)

    def _shard_bytes(self, bundle: int) -> int:
        segments = self.layout.bundles[bundle].segments
        return sum(self.layout.segments[s].shard_numel for s in segments) * self.layout.itemsize

    def _flaw(self, bundle: int, what: str) -> None:
        self.flaws.append(Flaw(self.moment, bundle, what))

    def _add(
        self,
        kind: Work,
        lane: LaneKind | None,
        bundle: int = -1,
        *,
        segment: int = -1,
        bytes: int = 0,
        device_delta: int = 0,
        seconds: float = 0.0,
        reads: tuple[str, ...] = (),
        writes: tuple[str, ...] = (),
        planned: bool = True,
    ) -> None:
        ticket = len(self.operations)
        self.operations.append(
            ScheduledOperation(
                ticket,
                *(self.moment, kind, lane, bundle, segment, bytes, device_delta, seconds, reads, writes),
                planned=planned,
            )
        )


def with_waits(
    operations: Sequence[ScheduledOperation], unused_bytes: int = 0, late: Sequence[tuple[int, int]] = ()
) -> list[ScheduledOperation]:
    """Derive waits over two steps in a row and keep those of the second, whose past is a whole step.

    late: fetches that need an update issued after them (a flaw); their wait points forward, so that the cycle shows.
    """
    accesses, room = Accesses(), Room(max(0, unused_bytes), LaneKind.COMPUTE.value)
    barriers = Barriers(lane.value for lane in DEVICE_LANES)
    count, found = len(operations), []
    updates = {o.bundle: o.ticket for o in operations if o.kind is Work.UPDATE}
    forward = {ticket: updates[bundle] for ticket, bundle in late if updates.get(bundle, -1) > ticket}
    for step in range(2):
        awaited: Waits = {}  # for memory of gradient ranges: their first writer is the next compute
        for o in operations:
            ticket = step * count + o.ticket
            taken: Waits = {}
            if o.device_delta > 0:
                taken = room.take(o.device_delta, own=o.kind is Work.ALLOCATE)
            elif o.device_delta < 0:
                resource = grad(o.bundle) if o.kind is Work.FREE else param(o.bundle)
                room.free(-o.device_delta, accesses.latest(resource))
            if o.kind is Work.BARRIER:
                barriers.join()
            if o.lane is None:
                merge(awaited, taken)
                if step:
                    found.append(o)
                continue
            lane = o.lane.value
            if o.lane is LaneKind.COMPUTE:
                merge(taken, awaited)
                awaited = {}
            waits = accesses.record(ticket, lane, o.reads, o.writes)
            merge(waits, barriers.record(ticket, lane))
            taken.pop(lane, None)
            if step:
                data = [t - count for t in waits.values() if t >= count] + [forward[t] for t in (o.ticket,) if t in forward]
                memory = [t - count for t in taken.values() if t >= count]
                previous = {t for t in (*waits.values(), *taken.values()) if t < count}
                found.append(
                    o._replace(
                        waits=tuple(sorted(data)),
                        room_waits=tuple(sorted(set(memory) - set(data))),
                        previous_waits=tuple(sorted(previous)),
                    )
                )
    return found
