"""Which updates on the host run ahead of the norm: all, or as few as make the step as short as all that there is room for.

Any strategy's plan is given them in the same way, once it is made. An update that runs ahead writes its bundle's second
version, which takes host memory that nothing else wants under the plan. States that are on the device have left their place at
home, and get it back when they come: second versions go then.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from systems.planning import hardware
from systems.planning.clock.simulator import step_time_of
from systems.planning.hardware import HardwareProfile
from systems.planning.layout import PAGE, Layout
from systems.planning.plan import Plan, UpdateRule
from systems.planning.policy.homes import host_need, waiting_input_bytes
from systems.planning.policy.windows import under
from systems.planning.step.demand import Demand, demand_of
from systems.planning.step.residence import Residence, second_version_bytes
from systems.planning.step.running_ahead import hindrance, last_flushes
from systems.planning.step.schedule import Schedule, expand
from systems.planning.step.validator import check_ahead, check_waits
from systems.planning.strategy import UNLIMITED, PlanningContext
from systems.planning.trace import Trace

NEAR = 1.005  # of two simulated steps that are taken to be equally long
SLOWER = 2 / 3  # steps that wait for the norm took 1.41 to 1.73 s of the same work on machines of one kind


@dataclass(frozen=True)
class AheadChoice:
    """A plan with nothing ahead, and which of its updates could be. offloaded: Strategy.offloaded_inputs.

    Times are those of the trace under the plan's switches, on context.hardware or on the shipped profile of its device.
    """

    plan: Plan
    layout: Layout
    trace: Trace
    context: PlanningContext
    offloaded: frozenset[int] = frozenset()
    allowed: frozenset[int] | None = None

    @cached_property
    def eligible(self) -> tuple[int, ...]:
        """Bundles whose updates can run ahead, in the order of their flushes: the earlier, the more of backward is left."""
        if self.plan.update_rule is not UpdateRule.AFTER_NORM or self.plan.provisional or self.context.any_plan:
            return ()
        if self.layout.on_disk:
            return ()
        flushes = last_flushes(self.trace, self.context.accumulate)
        found = [b for b in flushes if not hindrance(b, flushes, self._residence, self._demand)]
        return tuple(b for b in found if self.allowed is None or b in self.allowed)

    @cached_property
    def spare_bytes(self) -> int:
        """Of this rank's host, for second versions; below zero where even the first ones do not fit."""
        units = self.offloaded | self.trace.offloaded | (self.plan.offload_inputs or frozenset())
        waiting = waiting_input_bytes(self.trace, units)
        return self.context.host_budget - host_need(self.layout, self.context) + _left_behind(self._residence) - waiting

    @property
    def wants_memory(self) -> bool:
        """What would run ahead is held back by the host's memory alone: there is not enough for any of it."""
        if self.allowed is not None or not self.eligible:
            return False
        least = min(self.nbytes(frozenset({bundle})) for bundle in self.eligible)
        return least > self.spare_bytes and bool(self.within(UNLIMITED))

    def nbytes(self, bundles: frozenset[int]) -> int:
        """Of this rank's host, for second versions."""
        return second_version_bytes(self.layout, self.context, bundles)

    def share(self, ahead: frozenset[int]) -> float:
        """Of the trained parameters that the host updates, those in these bundles."""
        host = [b for b in self.layout.bundles if b.trainable and b.index not in self._residence.on_device]
        return sum(b.numel for b in host if b.index in ahead) / max(1, sum(b.numel for b in host))

    def within(self, nbytes: int) -> frozenset[int]:
        """All, where their second versions take so many bytes at most and the step is shorter by it; else the fewest that make
        it as short as can be with so many, on a host as fast as its profile says and on a slower one.

        Without a profile there is no telling, and it is all that fit.
        """
        fitting = [self._fitting(order, nbytes) for order in _orders(self.eligible)]
        if self.profile is None or not fitting[0]:
            return frozenset(fitting[0])
        weighed_s = self._simulated.weighed_s
        enough = NEAR * min(weighed_s(frozenset(each)) for each in fitting)
        if weighed_s(frozenset()) <= enough:
            return frozenset()
        if len(fitting[0]) == len(self.eligible):
            return frozenset(self.eligible)  # memory that nobody wants is better spent on a slow hour than kept
        found: list[int] | None = None
        for each in fitting:
            fewer = each if found is None else self._fitting(each, self.nbytes(frozenset(found)) - 1)
            if weighed_s(frozenset(fewer)) <= enough:
                found = fewer[: bisect_left(range(len(fewer)), True, key=_prefix_is(weighed_s, fewer, enough))]
        assert found is not None, "the order with the shortest step is enough"
        return frozenset(found)

    def _fitting(self, order: Sequence[int], nbytes: int) -> list[int]:
        """Of that order all that fit beside those before."""
        fitting: list[int] = []
        for bundle in order:
            if self.nbytes(frozenset((*fitting, bundle))) <= nbytes:
                fitting.append(bundle)
        return fitting

    def step_time_s(self, ahead: frozenset[int]) -> float:
        """Simulated, with these updates ahead. There is a profile."""
        return self._simulated.seconds(ahead)[0]

    @cached_property
    def _simulated(self) -> _Simulated:
        assert self.profile is not None
        return _Simulated(self._schedule, self.profile)

    def made(self) -> Plan:
        """The plan with what the spare memory has room for."""
        ahead = self.within(self.spare_bytes)
        if not ahead:
            return self.plan
        seconds = self.plan.predicted_step_time_s if self.profile is None else self.step_time_s(ahead)
        plan, schedule = replace(self.plan, ahead=ahead, predicted_step_time_s=seconds), self._schedule(ahead)
        check_ahead(self._trace, plan, schedule)
        check_waits(self._trace, schedule)
        assert schedule.residence.host_bytes <= self.context.host_budget
        return plan

    @cached_property
    def profile(self) -> HardwareProfile | None:
        if self.context.hardware is not None or self.context.device_name is None:
            return self.context.hardware
        name = hardware.of_device(self.context.device_name)
        return None if name is None else hardware.load(name)

    def _schedule(self, ahead: frozenset[int]) -> Schedule:
        return expand(self.layout, self._trace, replace(self.plan, ahead=ahead), self.context)

    @cached_property
    def _trace(self) -> Trace:
        """Of a step under the plan's switches, but for its memory."""
        units = self.plan.rematerialise
        if units is None or units >= self.trace.recomputed:
            return self.trace
        kept = dict.fromkeys(self.trace.recomputed, 0)
        return under(self.trace, kept, recomputed=units & self.trace.recomputed, offloaded=self.trace.offloaded)

    @cached_property
    def _demand(self) -> Demand:
        return demand_of(self.layout, self.trace, self.context, self.plan.in_place, self.plan.staying)

    @cached_property
    def _residence(self) -> Residence:
        plan = self.plan
        kept = plan.staying
        return Residence.of(self.layout, self.context, plan.optimizer_tier, plan.update_rule, plan.in_place, staying=kept)


