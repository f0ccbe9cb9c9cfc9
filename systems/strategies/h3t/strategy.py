"""H3T as a policy: profile, solve, compile, simulate, and keep the fastest plan that fits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from pydantic import BaseModel

from systems.planning import hardware
from systems.planning.layout import Layout, ModelIndex
from systems.planning.plan import Plan
from systems.planning.policy.base import StrategyBase
from systems.planning.policy.options import StrategyStatistics
from systems.planning.policy.packing import bundle_a_unit
from systems.planning.policy.windows import windows
from systems.planning.step.residence import unmovable
from systems.planning.step.timeline import timeline, with_peaks
from systems.planning.step.validator import validate
from systems.planning.strategy import PlanningContext
from systems.planning.trace import Trace
from systems.strategies.h3t.basic import check_size
from systems.strategies.h3t.candidates import Asked, Candidate
from systems.strategies.h3t.options import H3TOptions, H3TStatistics
from systems.strategies.h3t.profiling import MeasuredLayers, Profiler
from systems.strategies.h3t.rates import bytes_per_s, with_measured
from systems.strategies.h3t.search import Search
from systems.strategies.h3t.switches import ALL_ON, Assignment

DEFAULT_HARDWARE = "h100-80g-x1"  # of devices that no shipped profile is of


class H3T(StrategyBase):
    """See the package's docstring for the paper's words and for what differs."""

    name: ClassVar[str] = "h3t"
    summary: ClassVar[str] = "seven switches a layer, found by dynamic programming on a profile of the first steps"
    Options: ClassVar[type[BaseModel]] = H3TOptions
    Statistics: ClassVar[type[StrategyStatistics]] = H3TStatistics
    _options: H3TOptions

    def __init__(self, options: H3TOptions, context: PlanningContext) -> None:
        if context.any_plan:
            options = options.model_copy(update={"solver": "on"})  # fits wherever anything does
        super().__init__(options, context)
        self.rematerialised = frozenset()
        self._hardware = context.hardware or hardware.load(options.hardware or self._own_hardware())
        steps = 2 if context.hardware is not None else options.profile_steps  # a forecast sees all layers open at once
        self._profiler = Profiler(steps, None if context.hardware is not None else options.profile)
        self._blocks = frozenset[int]()
        self._forced = frozenset[int]()
        self._opened: list[int] = []  # layers that the steps of a run would measure at once, in a forecast

    def cut(self, index: ModelIndex) -> Layout:
        self._blocks = self.rematerialised = self.offloaded_inputs = index.blocks
        chosen = self._context.recompute
        numbers = {"none": (), "full": tuple(u.block for u in index.units)}[chosen] if isinstance(chosen, str) else chosen
        self._forced = frozenset(u.index for u in index.units if u.block is not None and u.block in numbers)
        layout = bundle_a_unit(index, self._context)
        layers, described = len(index.blocks), self._hardware.description
        if self._options.solver == "basic-dp":
            check_size(layers, self._options.bins)
        self.tell(variant=self._options.variant, num_layers=layers, num_bundles=len(layout.bundles), hardware=described)
        return layout

    def plan(self, layout: Layout, trace: Trace) -> Plan:
        """A validated plan. Raises BudgetError if not even the one with every switch on fits."""
        layers = [unit for unit in sorted(self._blocks) if any(windows(trace, unit))]
        if not self._profiler.can_use(trace, layers):
            return self._measuring(layout, trace, layers)
        measured = self._profiler.add(trace, layers)
        asked = self._asked
        if asked.paper and self._context.hardware is None:
            times = measured.base.lane_times
            asked = replace(asked, hardware=with_measured(self._hardware, times, self._context))
            self.tell(measured_bytes_per_s=bytes_per_s(times, self._context))
        search = Search(asked, layout, measured)
        if self._profiler.wants_more(measured):
            return self._provisional(search, layout, measured)
        began = time.perf_counter()
        best, found = search.fastest()
        self._tell_solved(layout, best, found, measured.steps, time.perf_counter() - began)
        memory = validate(layout, best.trace, best.plan, self._context)
        plan = with_peaks(best.plan, memory, layout, self._context)
        return replace(
            plan, predicted_step_time_s=best.step_time_s, provisional_peak_bytes=self._profiling_peak(search, layout, measured)
        )

    @property
    def _asked(self) -> Asked:
        given = self._context, self._options, self.update_rule, self._hardware
        return Asked(*given, self._blocks, self._forced, self.unit_name)

    def _profiling_peak(self, search: Search, layout: Layout, measured: MeasuredLayers) -> int:
        """Of the steps in which a run would measure some layers at a time; 0 at run time, where they were run."""
        if not self._opened:
            return 0
        found = self._with_open(search, measured, self._opened)
        return with_peaks(found.plan, found.memory, layout, self._context).predicted_device_peak_bytes or 0

    def _own_hardware(self) -> str:
        device = self._context.device_name
        return (hardware.of_device(device) if device is not None else None) or DEFAULT_HARDWARE

    def _measuring(self, layout: Layout, trace: Trace, layers: list[int]) -> Plan:
        """Every switch on but synchronisation, for a kind of step of which no trace tells enough; this one bounds it."""
        compiler = self._asked.compiles(layout, trace, self._context, self.update_rule, self._blocks)
        plan = compiler.plan(dict.fromkeys(layers, ALL_ON), others="held", on_device=unmovable(layout))
        memory = timeline(layout, trace, plan, self._context)
        return self._to_measure(with_peaks(plan, memory, layout, self._context))

    def _provisional(self, search: Search, layout: Layout, measured: MeasuredLayers) -> Plan:
        """Every switch on but synchronisation, and those of the layers that this step measures: as many as fit."""
        waiting = list(self._profiler.to_open(measured, self._options.profile_steps))
        found = self._with_open(search, measured, waiting)
        while waiting and not found.fits(self._context):
            waiting = waiting[: len(waiting) // 2]
            found = self._with_open(search, measured, waiting)
        if self._context.hardware is not None:
            self._opened = waiting
            found = self._with_open(search, measured, measured.layers)
        elif not found.fits(self._context):
            raise search.refusal(found)
        peaks = with_peaks(found.plan, found.memory, layout, self._context)
        return self._to_measure(peaks)

    def _to_measure(self, plan: Plan) -> Plan:
        """Under the paper's rules the profiler sees what copies and updates take, too."""
        return replace(plan, provisional=True, barriers=frozenset(), times_lanes=self._asked.paper)

    def _with_open(self, search: Search, measured: MeasuredLayers, layers: Sequence[int]) -> Candidate:
        switches = dict.fromkeys(measured.layers, ALL_ON)
        switches |= {unit: replace(ALL_ON, rematerialise=False, offload_hidden=False) for unit in layers}
        return search.unchecked(switches, "held", "profiler")

    def _tell_solved(self, layout: Layout, best: Candidate, found: list[Candidate], steps: int, seconds: float) -> None:
        times: dict[str, float] = {}
        for each in found:
            times[each.solver] = min(each.step_time_s, times.get(each.solver, each.step_time_s))
        self.tell_of(best.plan, layout)
        self.tell(
            profiled_steps=steps,
            solver=best.solver,
            solver_s=seconds,
            simulated_step_time_s=best.step_time_s,
            candidates_s=times,
            switch_on_ratios=Assignment(tuple(best.switches.values()), 0.0, 0, best.solver).ratios(),
            other_modules=best.others,
            barriers_per_step=len(best.plan.barriers),
        )
