"""What a scheduled operation costs on a hardware profile: its queue, its fixed time, its bytes, what it shares.

Note [One rank stands for all]
    Ranks do the same at the same time, so one is simulated with its part of what a node's devices share: of the host's DRAM,
    of CPU Adam, of the disk, and of the host link where all devices together reach less than each alone.

Note [Collectives]
    A bundle of N bytes over R ranks, which are those of the group that holds it, moves N (R - 1) / R bytes in and out of every
    device. One at a time, for a rank has one queue for all of them. Where they were measured by size they take what was
    measured, reductions with the staging and the additions of the ordered sum (ranks/link.py) in it; else the rate is that of
    the devices' link, or of the host link without one, and the fixed time a copy's for each of log2(R) hops. Over several nodes
    they are no faster than the node's network. Without a link they share the host link with copies, in both directions at once,
    and pass through the host's DRAM twice.

Note [All-to-alls]
    Of E ranks that share experts, each sends every other one a part of the tokens' slots, and waits for what comes before it
    goes on: so it is time of compute, in the intervals that have `swaps`. Neighbours share experts. Of the E - 1 parts those
    for the own node go at a gather's rate, the others beside them at a device's share of the node's network, through which all
    of its devices send at once (a gather's bytes pass it once a node); the slower counts, of the rank that has the fewest of
    its fellows near. The fixed time is a gather's. Without a link of the devices they share the host's with copies.
    They have a stream and communicators of their own (ranks/expert_exchange.py), so a collective may run beside them: both then
    share what a port passes one way, by the fastest of all that was measured of it, and a node's network, in proportion.

Note [Exchanges]
    What ranks tell each other once a step (substrate/agreement.py) is the host's: it hears which gradients came when it has
    issued the step, and then the norm's parts, for which it has waited for the device. Where no update waits for the norm,
    both are heard when the step is issued.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from systems.planning.clock.clocks import Claim, SharedResource, TimedJob
from systems.planning.hardware import BySize, Contention, Flow, HardwareProfile
from systems.planning.layout import Layout, space_of
from systems.planning.plan import COLLECTIVE, LaneKind, queue_of
from systems.planning.step.operations import ScheduledOperation, Work, before_updates
from systems.planning.strategy import PlanningContext

HOST_DRAM, HOST_LINK, DISK = "host-dram", "host-link", "disk"
DEVICE_LINK, NETWORK = "device-link", "network"
TO_DEVICE, FROM_DEVICE = "to-device", "from-device"  # the host link's two directions
THROUGH_HOST = Claim(HOST_DRAM, units=2.0), Claim(HOST_LINK, units=2.0), Claim(TO_DEVICE), Claim(FROM_DEVICE)
DISK_WAYS = {LaneKind.DISK_READ: "disk-read", LaneKind.DISK_WRITE: "disk-write"}
HOST_QUEUE = "host"
UPDATES = (Work.UPDATE, Work.UPDATE_AHEAD, Work.CLEAR)  # in the order of the bundles' next uses


@dataclass(frozen=True)
class LinkRates:
    """Of what ranks do together: see Note [Collectives]. host: bytes a second of the host link, both ways at once.

    ranks: that come together; among: that there are, over as many nodes as they fill.
    """

    profile: HardwareProfile
    ranks: int
    host: float
    among: int

    def rate(self, lane: LaneKind) -> float:
        """Bytes a second that pass a port."""
        rate, network = self._within(lane), self._network
        return rate if network is None else min(rate, network)

    def _within(self, lane: LaneKind) -> float:
        """The same on one node."""
        profile, measured = self.profile, self._measured(lane)
        if measured is not None:
            return measured.best
        return self.host if profile.device_link_bytes_per_s is None else profile.device_link_bytes_per_s.value

    @property
    def _network(self) -> float | None:
        """Of a node; None where there is one."""
        network = self.profile.network_bytes_per_s
        return network.value if network is not None and self.among > self.profile.devices_per_node.value else None

    @property
    def swap_rate(self) -> float:
        """Bytes a second that pass a port in an all-to-all: see Note [All-to-alls]."""
        within, network, others = self._within(LaneKind.GATHER), self._network, self.ranks - 1
        if network is None or not others:
            return within
        near, far = self._parts
        return others / max(near / within, far / network)

    @property
    def _parts(self) -> tuple[int, int]:
        """Of those that a rank sends: to its own node, and to others, of all devices of the node."""
        devices = self.profile.devices_per_node.value
        near = math.gcd(self.ranks, devices) - 1
        return near, (self.ranks - 1 - near) * devices

    def swap_s(self, size: float) -> float:
        """Of an all-to-all in which so many bytes pass a port."""
        return self.overhead_s(LaneKind.GATHER, size) + size / self.swap_rate

    def overhead_s(self, lane: LaneKind, size: float) -> float:
        """Seconds of a collective of so many bytes a port beside them at that rate."""
        measured = self._measured(lane)
        if self.ranks == 1:
            return 0.0
        if measured is not None:
            return measured.overhead_s(size)
        return math.ceil(math.log2(self.ranks)) * self.profile.copy_overhead_s(size / max(1, self.ranks - 1))

    def _measured(self, lane: LaneKind) -> BySize | None:
        return self.profile.gathers_by_size if lane is LaneKind.GATHER else self.profile.reductions_by_size

    @property
    def exchange_s(self) -> float:
        """See Note [Exchanges]."""
        told = self.profile.exchange_s
        return told.value if told is not None and self.ranks > 1 else 0.0

    @property
    def through_host(self) -> bool:
        """Collectives share the host link with copies."""
        return self.ranks > 1 and self.profile.device_link_bytes_per_s is None

    @property
    def claims(self) -> tuple[Claim, ...]:
        """Of each byte of a collective that passes a port."""
        if self.through_host or self.ranks == 1:
            return THROUGH_HOST if self.through_host else ()
        return Claim(DEVICE_LINK), *((Claim(NETWORK),) if self._network is not None else ())

    @property
    def swap_claims(self) -> tuple[Claim, ...]:
        """The same of an all-to-all."""
        if self.through_host or self._network is None:
            return self.claims
        near, far = self._parts
        return Claim(DEVICE_LINK, near / (self.ranks - 1)), Claim(NETWORK, far / (self.ranks - 1))

    def resources(self) -> dict[str, SharedResource]:
        """That claims are of: a port one way, and a node's network."""
        port, network = self.profile.device_link_bytes_per_s, self._network
        measured = [self._within(lane) for lane in COLLECTIVE]
        found = {} if port is None else {DEVICE_LINK: SharedResource(max(port.value, *measured))}
        return found if network is None else found | {NETWORK: SharedResource(network)}


