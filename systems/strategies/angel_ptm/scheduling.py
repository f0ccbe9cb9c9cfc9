"""Algorithm 1, "Fine-grained Life-time based Scheduling", over the layers of forward and backward, on one rank, where
all_gather moves nothing and is none. On several: `gathering`.

A life of a layer's pages is the time before one of its uses in which they may lie on the device: from where they were used
last, or were made anew by an update, to that use. The schedule has one trigger a life, the moment at which its pages are moved
to the device; where that is the life's beginning and nothing was made anew, they simply stay. So popping a movement is putting
its trigger off to the use, and advancing it is bringing it forward.

Positions are the paper's trigger ids: 0 is the end of the step before, when the updates of the CPU are issued (moment
len - 1), and k is moment k - 1.

As printed, phase 2 is of gathers alone, of which there are none here; else it advances the movements. What is popped and what
is pushed again then and else: `popping`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from systems.planning.plan import Operation, OpKind, Pages, PlannedOperation
from systems.planning.step.demand import Demand, Span
from systems.strategies.angel_ptm.popping import Popping


@dataclass(eq=False)
class Life:
    """begin, end: positions; trigger: between them.

    anew: what lies on the device at `begin` is out of date, so that a move is needed in any case. next_use: position of the use
    that it is for, `end` unless it is the tail of a step, which nothing in the step needs.
    """

    bundle: int
    size: int
    begin: int
    end: int
    anew: bool
    next_use: int = 0
    trigger: int = 0

    def __post_init__(self) -> None:
        self.trigger, self.next_use = self.begin, self.next_use or self.end

    @property
    def is_tail(self) -> bool:
        return self.next_use > self.end


@dataclass(frozen=True)
class Moves:
    """resident, shards: bundles that are on the device, and of several ranks those whose pages are, at moment 0. pages: of one
    rank, those of other bundles that are. at_start, later: moves from the host at trigger 0 and after it. advanced: triggers by
    which phase 2 brought moves, of several ranks gathers, forward, all together. fetched_bytes: what is moved, if it is told.
    """

    operations: tuple[PlannedOperation, ...]
    resident: frozenset[int]
    at_start: int
    later: int
    advanced: int
    shards: frozenset[int] = frozenset()
    pages: frozenset[Pages] = frozenset()
    fetched_bytes: int | None = None


def schedule(demand: Demand, sizes: Mapping[int, int], room: Sequence[int], *, as_printed: bool = False) -> Moves:
    """Moves of the layers in `sizes` (bytes), which come and go. room: bytes for them, one entry a moment, never less than what
    is held.
    """
    scheduler = Scheduler(demand, sizes, room, as_printed=as_printed)
    scheduler.prioritise_moves()
    advanced = scheduler.advance()
    operations = scheduler.operations()
    fetches = [p for p in operations if p.operation.kind is OpKind.FETCH]
    at_start = sum(p.trigger == len(demand) - 1 for p in fetches)
    return Moves(operations, scheduler.resident(), at_start, len(fetches) - at_start, advanced)


@dataclass
class LivesOfLayer:
    """first, between, tail: its lives, those between with the use before. last: its last use. ends: moments at which it is let
    go of though no life begins there.
    """

    bundle: int
    first: Life
    last: Span
    between: list[tuple[Span, Life]] = field(default_factory=list)
    tail: Life | None = None
    ends: list[int] = field(default_factory=list)


class Scheduler:
    def __init__(self, demand: Demand, sizes: Mapping[int, int], room: Sequence[int], *, as_printed: bool) -> None:
        self._popping = Popping(sizes, as_printed=as_printed)
        self._length = len(demand)
        self._room = np.array([room[-1], *room[:-1]], dtype=np.int64)
        self._used = np.zeros(self._length, dtype=np.int64)
        stale: dict[int, list[int]] = {}
        for moment, bundles in enumerate(demand.stale):
            for bundle in bundles:
                stale.setdefault(bundle, []).append(moment)
        self._layers = [
            self._lives(bundle, size, demand.hold_spans[bundle], stale.get(bundle, ()))
            for bundle, size in sizes.items()
            if demand.hold_spans.get(bundle)
        ]
        self._lifetimes = [life for layer in self._layers for life in all_of(layer)]

    def _lives(self, bundle: int, size: int, holds: Sequence[Span], stale: Sequence[int]) -> LivesOfLayer:
        """stale: the moments at which its parameters on the device are out of date and go; empty if they never are."""
        length = self._length
        for span in holds:
            self._used[span.begin + 1 : min(span.end + 1, length)] += size
        layer = LivesOfLayer(bundle, Life(bundle, size, 0, holds[0].begin + 1, anew=bool(stale)), holds[-1])
        for before, after in pairwise(holds):
            going = [moment for moment in stale if before.end <= moment < after.begin]
            if going and going[0] > before.end:
                layer.ends.append(before.end)
            begin = going[-1] if going else before.end
            layer.between.append((before, Life(bundle, size, begin + 1, after.begin + 1, anew=bool(going))))
        end = holds[-1].end
        if not stale and end < length - 1:
            layer.tail = Life(bundle, size, end + 1, length, anew=False, next_use=length + layer.first.end)
        elif stale and end < min((moment for moment in stale if moment >= end), default=end):
            layer.ends.append(end)
        for life in all_of(layer):
            self._used[life.trigger : life.end] += size
        return layer

    def prioritise_moves(self) -> None:
        """Phase 1 (lines 1 to 15): all is moved as early as can be; where memory is short, movements are popped, and wait until
        there is room.
        """
        last = self._popping.last
        coming = sorted(self._lifetimes, key=lambda life: -life.begin)
        there: list[Life] = []
        waiting: list[Life] = []
        for position in range(self._length):
            while coming and coming[-1].begin <= position:
                there.append(coming.pop())
            there = [life for life in there if life.end > position]
            for life in waiting:
                if life.end == position:  # it waits no longer, for it is used
                    self._popping.pushed(life.bundle)
            waiting = [life for life in waiting if life.end > position]
            while self._used[position] > self._room[position]:
                popped = max(there, key=lambda life: last(life.bundle, (life.next_use, life.size, -life.bundle)))
                there.remove(popped)
                self._move(popped, popped.end)
                if not popped.is_tail:
                    waiting.append(popped)
            waiting = self._popping.in_turn(waiting, lambda life: (life.end, life.bundle))
            while waiting and self._used[position] + waiting[-1].size <= self._room[position]:
                pushed = waiting.pop()
                self._move(pushed, position)
                self._popping.pushed(pushed.bundle)
                there.append(pushed)

    def advance(self) -> int:
        """Phase 2 (lines 17 to 22): each movement to the earliest trigger at which memory suffices from there on; what reaches
        the beginning of its life is not moved at all, unless it was made anew. Returns by how many triggers in all.

        What lies there after its last use saves a movement only if it stays to the end of the step and to its use in the next.
        """
        tails = [(layer.first, layer.tail) for layer in self._layers if layer.tail is not None]
        for first, tail in tails:
            if first.trigger > 0:
                self._move(tail, tail.end)
        advanced = 0
        if self._popping.as_printed:
            return advanced
        movements = [life for life in self._lifetimes if not life.is_tail]
        for life in sorted(movements, key=lambda life: (life.trigger, life.end, life.bundle)):
            earliest = self._earliest(life)
            advanced += life.trigger - earliest
            self._move(life, earliest)
        for first, tail in tails:
            if first.trigger == 0 and self._earliest(tail) == tail.begin:
                self._move(tail, tail.begin)
        return advanced

    def _earliest(self, life: Life) -> int:
        trigger = life.trigger
        while trigger > life.begin and self._used[trigger - 1] + life.size <= self._room[trigger - 1]:
            trigger -= 1
        return trigger

    def _move(self, life: Life, trigger: int) -> None:
        self._used[min(life.trigger, trigger) : max(life.trigger, trigger)] += life.size * (1 if trigger < life.trigger else -1)
        life.trigger = trigger

    def resident(self) -> frozenset[int]:
        return frozenset(layer.bundle for layer in self._layers if layer.first.trigger == 0)

    def operations(self) -> tuple[PlannedOperation, ...]:
        """At each moment what goes, then what comes, the one needed first before the others."""
        found: list[tuple[int, int, int, Operation]] = []  # moment, 0 for what goes, order, operation
        last, drop, fetch = self._length - 1, OpKind.DROP, OpKind.FETCH
        for layer in self._layers:
            stays = layer.tail is not None and layer.tail.trigger == layer.tail.begin
            gone = [before.end for before, life in layer.between if life.trigger > life.begin and not life.anew]
            if layer.tail is not None and not stays:
                gone.append(layer.last.end)
            held_to_the_end = layer.tail is None and not layer.first.anew  # then it is there at the end of the step
            if held_to_the_end and layer.first.trigger > 0:
                gone.append(last)
            found += [(moment, 0, layer.bundle, Operation(drop, layer.bundle)) for moment in (*gone, *layer.ends)]
            coming = [life for _, life in layer.between if life.trigger > life.begin or life.anew]
            if not (stays or held_to_the_end) or layer.first.trigger > 0:
                coming.append(layer.first)
            for life in coming:
                found.append(((life.trigger - 1) % self._length, 1, life.end, Operation(fetch, layer.bundle)))
        found.sort(key=lambda entry: (*entry[:3], entry[3].bundle))
        return tuple(PlannedOperation(moment, number, operation) for number, (moment, _, _, operation) in enumerate(found))


def all_of(layer: LivesOfLayer) -> list[Life]:
    """In order of time."""
    lives = [layer.first, *(life for _, life in layer.between)]
    return lives if layer.tail is None else [*lives, layer.tail]
