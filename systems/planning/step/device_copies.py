"""Parameters on the device: which bundles have a copy there, how it comes and how it goes. Their gradients: gradients.py."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from systems.planning.plan import LaneKind, OpKind, Pages, Plan, UpdateRule, pages_bytes
from systems.planning.step.demand import Demand
from systems.planning.step.issue_order import IssueOrder
from systems.planning.step.operations import Work, pages, param, shard, slot, state
from systems.planning.step.residence import Residence


class DeviceCopies:
    """Copies of bundles on the device, as the plan and the mechanism make them come and go.

    resident: bundles that are there. shards: of several ranks, bundles of which this rank's part is there beside the copy, or
    without one. moved: of one rank, what a MOVE has fetched or a
    SHRINK has left, for which a FETCH does nothing. pages: by bundle, those that are there without the rest, see Note [Pages].
    outdated: bundles flushed in the last micro-step.
    """

    def __init__(self, plan: Plan, residence: Residence, demand: Demand, order: IssueOrder) -> None:
        self.layout, self.context, self.residence, self.demand = residence.layout, residence.context, residence, demand
        self.resident = set(plan.resident_at_start) | residence.whole
        self.shards = set(plan.shards_at_start) | residence.sharded
        self.outdated: set[int] = set()
        self.pages: dict[int, list[Pages]] = {}
        for there in sorted(plan.pages_at_start):
            self.pages.setdefault(self.layout.bundle_of_segment[there.first], []).append(there)
        self._order = order
        moves = {p.operation.bundle for p in plan.operations if p.operation.kind is OpKind.MOVE}
        self.moved = moves & plan.resident_at_start if self.context.ranks == 1 else set[int]()

    def fetch(self, bundle: int, *, planned: bool) -> None:
        """Nothing if a MOVE brought all of it."""
        if bundle in self.moved and bundle in self.resident:
            return
        if bundle in self.shards:
            if bundle in self.residence.sharded:
                self._check_current(bundle)
            self.resident.add(bundle)
            self.gather(bundle, fetched=True, planned=planned)
            return
        self.resident.add(bundle)
        if bundle in self.pages:
            self._merge(bundle, planned=planned)
            return
        self._from_host(Work.FETCH, bundle, self.layout.bundle_bytes(bundle), param(bundle), planned=planned)
        self.gather(bundle)

    def _merge(self, bundle: int, *, planned: bool) -> None:
        """Pages are there: what is missing comes from the host."""
        size, there = self.layout.bundle_bytes(bundle), self.pages[bundle]
        had = {s for run in there for s in range(*run)}
        missing = tuple(s for s in self.layout.bundles[bundle].segments if s not in had)
        merged = sum(pages_bytes(self.layout, run) for run in there)
        if missing:
            reads = tuple((slot if self._check_current(bundle) else state)(s) for s in missing)
            payload, writes = size - merged, (param(bundle),)
            what = Work.FETCH, LaneKind.H2D, bundle
            self._order.add(*what, bytes=payload, device_delta=size, reads=reads, writes=writes, planned=planned)
        self._order.add(
            *(Work.MERGE, LaneKind.COMPUTE, bundle),
            bytes=merged,
            device_delta=0 if missing else size,
            reads=tuple(pages(run.first) for run in there),
            writes=(param(bundle),),
            planned=planned,
        )
        self._drop_pages(bundle)

    def move_pages(self, bundle: int, run: Pages) -> None:
        size = pages_bytes(self.layout, run)
        self.pages.setdefault(bundle, []).append(run)
        reads = tuple((slot if self._check_current(bundle) else state)(s) for s in range(*run))
        writes = (pages(run.first),)
        self._order.add(Work.MOVE, LaneKind.H2D, bundle, bytes=size, device_delta=size, reads=reads, writes=writes)

    def leave_pages(self, bundle: int, left: tuple[Pages, ...]) -> None:
        """They stay where they are, of a bundle that is there."""
        self.resident.discard(bundle)
        self.pages[bundle] = list(left)
        size = sum(pages_bytes(self.layout, run) for run in left)
        self._order.add(Work.DROP, None, bundle, device_delta=size - self.layout.bundle_bytes(bundle))

    def _drop_pages(self, bundle: int) -> None:
        for run in self.pages.pop(bundle, ()):
            size = pages_bytes(self.layout, run)
            self._order.add(Work.DROP, None, bundle, device_delta=-size, reads=(pages(run.first),))

    def move(self, bundle: int) -> None:
        if self.context.ranks == 1:
            self.fetch(bundle, planned=True)
            self.moved.add(bundle)
        else:
            self.shards.add(bundle)
            self._from_host(Work.MOVE, bundle, self.layout.shard_bytes(bundle), shard(bundle), planned=True)

    def shrink(self, bundle: int) -> None:
        """All of it goes if its gradient has left for the host: the shard would be of no use."""
        if self.context.ranks == 1:
            self.moved.add(bundle)
            return
        if bundle in self.outdated and bundle not in self.residence.sharded:
            self.drop(bundle)
            return
        if bundle not in self.shards:
            self.shards.add(bundle)
            size = self.layout.shard_bytes(bundle)
            reads, writes = (param(bundle),), (shard(bundle),)
            self._order.add(Work.SHRINK, LaneKind.COMPUTE, bundle, device_delta=size, reads=reads, writes=writes)
        self._drop_copy(bundle)

    def _from_host(self, kind: Work, bundle: int, size: int, target: str, *, planned: bool) -> None:
        """size: bytes that it takes on the device."""
        segments = self.layout.bundles[bundle].segments
        reads = tuple((slot if self._check_current(bundle) else state)(s) for s in segments)
        payload, writes = self.layout.shard_bytes(bundle), (target,)
        self._order.add(
            kind, LaneKind.H2D, bundle, bytes=payload, device_delta=size, reads=reads, writes=writes, planned=planned
        )

    def _check_current(self, bundle: int) -> bool:
        """False if it was flushed already, and is read by another unit of the step all the same. A flaw if none does, or if
        its update does not wait for the norm.
        """
        if bundle not in self.outdated or self._order.moment == len(self.demand) - 1:
            return True
        used_again = self.demand.next_use.after(bundle, self._order.moment - 1) < len(self.demand)
        if used_again and self.residence.update_rule is UpdateRule.AFTER_NORM:
            return False
        self._order.flaw(bundle, "is fetched between its flush and STEP_END, when its parameters are outdated")
        self._order.late.append((len(self._order.operations), bundle))
        return True

    def gather(self, bundle: int, *, fetched: bool = False, planned: bool = True) -> None:
        """fetched: into a new copy, from the shard that is there; else within the copy."""
        if self.context.ranks > 1:
            size, reads = self.layout.bundle_bytes(bundle), (shard(bundle) if fetched else param(bundle),)
            self._order.add(
                Work.GATHER,
                LaneKind.GATHER,
                bundle,
                bytes=size,
                device_delta=size if fetched else 0,
                reads=reads,
                writes=(param(bundle),),
                planned=planned,
            )

    def write_back(self, bundle: int) -> None:
        slots = tuple(slot(s) for s in self.layout.bundles[bundle].segments)
        size = self.layout.shard_bytes(bundle)
        self._order.add(Work.WRITE_BACK, LaneKind.D2H, bundle, bytes=size, reads=(param(bundle),), writes=slots)
        self.drop(bundle)

    def drop(self, bundle: int) -> None:
        """All of it that is no home."""
        self._drop_copy(bundle)
        self._drop_pages(bundle)
        if bundle in self.shards and bundle not in self.residence.sharded:
            self.shards.discard(bundle)
            size = self.layout.shard_bytes(bundle)
            self._order.add(Work.DROP, None, bundle, device_delta=-size, reads=(shard(bundle),))

    def _drop_copy(self, bundle: int) -> None:
        if bundle in self.resident:
            self.resident.discard(bundle)
            self.moved.discard(bundle)
            self._order.add(Work.DROP, None, bundle, device_delta=-self.layout.bundle_bytes(bundle))

    def drop_stale(self, bundle: int) -> None:
        """Its parameters are about to be updated: what is there of it, but for what the update is made on, goes."""
        if bundle not in self.residence.whole:
            self.drop(bundle)


def overlap(some: Iterable[Pages], others: Iterable[Pages]) -> bool:
    """Any page is among both."""
    return any(one.first < other.stop and other.first < one.stop for one, other in product(some, others))