def weighed_s(choice: AheadChoice) -> float:
    """Of the shortest step with what fits the spare memory, on both hosts as `within` weighs it. There is a profile."""
    fitting = [choice._fitting(order, choice.spare_bytes) for order in _orders(choice.eligible)]
    return min(choice._simulated.weighed_s(frozenset(each)) for each in ([], *fitting))


class _Simulated:
    """Step times of a plan with some updates ahead, each simulated once: at the profile's rates, and with a slower host."""

    def __init__(self, schedule: Callable[[frozenset[int]], Schedule], profile: HardwareProfile) -> None:
        self._schedule, self._profiles = schedule, (profile, slowed(profile))
        self._known: dict[frozenset[int], tuple[float, float]] = {}

    def seconds(self, ahead: frozenset[int]) -> tuple[float, float]:
        if ahead not in self._known:
            schedule = self._schedule(ahead)
            usual, slower = (step_time_of(schedule, profile) for profile in self._profiles)
            self._known[ahead] = usual, slower
        return self._known[ahead]

    def weighed_s(self, ahead: frozenset[int]) -> float:
        """Both count alike."""
        return sum(self.seconds(ahead)) / 2


def _left_behind(residence: Residence) -> int:
    """Bytes that the machine has again, of states on the device whose home is the host: all whole pages in them."""
    layout = residence.layout
    moved = (b for b in map(layout.bundles.__getitem__, residence.on_device) if b.movable and b.trainable)
    segments = [layout.segments[s] for b in moved for s in b.segments]
    pages = sum(max(0, 4 * s.shard_numel + 1 - PAGE) // PAGE for s in segments)  # of one part, wherever it begins
    return pages * PAGE * residence.context.optimizer_itemsize // 4


def slowed(profile: HardwareProfile) -> HardwareProfile:
    """A host that updates at SLOWER times the profile's rate, as one does that has neighbours."""
    rates = {name: getattr(profile, name) for name in ("cpu_adam_bytes_per_s", "host_dram_bytes_per_s")}
    return profile.model_copy(
        update={name: rate.model_copy(update={"value": SLOWER * rate.value}) for name, rate in rates.items()}
    )


def _orders(flushed: Sequence[int]) -> Sequence[Sequence[int]]:
    """In which bundles are taken, out of the order of their flushes: those that are flushed first, which have the longest time
    until the norm; those that the next step uses first, so that what waits has its forward to be updated in; those between.
    """
    middle = (len(flushed) - 1) / 2
    between = sorted(range(len(flushed)), key=lambda place: abs(place - middle))
    return flushed, flushed[::-1], [flushed[place] for place in between]


def _prefix_is(step_time_s: Callable[[frozenset[int]], float], order: list[int], enough: float) -> Callable[[int], bool]:
    """Whether so many of an order make the step as short as that."""
    return lambda count: step_time_s(frozenset(order[:count])) <= enough
