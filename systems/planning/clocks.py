"""Virtual lanes: jobs on queues, some of them bytes that flow through resources which several jobs share.

A queue runs one job at a time: in order, or, where jobs have a priority, the lowest of those that are ready. A job starts
when it is its queue's turn and all it waits for is done; it takes its fixed time first, then its bytes flow.

Note [Sharing]
    A flow alone moves at its own rate. Where flows together would take more of a resource than it has, each is slowed in
    proportion to what it would take alone. A resource may have a favoured side: that side gets at least its share of the
    resource, and whatever the others leave; within each side proportion rules. A flow through several resources moves at the
    slowest. Rates change only when a flow begins or ends.

    More of a resource helps whoever shares it. A higher rate of one flow alone does so at the others' cost, as on a real
    machine: a step that waits for them can then take a little longer.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Resource:
    """capacity: units a second. favoured_share: of the flows that claim it as favoured, see Note [Sharing]; 0: nobody is."""

    capacity: float
    favoured_share: float = 0.0


@dataclass(frozen=True)
class Claim:
    """units: of the resource, for each byte that flows."""

    resource: str
    units: float = 1.0
    favoured: bool = False


@dataclass(frozen=True)
class Job:
    """waits: numbers of jobs. rate: bytes a second when alone. priority: None on queues that keep their order."""

    queue: str
    waits: tuple[int, ...] = ()
    fixed_s: float = 0.0
    flow_bytes: float = 0.0
    rate: float = 0.0
    claims: tuple[Claim, ...] = ()
    priority: int | None = None


@dataclass(frozen=True)
class Span:
    start_s: float
    end_s: float


class CircularWaitError(ValueError):
    """Jobs that wait for each other can never run."""


def run(jobs: Sequence[Job], resources: Mapping[str, Resource]) -> list[Span]:
    """When each job runs. O(jobs x queues)."""
    return _Run(jobs, resources).spans()


@dataclass
class _Active:
    number: int
    started_s: float
    fixed_until_s: float
    left: float
    rate: float = 0.0

    def flows(self, now: float) -> bool:
        return self.fixed_until_s <= now and self.left > 0


@dataclass
class _Queue:
    """waiting: job numbers in order. ready: heap of (priority, number) of jobs whose waits are over, without their turn."""

    waiting: deque[int] = field(default_factory=deque)
    ready: list[tuple[int, int]] = field(default_factory=list)
    active: _Active | None = None


class _Run:
    def __init__(self, jobs: Sequence[Job], resources: Mapping[str, Resource]) -> None:
        self._jobs, self._resources = jobs, resources
        self._now = 0.0
        self._spans: list[Span | None] = [None] * len(jobs)
        self._missing = [len(set(job.waits)) for job in jobs]
        self._waiters: list[list[int]] = [[] for _ in jobs]
        self._queues: dict[str, _Queue] = {}
        for number, job in enumerate(jobs):
            queue = self._queues.setdefault(job.queue, _Queue())
            if job.priority is None:
                queue.waiting.append(number)
            elif not self._missing[number]:
                heapq.heappush(queue.ready, (job.priority, number))
            for other in set(job.waits):
                self._waiters[other].append(number)

    def spans(self) -> list[Span]:
        self._start(self._queues.values())
        while active := [q.active for q in self._queues.values() if q.active is not None]:
            self._advance(active)
        found = [span for span in self._spans if span is not None]
        if len(found) < len(self._jobs):
            stuck = next(number for number, span in enumerate(self._spans) if span is None)
            raise CircularWaitError(f"job {stuck} on queue {self._jobs[stuck].queue} waits for ever")
        return found

    def _start(self, queues: Iterable[_Queue]) -> None:
        for queue in queues:
            if queue.active is not None:
                continue
            if queue.waiting and not self._missing[queue.waiting[0]]:
                number = queue.waiting.popleft()
            elif queue.ready:
                number = heapq.heappop(queue.ready)[1]
            else:
                continue
            job = self._jobs[number]
            queue.active = _Active(number, self._now, self._now + job.fixed_s, job.flow_bytes)

    def _advance(self, active: list[_Active]) -> None:
        """On to the next moment at which something begins to flow or ends."""
        flows = [a for a in active if a.flows(self._now)]
        self._set_rates(flows)
        ends = [self._now + a.left / a.rate if a.rate else a.fixed_until_s for a in active]
        then = min(ends)
        for one, end in zip(active, ends, strict=True):
            if one.rate:
                one.left = 0.0 if end <= then else one.left - one.rate * (then - self._now)
                one.rate = 0.0
        self._now = then
        for queue in self._queues.values():
            running = queue.active
            if running is not None and running.fixed_until_s <= then and running.left <= 0:
                self._finish(queue, running)
        self._start(self._queues.values())

    def _finish(self, queue: _Queue, one: _Active) -> None:
        queue.active = None
        self._spans[one.number] = Span(one.started_s, self._now)
        for number in self._waiters[one.number]:
            self._missing[number] -= 1
            job = self._jobs[number]
            if not self._missing[number] and job.priority is not None:
                heapq.heappush(self._queues[job.queue].ready, (job.priority, number))

    def _set_rates(self, flows: Sequence[_Active]) -> None:
        """See Note [Sharing]."""
        demand: dict[tuple[str, bool], float] = {}
        for flow in flows:
            job = self._jobs[flow.number]
            for claim in job.claims:
                side = (claim.resource, claim.favoured)
                demand[side] = demand.get(side, 0.0) + job.rate * claim.units
        factors = {side: self._factor(side, demand) for side in demand}
        for flow in flows:
            job = self._jobs[flow.number]
            flow.rate = job.rate * min((factors[c.resource, c.favoured] for c in job.claims), default=1.0)

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
