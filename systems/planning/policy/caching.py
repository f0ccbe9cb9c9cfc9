"""Belady with prefetching over a repeating step: which bundle is fetched and let go of at which moment.

The rules are those of optimal prefetching (Cao et al. 1995, "aggressive"): fetch the next missing bundle in order of
use; let go of the one used farthest in the future; do no harm, that is, never let go of one that is used before the
fetched one; fetch at the first opportunity. With prefetch 0 what remains is Belady's demand paging.

A strategy says how much room there is at each moment; this returns operations. It knows nothing of optimizers or tiers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from systems.planning.plan import Operation, OpKind, PlannedOperation
from systems.planning.step.belady import NEVER
from systems.planning.step.demand import Demand, Span
from systems.planning.step.profiles import Profile
from systems.planning.strategy import Eviction

MAX_ROUNDS = 6  # a step's end state is found again within one or two; beyond this the step starts empty


@dataclass(frozen=True)
class CacheRequest:
    """sizes: bytes of the bundles to manage, all of which come and go. room: bytes for them, one entry a moment. sharded: those
    whose shard stays as the rest goes.

    room must hold what is held at every moment. prefetch: bundles that may be fetched ahead of their use.
    evict: DROP, or WRITE_BACK where there is no master shard. order: who goes where room is needed, in place of Belady's rule;
    with prefetch 0 the operations until a moment then depend on nothing that comes after it, but for where a step begins.
    """

    demand: Demand
    sizes: Mapping[int, int]
    room: Sequence[int]
    prefetch: int
    evict: OpKind = OpKind.DROP
    sharded: frozenset[int] = frozenset()
    order: Eviction | None = None


@dataclass(frozen=True)
class CachePlan:
    """resident: managed bundles on the device at the start of a steady step, and again at its end."""

    operations: tuple[PlannedOperation, ...]
    resident: frozenset[int]


def demanding(operations: Sequence[PlannedOperation]) -> frozenset[int]:
    """Moments at which something is fetched. As barriers they are demand paging as a hook in the program has it: a fetch begins
    when all that was computed before has ended, and not as soon as a lane and room are free.
    """
    return frozenset(p.trigger for p in operations if p.operation.kind is OpKind.FETCH)


def plan_cache(request: CacheRequest) -> CachePlan:
    """Steps are simulated until one ends as it began."""
    start: frozenset[int] = frozenset()
    for _ in range(MAX_ROUNDS):
        step = _CachedStep(request, start)
        step.run()
        if step.resident == start:
            break
        start = frozenset(step.resident)
    else:
        start = frozenset()
        step = _CachedStep(request, start)
        step.run(empty_at_end=True)
    return CachePlan(tuple(step.operations), start)


class _CachedStep:
    """One step through the cache."""

    def __init__(self, request: CacheRequest, start: frozenset[int]) -> None:
        self.demand, self.sizes, self.room = request.demand, request.sizes, request.room
        self._prefetch_depth, self._evict_kind, self._sharded = request.prefetch, request.evict, request.sharded
        self._order = request.order
        self.resident = set(start)
        self.used = sum(self.sizes[b] for b in start)
        self.operations: list[PlannedOperation] = []
        self.moments = len(self.demand)
        self._uses = [(m, b) for m, bundles in enumerate(self.demand.demanded) for b in bundles if b in self.sizes]
        self._blocked: dict[int, int] = {}  # bundle to the moment until which it cannot be fetched ahead
        self._priority = 0

    def run(self, *, empty_at_end: bool = False) -> None:
        for moment in range(self.moments):
            self._priority = 0
            for bundle in self.demand.stale[moment]:
                if bundle in self.resident:
                    self.resident.remove(bundle)
                    self.used -= self.sizes[bundle]
            held = set(self.demand.held[moment])
            wanted = [b for b in self.demand.demanded[moment] if b in self.sizes and b not in self.resident]
            self._make_room(moment, sum(self.sizes[b] for b in wanted), held)
            for bundle in wanted:
                self._fetch(moment, bundle)
            if empty_at_end and moment == self.moments - 1:
                for bundle in sorted(self.resident):
                    self._evict(moment, bundle)
            elif len(self.resident) < len(self.sizes):
                self._prefetch(moment, held)

    def _make_room(self, moment: int, size: int, held: set[int]) -> None:
        while self.used + size > self.room[moment]:
            candidates = self.resident - held
            assert candidates, f"moment {moment} has room for {self.room[moment]} bytes, less than is held"
            if self._order is None:
                self._evict(moment, self.demand.next_wanted.farthest(candidates, moment, self.sizes))
            else:
                self._evict(moment, self._order.choose(sorted(candidates), moment))

    def _prefetch(self, moment: int, held: set[int]) -> None:
        """Fetch up to the allowed number of absent bundles in order of use, while that harms nobody."""
        last = self.moments - 1
        index = bisect_right(self._uses, (moment, len(self.sizes) + NEVER)) if moment < last else 0
        turn = 0 if moment < last else self.moments
        seen: set[int] = set()
        for use, bundle in self._uses[index:]:
            if len(seen) == self._prefetch_depth:
                return
            if bundle in self.resident or bundle in seen:
                continue
            seen.add(bundle)
            if not self._fetch_ahead(moment, bundle, use + turn, held):
                return

    def _fetch_ahead(self, moment: int, bundle: int, use: int, held: set[int]) -> bool:
        """Fetch `bundle` now for its use at `use` (past the last moment: in the next step) if room can be made."""
        if self._blocked.get(bundle, -1) >= moment and use < self.moments:
            return False
        size = self.sizes[bundle]
        next_use = self.demand.next_wanted
        victims = []
        if self.used + size > self.room[moment]:
            later = [(next_use.after(b, moment), self.sizes[b], b) for b in self.resident - held]
            victims = sorted((v for v in later if v[0] > use), reverse=True)
        freed, chosen = 0, []
        for _, victim_size, victim in victims:
            if self.used - freed + size <= self.room[moment]:
                break
            chosen.append(victim)
            freed += victim_size
        if self.used - freed + size > self.room[moment]:
            return False
        if not self._survives(moment, bundle, use, freed):
            return False
        for victim in chosen:
            self._evict(moment, victim)
        self._fetch(moment, bundle)
        return True

    def _survives(self, moment: int, bundle: int, use: int, freed: int) -> bool:
        """True if the bundle can stay until its use beside everything that is held or used before that."""
        rooms = self._rooms(moment, use)
        size = self.sizes[bundle]
        if self.used - freed + size <= min(rooms):
            return True
        profile = Profile(use - moment)
        for other in self.resident:
            end = self._needed_until(other, moment, use)
            if end > moment:
                profile.add(Span(0, end - moment), self.sizes[other])
        for number, (needed, room) in enumerate(zip(profile.values(), rooms, strict=True)):
            if needed + size > room:
                self._blocked[bundle] = moment + number
                return False
        return True

    def _rooms(self, moment: int, use: int) -> Sequence[int]:
        if use <= self.moments:
            return self.room[moment:use]
        return [*self.room[moment:], *self.room[: use - self.moments]]

    def _needed_until(self, bundle: int, moment: int, use: int) -> int:
        """End of the bundle's last hold that begins no later than `use`, at most `use`; `moment` if there is none."""
        end = moment
        for turn in (0, self.moments):
            for span in self.demand.hold_spans.get(bundle, ()):
                if span.begin + turn <= use and span.end + turn > moment:
                    end = max(end, min(span.end + turn, use))
        return end

    def _fetch(self, moment: int, bundle: int) -> None:
        self.resident.add(bundle)
        self.used += self.sizes[bundle]
        self._add(moment, OpKind.FETCH, bundle)

    def _evict(self, moment: int, bundle: int) -> None:
        self.resident.remove(bundle)
        self.used -= self.sizes[bundle]
        self._add(moment, OpKind.SHRINK if bundle in self._sharded else self._evict_kind, bundle)

    def _add(self, moment: int, kind: OpKind, bundle: int) -> None:
        self.operations.append(PlannedOperation(moment, self._priority, Operation(kind, bundle)))
        self._priority += 1
