"""ZeRO's stages 2 and 3, with and without offload, as DeepSpeed has them by its rules: what the papers compare with.

Note [Static partition]
    Every rank owns an even part of every unit's states, wherever they are, and that never changes.
    stage 2     16-bit parameters stay on the device whole. A gradient is reduced when it is complete, and the own part kept.
                All parts are updated once the norm is known, then gathered, and then the next step begins.
    stage 3     of the parameters the own part alone stays. A unit's are gathered before its forward and its backward, as far
                ahead as PREFETCH elements, and go when it is left, unless the next unit needs them.
    offload     gradients' parts go to the host, which updates all of them once the norm is known, and parameters come from
                there: with stage 2 all at a step's end, with stage 3 a unit's own part before it is gathered.
    DeepSpeed's buckets are taken to be units, and its memory beyond that of parameters, gradients and states is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from pydantic import BaseModel

from systems.planning.layout import Layout
from systems.planning.plan import LaneKind, Operation, OpKind, Plan, PlannedOperation, Tier, optimizer_tiers
from systems.planning.step.demand import Demand, demand_of
from systems.planning.step.operations import ScheduledOperation, Work, grad
from systems.planning.step.schedule import Schedule
from systems.planning.strategy import PlanningContext
from systems.planning.trace import Trace
from systems.prediction.baseline_policy import BaselinePolicy, one_step_after_the_other, reissued

PREFETCH = 500_000_000
"""Elements that are gathered before they are needed (stage3_prefetch_bucket_size)."""


class ZeroPolicy(BaselinePolicy):
    """See Note [Static partition]."""

    def __init__(self, name: str, stage: Literal[2, 3], offloads: bool, options: BaseModel, context: PlanningContext) -> None:
        super().__init__(options, context)
        self.name, self.stage, self.offloads = name, stage, offloads

    def decide(self, layout: Layout, trace: Trace) -> Plan:
        everything = frozenset(bundle.index for bundle in layout.bundles)
        if self.stage == 2:
            operations = self._all_at_the_end(trace) if self.offloads else ()
            tiers = (Tier.HOST if self.offloads else Tier.DEVICE,) * len(layout.segments)
            return Plan(trace.signature, operations, tiers, everything, self.update_rule)
        operations = _unit_by_unit(layout, demand_of(layout, trace, self.context))
        return Plan(trace.signature, operations, optimizer_tiers(layout, frozenset()), frozenset(), self.update_rule)

    def _all_at_the_end(self, trace: Trace) -> tuple[PlannedOperation, ...]:
        """What is updated comes again."""
        updated = sorted({bundle for bundles in trace.flushes for bundle in bundles})
        end = len(trace) - 1
        return tuple(PlannedOperation(end, n, Operation(OpKind.FETCH, bundle)) for n, bundle in enumerate(updated))

    def edited(self, schedule: Schedule, trace: Trace) -> Schedule:
        if self.stage == 3 and not self.offloads:
            rest = self.resting_bytes(schedule.residence.layout)
            schedule = replace(schedule, initial_device_bytes=schedule.initial_device_bytes + sum(rest.values()))
            return reissued(schedule, one_step_after_the_other(_on_the_device(schedule.bare)))
        return reissued(schedule, one_step_after_the_other(schedule.bare))

    def resting_bytes(self, layout: Layout) -> dict[str, int]:
        """Of a rank's parts that are on the device at every moment though the plan's schedule has them on the host, by kind."""
        if self.offloads or self.stage == 2:
            return {}
        trained = sum(layout.shard_numel(b.index) for b in layout.bundles if b.trainable)
        weights = sum(layout.shard_numel(b.index) for b in layout.bundles) * layout.itemsize
        gradients = {"gradients": trained * layout.itemsize} if self.context.accumulate == 1 else {}
        accumulators = {"accumulators": 4 * trained} if self.context.accumulate > 1 else {}
        return {"weights": weights, **gradients, "master": 4 * trained, "moments": 8 * trained, **accumulators}


def _unit_by_unit(layout: Layout, demand: Demand) -> tuple[PlannedOperation, ...]:
    """Fetches and drops of stage 3. A bundle whose gradient has left goes by itself."""
    entered = [moment for moment, bundles in enumerate(demand.demanded) if bundles]
    there: set[int] = set()
    wanted: dict[int, None] = {}
    found: list[PlannedOperation] = []

    def add(moment: int, kind: OpKind, bundle: int) -> None:
        found.append(PlannedOperation(moment, len(found), Operation(kind, bundle)))

    for moment in range(len(demand)):
        if entered and moment == entered[0]:
            wanted = _window(layout, demand, entered)
            for bundle in wanted:
                if bundle not in there:
                    add(moment, OpKind.FETCH, bundle)
            there.update(wanted)
            entered = entered[1:]
            wanted = wanted if entered else {}
        there.difference_update(demand.stale[moment])
        for bundle in sorted(there - wanted.keys() - set(demand.held[moment])):
            add(moment, OpKind.DROP, bundle)
            there.discard(bundle)
    return tuple(found)


def _window(layout: Layout, demand: Demand, entered: Sequence[int]) -> dict[int, None]:
    """What the unit that enters first reads, and those after it, in order: one at least, and PREFETCH elements at most."""
    found = dict.fromkeys(demand.demanded[entered[0]])
    ahead = 0
    for moment in entered[1:]:
        more = [bundle for bundle in demand.demanded[moment] if bundle not in found]
        ahead, before = ahead + sum(layout.bundles[bundle].numel for bundle in more), ahead
        if before and ahead > PREFETCH:
            break
        found |= dict.fromkeys(more)
    return found


def _on_the_device(operations: Iterable[ScheduledOperation]) -> Iterator[ScheduledOperation]:
    """A schedule of stage 3 with offload, without it: gathers out of the own parts on the device, and updates of them there."""
    fetched: ScheduledOperation | None = None
    for operation in operations:
        kind, bundle, before, fetched = operation.kind, operation.bundle, fetched, None
        if before is not None and kind is Work.GATHER:
            yield operation._replace(reads=before.reads, device_delta=before.device_delta)
            continue
        if before is not None:  # of one rank
            yield before._replace(kind=Work.ALLOCATE, lane=None, bytes=0, reads=(), writes=())
        if kind is Work.FETCH:
            fetched = operation
        elif operation.lane is LaneKind.CPU and kind not in (Work.NORM, Work.RESTORE):
            reads = (grad(bundle),) if kind is Work.ACCUMULATE else operation.reads
            yield operation._replace(lane=LaneKind.COMPUTE, reads=reads)
        elif kind not in (Work.OFFLOAD, Work.RESTORE):
            yield operation
    assert fetched is None, "a step does not end with a fetch"
