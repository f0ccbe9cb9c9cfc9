"""Gradients from the first backward that makes them to the update that they end in.

When they begin, when they are complete and when their memory is free: Note [Lifetimes on the device] in demand.py.
"""

from __future__ import annotations

from systems.planning.disk_layout import buffer_of, parts_of
from systems.planning.plan import LaneKind, UpdateRule
from systems.planning.step.demand import Demand, in_order_of_use
from systems.planning.step.device_copies import DeviceCopies
from systems.planning.step.issue_order import IssueOrder
from systems.planning.step.operations import Work, grad, grad_shard, param, shard, slot, state
from systems.planning.step.residence import Residence


class ScheduledGradients:
    """The gradients of one step, and the updates made of them.

    open_now: bundles whose gradient takes memory, a range's or autograd's buffers'. staying: those whose gradient is complete,
    and stays in its parameters' place.
    """

    def __init__(self, residence: Residence, demand: Demand, copies: DeviceCopies, order: IssueOrder) -> None:
        self.layout, self.context, self.residence, self.demand = residence.layout, residence.context, residence, demand
        self._copies, self._order = copies, order
        self.open_now: set[int] = set()
        self.staying: dict[int, None] = {}
        self._flushed: dict[int, None] = {}  # bundles whose update is due at STEP_END, in order of flushing
        self._kept: set[int] = set()  # of which the shard of the sum over ranks waits for the norm
        self._summed: set[int] = set()  # of accumulators whose sums of squares are left in this step
        self._buffers = buffer_of(self.layout)
        self._opening: dict[int, list[int]] = {}
        for bundle, spans in demand.gradient_spans.items():
            for span in spans:
                self._opening.setdefault(span.begin, []).append(bundle)

    def open(self) -> None:
        """Those whose first backward begins at this moment."""
        for bundle in self._opening.get(self._order.moment, ()):
            if bundle not in self.open_now:
                self.open_now.add(bundle)
                if self._ranged(bundle):
                    self._order.add(Work.ALLOCATE, None, bundle, device_delta=self.layout.bundle_bytes(bundle))

    def resource(self, bundle: int) -> str:
        """Where it is on the device: in place, its parameters' copy is it."""
        return param(bundle) if self.residence.reuses(bundle) else grad(bundle)

    def _ranged(self, bundle: int) -> bool:
        """True if the gradient takes pool bytes of its own."""
        return not self.residence.adopted(bundle) and not self.residence.reuses(bundle)

    def _free(self, bundle: int) -> None:
        if bundle in self.open_now:
            self.open_now.remove(bundle)
            if self._ranged(bundle):
                self._order.add(Work.FREE, None, bundle, device_delta=-self.layout.bundle_bytes(bundle))

    def flush(self, bundle: int, *, last_micro_step: bool) -> None:
        """The gradient of one micro-step is complete: it leaves for where its optimizer is."""
        gradient = (self.resource(bundle),)
        on_device, several = bundle in self.residence.on_device, self.context.accumulate > 1
        stays = bundle in self.residence.staying
        segments = self.layout.bundles[bundle].segments
        states, slots = tuple(state(s) for s in segments), tuple(slot(s) for s in segments)
        reduce_lane, total = LaneKind.COMPUTE, self.resource(bundle)
        if self.context.ranks > 1:
            reduce_lane, total = LaneKind.REDUCE, self._reduce(bundle)
        if not several:
            self._order.add(Work.SQUARES, reduce_lane, bundle, reads=(total,), writes=(f"norm:{bundle}",))
        if self.context.ranks > 1 and not self.layout.bundles[bundle].scattered:  # every rank is to have all of the sum
            size = self.layout.bundle_bytes(bundle)
            self._order.add(Work.GATHER, LaneKind.GATHER, bundle, bytes=size, reads=(total,), writes=(total,))
        if stays:
            self.staying[bundle] = None
        elif not on_device:
            self._offload(bundle)
            if several:
                self._order.add(Work.ACCUMULATE, LaneKind.CPU, bundle, reads=slots, writes=states)
            if several and not last_micro_step:
                self._order.add(Work.RESTORE, LaneKind.CPU, bundle, reads=states, writes=slots)
        elif several:
            self._order.add(Work.ACCUMULATE, LaneKind.COMPUTE, bundle, reads=gradient, writes=states)
        if several and last_micro_step:
            self._squares_of_accumulated(bundle)
        update_now = last_micro_step and self.residence.update_rule is UpdateRule.WHEN_REDUCED
        self._flushed[bundle] = None
        if last_micro_step:
            self._copies.outdated.add(bundle)
        if update_now:
            self._update(bundle)
            del self._flushed[bundle]
        elif last_micro_step and bundle in self.residence.ahead:
            self._order.add(Work.UPDATE_AHEAD, LaneKind.CPU, bundle, writes=(*states, *slots))
        if self.residence.gradient_freed_at_flush(bundle):
            self._free(bundle)
        if self.residence.reuses(bundle) and bundle in self._copies.resident and not stays:
            self._copies.drop(bundle)  # the block was the gradient

    def _offload(self, bundle: int) -> None:
        size, slots = self.layout.shard_bytes(bundle), tuple(slot(s) for s in self.layout.bundles[bundle].segments)
        self._order.add(Work.OFFLOAD, LaneKind.D2H, bundle, bytes=size, reads=(self.resource(bundle),), writes=slots)

    def leave(self, bundle: int) -> None:
        """Its gradient has stayed until now."""
        del self.staying[bundle]
        self._offload(bundle)
        self._copies.drop(bundle)

    def _reduce(self, bundle: int) -> str:
        """Over all ranks, in place, or into a shard. Where this rank's part of the sum is, then."""
        size, gradient, lane = self.layout.bundle_bytes(bundle), self.resource(bundle), LaneKind.REDUCE
        if not self.residence.keeps_shard(bundle):
            self._order.add(Work.REDUCE, lane, bundle, bytes=size, reads=(gradient,), writes=(gradient,))
            return gradient
        self._kept.add(bundle)
        kept, written = self.layout.shard_bytes(bundle), (gradient, grad_shard(bundle))
        self._order.add(Work.REDUCE, lane, bundle, bytes=size, device_delta=kept, reads=(gradient,), writes=written)
        return grad_shard(bundle)

    def update_all(self) -> None:
        """At STEP_END: see Note [What happens at a moment] in schedule.py."""
        due = in_order_of_use(self._flushed, self.demand)
        for bundle in in_order_of_use(self.staying, self.demand):
            self.leave(bundle)
        if self.context.accumulate > 1:
            for bundle in sorted(self._flushed.keys() - self._summed):
                self._squares_of_accumulated(bundle)
        self._summed.clear()
        if due and self.residence.update_rule is UpdateRule.AFTER_NORM:
            self._order.add(Work.NORM, LaneKind.CPU, reads=tuple(f"norm:{bundle}" for bundle in due), writes=("norm",))
        on_device = [bundle for bundle in due if bundle in self.residence.on_device]
        for bundle in on_device:
            self._update(bundle)
        for bundle in sorted(self.open_now):
            self._free(bundle)
        for bundle in sorted(self._kept):
            size = self.layout.shard_bytes(bundle)
            self._order.add(Work.FREE, None, bundle, device_delta=-size, reads=(grad_shard(bundle),))
        self._kept.clear()
        for bundle in due:
            if bundle in self.residence.ahead:
                self._clear(bundle)
            elif bundle not in self.residence.on_device:
                self._update(bundle)
        self._flushed.clear()
        for bundle in in_order_of_use(self.residence.whole & set(self.demand.gradient_spans), self.demand):
            if self.layout.bundles[bundle].scattered:
                self._copies.gather(bundle)  # each rank has updated its shard

    def _squares_of_accumulated(self, bundle: int) -> None:
        self._summed.add(bundle)
        lane = LaneKind.COMPUTE if bundle in self.residence.on_device else LaneKind.CPU
        states = tuple(state(s) for s in self.layout.bundles[bundle].segments)
        self._order.add(Work.SQUARES, lane, bundle, reads=states, writes=(f"norm:{bundle}",))

    def _clear(self, bundle: int) -> None:
        """What an update behind the norm does beside all else, of a bundle that was updated ahead of it."""
        if self.context.accumulate > 1:
            states = tuple(state(s) for s in self.layout.bundles[bundle].segments)
            self._order.add(Work.CLEAR, LaneKind.CPU, bundle, writes=states)

    def _update(self, bundle: int) -> None:
        norm = ("norm",) if self.residence.update_rule is UpdateRule.AFTER_NORM else ()
        segments = self.layout.bundles[bundle].segments
        states = tuple(state(s) for s in segments)
        if bundle in self.residence.on_device:
            gradient = grad_shard(bundle) if bundle in self._kept else self.resource(bundle)
            reads = norm if self.context.accumulate > 1 else (gradient, *norm)
            parameters = shard(bundle) if bundle in self.residence.sharded else param(bundle)
            self._order.add(Work.UPDATE, LaneKind.COMPUTE, bundle, reads=reads, writes=(*states, parameters))
        elif bundle in self.layout.on_disk:
            for s in segments:
                self._update_on_disk(bundle, s, norm)
        else:
            writes = (*states, *(slot(s) for s in segments))
            self._order.add(Work.UPDATE, LaneKind.CPU, bundle, reads=norm, writes=writes)

    def _update_on_disk(self, bundle: int, segment: int, norm: tuple[str, ...]) -> None:
        buffer, home = (f"host:buffer:{self._buffers[segment]}",), (state(segment),)
        size = parts_of(self.layout) * 4 * self.layout.segments[segment].shard_numel
        self._order.add(Work.READ_STATE, LaneKind.DISK_READ, bundle, segment=segment, bytes=size, reads=home, writes=buffer)
        writes = (*buffer, slot(segment), *(home if self.context.accumulate > 1 else ()))
        self._order.add(Work.UPDATE, LaneKind.CPU, bundle, segment=segment, reads=norm, writes=writes)
        self._order.add(Work.WRITE_STATE, LaneKind.DISK_WRITE, bundle, segment=segment, bytes=size, reads=buffer, writes=home)
