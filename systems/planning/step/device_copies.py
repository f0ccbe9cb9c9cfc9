"""Parameters on the device: which bundles have a copy there, how it comes and how it goes. Their gradients: gradients.py."""

from __future__ import annotations

from collections.abc import Iterable

from systems.planning.plan import LaneKind, UpdateRule
from systems.planning.step.demand import Demand
from systems.planning.step.issue_order import IssueOrder
from systems.planning.step.operations import Work, param, slot, state
from systems.planning.step.residence import Residence


class DeviceCopies:
    """Copies of bundles on the device, as the plan and the mechanism make them come and go.

    resident: bundles that are there. outdated: bundles flushed in the last micro-step.
    """

    def __init__(self, resident: Iterable[int], residence: Residence, demand: Demand, order: IssueOrder) -> None:
        self.layout, self.context, self.residence, self.demand = residence.layout, residence.context, residence, demand
        self.resident = set(resident) | residence.on_device
        self.outdated: set[int] = set()
        self._order = order

    def fetch(self, bundle: int, *, planned: bool) -> None:
        segments = self.layout.bundles[bundle].segments
        reads = tuple(slot(s) for s in segments)
        if bundle in self.outdated and self._order.moment < len(self.demand) - 1:
            used_again = self.demand.next_use.after(bundle, self._order.moment - 1) < len(self.demand)
            if used_again and self.residence.update_rule is UpdateRule.AFTER_NORM:
                reads = tuple(state(s) for s in segments)
            else:
                self._order.flaw(bundle, "is fetched between its flush and STEP_END, when its parameters are outdated")
                self._order.late.append((len(self._order.operations), bundle))
        self.resident.add(bundle)
        size = self.layout.bundle_bytes(bundle)
        payload, writes = self.shard_bytes(bundle), (param(bundle),)
        self._order.add(
            Work.FETCH,
            LaneKind.H2D,
            bundle,
            bytes=payload,
            device_delta=size,
            reads=reads,
            writes=writes,
            planned=planned,
        )
        self.gather(bundle)

    def gather(self, bundle: int) -> None:
        if self.context.ranks > 1:
            size = self.layout.bundle_bytes(bundle)
            self._order.add(Work.GATHER, LaneKind.GATHER, bundle, bytes=size, reads=(param(bundle),), writes=(param(bundle),))

    def write_back(self, bundle: int) -> None:
        slots = tuple(slot(s) for s in self.layout.bundles[bundle].segments)
        size = self.shard_bytes(bundle)
        self._order.add(Work.WRITE_BACK, LaneKind.D2H, bundle, bytes=size, reads=(param(bundle),), writes=slots)
        self.drop(bundle)

    def drop(self, bundle: int) -> None:
        self.resident.discard(bundle)
        self._order.add(Work.DROP, None, bundle, device_delta=-self.layout.bundle_bytes(bundle))

    def shard_bytes(self, bundle: int) -> int:
        return self.layout.shard_numel(bundle) * self.layout.itemsize
