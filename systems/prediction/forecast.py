"""Will it fit, and how fast: one system's plan for a model on a hardware profile, without the hardware.

The step is observed on the meta device (`meta_step`), planned by the system's own policy, and run by the simulator. Any
strategy of the registry can be asked, and `resident`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from pydantic import BaseModel
from torch import nn

from systems.errors import BudgetError, UnsupportedError
from systems.planning.allowance import EXACT, Allowance
from systems.planning.clock.rates import Rates
from systems.planning.clock.simulator import Simulation, simulation_of
from systems.planning.clock.work import MicroStepWork, interval_seconds, trace_of_work
from systems.planning.hardware import HardwareProfile
from systems.planning.layout import ADAM, Layout, ModelIndex
from systems.planning.plan import Plan
from systems.planning.policy.ahead import AheadChoice
from systems.planning.policy.homes import host_need as host_bytes
from systems.planning.policy.homes import waiting_input_bytes, within_host
from systems.planning.policy.windows import leaving, under
from systems.planning.step.residence import Residence, unmovable
from systems.planning.step.schedule import Schedule, expand
from systems.planning.strategy import UNLIMITED, PlanningContext, Strategy, check_update_rule
from systems.planning.trace import Trace
from systems.prediction.baseline_policy import BaselinePolicy
from systems.prediction.meta_step import observe
from systems.prediction.needs import TierNeed, device_need, disk_need, host_need
from systems.prediction.policies import policy_of, sums_natively
from systems.prediction.running_ahead import AheadForecast
from systems.settings import TORCH_DTYPE, DType, check_whole
from systems.sizes import format_size
from systems.substrate.system import ManagedSystem
from systems.system import System

MOST_TOKENS = 1 << 48  # of a micro-batch: what a step of more takes is no number that torch counts with
MAX_ROUNDS = 16  # of raising a device budget to what the last refusal asked for
Recompute = Literal["none", "full"] | tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked about, but for the system. Budgets in bytes: of one device, and of one node's host and disk (0: none).

    ranks: data-parallel, filling node after node. batch_size: of one rank and micro-batch. allowance: for the allocator of the
    device that is meant. shared_memory: bytes that both are part of, as the emulated device's and the host's are; None: each
    has its own. moments, expert_ranks: see PlanningContext.
    """

    profile: HardwareProfile
    device_memory: int
    host_memory: int
    ranks: int
    batch_size: int
    seq_len: int
    dtype: DType = "bf16"
    accumulate: int = 1
    recompute: Recompute = "none"
    clip: float = 0.0
    seed: int = 0
    allowance: Allowance = EXACT
    disk_memory: int = 0
    shared_memory: int | None = None
    moments: tuple[str, ...] = ADAM
    expert_ranks: int = 1

    def __post_init__(self) -> None:
        for name in ("ranks", "batch_size", "seq_len"):
            check_whole(name, getattr(self, name), 1)
        if self.batch_size * self.seq_len > MOST_TOKENS:
            raise ValueError(f"`batch_size={self.batch_size}` x `seq_len={self.seq_len}` is beyond any machine: lower them")
        if self.ranks > self.profile.devices:
            raise ValueError(f"`ranks={self.ranks}` is more than the {self.profile.devices} devices of the profile: lower it")
        self.profile.matmul_rate(self.dtype)

    @property
    def ranks_on_node(self) -> int:
        return Rates(self.profile, self.ranks).on_node

    @property
    def tokens(self) -> int:
        """Of all ranks in one optimizer step."""
        return self.batch_size * self.seq_len * self.accumulate * self.ranks


@dataclass
class Observations:
    """Micro-steps of one model, each observed once. model: parameters may be on the meta device. loss: as in `observe`."""

    model: nn.Module
    loss: Callable[..., torch.Tensor]
    _known: dict[Any, tuple[ModelIndex, MicroStepWork]] = field(default_factory=dict)

    def of(self, question: Question) -> tuple[ModelIndex, MicroStepWork]:
        alone = question.ranks == 1
        key = (question.batch_size, question.seq_len, question.dtype, question.recompute, alone, question.expert_ranks)
        if key not in self._known:
            self._known[key] = observe(
                self.model,
                self.loss,
                batch_size=question.batch_size,
                seq_len=question.seq_len,
                dtype=TORCH_DTYPE[question.dtype],
                recompute=question.recompute,
                by_gradients=alone,
                expert_ranks=question.expert_ranks,
            )
        return self._known[key]


