"""What each tier must hold for a plan, by kind of content, at the moment that needs most.

Note [Kinds]
    weights        16-bit (or fp32) parameters: on the device those that a unit holds or that stay for good, on the host the
                   shards of what may leave the device, whose place a gradient takes between backward and update
    weight shards  on the device, of several ranks: this one's part of the parameters that it updates there
    working space  parameters on the device beyond those: fetched ahead, or kept because there is room
    gradients      on the device, in ranges of their own or in autograd's buffers until the update
    master, moments, accumulators    of the optimizer, where the update is
    buffers, on the host   through which states on the disk go
    versions and sums      of bundles whose updates run behind the steps: parameters and sums of gradients, twice each
    second versions        of bundles whose updates run ahead of the norm: master, moments and slots
    before a plan          on the host: states that a plan takes to the device, which have to be here first and do not fit
    allocator              left free: blocks do not lie without holes, see `planning.allowance`
    activations    everything else that forward and backward make, temporaries included; buffers: the module's own
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from systems.planning.disk_layout import buffer_bytes, disk_bytes, parts_of
from systems.planning.layout import Layout
from systems.planning.step.operations import Work
from systems.planning.step.residence import lock_free_bytes, second_version_bytes, slot_bytes
from systems.planning.step.schedule import Schedule
from systems.planning.step.timeline import MemTimeline
from systems.planning.strategy import PlanningContext


@dataclass(frozen=True)
class TierNeed:
    """Bytes of one device, or of one node's host with all its ranks. parts: see Note [Kinds]; they add up to need_bytes."""

    need_bytes: int
    have_bytes: int
    parts: Mapping[str, int]

    @property
    def fits(self) -> bool:
        return self.need_bytes <= self.have_bytes

    @property
    def spare_bytes(self) -> int:
        """Below zero if it does not fit."""
        return self.have_bytes - self.need_bytes


def device_need(
    schedule: Schedule,
    memory: MemTimeline,
    *,
    buffer_bytes: int,
    allocator_bytes: int,
    have_bytes: int,
    resting: Mapping[str, int] | None = None,
) -> TierNeed:
    """At the moment of the highest total. allocator_bytes: kept free for the allocator. resting: by kind, what is always there
    though the schedule's residence has it on the host.
    """
    resting = resting or {}
    need = memory.total_peak
    moment = memory.device_total_bytes.index(need)
    residence, demand = schedule.residence, schedule.demand
    layout = residence.layout
    parameters, ranges = _contents(schedule, memory, moment)
    parameters -= sum(resting.values())
    shards = sum(map(residence.resting_bytes, residence.sharded))
    fixed = sum(map(layout.bundle_bytes, residence.whole))
    held = sum(layout.bundle_bytes(b) for b in demand.held[moment] if b not in residence.whole)
    weights = min(parameters - shards, fixed + held)
    other = need - parameters - ranges - sum(map(residence.state_bytes, residence.on_device)) - sum(resting.values())
    adopted = sum(
        layout.bundle_bytes(b)
        for b in filter(residence.adopted, demand.gradient_spans)
        if any(span.begin < moment < span.end for span in residence.gradient_spans(demand, b))
    )
    buffers = min(buffer_bytes, other)
    gradients = min(adopted, other - buffers)
    parts = {
        "weights": weights,
        "weight shards": shards,
        "gradients": ranges + gradients,
        **_states(sum(map(residence.state_bytes, residence.on_device)), residence.context),
        "activations": other - buffers - gradients,
        "buffers": buffers,
        "working space": parameters - shards - weights,
        "allocator": allocator_bytes,
    }
    parts = {kind: size + resting.get(kind, 0) for kind, size in parts.items()}
    return TierNeed(need + allocator_bytes, have_bytes, _present(parts))


def _contents(schedule: Schedule, memory: MemTimeline, moment: int) -> tuple[int, int]:
    """(bytes of parameters, of gradient ranges) in the pool at its fullest that still counts there, replayed."""
    layout, residence = schedule.residence.layout, schedule.residence
    states = sum(map(residence.state_bytes, residence.on_device))
    after = memory.device_pool_bytes[moment]
    behind = after + memory.device_non_model_bytes[moment] == memory.total_peak  # else while the moment is worked off
    wanted = after if behind else memory.device_pool_peak_bytes[moment]
    parameters, ranges = schedule.initial_device_bytes - states, 0
    found = parameters, ranges
    for operation in schedule.bare:
        if operation.moment > moment:
            break
        if operation.kind in (Work.ALLOCATE, Work.FREE, Work.REDUCE):
            ranges += operation.device_delta
        else:
            parameters += operation.device_delta
        if parameters + ranges + states == wanted:
            found = parameters, ranges
    assert layout.segments, "a layout has segments"
    return found


def host_need(
    schedule: Schedule, *, ranks_on_node: int, have_bytes: int, offloads: bool, inputs: int = 0, first: int = 0
) -> TierNeed:
    """offloads: False for a system that keeps nothing on the host at all. inputs: bytes of a rank's that wait there. first: of
    one whose layout is refused with this host, what a rank has there before a plan takes states to the device.
    """
    if not offloads:
        return TierNeed(0, have_bytes, {})
    residence = schedule.residence
    layout = residence.layout
    slots = slot_bytes(layout)
    bundles = [b.index for b in layout.bundles if b.index not in residence.on_device]
    states = sum(residence.optimizer_bytes(b) for b in bundles if b not in layout.on_disk)
    parts = {"weights": slots, **_states(states, residence.context)}
    beside = sum(residence.host_state_bytes(b) for b in bundles if b in layout.on_disk)
    parts["accumulators"] += beside
    parts["buffers"], parts["activations"] = buffer_bytes(layout), inputs
    parts["versions and sums"] = lock_free_bytes(layout, residence.context, residence.buffered)
    parts["second versions"] = second_version_bytes(layout, residence.context, residence.ahead)
    parts = {name: size * ranks_on_node for name, size in parts.items()}
    total = sum(parts.values())
    if total <= have_bytes:  # so it is the beginning that does not fit
        parts["before a plan"] = max(0, first * ranks_on_node - total)
    return TierNeed(sum(parts.values()), have_bytes, _present(parts))


def disk_need(layout: Layout, *, ranks_on_node: int, have_bytes: int) -> TierNeed:
    """Of what has its home there."""
    size = disk_bytes(layout) * ranks_on_node
    master = size // parts_of(layout)
    return TierNeed(size, have_bytes, _present({"master": master, "moments": size - master}))


def _states(size: int, context: PlanningContext) -> dict[str, int]:
    """Optimizer state of Adam's 12 bytes a parameter, or 16 with an accumulator, by what it is."""
    numel = size // context.optimizer_itemsize
    return {
        "master": 4 * numel,
        "moments": 4 * len(context.moments) * numel,
        "accumulators": context.accumulator_itemsize * numel,
    }


def _present(parts: Mapping[str, int]) -> dict[str, int]:
    return {name: size for name, size in parts.items() if size}
