"""Virtual lanes: jobs on queues, some of them bytes that flow through resources which several jobs share.

A queue runs one job at a time: in order, or, where jobs have a priority, the lowest of those that are ready. A job starts
when it is its queue's turn and all it waits for is done; it takes its fixed time first, then its bytes flow.

Note [Sharing]
    A flow alone moves at its own rate. Where flows together would take more of a resource than it has, each is slowed in
    proportion to what it would take alone. A resource may have a favoured side: that side gets at least its share of the
    resource, and whatever the others leave; within each side proportion rules. A flow through several resources moves at the
    slowest. Rates change only when a flow begins or ends.

    Where it was measured what flows do to each other, that rules instead (`beside`): which part of its own rate each keeps, by
    which of them run. If others that nobody measured flow as well, the lower of both counts.

    More of a resource helps whoever shares it. A higher rate of one flow alone does so at the others' cost, as on a real
    machine: a step that waits for them can then take a little longer.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Beside = Mapping[frozenset[str], Mapping[str, float]]


@dataclass(frozen=True)
class SharedResource:
    """capacity: units a second. favoured_share: of the flows that claim it as favoured, see Note [Sharing]; 0: nobody is.
    beside: measured flows that run together, by name, and the part of its own rate that each keeps.
    """

    capacity: float
    favoured_share: float = 0.0
    beside: Beside = field(default_factory=dict)


@dataclass(frozen=True)
class Claim:
    """units: of the resource, for each byte that flows. measured_as: the flow's name in `beside`; empty: it has none."""

    resource: str
    units: float = 1.0
    favoured: bool = False
    measured_as: str = ""


class TimedJob(NamedTuple):
    """waits: numbers of jobs. rate: bytes a second when alone. priority: None on queues that keep their order."""

    queue: str
    waits: tuple[int, ...] = ()
    fixed_s: float = 0.0
    flow_bytes: float = 0.0
    rate: float = 0.0
    claims: tuple[Claim, ...] = ()
    priority: int | None = None


class BusySpan(NamedTuple):
    start_s: float
    end_s: float


class CircularWaitError(ValueError):
    """Jobs that wait for each other can never run."""


def run(jobs: Sequence[TimedJob], resources: Mapping[str, SharedResource]) -> list[BusySpan]:
    """When each job runs. O(jobs x queues)."""
    return _VirtualRun(jobs, resources).spans()


@dataclass(slots=True)
class _Active:
    """left: bytes. rate: at which they flow now; 0 while its fixed time runs."""

    number: int
    started_s: float
    fixed_until_s: float
    left: float
    rate: float = 0.0


@dataclass(slots=True)
class _Queue:
    """waiting: job numbers in order. ready: heap of (priority, number) of jobs whose waits are over, without their turn."""

    waiting: deque[int] = field(default_factory=deque)
    ready: list[tuple[int, int]] = field(default_factory=list)
    active: _Active | None = None