@dataclass(frozen=True)
class Forecast:
    """One system's answer. tiers: device and host.

    device_peak_bytes: what the device's allocator will have reserved. warm_up_peak_bytes: already before there is a plan.
    least_device_bytes: the smallest device budget in which there is a plan, where a node's host has least_device_host_bytes,
    which may be more than there is: what that lacks a larger device may have. why_not: one line; None if it fits. Where the
    device is too small, tiers, simulation and statistics are of that smallest budget. ahead: of updates that run ahead of the
    norm; None where none can. statistics: of the strategy, as its Statistics have them; empty of a baseline.
    """

    system: str
    question: Question
    tiers: Mapping[str, TierNeed]
    simulation: Simulation
    device_peak_bytes: int
    warm_up_peak_bytes: int
    least_device_bytes: int
    least_device_host_bytes: int
    why_not: str | None
    ahead: AheadForecast | None = None
    statistics: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        return self.why_not is None

    @property
    def tokens_per_s(self) -> float:
        return self.question.tokens / self.simulation.step_time_s


@dataclass(frozen=True)
class _Planned:
    """warm_up_peak_bytes: of steps before the plan; 0 where nothing is set aside for them. inputs_away: of blocks' inputs that
    may wait on the host, whole pages. choice: of what runs ahead. cannot_begin: the layout is refused with the host there is.
    """

    policy: Any
    layout: Layout
    trace: Trace
    plan: Plan
    context: PlanningContext
    choice: AheadChoice
    warm_up_peak_bytes: int = 0
    inputs_away: int = 0
    cannot_begin: bool = False

    def schedule(self) -> Schedule:
        if isinstance(self.policy, BaselinePolicy):
            return self.policy.schedule(self.layout, self.trace, self.plan)
        return expand(self.layout, self.trace, self.plan, self.context)

    @property
    def statistics(self) -> Mapping[str, Any]:
        return {} if isinstance(self.policy, BaselinePolicy) else self.policy.statistics().model_dump(mode="json")

    @property
    def resting(self) -> Mapping[str, int]:
        return self.policy.resting_bytes(self.layout) if isinstance(self.policy, BaselinePolicy) else {}


def forecast(system: System, options: BaseModel, question: Question, observations: Observations) -> Forecast:
    """Raises UnsupportedError, one line, if the system cannot do what is asked on any machine."""
    planner = _PlansByBudget(system, options, question, observations)
    least, refusal = _least_budget(planner)
    planned = planner.at(max(least, question.device_memory))
    assert isinstance(planned, _Planned), "a device with more memory than the least holds a plan"
    schedule, profile = planned.schedule(), planner.question.profile
    simulation = simulation_of(schedule, planned.trace, planned.plan, profile, ranks=question.ranks)
    kept = planned.context.memory_for(simulation.memory.total_peak) - simulation.memory.total_peak
    device = device_need(
        schedule,
        simulation.memory,
        buffer_bytes=observations.of(question)[1].buffer_bytes,
        allocator_bytes=kept,
        have_bytes=question.device_memory,
        resting=planned.resting,
    )
    host = planner.host_need(planned, schedule)
    why_not = refusal
    if why_not is None and not host.fits:
        why_not = (
            f"{system.name} needs {format_size(host.need_bytes)} of host memory on a node of {question.ranks_on_node} ranks, "
            f"{format_size(host.have_bytes)} is there: raise `host_memory`, use more nodes, or take a smaller model"
        )
    steady = planned.plan.predicted_device_peak_bytes
    assert steady is not None, "every policy predicts it"
    peaks = max(steady, planned.warm_up_peak_bytes), planned.warm_up_peak_bytes
    tiers = {"device": device, "host": host}
    if question.disk_memory and isinstance(system, ManagedSystem):
        tiers["disk"] = disk_need(planned.layout, ranks_on_node=question.ranks_on_node, have_bytes=question.disk_memory)
    ahead = AheadForecast.of(planned.choice, planned.plan, question.ranks_on_node)
    smallest = planner.at(least, any_plan=True)
    assert isinstance(smallest, _Planned), "there is a plan for the least"
    on_host = planner.host_need(smallest, smallest.schedule()).need_bytes
    return Forecast(system.name, question, tiers, simulation, *peaks, least, on_host, why_not, ahead, planned.statistics)


def fits(system: System, options: BaseModel, question: Question, observations: Observations) -> bool:
    """The same without the simulation."""
    planner = _PlansByBudget(system, options, question, observations)
    planned = planner.at(question.device_memory, any_plan=True)
    if isinstance(planned, _Planned) and planned.inputs_away and not planner.host_need(planned, planned.schedule()).fits:
        planned = planner.at(question.device_memory)  # the one that a run has may leave fewer inputs on the host
    if not isinstance(planned, _Planned):
        return False
    host = planner.host_need(planned, planned.schedule())
    if not host.fits or question.shared_memory is None:
        return host.fits
    left = min(question.device_memory, question.shared_memory - planner.at_first(planned))
    return left > 0 and fits(system, options, replace(question, device_memory=left, shared_memory=None), observations)