@dataclass(frozen=True)
class Rates:
    """One rank's part of a profile, see Note [One rank stands for all]. Bytes a second."""

    profile: HardwareProfile
    ranks: int

    @property
    def on_node(self) -> int:
        """Ranks that share a node."""
        return min(self.ranks, self.profile.devices_per_node.value)

    @property
    def h2d(self) -> float:
        return self._one_way(self.profile.h2d_bytes_per_s.value)

    @property
    def d2h(self) -> float:
        return self._one_way(self.profile.d2h_bytes_per_s.value)

    def _one_way(self, alone: float) -> float:
        return min(alone, self.profile.node_copy_bytes_per_s.value / self.on_node, self.both_ways)

    @property
    def both_ways(self) -> float:
        return min(self.profile.both_ways_bytes_per_s.value, self.profile.node_both_ways_bytes_per_s.value / self.on_node)

    @property
    def cpu_adam(self) -> float:
        return min(self.profile.cpu_adam_bytes_per_s.value / self.on_node, self.host_dram)

    @property
    def host_dram(self) -> float:
        most = self._contention.most if self._contention is not None else 0.0
        return max(self.profile.host_dram_bytes_per_s.value, most) / self.on_node

    @property
    def _contention(self) -> Contention | None:
        """What was measured with all devices of a node says nothing of fewer."""
        return self.profile.contention if self.on_node == self.profile.devices_per_node.value else None

    @property
    def update_s(self) -> float:
        """Of each operation of the CPU lane, whatever its size."""
        return self.profile.cpu_update_s.value if self.profile.cpu_update_s is not None else 0.0

    @property
    def device_dram(self) -> float:
        return self.profile.device_dram_bytes_per_s.value

    @property
    def link(self) -> LinkRates:
        return self.link_of(self.ranks)

    def link_of(self, ranks: int) -> LinkRates:
        """Of a group of so many."""
        return LinkRates(self.profile, ranks, min(self.h2d, self.d2h, self.both_ways / 2), self.ranks)

    def disk(self, lane: LaneKind) -> float:
        profile = self.profile
        rate = profile.disk_read_bytes_per_s if lane is LaneKind.DISK_READ else profile.disk_write_bytes_per_s
        if rate is None:
            raise ValueError(f"the plan uses a disk, and the hardware profile ({profile.description}) has none")
        return rate.value / self.on_node

    @property
    def shared_disk(self) -> SharedResource:
        """In seconds of its own a second, of which either way alone takes one, and both at once as many as the profile's figure
        leaves each of its rate; without a figure each has all of it.
        """
        profile = self.profile
        each = [way.value for way in (profile.disk_read_bytes_per_s, profile.disk_write_bytes_per_s) if way is not None]
        together = profile.disk_both_ways_bytes_per_s
        part = min(1.0, together.value / sum(each)) if together is not None and each else 1.0
        kept = dict.fromkeys(DISK_WAYS.values(), part)
        return SharedResource(max(1.0, 2 * part), beside={frozenset(kept): kept})

    def resources(self) -> dict[str, SharedResource]:
        share, measured = self.profile.cpu_adam_dram_share, self._contention
        beside = measured.kept if measured is not None else {}
        return {
            HOST_DRAM: SharedResource(self.host_dram, share.value if share is not None else 0.0, beside),
            HOST_LINK: SharedResource(self.both_ways),
            TO_DEVICE: SharedResource(self.h2d),
            FROM_DEVICE: SharedResource(self.d2h),
            DISK: self.shared_disk,
            **self.link.resources(),
        }


