"""A plan spelt out: every operation of one steady step in issue order, with what the mechanism adds to the plan.

`expand` follows the runtime's rules (see the notes below and in `demand`) and gives each lane its work in the runtime's order,
so whatever is proved, drawn or timed from a schedule holds for the run: the timeline adds up its bytes, the validator walks its
graph, the race detector replays its waits, the simulator gives its lanes a clock.

Note [What happens at a moment]
    first   a barrier, if the plan has one there; then planned operations that come first
    ENTER   at BACKWARD_ENTER the unit's input, and the one needed next, if they wait on the host; planned operations; holds (a
            bundle that is missing is fetched on demand); gradient ranges at BACKWARD_ENTER
    EXIT    holds end; at BACKWARD_EXIT and BACKWARD_END the flushes: reduce, sum of squares, offload or accumulate (then
            the sum of squares follows, in the last micro-step), update if the rule allows or if it runs ahead; stale device
            copies go; planned operations
    STEP_END  gradients that stayed leave, first-used bundles first; sums of squares of accumulators that the last micro-step
            added nothing to; the norm; updates on the device, and the gradients that waited for them go; updates on the
            host, first-used bundles first, and among them, of bundles updated ahead, the accumulators are cleared; stale copies
            go; planned operations (fetches for the next step, which wait for the host's updates)
    last    the inputs of recomputed units that leave for the host before the next moment
    Between two moments the compute lane runs what the model does there. At the end of a backward that includes the writing of
    gradients in place, which the runtime does before the barrier of the unit's exit.
    Where the order of two things changes nothing the runtime may have the other one: holds end before the barrier of an exit,
    and stale copies go before the norm and before any update, for neither is work of a lane and nothing takes that room before
    the planned operations; updates on the host are issued before those on the device, for their lanes differ.

Note [Resources]
    device:param:B  device:grad:B  one bundle's device copy and gradient (in place, the first is both)
    device:pages:S  neighbouring segments of a bundle, S the first, that are there without the rest
    device:shard:B  device:grad-shard:B  this rank's part of the parameters, and of the gradient summed over ranks, beside those
    host:slot:S     the host's 16-bit parameters of a segment, which take its gradient between flush and update; what
                    is used again in between is fetched from the master in state:S
    state:S         master weight, moments and accumulator of a segment, on whatever tier
                    An update that runs ahead reads one version of state and slot and writes the other, which has the names
                    from there on. Here it writes both names as any update does: in steady steps the versions take turns, so
                    that waits come out the same, or stricter by what would still read the version before.
    host:buffer:N   through which states on the disk go
    hidden:U        the input of a unit that waits on the host (host:hidden:U) for its backward
    norm:B, norm    a bundle's sum of squares; the step's norm
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from systems.planning.layout import Layout
from systems.planning.plan import LaneKind, Operation, OpKind, Pages, Plan, PlannedOperation, pages_bytes
from systems.planning.step.demand import Demand, demand_of
from systems.planning.step.derived_waits import with_waits
from systems.planning.step.device_copies import DeviceCopies, overlap
from systems.planning.step.gradients import ScheduledGradients
from systems.planning.step.issue_order import Flaw, IssueOrder
from systems.planning.step.operations import IssuedOperation, ScheduledOperation, Work, param
from systems.planning.step.residence import Residence
from systems.planning.step.waiting_inputs import WaitingInputs
from systems.planning.strategy import PlanningContext
from systems.planning.trace import ENTER, NO_UNIT, Moment, Phase, Trace


@dataclass(frozen=True)
class Schedule:
    """bare: the operations without their waits. late: see `with_waits`. initial_device_bytes: the pool at the step's start,
    states included. resident_at_end: bundles there then. shards_at_end: those whose shard is, though it is not their home.
    pages_at_end: pages that are, without the rest. one_copy_queue: the plan's.
    """

    bare: tuple[ScheduledOperation, ...]
    late: tuple[tuple[int, int], ...]
    flaws: tuple[Flaw, ...]
    initial_device_bytes: int
    resident_at_end: frozenset[int]
    shards_at_end: frozenset[int]
    pages_at_end: frozenset[Pages]
    demand: Demand
    residence: Residence
    one_copy_queue: bool = False

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
    rests = plan.optimizer_tier, plan.update_rule, plan.in_place, plan.ahead, plan.sharded, plan.staying
    residence = Residence.of(layout, context, *rests)
    expansion = _Expansion(trace, plan, residence, demand_of(layout, trace, context, plan.in_place, plan.staying))
    for moment in range(len(trace)):
        expansion.step(moment)
    initial = residence.static_bytes + sum(layout.bundle_bytes(b) for b in plan.resident_at_start - residence.whole)
    initial += sum(map(layout.shard_bytes, plan.shards_at_start))
    initial += sum(pages_bytes(layout, run) for run in plan.pages_at_start)
    return Schedule(
        bare=tuple(expansion.order.operations),
        late=tuple(expansion.order.late),
        flaws=tuple(expansion.order.flaws),
        initial_device_bytes=initial,
        resident_at_end=frozenset(expansion.copies.resident),
        shards_at_end=frozenset(expansion.copies.shards - residence.sharded),
        pages_at_end=frozenset(run for there in expansion.copies.pages.values() for run in there),
        demand=expansion.demand,
        residence=residence,
        one_copy_queue=plan.one_copy_queue,
    )


def _name_of_compute(moment: Moment, layout: Layout) -> str:
    """As a run's spans are called, while a unit is entered; between two units whatever the model does there."""
    if moment.unit == NO_UNIT:
        return f"behind {moment.phase.value}"
    way = "forward" if moment.phase in (Phase.FORWARD_ENTER, Phase.FORWARD_EXIT) else "backward"
    return f"{'' if moment.phase in ENTER else 'behind '}{way} of {layout.unit_name(moment.unit)}"


