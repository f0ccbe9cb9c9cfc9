"""A plan spelt out: every operation of one steady step in issue order, with what the mechanism adds to the plan.

`expand` follows the runtime's rules to the letter (see the notes below and in `demand`), so whatever is proved, drawn
or timed from a schedule holds for the run: the timeline adds up its bytes, the validator walks its graph, the race
detector replays its waits, the simulator gives its lanes a clock.

Note [What happens at a moment]
    first   a barrier, if the plan has one there
    ENTER   planned operations; holds (a bundle that is missing is fetched on demand); gradient ranges at BACKWARD_ENTER
    EXIT    holds end; at BACKWARD_EXIT and BACKWARD_END the flushes: reduce, sum of squares, offload or accumulate,
            update if the rule allows; stale device copies go; planned operations
    STEP_END  sums of squares of what was accumulated, the norm, updates on the device, then on the host, first-used bundles
            first; gradients that waited for them go; stale copies go; planned operations (fetches for the next step,
            which wait for the host's updates)
    last    the inputs of recomputed units that leave for the host before the next moment
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

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from systems.planning.disk_layout import PARTS, buffer_of
from systems.planning.layout import Layout
from systems.planning.plan import LaneKind, OpKind, Plan, UpdateRule
from systems.planning.step.demand import Demand, Residence, demand_of, in_order_of_use
from systems.planning.step.derived_waits import with_waits
from systems.planning.step.operations import IssuedOperation, ScheduledOperation, Work, grad, param, slot, state
from systems.planning.strategy import PlanningContext
from systems.planning.trace import ENTER, NO_UNIT, Moment, Phase, Trace


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


def inputs_leaving(trace: Trace, units: frozenset[int]) -> dict[int, list[int]]:
    """Per moment those of `units` whose inputs leave there: where the trace saw it. Those that stayed in it behave so again (a
    model that recomputes within hooks of its own keeps them); what it was not asked to show leaves where its forward begins.
    """
    found: dict[int, list[int]] = {}
    for number, seen in enumerate(trace.inputs_left):
        found.setdefault(number, []).extend(unit for unit in seen if unit in units)
    unseen = units - trace.offloaded if trace.inputs_left else units
    for number, moment in enumerate(trace.moments):
        if moment.phase is Phase.FORWARD_ENTER and moment.unit in unseen:
            found.setdefault(number, []).append(moment.unit)
    return found


class _WaitingInputs:
    """Inputs that have left and that no backward has taken, as the substrate's offloaded_inputs keeps them."""

    def __init__(self) -> None:
        self._waiting: list[list[int]] = []  # [unit, 1 if fetched], in order of forward

    def leave(self, unit: int) -> None:
        self._waiting.append([unit, 0])

    def needed(self, unit: int) -> Iterator[int]:
        """The unit's backward begins: its own, then the one before it; of a unit that has none, the last. Each comes once."""
        mine = max((place for place, (each, _) in enumerate(self._waiting) if each == unit), default=len(self._waiting))
        for entry in reversed(self._waiting[max(mine - 1, 0) : mine + 1]):
            if not entry[1]:
                entry[1] = 1
                yield entry[0]
        del self._waiting[mine : mine + 1]


def _name_of_compute(moment: Moment, layout: Layout) -> str:
    """As a run's spans are called, while a unit is entered; between two units whatever the model does there."""
    if moment.unit == NO_UNIT:
        return f"behind {moment.phase.value}"
    way = "forward" if moment.phase in (Phase.FORWARD_ENTER, Phase.FORWARD_EXIT) else "backward"
    return f"{'' if moment.phase in ENTER else 'behind '}{way} of {layout.unit_name(moment.unit)}"


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
        leaving = trace.offloaded if plan.offload_inputs is None else plan.offload_inputs
        self._input_bytes = {unit: size for unit, size in trace.input_bytes if unit in leaving and size}
        self._leaving = inputs_leaving(trace, frozenset(self._input_bytes))
        self._inputs = _WaitingInputs()
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
            if entering.phase is Phase.BACKWARD_ENTER:
                for unit in self._inputs.needed(entering.unit):
                    self._input(Work.FETCH_INPUT, unit)
            self._planned_operations()
            for bundle in bundles:
                if bundle not in self.resident:
                    self._flaw(bundle, "is used before it is fetched")
                    self._fetch(bundle, planned=False)
                self._add(Work.HOLD, None, bundle)
            if entering.phase is Phase.BACKWARD_ENTER:
                self._open_gradients()
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
        for unit in self._leaving.get(moment, ()):
            self._inputs.leave(unit)
            self._input(Work.OFFLOAD_INPUT, unit)
        if moment < len(self.trace) - 1:
            self._compute()

    def _input(self, kind: Work, unit: int) -> None:
        size, name, here, there = self._input_bytes[unit], self.layout.unit_name(unit), f"hidden:{unit}", f"host:hidden:{unit}"
        if kind is Work.OFFLOAD_INPUT:
            self._add(kind, LaneKind.D2H, bytes=size, reads=(here,), writes=(there,), name=name)
        else:
            self._add(kind, LaneKind.H2D, bytes=size, reads=(there,), writes=(here,), name=name)

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
        reduce_lane = LaneKind.COMPUTE
        if self.context.ranks > 1:
            reduce_lane, size = LaneKind.REDUCE, self.layout.bundle_bytes(bundle)
            self._add(Work.REDUCE, reduce_lane, bundle, bytes=size, reads=gradient, writes=gradient)
        if not several:
            self._add(Work.SQUARES, reduce_lane, bundle, reads=gradient, writes=(f"norm:{bundle}",))
        if not on_device:
            size = self._shard_bytes(bundle)
            self._add(Work.OFFLOAD, LaneKind.D2H, bundle, bytes=size, reads=gradient, writes=slots)
            if several:
                self._add(Work.ACCUMULATE, LaneKind.CPU, bundle, reads=slots, writes=states)
            if several and not last_micro_step:
                self._add(Work.RESTORE, LaneKind.CPU, bundle, reads=states, writes=slots)
        elif several:
            self._add(Work.ACCUMULATE, LaneKind.COMPUTE, bundle, reads=gradient, writes=states)
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
        if self.context.accumulate > 1:
            for bundle in sorted(due):
                self._squares_of_accumulated(bundle)
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

    def _squares_of_accumulated(self, bundle: int) -> None:
        lane = LaneKind.COMPUTE if bundle in self.residence.on_device else LaneKind.CPU
        states = tuple(state(s) for s in self.layout.bundles[bundle].segments)
        self._add(Work.SQUARES, lane, bundle, reads=states, writes=(f"norm:{bundle}",))

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
        written = tuple(dict.fromkeys(writes))
        name = _name_of_compute(self.trace.moments[self.moment], self.layout)
        self._add(Work.COMPUTE, LaneKind.COMPUTE, reads=reads, writes=written, seconds=seconds, name=name)

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
        name: str = "",
    ) -> None:
        ticket = len(self.operations)
        self.operations.append(
            ScheduledOperation(
                ticket,
                *(self.moment, kind, lane, bundle, segment, bytes, device_delta, seconds, reads, writes),
                planned=planned,
                name=self.layout.bundle_names[bundle] if bundle >= 0 else name,
            )
        )