def default_queues(*, one_copy_queue: bool = False) -> dict[LaneKind, str]:
    """Those that a run has. one_copy_queue: its plan's."""
    return {lane: queue_of(lane, one_copy_queue=one_copy_queue) for lane in LaneKind}


def _gradient_bytes(context: PlanningContext) -> int:
    return context.itemsize if context.accumulate == 1 else 4


def update_bytes(context: PlanningContext, *, clears: bool = True) -> int:
    """Read and written for each element that is updated, in a step of several micro-steps with what clears its accumulator."""
    states = 8 * (1 + len(context.moments))  # read and written
    return states + context.itemsize + _gradient_bytes(context) + (4 if clears and context.accumulate > 1 else 0)


@dataclass(frozen=True)
class Costs:
    """Turns the operations of a schedule into jobs. queues: the queue of every lane; lanes may share one.

    updates: bundles to their place in the order of updates, in which the host's lane takes them where it has a choice.
    """

    layout: Layout
    context: PlanningContext
    rates: Rates
    queues: Mapping[LaneKind, str]
    updates: Mapping[int, int] = field(default_factory=dict)

    def job(self, operation: ScheduledOperation, waits: tuple[int, ...]) -> TimedJob:
        """waits: job numbers. The operation is on a lane."""
        assert operation.lane is not None
        if operation.kind is Work.NORM:  # the host reads it and goes on: it belongs to the host's own order
            return TimedJob(HOST_QUEUE, waits, self.rates.profile.unit_event_s.value + self.rates.link.exchange_s)
        queue = self.queues[operation.lane]
        if operation.lane is LaneKind.CPU:
            claims = (Claim(HOST_DRAM, favoured=True, measured_as=Flow.CPU_ADAM),)
            nbytes, priority = self.host_bytes(operation), self._priority(operation)
            return TimedJob(queue, waits, self.rates.update_s, nbytes, self.rates.cpu_adam, claims, priority)
        if operation.kind is Work.COMPUTE and operation.bytes:
            return self._swapping(operation, queue, waits)
        if operation.lane is LaneKind.COMPUTE or operation.kind is Work.SQUARES:
            return TimedJob(queue, waits, operation.seconds + self.device_bytes(operation) / self.rates.device_dram)
        if operation.lane in COLLECTIVE:
            return self._collective(operation, queue, waits)
        return self._copy(operation, queue, waits)

    def payload(self, operation: ScheduledOperation) -> int:
        """Bytes that pass a device's port: of a collective all but the rank's own part."""
        if operation.lane in COLLECTIVE:
            ranks = self._together(operation)
            return operation.bytes * (ranks - 1) // ranks
        return operation.bytes

    def _together(self, operation: ScheduledOperation) -> int:
        """Ranks of the group that holds its bundle. Of all there are more than in the context where each has all states."""
        shared = space_of(self.layout, operation.bundle).ranks
        return self.rates.ranks * shared // self.context.ranks

    def host_bytes(self, operation: ScheduledOperation) -> int:
        """Read and written by the CPU: Adam, or what accumulation takes, of one rank's shards."""
        if operation.kind is Work.NORM or operation.lane is not LaneKind.CPU:
            return 0
        return self._numel(operation) * self._per_element(operation)

    def device_bytes(self, operation: ScheduledOperation) -> int:
        """Read and written in the device's DRAM by the optimizer's part of a step."""
        if operation.kind is Work.SQUARES and operation.lane is not LaneKind.CPU:
            return self._numel(operation) * self._per_element(operation)
        if operation.kind is Work.SHRINK:
            return 2 * self.layout.shard_bytes(operation.bundle)
        if operation.kind is Work.MERGE:
            return 2 * operation.bytes
        if operation.lane is not LaneKind.COMPUTE or operation.kind not in (Work.UPDATE, Work.ACCUMULATE):
            return 0
        return self._numel(operation) * self._per_element(operation)

    def _per_element(self, operation: ScheduledOperation) -> int:
        """An update reads the gradient and writes the parameter beside the states. It clears an accumulator as well, but not if
        it runs ahead: should that have been in vain, the gradient is needed again."""
        item = self.context.itemsize
        gradient = _gradient_bytes(self.context)
        if operation.kind is Work.SQUARES:
            return gradient
        if operation.kind is Work.ACCUMULATE:
            return item + 8
        if operation.kind is Work.RESTORE:
            return 4 + item
        if operation.kind is Work.CLEAR:
            return 4
        return update_bytes(self.context, clears=operation.kind is not Work.UPDATE_AHEAD)

    def _numel(self, operation: ScheduledOperation) -> int:
        mine = self.layout.bundles[operation.bundle].segments if operation.segment < 0 else (operation.segment,)
        return sum(self.layout.segments[s].shard_numel for s in mine)

    def _priority(self, operation: ScheduledOperation) -> int:
        """As the substrate gives them."""
        if operation.kind in UPDATES:
            return self.updates.get(operation.bundle, operation.bundle)
        return before_updates(self.layout, -1 if operation.kind is Work.SQUARES else operation.bundle)

    def _swapping(self, operation: ScheduledOperation, queue: str, waits: tuple[int, ...]) -> TimedJob:
        """Compute and the way of its tokens, which shares what that goes through."""
        link = self.rates.link_of(self.context.expert_ranks)
        own = max(operation.seconds - operation.bytes / link.swap_rate, 0.0)
        return TimedJob(queue, waits, own, operation.bytes, link.swap_rate, link.swap_claims)

    def _copy(self, operation: ScheduledOperation, queue: str, waits: tuple[int, ...]) -> TimedJob:
        assert operation.lane is not None
        fixed = self.rates.profile.copy_overhead_s(operation.bytes)
        if operation.lane in (LaneKind.DISK_READ, LaneKind.DISK_WRITE):
            alone = self.rates.disk(operation.lane)
            claims = Claim(HOST_DRAM), Claim(DISK, 1 / alone, measured_as=DISK_WAYS[operation.lane])
            return TimedJob(queue, waits, fixed, operation.bytes, alone, claims)
        down = operation.lane is LaneKind.H2D
        rate, flow = (self.rates.h2d, Flow.H2D) if down else (self.rates.d2h, Flow.D2H)
        way = (Claim(TO_DEVICE if down else FROM_DEVICE),) if self.rates.link.through_host else ()
        claims = (Claim(HOST_DRAM, measured_as=flow), Claim(HOST_LINK), *way)
        return TimedJob(queue, waits, fixed, operation.bytes, rate, claims)

    def _collective(self, operation: ScheduledOperation, queue: str, waits: tuple[int, ...]) -> TimedJob:
        assert operation.lane is not None
        link, size = self.rates.link_of(self._together(operation)), self.payload(operation)
        fixed = link.overhead_s(operation.lane, size)
        return TimedJob(queue, waits, fixed, size, link.rate(operation.lane), link.claims)
