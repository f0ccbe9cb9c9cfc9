"""Looks for the fastest plan of one kind of step: solvers' assignments are compiled, and run by the simulator."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from systems.errors import BudgetError
from systems.planning.clock.simulator import step_time_of
from systems.planning.layout import Layout
from systems.planning.policy.refusal import refusal
from systems.planning.policy.windows import under
from systems.planning.step.residence import unmovable
from systems.planning.step.schedule import expand
from systems.planning.step.timeline import excess_bytes, timeline_of
from systems.planning.trace import NO_UNIT
from systems.sizes import format_size
from systems.strategies.h3t.basic import basic_dp
from systems.strategies.h3t.candidates import Asked, Candidate, fastest
from systems.strategies.h3t.compiling import OTHERS, Compiler
from systems.strategies.h3t.costs import ModelCosts
from systems.strategies.h3t.dynamic import pruned_dp
from systems.strategies.h3t.evaluation import allowed
from systems.strategies.h3t.modelling import Modeller
from systems.strategies.h3t.placement import fastest_placement, placements
from systems.strategies.h3t.profiling import MeasuredLayers
from systems.strategies.h3t.solvers import greedy_solver, manual_solver, random_solver
from systems.strategies.h3t.switches import ALL_ON, EVERY, SYNCHRONISED, Switches

ROUNDS = 4  # of solving with a smaller budget, where the cost model was too hopeful
CHEAP = ("greedy", "manual")  # of best's solvers those that are asked for every placement


class Search:
    """Plans for one kind of step, each tried on the simulator."""

    def __init__(self, asked: Asked, layout: Layout, measured: MeasuredLayers) -> None:
        self._asked, self._layout = asked, layout
        self._context, self._options = asked.context, asked.options
        base = measured.base
        leaving = asked.blocks & frozenset(measured.layers)
        base = under(base, measured.kept, recomputed=base.recomputed, offloaded=leaving)
        self._measured = replace(measured, base=base)

    def fastest(self) -> tuple[Candidate, list[Candidate]]:
        """And all that fit, of every solver asked for; where pool and activations of none fit side by side, what passes the
        budget least. BudgetError if there is none.

        best looks at states on the device with its quick solvers first, and with dp under the placement that is fastest then.
        """
        least, *others = placements(self._asked, self._layout, self._measured.base)
        best = self._options.solver == "best"
        found = self._placed(least, ("dp", *CHEAP) if best else (self._options.solver,))
        for on_device in others:
            found += self._placed(on_device, CHEAP if best else (self._options.solver,))
        if not found:
            on = self.unchecked(dict.fromkeys(self._measured.layers, ALL_ON), "held", "on")
            if not on.fits(self._context):
                raise self.refusal(on)
            found = [self._simulated(on)]
        found = self._side_by_side(found)
        chosen = fastest_placement(self._asked, self._layout, found)
        if best and chosen.on_device != least:
            found = self._side_by_side([*found, *self._solved(chosen.others, chosen.on_device, ("dp",))])
            chosen = fastest(self._layout, [each for each in found if each.on_device == chosen.on_device])
        return chosen, found

    def _side_by_side(self, found: Sequence[Candidate]) -> list[Candidate]:
        excess = [excess_bytes(each.memory, self._layout, self._context) for each in found]
        return [each for each, over in zip(found, excess, strict=True) if over <= max(min(excess), 0)]

    def _placed(self, on_device: frozenset[int], names: Sequence[str]) -> list[Candidate]:
        return [each for others in OTHERS for each in self._solved(others, on_device, names)]

    def refusal(self, least: Candidate) -> BudgetError:
        """What the least plan, with every switch on, needs, and the unit that sets it. It does not fit."""
        memory, moments = least.memory, self._measured.base.moments
        moment = memory.device_total_bytes.index(memory.total_peak)
        owner = next((m.unit for m in moments[moment::-1] if m.unit != NO_UNIT), NO_UNIT)
        activations = memory.device_non_model_bytes[moment]
        rest = format_size(memory.total_peak - activations)
        parts = [f"{rest} of parameters and gradients", f"{format_size(activations)} of activations"]
        advice = "raise `device_memory`, or lower the batch or the sequence length"
        return refusal(memory.total_peak, owner, parts, advice, self._context, "h3t", self._asked.unit_name)

    def _solved(self, others: str, on_device: frozenset[int], names: Sequence[str]) -> Iterator[Candidate]:
        everything = dict.fromkeys(self._measured.layers, ALL_ON)
        least = self.candidate(everything, others, "on", on_device)
        if least is None:
            return
        options = self._options
        if options.solver == "on":
            yield self._simulated(least)
            return
        if not self._measured.layers:
            yield self._simulated(least)
            return
        asked = self._asked
        modeller = Modeller(self._layout, self._context, asked.hardware, asked.blocks, asked.unit_name, asked.paper)
        bare = self.unchecked(everything, others, "on", on_device, Compiler) if asked.paper else least
        costs = modeller.costs(self._measured, bare.memory, on_device)
        for name in names:
            found = self._fitting(name, costs, others, on_device)
            if found is not None:
                yield self._simulated(found)
        if options.solver == "best":
            yield self._simulated(least)

    def _fitting(self, name: str, costs: ModelCosts, others: str, on_device: frozenset[int]) -> Candidate | None:
        """The solver's assignment as a plan that fits; it is asked again with less where the cost model was too hopeful."""
        budget = self._context.device_budget
        for _ in range(ROUNDS):
            try:
                rows = self._assigned(name, costs, budget)
            except BudgetError:
                return None
            order = sorted(self._measured.layers, key=self._first_use)
            switches = {unit: self._with_forced(unit, s) for unit, s in zip(order, rows, strict=True)}
            found = self.unchecked(switches, others, name, on_device)
            excess = excess_bytes(found.memory, self._layout, self._context)
            if excess <= 0:
                return found
            budget -= excess
        return None

    def _assigned(self, name: str, costs: ModelCosts, budget: int) -> tuple[Switches, ...]:
        if name == "dp":
            return pruned_dp(costs, budget, bins=self._options.bins, choices=self._among(SYNCHRONISED)).switches
        if name == "basic-dp":
            return basic_dp(costs, budget, bins=self._options.bins, choices=self._among(SYNCHRONISED)).switches
        if name == "greedy":
            return greedy_solver(costs, budget, choices=self._among(EVERY)).switches
        if name == "manual":
            return manual_solver(costs, budget, choices=self._among(EVERY)).switches
        if name == "random":
            samples, seed = self._options.samples, self._context.seed
            return random_solver(costs, budget, samples=samples, seed=seed, choices=self._among(EVERY)).switches
        if name == "off":
            return (Switches(),) * len(costs.layers)
        return tuple(random.Random(self._context.seed).choices(allowed(costs, EVERY), k=len(costs.layers)))

    def _among(self, choices: Sequence[Switches]) -> Sequence[Switches]:
        """Under the paper's rules solvers know that all layers are to rematerialise, if they are; else plans alone do."""
        all_forced = self._asked.forced.issuperset(self._measured.layers)
        return [s for s in choices if s.rematerialise] if self._asked.paper and all_forced else choices

    def _first_use(self, unit: int) -> int:
        return next(number for number, m in enumerate(self._measured.base.moments) if m.unit == unit)

    def _with_forced(self, unit: int, s: Switches) -> Switches:
        return replace(s, rematerialise=True) if unit in self._asked.forced else s

    def candidate(
        self, switches: Mapping[int, Switches], others: str, solver: str, on_device: frozenset[int] | None = None
    ) -> Candidate | None:
        """None if it does not fit."""
        found = self.unchecked(switches, others, solver, on_device)
        return found if found.fits(self._context) else None

    def unchecked(
        self,
        switches: Mapping[int, Switches],
        others: str,
        solver: str,
        on_device: frozenset[int] | None = None,
        compiles: type[Compiler] | None = None,
    ) -> Candidate:
        """The best plan has no barriers: they take time here and save no memory, for what leaves frees its room at once.

        compiles: None for the variant's own.
        """
        base = self._measured.base
        compiles = compiles or self._asked.compiles
        compiler = compiles(self._layout, base, self._context, self._asked.rule, self._asked.blocks)
        staying = unmovable(self._layout) if on_device is None else on_device
        plan = compiler.plan(switches, others=others, on_device=staying)
        if self._options.solver == "best":
            plan = replace(plan, barriers=frozenset())
            switches = {unit: replace(each, synchronise=False) for unit, each in switches.items()}
        assert plan.rematerialise is not None and plan.offload_inputs is not None
        trace = under(base, self._measured.kept, recomputed=plan.rematerialise, offloaded=plan.offload_inputs)
        schedule = expand(self._layout, trace, plan, self._context)
        return Candidate(plan, trace, schedule, timeline_of(schedule, trace), dict(switches), others, solver, staying)

    def _simulated(self, found: Candidate) -> Candidate:
        return replace(found, step_time_s=step_time_of(found.schedule, self._asked.hardware))
