"""Hardware profiles for tests: a plain one whose numbers are easy to reckon with, scaled copies of any; plans run on them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

from systems.planning.clock.simulator import Simulation, simulation_of
from systems.planning.hardware import Count, HardwareProfile, Share, SourcedNumber
from systems.planning.layout import Layout
from systems.planning.plan import Plan
from systems.planning.step.schedule import expand
from systems.planning.strategy import PlanningContext
from systems.planning.trace import Trace

BANDWIDTHS = (
    "device_dram_bytes_per_s",
    "h2d_bytes_per_s",
    "d2h_bytes_per_s",
    "both_ways_bytes_per_s",
    "node_copy_bytes_per_s",
    "node_both_ways_bytes_per_s",
    "device_link_bytes_per_s",
    "network_bytes_per_s",
    "host_dram_bytes_per_s",
    "cpu_adam_bytes_per_s",
)
PLENTY = 1e18


def figure(value: float) -> SourcedNumber:
    return SourcedNumber(value=value, source="test")


def machine(*, nodes: int = 1, devices: int = 1, **figures: Any) -> HardwareProfile:
    """Everything is plentiful but what is given; fixed times are a nanosecond."""
    given: dict[str, Any] = {name: figure(PLENTY) for name in BANDWIDTHS}
    given |= {"copy_latency_s": figure(1e-9), "unit_event_s": figure(1e-9)}
    given |= {name: value if value is None else figure(value) for name, value in figures.items()}
    counts = dict(nodes=nodes, devices_per_node=devices, device_memory_bytes=1 << 50, host_memory_bytes=1 << 50)
    given |= {name: Count(value=value, source="test") for name, value in counts.items()}
    return HardwareProfile(
        description="test",
        device_name="test",
        matmul_flops_per_s={"bf16": figure(1e12), "fp32": figure(1e12)},
        matmul_efficiency=Share(value=1.0, source="test"),
        **given,
    )


def scaled(profile: HardwareProfile, names: Iterable[str], factor: float) -> HardwareProfile:
    """The same with these bandwidths multiplied; absent ones stay absent."""
    changes = {}
    for name in names:
        old: SourcedNumber | None = getattr(profile, name)
        if old is not None:
            changes[name] = figure(old.value * factor)
    return profile.model_copy(update=changes)


def simulate(layout: Layout, trace: Trace, plan: Plan, context: PlanningContext, profile: HardwareProfile) -> Simulation:
    return simulation_of(expand(layout, trace, plan, context), trace, plan, profile)


def computes_beside_fetches(layout: Layout, trace: Trace, plan: Plan, context: PlanningContext) -> bool:
    """Whether anything is computed while something comes, on a machine whose copies and link are slow."""
    slow = machine(devices=context.ranks, h2d_bytes_per_s=1e6, device_link_bytes_per_s=1e6)
    spans: dict[str, list[tuple[float, float]]] = {"h2d": [], "gather": [], "compute": []}
    for event in simulate(layout, trace, plan, context, slow).events:
        if event.lane in spans:
            spans[event.lane].append((event.start_s, event.start_s + event.duration_s))
    comes = [*spans["h2d"], *spans["gather"]]
    assert comes, "void: nothing comes"
    return max(min(a[1], b[1]) - max(a[0], b[0]) for a, b in product(comes, spans["compute"])) > 1e-9
