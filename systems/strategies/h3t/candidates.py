"""A plan as the search looks at it: what was asked for, what it takes, and which of several is the fastest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from systems.planning.hardware import HardwareProfile
from systems.planning.layout import Layout
from systems.planning.plan import OpKind, Plan, UpdateRule
from systems.planning.step.schedule import Schedule
from systems.planning.step.timeline import MemTimeline
from systems.planning.strategy import PlanningContext
from systems.planning.trace import Trace
from systems.strategies.h3t.compiling import Compiler
from systems.strategies.h3t.options import H3TOptions
from systems.strategies.h3t.segments import PaperCompiler
from systems.strategies.h3t.switches import Switches

LIKE = 1e-3  # relative difference of times that are taken as equal


@dataclass(frozen=True)
class Asked:
    """What holds for the whole run. blocks: units that are layers. forced: those of them that are always rematerialised."""

    context: PlanningContext
    options: H3TOptions
    rule: UpdateRule
    hardware: HardwareProfile
    blocks: frozenset[int]
    forced: frozenset[int]
    unit_name: Callable[[int], str]

    @property
    def paper(self) -> bool:
        """By the paper's workflow and cost model."""
        return self.options.variant == "paper"

    @property
    def compiles(self) -> type[Compiler]:
        return PaperCompiler if self.paper else Compiler


@dataclass(frozen=True)
class Candidate:
    """on_device: bundles that are updated there, or never move. step_time_s: simulated, with nothing ahead of the norm."""

    plan: Plan
    trace: Trace
    schedule: Schedule
    memory: MemTimeline
    switches: Mapping[int, Switches]
    others: str
    solver: str
    on_device: frozenset[int]
    step_time_s: float = 0.0

    def fits(self, context: PlanningContext) -> bool:
        return self.memory.total_peak <= context.device_budget


def fastest(layout: Layout, found: Sequence[Candidate], times_s: Sequence[float] | None = None) -> Candidate:
    """Of those as fast as the fastest, to a thousandth, the one that moves the fewest bytes. times_s: None for step_time_s."""

    def moved(each: Candidate) -> int:
        fetches = [p.operation.bundle for p in each.plan.operations if p.operation.kind is OpKind.FETCH]
        sizes = dict(each.trace.input_bytes)
        return sum(map(layout.bundle_bytes, fetches)) + 2 * sum(sizes.get(unit, 0) for unit in each.trace.offloaded)

    times = [each.step_time_s for each in found] if times_s is None else times_s
    limit = min(times) * (1 + LIKE)
    timed = [(each, taken_s) for each, taken_s in zip(found, times, strict=True) if taken_s <= limit]
    return min(timed, key=lambda each: (moved(each[0]), each[1]))[0]