class _VirtualRun:
    def __init__(self, jobs: Sequence[TimedJob], resources: Mapping[str, SharedResource]) -> None:
        self._jobs, self._resources = jobs, resources
        self._now = 0.0
        self._spans: list[BusySpan | None] = [None] * len(jobs)
        self._missing = [0] * len(jobs)
        self._waiters: list[list[int]] = [[] for _ in jobs]
        self._queues = {job.queue: _Queue() for job in jobs}
        self._active: list[_Active] = []  # in the order of the queues
        for number, job in enumerate(jobs):
            waits = set(job.waits)
            self._missing[number] = len(waits)
            for other in waits:
                self._waiters[other].append(number)
            queue = self._queues[job.queue]
            if job.priority is None:
                queue.waiting.append(number)
            elif not waits:
                heapq.heappush(queue.ready, (job.priority, number))

    def spans(self) -> list[BusySpan]:
        self._start()
        self._set_rates()
        while self._active:
            self._advance()
        found = [span for span in self._spans if span is not None]
        if len(found) < len(self._jobs):
            stuck = next(number for number, span in enumerate(self._spans) if span is None)
            raise CircularWaitError(f"job {stuck} on queue {self._jobs[stuck].queue} waits for ever")
        return found

    def _start(self) -> bool:
        """Whatever can; True if some of it flows at once."""
        self._active, flows = [], False
        for queue in self._queues.values():
            if queue.active is None:
                if queue.waiting and not self._missing[queue.waiting[0]]:
                    number = queue.waiting.popleft()
                elif queue.ready:
                    number = heapq.heappop(queue.ready)[1]
                else:
                    continue
                job = self._jobs[number]
                queue.active = _Active(number, self._now, self._now + job.fixed_s, job.flow_bytes)
                flows = flows or (job.flow_bytes > 0 and queue.active.fixed_until_s <= self._now)
            self._active.append(queue.active)
        return flows

    def _advance(self) -> None:
        """On to the next moment at which something begins to flow or ends."""
        now, active = self._now, self._active
        ends = [now + one.left / one.rate if one.rate else one.fixed_until_s for one in active]
        self._now = then = min(ends)
        over, changed = [], False  # rates stay as they are while no flow begins or ends
        for one, end in zip(active, ends, strict=True):
            if one.rate:
                one.left = 0.0 if end <= then else one.left - one.rate * (then - now)
            if one.fixed_until_s <= then:
                ends_now, flowed = one.left <= 0, one.rate > 0
                if ends_now:
                    over.append(one)
                changed = changed or ends_now == flowed
        for one in over:
            self._finish(one)
        if over:
            changed = self._start() or changed
        if changed:
            self._set_rates()

    def _finish(self, one: _Active) -> None:
        self._queues[self._jobs[one.number].queue].active = None
        self._spans[one.number] = BusySpan(one.started_s, self._now)
        for number in self._waiters[one.number]:
            self._missing[number] -= 1
            job = self._jobs[number]
            if not self._missing[number] and job.priority is not None:
                heapq.heappush(self._queues[job.queue].ready, (job.priority, number))

    def _set_rates(self) -> None:
        """Of all that flows, see Note [Sharing]."""
        flows = [one for one in self._active if one.left > 0 and one.fixed_until_s <= self._now]
        demand: dict[tuple[str, bool], float] = {}
        names: dict[str, set[str]] = {}
        for flow in flows:
            job = self._jobs[flow.number]
            for claim in job.claims:
                side = (claim.resource, claim.favoured)
                demand[side] = demand.get(side, 0.0) + job.rate * claim.units
                names.setdefault(claim.resource, set()).add(claim.measured_as)
        factors = {side: self._factor(side, demand) for side in demand}
        for flow in flows:
            job = self._jobs[flow.number]
            kept = (self._kept(c, names[c.resource], factors[c.resource, c.favoured]) for c in job.claims)
            flow.rate = job.rate * min(kept, default=1.0)

    def _kept(self, claim: Claim, names: set[str], factor: float) -> float:
        """Of its own rate. names: of all that flows there now. factor: by the resource's capacity."""
        beside = self._resources[claim.resource].beside
        together = beside.get(frozenset(names - {""}))
        if together is None:
            return factor
        measured = together.get(claim.measured_as, 1.0)
        return min(measured, factor) if "" in names else measured

    def _factor(self, side: tuple[str, bool], demand: Mapping[tuple[str, bool], float]) -> float:
        name, favoured = side
        resource = self._resources[name]
        mine, theirs = demand[side], demand.get((name, not favoured), 0.0)
        if mine + theirs <= resource.capacity:
            return 1.0
        if not resource.favoured_share:
            return resource.capacity / (mine + theirs)
        share = resource.favoured_share if favoured else 1 - resource.favoured_share
        got = max(share * resource.capacity, resource.capacity - theirs)
        return min(1.0, got / mine)
