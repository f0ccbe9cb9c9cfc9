"""Runs any plan on virtual lanes with a hardware profile: step time, memory, traffic, and what binds.

The operations, their order and their waits are those of `schedule.expand`, which the runtime, the validator and the timeline
share; here they get a clock. Several steps in a row are run, so that the optimizer's tail overlaps the next forward, until
one takes as long as the one before: that is the steady step.

Note [The host]
    The host issues what belongs to a moment when it gets there, each moment taking the profile's unit_event_s; it runs ahead
    of the device and waits once a step, for the norm, if updates wait for it. What it issues after the norm starts after it.
    Of several ranks it waits for the others too: Note [Exchanges] in rates.py.

Note [Bounds]
    No order of work can beat these. compute: what the compute lane does, tokens' way to experts of other ranks with it.
    host-dram: what CPU Adam and copies take of it; cpu-adam: Adam alone at its own rate. pcie: copies in either direction, and
    both together, or one after the other if they are one queue. disk: reads, writes, or both at once. link: all collectives,
    and what passes a port or a node's network beside them. issue: unit events on the host. norm: updates that wait for the
    norm lie between one backward and the next forward's end, so a step is at least the backward and all of these host updates;
    those that run ahead, and accumulators that are cleared for them, are no part of it.
    Updates that run K steps behind (Strategy.max_staleness) take the gradients of K + 1 steps at most. Their step is the longer
    of two, neither of which it beats: one whose updates on the host take no time, and the synchronous one over K + 1. So are
    disk and cpu-adam, and what the host's memory does for them is left out of host-dram. Events are the synchronous step's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from systems.planning.clock.clocks import BusySpan, TimedJob, run
from systems.planning.clock.perfetto import TimedEvent
from systems.planning.clock.rates import (
    DEVICE_LINK,
    DISK,
    HOST_DRAM,
    HOST_LINK,
    HOST_QUEUE,
    NETWORK,
    Costs,
    Rates,
    default_queues,
)
from systems.planning.hardware import HardwareProfile
from systems.planning.plan import COLLECTIVE, LaneKind, Plan, UpdateRule
from systems.planning.step.demand import in_order_of_use
from systems.planning.step.operations import ScheduledOperation, Work
from systems.planning.step.schedule import Schedule
from systems.planning.step.timeline import MemTimeline, timeline_of
from systems.planning.trace import Phase, Trace

STEPS = (3, 6, 12)  # in a row, until the last two take equally long
EXCHANGES = 2  # a step
EXCHANGE = "exchange"  # of tokens, in `Simulation.bytes`: they go in compute's time
STEADY = 1e-6  # relative difference of two steps that are equally long


@dataclass(frozen=True)
class Simulation:
    """One steady step of one rank.

    events: of that step, from its begin; what it leaves for the next is there with its own times.
    busy_s, bytes: per lane, and EXCHANGE; of a collective the bytes that pass a device's port. bounds_s: see Note [Bounds].
    memory: of the plan's timeline.
    """

    step_time_s: float
    events: tuple[TimedEvent, ...]
    busy_s: Mapping[str, float]
    bytes: Mapping[str, int]
    bounds_s: Mapping[str, float]
    memory: MemTimeline

    @cached_property
    def bound(self) -> str:
        """The name of the highest bound."""
        return max(self.bounds_s, key=lambda name: self.bounds_s[name])


def simulation_of(
    schedule: Schedule, trace: Trace, plan: Plan, profile: HardwareProfile, *, ranks: int | None = None
) -> Simulation:
    """One steady step of a valid plan. One that can never end raises CircularWaitError; the validator says why.

    ranks: that take part, where each has all states and the schedule was made as for one of them; None: the schedule's own.
    """
    costs = costs_of(schedule, profile, ranks)
    timed = clocked(schedule.operations, len(trace), costs)
    events = tuple(
        TimedEvent(_lane(operation), operation.label, span.start_s, span.end_s - span.start_s)
        for operation, span in timed.operations
    )
    step_time_s, bounds_s = timed.step_time_s, _bounds(timed.work, trace, plan, costs)
    most = schedule.residence.layout.max_staleness
    if most:
        free = clocked([_unread(o) for o in schedule.operations], len(trace), _UpdatesForNothing(**vars(costs)))
        step_time_s = max(free.step_time_s, step_time_s / (most + 1))
        merged = {name: seconds / (most + 1) for name, seconds in bounds_s.items() if name in ("disk", "cpu-adam")}
        bounds_s = _bounds(free.work, trace, plan, costs) | merged
    return Simulation(
        step_time_s=step_time_s,
        events=events,
        busy_s=_busy(events),
        bytes=_moved(timed.work, costs),
        bounds_s=bounds_s,
        memory=timeline_of(schedule, trace),
    )


def _unread(operation: ScheduledOperation) -> ScheduledOperation:
    """The same, with nothing of states on the disk."""
    return operation._replace(bytes=0) if operation.kind in (Work.READ_STATE, Work.WRITE_STATE) else operation


@dataclass(frozen=True)
class _UpdatesForNothing(Costs):
    def host_bytes(self, operation: ScheduledOperation) -> int:
        return 0 if operation.kind is Work.UPDATE else super().host_bytes(operation)


def step_time_of(schedule: Schedule, profile: HardwareProfile) -> float:
    """Simulation.step_time_s alone."""
    return clocked(schedule.operations, len(schedule.demand), costs_of(schedule, profile)).step_time_s


def costs_of(schedule: Schedule, profile: HardwareProfile, ranks: int | None = None) -> Costs:
    residence = schedule.residence
    rates = Rates(profile, residence.context.ranks if ranks is None else ranks)
    updates = in_order_of_use((b.index for b in residence.layout.bundles if b.trainable), schedule.demand)
    return Costs(
        residence.layout,
        residence.context,
        rates,
        default_queues(one_copy_queue=schedule.one_copy_queue),
        {bundle: place for place, bundle in enumerate(updates)},
    )


@dataclass(frozen=True)
class TimedStep:
    """One steady step of given operations. operations: those that take time, with when they run, from the step's begin.

    work: of the step, with the jobs they became.
    """

    step_time_s: float
    operations: tuple[tuple[ScheduledOperation, BusySpan], ...]
    work: tuple[tuple[ScheduledOperation, TimedJob], ...]


def clocked(operations: Sequence[ScheduledOperation], moments: int, costs: Costs) -> TimedStep:
    """Give the operations of a steady step, waits and all, a clock. moments: of the step."""
    for steps in STEPS:
        run_steps = _Steps(operations, moments, costs, steps)
        spans = run(run_steps.jobs, costs.rates.resources())
        ends = run_steps.ends(spans)
        step_time_s = _period(ends, steps - 2, steps - 1)
        if abs(step_time_s - _period(ends, steps - 3, steps - 2)) <= STEADY * step_time_s:
            break
    else:
        step_time_s = _period(ends, steps // 2 - 1, steps - 1)
    return TimedStep(step_time_s, tuple(run_steps.timed(spans)), tuple(run_steps.one_step()))


def _period(ends: Sequence[Mapping[str, float]], first: int, last: int) -> float:
    """Mean time of the steps after `first` up to `last`, of the queue that takes longest: so never less than its work."""
    return max((ends[last][queue] - ends[first][queue]) / (last - first) for queue in ends[last])


class _Steps:
    """The jobs of several steps in a row, step by step: the host's moments and the operations on lanes, in issue order."""

    def __init__(self, operations: Sequence[ScheduledOperation], moments: int, costs: Costs, steps: int) -> None:
        self._operations = [(o, costs.job(o, ())) for o in operations if o.lane is not None]
        event_s, heard = costs.rates.profile.unit_event_s.value, exchanged(operations)
        self._events = [TimedJob(HOST_QUEUE, fixed_s=event_s)] * (moments - 1)
        self._events.append(TimedJob(HOST_QUEUE, fixed_s=event_s + heard * costs.rates.link.exchange_s))
        self.jobs: list[TimedJob] = []
        self._shown: list[tuple[int, ScheduledOperation]] = []  # (job, operation) of the last step
        self._firsts: list[int] = []
        self._writer: dict[str, int] = {}
        self._readers: dict[str, list[int]] = {}
        before: dict[int, int] = {}
        for _ in range(steps):
            before = self._add_step(before)

    def _add_step(self, before: Mapping[int, int]) -> dict[int, int]:
        """before: ticket to job of the step before. The same of this step."""
        self._firsts.append(len(self.jobs))
        now: dict[int, int] = {}
        self._shown = []
        moment, host, last = -1, -1, len(self._events) - 1
        for operation, job in self._operations:
            while moment < operation.moment:
                moment += 1
                host = len(self.jobs)
                self.jobs.append(self._events[moment])
            waits = [now[t] for t in (*operation.waits, *operation.room_waits) if t in now]
            waits += [before[t] for t in operation.previous_waits if t in before]
            number = len(self.jobs)
            if operation.lane is LaneKind.CPU:
                waits += self._on_cpu(operation, number)
            self.jobs.append(job._replace(waits=(*waits, host)))
            if operation.kind is Work.NORM:
                host = number
            now[operation.ticket] = number
            self._shown.append((number, operation))
        while moment < last:
            moment += 1
            self.jobs.append(self._events[moment])
        return now

    def _on_cpu(self, operation: ScheduledOperation, number: int) -> list[int]:
        """What it waits for on its own lane: a schedule leaves that to the lane's order, which priorities change."""
        names = (*operation.reads, *operation.writes)
        waits = [self._writer[name] for name in names if name in self._writer]
        for name in operation.writes:
            waits += self._readers.pop(name, [])
            self._writer[name] = number
        for name in operation.reads:
            self._readers.setdefault(name, []).append(number)
        return [other for other in waits if other != number]

    def ends(self, spans: list[BusySpan]) -> list[dict[str, float]]:
        """Per step and queue when its last job is done."""
        edges = [*self._firsts, len(self.jobs)]
        found: list[dict[str, float]] = []
        for begin, end in pairwise(edges):
            last: dict[str, float] = {}
            for job, span in zip(self.jobs[begin:end], spans[begin:end], strict=True):
                last[job.queue] = max(span.end_s, last.get(job.queue, 0.0))
            found.append(last)
        return found

    def one_step(self) -> list[tuple[ScheduledOperation, TimedJob]]:
        return [(operation, self.jobs[number]) for number, operation in self._shown]

    def timed(self, spans: list[BusySpan]) -> Iterator[tuple[ScheduledOperation, BusySpan]]:
        """Of the last step; operations of no length are left out."""
        first = min(spans[number].start_s for number, _ in self._shown)
        for number, operation in self._shown:
            span = spans[number]
            if span.end_s > span.start_s:
                yield operation, BusySpan(span.start_s - first, span.end_s - first)


