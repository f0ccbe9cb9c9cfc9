"""Systems of which each rank has all states, gradients summed over ranks: `resident`, and DistributedDataParallel.

Note [Whole gradients over ranks]
    A whole gradient's sum over ranks is a reduction and a gather of it. `resident` does so when a micro-step's backward is
    over, parameter by parameter, into memory beside the gradients, while compute waits (ranks/sums.py). DDP does so during the
    last micro-step's backward, as soon as a unit's gradients are complete, where they lie; its buckets of 25 MiB are taken
    to be units.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace

from pydantic import BaseModel

from systems.errors import UnsupportedError
from systems.planning.layout import Layout, round_up
from systems.planning.plan import LaneKind, Plan, Tier
from systems.planning.step.operations import ScheduledOperation, Work
from systems.planning.step.schedule import Schedule
from systems.planning.strategy import PlanningContext
from systems.planning.trace import Phase, Trace
from systems.prediction.baseline_policy import BaselinePolicy, one_step_after_the_other, reissued


class ReplicaPolicy(BaselinePolicy):
    """Everything on the device of every rank, for good."""

    def __init__(self, options: BaseModel, context: PlanningContext) -> None:
        super().__init__(options, replace(context, ranks=1))
        self.ranks = context.ranks

    def decide(self, layout: Layout, trace: Trace) -> Plan:
        everything = frozenset(bundle.index for bundle in layout.bundles)
        return Plan(trace.signature, (), (Tier.DEVICE,) * len(layout.segments), everything, self.update_rule)

    def edited(self, schedule: Schedule, trace: Trace) -> Schedule:
        if self.ranks == 1:
            return schedule
        return reissued(schedule, one_step_after_the_other(self.summed(schedule, trace)))

    @abstractmethod
    def summed(self, schedule: Schedule, trace: Trace) -> Iterator[ScheduledOperation]:
        """The operations, with those that sum gradients over ranks."""

    def over_ranks(self, after: ScheduledOperation, nbytes: int) -> Iterator[ScheduledOperation]:
        """The sum of what `after` reads, issued at its moment."""
        for kind, lane in ((Work.REDUCE, LaneKind.REDUCE), (Work.GATHER, LaneKind.GATHER)):
            yield after._replace(kind=kind, lane=lane, bytes=nbytes, seconds=0.0, device_delta=0, writes=after.reads)


class ResidentPolicy(ReplicaPolicy):
    """See Note [Whole gradients over ranks]."""

    name = "resident"

    def summed(self, schedule: Schedule, trace: Trace) -> Iterator[ScheduledOperation]:
        """What follows a unit's gradients during backward comes when that is over: behind their sums, issued where compute goes
        on, or where the norm is waited for."""
        several, last = self.context.accumulate > 1, len(trace) - 1
        over = [n for n, moment in enumerate(trace.moments) if moment.phase is Phase.BACKWARD_END] if several else [last]
        held: list[ScheduledOperation] = []
        for operation in schedule.bare:
            if held and operation.kind in (Work.COMPUTE, Work.NORM) and operation.moment in over:
                yield from self._summed_together(held, operation.moment, schedule.residence.layout)
                held = []
            follows = operation.kind in (Work.ACCUMULATE, Work.SQUARES, Work.FREE)
            if follows and operation.moment < last:
                held.append(operation)
            else:
                yield operation
        assert not held, "a step with gradients has a norm"

    def _summed_together(self, held: list[ScheduledOperation], moment: int, layout: Layout) -> Iterator[ScheduledOperation]:
        """held: of one micro-step. Each waits for all that backward made, as one queue does that compute is in too."""
        kind = Work.ACCUMULATE if self.context.accumulate > 1 else Work.SQUARES
        issued = [operation._replace(moment=moment) for operation in held]
        firsts = [operation for operation in issued if operation.kind is kind]
        all_of_them = tuple(dict.fromkeys(name for first in firsts for name in first.reads))
        sums: list[ScheduledOperation] = []
        for first in firsts:
            size = layout.bundle_bytes(first.bundle)
            sums.append(first._replace(kind=Work.ALLOCATE, lane=None, device_delta=size, reads=(), writes=()))
            for segment in layout.bundles[first.bundle].segments:
                for placement in layout.segments[segment].placements:
                    sums += self.over_ranks(first, round_up(placement.numel, self.ranks) * layout.itemsize)
        begin = next((n for n, operation in enumerate(sums) if operation.lane is not None), None)
        if begin is not None:
            sums[begin] = sums[begin]._replace(reads=all_of_them)
        yield from sums
        yield issued[0]._replace(reads=(*issued[0].reads, *all_of_them))
        yield from issued[1:]
        for first in firsts:
            size = layout.bundle_bytes(first.bundle)
            yield first._replace(kind=Work.FREE, lane=None, device_delta=-size, reads=(), writes=())


class DdpPolicy(ReplicaPolicy):
    """See Note [Whole gradients over ranks]. With 16-bit weights beside masters, as `weights=masters` has them."""

    name = "torch-ddp"

    def __init__(self, options: BaseModel, context: PlanningContext) -> None:
        super().__init__(options, context)
        weights = getattr(options, "weights", "masters")
        if weights != "masters":
            raise UnsupportedError(
                f"torch-ddp with `options=dict(weights={weights!r})` has no forecast: use `options=dict(weights='masters')`"
            )

    def summed(self, schedule: Schedule, trace: Trace) -> Iterator[ScheduledOperation]:
        """Sums of squares are of what all ranks have summed, in the last micro-step."""
        layout, itemsize = schedule.residence.layout, self.context.accumulator_itemsize or schedule.residence.layout.itemsize
        for operation in schedule.bare:
            if operation.kind is Work.SQUARES and operation.lane is LaneKind.COMPUTE:
                numel = layout.bundle_bytes(operation.bundle) // layout.itemsize
                yield from self.over_ranks(operation, numel * itemsize)
            yield operation