def simulated(system: System, options: BaseModel, question: Question, observations: Observations) -> Simulation | None:
    """Of a step that fits, None where it does not: what `forecast` says of its time, and nothing of smaller devices."""
    try:
        planner = _PlansByBudget(system, options, question, observations)
        planned = planner.at(question.device_memory)
    except (UnsupportedError, BudgetError):
        return None
    if not isinstance(planned, _Planned) or not planner.host_need(planned, schedule := planned.schedule()).fits:
        return None
    return simulation_of(schedule, planned.trace, planned.plan, planner.question.profile, ranks=question.ranks)


def as_summed(question: Question, system: System, options: BaseModel) -> Question:
    """On a profile whose reductions are this system's."""
    profile = question.profile
    return replace(question, profile=profile.summing_natively()) if sums_natively(system, options) else question


class _PlansByBudget:
    """A system's plans by device budget, each made once; host memory is looked at apart."""

    def __init__(self, system: System, options: BaseModel, question: Question, observations: Observations) -> None:
        if question.moments != ADAM and not system.abilities.optimizers:
            raise UnsupportedError(f"{system.name} trains with Adam alone here: `optimizer='adamw'`")
        self.question = question = as_summed(question, system, options)
        self._policy, self._options, self._observations = policy_of(system), options, observations
        self._keeps_host_copies = isinstance(system, ManagedSystem)
        self._overflows = False  # the layout asked for last has bundles that stay on the device for want of host memory
        self._known: dict[int, _Planned | BudgetError] = {}

    def at(self, device_budget: int, *, any_plan: bool = False) -> _Planned | BudgetError:
        """The plan for that budget, or why there is none. any_plan: one that is there will do, see PlanningContext."""
        known = self._known.get(device_budget)
        if known is None or not (any_plan or isinstance(known, BudgetError) or not known.context.any_plan):
            try:
                self._known[device_budget] = self._plan(device_budget, any_plan)
            except BudgetError as error:
                if error.tier != "device":
                    raise
                self._known[device_budget] = error
        return self._known[device_budget]

    def _plan(self, device_budget: int, any_plan: bool) -> _Planned:
        """What the host cannot hold stays on the device if that has room for it; if not, the host's need is told as it is."""
        host_budget = self.question.host_memory // self.question.ranks_on_node
        try:
            return self._plan_within(device_budget, host_budget, any_plan)
        except BudgetError as error:
            if error.tier == "device" and not self._overflows:
                raise  # nothing of it comes from the host's budget
            return replace(self._plan_within(device_budget, UNLIMITED, any_plan), cannot_begin=error.tier == "host")

    def _plan_within(self, device_budget: int, host_budget: int, any_plan: bool) -> _Planned:
        question, allowance = self.question, self.question.allowance.on(self.question.ranks)
        context = PlanningContext(
            device_budget=allowance.plannable(device_budget),
            host_budget=host_budget,
            itemsize=TORCH_DTYPE[question.dtype].itemsize,
            ranks=question.ranks,
            accumulate=question.accumulate,
            seed=question.seed,
            recompute=question.recompute,
            hardware=question.profile,
            allowance=allowance,
            any_plan=any_plan,
            disk_budget=question.disk_memory // question.ranks_on_node,
            moments=question.moments,
            expert_ranks=question.expert_ranks,
        )
        self._overflows = False
        strategy = self._policy(self._options, context)
        if isinstance(strategy, BaselinePolicy):
            context = strategy.context
        check_update_rule(strategy.update_rule, to_wait=strategy.to_wait, clip=question.clip, dtype=question.dtype)
        index, work = self._observations.of(question)
        layout = self._layout(strategy, index, context)
        if strategy.rematerialised is None:
            blocks = [u for u in index.units if u.block is not None and question.recompute != "none"]
            recomputed = frozenset(u.index for u in blocks if question.recompute == "full" or u.block in question.recompute)
            away = leaving(strategy.offloaded_inputs, recomputed)
            trace = self._trace(question, layout, work)
            trace = under(replace(trace, recomputed=away), {}, recomputed=away, offloaded=away)
            warm_up = self._warm_up(strategy, layout, trace, context)
            choice = self._choice(strategy, strategy.plan(layout, trace), layout, trace, context)
            return _Planned(strategy, layout, trace, choice.made(), context, choice, warm_up, waiting_input_bytes(trace, away))
        return self._plan_with_switches(strategy, index, layout, context)

    def _plan_with_switches(self, strategy: Strategy, index: ModelIndex, layout: Layout, context: PlanningContext) -> _Planned:
        """A strategy that chooses what is recomputed sees a step under each plan that it calls provisional, as at run time."""
        plan: Plan | None = None
        warm_up: int | None = None
        units, away = strategy.rematerialised, frozenset[int]()
        for _ in range(MAX_ROUNDS):
            assert units is not None, "its plans say what is recomputed"
            blocks = tuple(unit.block for unit in index.units if unit.index in units and unit.block is not None)
            alike: dict[frozenset[int], Recompute] = {index.blocks: "full", frozenset(): "none"}
            question = replace(self.question, recompute=alike.get(units, blocks))
            trace = self._trace(question, layout, self._observations.of(question)[1])
            trace = under(replace(trace, recomputed=units), {}, recomputed=units, offloaded=away)
            if plan is not None and not plan.provisional:
                choice = self._choice(strategy, plan, layout, trace, context)
                inputs = waiting_input_bytes(trace, strategy.offloaded_inputs)
                peak = max(warm_up or 0, plan.provisional_peak_bytes)
                return _Planned(strategy, layout, trace, choice.made(), context, choice, peak, inputs)
            seen = self._warm_up(strategy, layout, trace, context)
            warm_up = seen if warm_up is None else min(warm_up, seen)  # a run opens layers one by one, not all as here
            plan = strategy.plan(layout, trace)
            units, away = plan.rematerialise, plan.offload_inputs or frozenset()
        raise UnsupportedError(f"{strategy.name} does not come to a plan")

    def _choice(self, strategy: Strategy, plan: Plan, layout: Layout, trace: Trace, context: PlanningContext) -> AheadChoice:
        """Of a host that is as large as it is, also where the plan was made for a larger one."""
        host = self.question.host_memory // self.question.ranks_on_node
        allowed = None if strategy.runs_ahead else frozenset[int]()
        return AheadChoice(plan, layout, trace, replace(context, host_budget=host), strategy.offloaded_inputs, allowed)

    def _warm_up(self, strategy: Strategy, layout: Layout, trace: Trace, context: PlanningContext) -> int:
        """Peak of a step without a plan: the pool that is set aside beside what the step makes."""
        if not self._keeps_host_copies or context.allowance == EXACT:
            return 0
        settled = Residence(layout, context, unmovable(layout), strategy.update_rule).static_bytes
        share, plannable, allowance = strategy.warm_up_share, context.device_budget, context.allowance
        pool = allowance.warm_up_pool(settled, layout.movable_bytes, plannable, share)
        slab = allowance.slab(pool, layout.largest_movable_bytes, context.memory_for(plannable))
        return slab + max(trace.non_model_bytes)

    def _trace(self, question: Question, layout: Layout, work: MicroStepWork) -> Trace:
        seconds = interval_seconds(question.profile, question.dtype, ranks=question.ranks, expert_ranks=question.expert_ranks)
        return trace_of_work(work, layout, accumulate=question.accumulate, seconds=seconds)

    def _layout(self, strategy: Any, index: ModelIndex, context: PlanningContext) -> Layout:
        """As the runtime cuts it. Raises BudgetError if host and device together are too small."""
        layout: Layout = strategy.layout(index).named(index)
        if not self._keeps_host_copies:
            return layout
        kept = within_host(layout, context, strategy.update_rule)
        self._overflows = any(b.movable is not c.movable for b, c in zip(layout.bundles, kept.bundles, strict=True))
        return kept

    def at_first(self, planned: _Planned) -> int:
        """Bytes on the host before a plan has taken any state to the device."""
        return host_bytes(planned.layout, planned.context) + planned.inputs_away if self._keeps_host_copies else 0

    def host_need(self, planned: _Planned, schedule: Schedule) -> TierNeed:
        return host_need(
            schedule,
            ranks_on_node=self.question.ranks_on_node,
            have_bytes=self.question.host_memory,
            offloads=self._keeps_host_copies or planned.policy.offloads,
            inputs=planned.inputs_away,
            first=self.at_first(planned) if planned.cannot_begin else 0,
        )


def _least_budget(planner: _PlansByBudget) -> tuple[int, str | None]:
    """(smallest device budget with a plan, why the one asked for is not enough or None if it is).

    A policy refuses a budget with what it needs. It may find more to need once it has that, so it is asked again.
    """
    have = planner.question.device_memory
    enough = isinstance(planner.at(have), _Planned)
    budget, why = 1 if enough else have, None
    for _ in range(MAX_ROUNDS):
        found = planner.at(budget, any_plan=True)
        if isinstance(found, _Planned):
            return budget, why
        why = None if enough else str(found).replace(f"{format_size(found.have)} is given", f"{format_size(have)} is given")
        budget = max(found.need, budget + 1)
    raise UnsupportedError(f"no device memory is enough: {why}")