def exchanged(operations: Sequence[ScheduledOperation]) -> int:
    """How often ranks tell each other something when a step is issued: see Note [Exchanges] in rates.py."""
    return EXCHANGES - any(operation.kind is Work.NORM for operation in operations)


def _lane(operation: ScheduledOperation) -> str:
    assert operation.lane is not None
    return HOST_QUEUE if operation.kind is Work.NORM else operation.lane.value


def _busy(events: tuple[TimedEvent, ...]) -> dict[str, float]:
    busy: dict[str, float] = {}
    for event in events:
        busy[event.lane] = busy.get(event.lane, 0.0) + event.duration_s
    return busy


def _moved(work: Sequence[tuple[ScheduledOperation, TimedJob]], costs: Costs) -> dict[str, int]:
    """Bytes per lane of what moves between memories."""
    moved: dict[str, int] = {}
    for operation, _ in work:
        if operation.bytes:
            lane = EXCHANGE if operation.kind is Work.COMPUTE else _lane(operation)
            moved[lane] = moved.get(lane, 0) + costs.payload(operation)
    return moved


def _bounds(work: Sequence[tuple[ScheduledOperation, TimedJob]], trace: Trace, plan: Plan, costs: Costs) -> dict[str, float]:
    """See Note [Bounds]. Seconds; those of what a step does not use are left out."""
    compute: list[float] = [0.0] * len(trace)
    claimed: dict[str, float] = {}
    copied: dict[LaneKind, float] = {}
    stored: dict[LaneKind, float] = {}
    updated = after_norm = collected = 0.0
    for operation, job in work:
        lane = operation.lane
        alone_s = job.flow_bytes / job.rate if job.rate else 0.0
        if lane is LaneKind.COMPUTE:
            compute[operation.moment] += job.fixed_s + alone_s
        for claim in job.claims:
            claimed[claim.resource] = claimed.get(claim.resource, 0.0) + job.flow_bytes * claim.units
        if lane in COLLECTIVE:
            collected += job.fixed_s + alone_s
        elif lane in (LaneKind.H2D, LaneKind.D2H):
            copied[lane] = copied.get(lane, 0.0) + alone_s
        elif lane in (LaneKind.DISK_READ, LaneKind.DISK_WRITE):
            stored[lane] = stored.get(lane, 0.0) + alone_s
        elif lane is LaneKind.CPU:
            updated += alone_s
            after_norm += alone_s if operation.kind is Work.UPDATE else 0.0
    resources = costs.rates.resources()
    shared = {name: size / resources[name].capacity for name, size in claimed.items()}
    bounds = {
        "compute": sum(compute),
        "host-dram": shared.get(HOST_DRAM, 0.0),
        "cpu-adam": updated,
        "pcie": max([shared.get(HOST_LINK, 0.0), *([sum(copied.values())] if plan.one_copy_queue else copied.values())]),
        "disk": max([shared.get(DISK, 0.0), *stored.values()]),
        "link": max(collected, shared.get(DEVICE_LINK, 0.0), shared.get(NETWORK, 0.0)),
        "issue": len(trace) * costs.rates.profile.unit_event_s.value + EXCHANGES * costs.rates.link.exchange_s,
    }
    if plan.update_rule is UpdateRule.AFTER_NORM and after_norm:
        turn = next((m for m, entering in enumerate(trace.moments) if entering.phase is Phase.BACKWARD_ENTER), 0)
        step_end = len(trace) - 1
        bounds["norm"] = after_norm + sum(compute[turn:step_end])
    return {name: seconds for name, seconds in bounds.items() if seconds}
