"""Copy and update rates as the profiler's steps had them (paper, section 3.3.1, appendix C.3), in a hardware profile's place.

Each is what was moved over the seconds that it took, so that what an operation takes beside its bytes is in it. Of several
ranks the first one's, measured while all of them copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from systems.planning.clock.rates import update_bytes
from systems.planning.hardware import HardwareProfile, SourcedNumber
from systems.planning.plan import LaneKind
from systems.planning.strategy import PlanningContext
from systems.planning.trace import LaneTime

SOURCE = "measured in the first steps of this run"


def bytes_per_s(times: Sequence[LaneTime], context: PlanningContext) -> dict[str, float]:
    """By lane, of those that were seen. Of the host's updates the bytes that are read and written, as profiles count them."""
    elements = update_bytes(context) / context.itemsize
    counted = {t.lane: t.nbytes * (elements if t.lane == LaneKind.CPU.value else 1.0) for t in times}
    return {t.lane: counted[t.lane] / t.seconds for t in times if t.nbytes and t.seconds}


def with_measured(profile: HardwareProfile, times: Sequence[LaneTime], context: PlanningContext) -> HardwareProfile:
    """The profile with what was measured. What devices of a node share is no less than what this rank had of it."""
    on_node = min(context.ranks, profile.devices_per_node.value)
    found, changed = bytes_per_s(times, context), dict[str, float]()
    for lane, name in (("h2d", "h2d_bytes_per_s"), ("d2h", "d2h_bytes_per_s")):
        if lane in found:
            changed[name] = found[lane]
    fastest = max(changed.values(), default=0.0)
    for name, least in (
        ("both_ways_bytes_per_s", fastest),
        ("node_copy_bytes_per_s", fastest * on_node),
        ("node_both_ways_bytes_per_s", fastest * on_node),
        ("host_dram_bytes_per_s", found.get("cpu", 0.0) * on_node),
    ):
        if getattr(profile, name).value < least:
            changed[name] = least
    if "cpu" in found:
        changed["cpu_adam_bytes_per_s"] = found["cpu"] * on_node
    return profile.model_copy(update={name: SourcedNumber(value=value, source=SOURCE) for name, value in changed.items()})


def summed(old: Iterable[LaneTime], new: Iterable[LaneTime]) -> tuple[LaneTime, ...]:
    """Of several steps together, by lane."""
    found: dict[str, LaneTime] = {}
    for each in (*old, *new):
        before = found.get(each.lane, LaneTime(each.lane, 0, 0.0))
        found[each.lane] = LaneTime(each.lane, before.nbytes + each.nbytes, before.seconds + each.seconds)
    return tuple(found.values())