class _Expansion:
    """The runtime's bookkeeping, moment by moment: of copies, gradients and inputs, all of which issue into one order."""

    def __init__(self, trace: Trace, plan: Plan, residence: Residence, demand: Demand) -> None:
        self.trace, self.plan, self.residence, self.demand = trace, plan, residence, demand
        self.layout, self.context = residence.layout, residence.context
        self.order = IssueOrder(self.layout)
        self.copies = DeviceCopies(plan, residence, demand, self.order)
        self._gradients = ScheduledGradients(residence, demand, self.copies, self.order)
        self._inputs = WaitingInputs(trace, plan, self.order)
        self._planned: dict[int, list[PlannedOperation]] = {}
        for p in plan.operations:
            self._planned.setdefault(p.trigger, []).append(p)
        for operations in self._planned.values():
            operations.sort(key=lambda planned: planned.priority)

    def step(self, moment: int) -> None:
        """See Note [What happens at a moment]."""
        self.order.begin(moment)
        entering = self.trace.moments[moment]
        bundles = self.layout.bundles_of_unit.get(entering.unit, ()) if entering.unit != NO_UNIT else ()
        if moment in self.plan.barriers:
            self.order.add(Work.BARRIER, None)
        self._planned_operations(moment, first=True)
        if entering.phase in ENTER:
            if entering.phase is Phase.BACKWARD_ENTER:
                self._inputs.fetch_for(entering.unit)
            self._planned_operations(moment)
            for bundle in bundles:
                if bundle not in self.copies.resident:
                    self.order.flaw(bundle, "is used before it is fetched")
                    self.copies.fetch(bundle, planned=False)
                self.order.add(Work.HOLD, None, bundle)
            if entering.phase is Phase.BACKWARD_ENTER:
                self._gradients.open()
        else:
            for bundle in bundles:
                self.order.add(Work.RELEASE, None, bundle)
            last_micro_step = entering.micro_step == self.context.accumulate - 1
            for bundle in self.trace.flushes[moment]:
                self._gradients.flush(bundle, last_micro_step=last_micro_step)
                if self.context.ranks > 1 and bundle in self.demand.stale[moment]:  # before a shard of the next one's is kept
                    self.copies.drop_stale(bundle)
            if entering.phase is Phase.STEP_END:
                self._gradients.update_all()
            for bundle in self.demand.stale[moment]:
                self.copies.drop_stale(bundle)
            self._planned_operations(moment)
        self._inputs.offload()
        if moment < len(self.trace) - 1:
            self._compute(moment)

    def _planned_operations(self, moment: int, *, first: bool = False) -> None:
        entering = self.trace.moments[moment].phase in ENTER  # then its own holds come after the plan's operations
        held = self.demand.held[moment - 1 if entering else moment]
        for planned in self._planned.get(moment, ()):
            if planned.first != first:
                continue
            kind, bundle = planned.operation.kind, planned.operation.bundle
            why = self._hindrance(planned.operation, held)
            if why is not None:
                self.order.flaw(bundle, why)
            elif kind is OpKind.MOVE and planned.operation.pages:
                self.copies.move_pages(bundle, *planned.operation.pages)
            elif kind is OpKind.SHRINK and planned.operation.pages:
                self.copies.leave_pages(bundle, planned.operation.pages)
            elif kind is OpKind.FETCH:
                self.copies.fetch(bundle, planned=True)
            elif kind is OpKind.MOVE:
                self.copies.move(bundle)
            elif bundle in self._gradients.staying:
                self._gradients.leave(bundle)
            elif kind is OpKind.SHRINK:
                self.copies.shrink(bundle)
            elif kind is OpKind.DROP or bundle in self.copies.outdated:
                self.copies.drop(bundle)  # an outdated bundle is never written: its slot holds the gradient
            else:
                self.copies.write_back(bundle)

    def _hindrance(self, operation: Operation, held: tuple[int, ...]) -> str | None:
        """Why there can be no such operation now; None if there can."""
        kind, bundle, copies = operation.kind, operation.bundle, self.copies
        if bundle in self.residence.whole:
            return f"stays on the device, yet the plan has a {kind.value} of it"
        if bundle in self.residence.sharded and kind not in (OpKind.FETCH, OpKind.SHRINK):
            return f"has its home on the device, yet the plan has a {kind.value} of it"
        if kind is OpKind.FETCH:
            there = bundle in copies.resident and bundle not in copies.moved
            return "is fetched though it is on the device" if there else None
        if kind is OpKind.MOVE:
            some = copies.pages.get(bundle, ())
            there = bundle in copies.resident | copies.shards or overlap(some, operation.pages or some)
            return "is moved though it is on the device" if there else None
        if bundle not in copies.resident and not (kind is OpKind.DROP and (bundle in copies.shards or bundle in copies.pages)):
            return f"has a {kind.value} though it is not on the device"
        if bundle in self._gradients.staying and kind is not OpKind.WRITE_BACK:
            return f"has a {kind.value} though its gradient is there, which a write-back alone sends off"
        return f"has a {kind.value} while a unit holds it" if bundle in held else None

    def _compute(self, moment: int) -> None:
        reads = tuple(param(bundle) for bundle in self.demand.held[moment])
        writes = tuple(
            self._gradients.resource(bundle)
            for unit in self.demand.backward[moment]
            for bundle in self.layout.bundles_of_unit.get(unit, ())
            if bundle in self._gradients.open_now
        )
        if self._inputs.bytes:
            now, then = self.trace.moments[moment], self.trace.moments[moment + 1]
            if now.phase is Phase.BACKWARD_ENTER and now.unit in self._inputs.bytes:
                reads = (*reads, f"hidden:{now.unit}")
            if then.phase is Phase.FORWARD_ENTER and then.unit in self._inputs.bytes:
                writes = (*writes, f"hidden:{then.unit}")
        seconds, exchanged = self.trace.compute_time_s[moment], self.trace.exchange_bytes
        nbytes = exchanged[moment] if exchanged else 0
        written = tuple(dict.fromkeys(writes))
        name = _name_of_compute(self.trace.moments[moment], self.layout)
        self.order.add(Work.COMPUTE, LaneKind.COMPUTE, bytes=nbytes, reads=reads, writes=written, seconds=seconds, name=name)
