"""Algorithm 1 on several ranks, where move_to_gpu and all_gather are two tasks: a MOVE of this rank's pages of a layer, and a
FETCH that gathers the layer from all ranks' pages.

A gap is the time before one of a layer's uses in which it may be brought: from where it was used last, or was made anew by an
update, to that use. In it the layer comes in one of four ways:

    rests   the pages stay as the rest goes (SHRINK), or go nowhere, and the layer is gathered
    moved   the pages are moved at one trigger, and the layer is gathered at that or a later one
    whole   both at one trigger as one: a FETCH from the host, in place, and no page lies beside the layer
    stays   nothing went, nothing comes

A moved layer takes its pages' bytes until it is gathered, and then, until it is let go of, those and the layer's: a gather is a
copy, beside the pages, which the next use may gather anew. Positions are trigger ids as in `scheduling`, which is this for one
rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from systems.planning.plan import Operation, OpKind, PlannedOperation
from systems.planning.step.demand import Demand, Span
from systems.strategies.angel_ptm.scheduling import Moves

Bytes = npt.NDArray[np.int64]  # one entry a position


@dataclass(eq=False)
class Gap:
    """[begin, end): positions before the use [end, stop). anew: what lies on the device before is out of date. tail: of the
    first use of what is never out of date, the position since its last use; then the gap goes over the turn of the step.

    rests, whole, stays: see above; none of them is moved. move, gather: triggers, as late as `end` at most.
    """

    bundle: int
    begin: int
    end: int
    stop: int
    anew: bool
    tail: int | None = None
    rests: bool = False
    whole: bool = False
    stays: bool = False
    move: int = 0
    gather: int = 0

    @property
    def first(self) -> int:
        return self.begin if self.tail is None else self.tail

    @property
    def moved(self) -> bool:
        return not (self.rests or self.whole or self.stays)

    def spans(self, length: int) -> list[slice]:
        """All of it."""
        head = slice(self.begin, self.end)
        return [head] if self.tail is None else [slice(self.tail, length), head]

    def until(self, position: int, length: int) -> int | None:
        """How long after `position` the use is for which the pages lie there then, 0 within it; None if none do."""
        if self.end <= position < self.stop:
            return 0 if self.rests or self.moved else None
        if self.moved:
            return self.end - position if self.move <= position < self.end else None
        if not self.rests:
            return None
        if self.tail is not None and position >= self.tail - 1:
            return length + self.end - position
        begin = 0 if self.tail is not None else self.begin - 1  # there a copy of the pages may lie beside the layer already
        return self.end - position if begin <= position < self.end else None


@dataclass(eq=False)
class Layer:
    """size: bytes of all of it. part: of this rank's pages where they come and go, 0 where they are at home on the device.
    ends: positions before which it is let go of though no gap begins there.
    """

    bundle: int
    size: int
    part: int
    gaps: list[Gap]
    ends: list[int] = field(default_factory=list)

    def pages(self) -> Iterator[tuple[Gap, bool, bool]]:
        """Each gap with whether pages lie beside the layer in the use before it, and in its own."""
        there = False
        for _ in range(2):  # what is before the first use is known by what is in the last
            found = []
            for gap in self.gaps:
                before, there = there, there if gap.stays else gap.rests or gap.moved
                found.append((gap, before and bool(self.part), there and bool(self.part)))
        return iter(found)

    def profile(self, length: int) -> Bytes:
        used = np.zeros(length, dtype=np.int64)
        for gap, before, beside in self.pages():
            used[gap.end : gap.stop] += self.size + self.part * beside
            if gap.stays:
                for span in gap.spans(length):
                    used[span] += self.size + self.part * before
                continue
            used[gap.gather : gap.end] += self.size
            if gap.rests:
                for span in gap.spans(length):
                    used[span] += self.part
                if not before:  # its copy of the pages is there before the layer goes
                    used[gap.first - 1] += self.part
            elif gap.moved:
                used[gap.move : gap.end] += self.part
        return used


def schedule_on_ranks(
    demand: Demand, sizes: Mapping[int, int], parts: Mapping[int, int], room: Sequence[int], sharded: frozenset[int]
) -> Moves:
    """Moves and gathers of the layers in `sizes` (bytes), which come and go; parts: bytes of this rank's pages of each.

    room: bytes for both, one entry a moment, never less than what is held. sharded: those whose pages are at home on the
    device, and take none of the room.
    """
    length = len(demand)
    layers = [
        layer_of(demand, bundle, size, 0 if bundle in sharded else parts[bundle])
        for bundle, size in sizes.items()
        if demand.hold_spans.get(bundle)
    ]
    scheduler = _Scheduler(layers, room)
    scheduler.prioritise_moves()
    advanced = scheduler.advance_gathers()
    operations = _operations(layers, length, sharded)
    of_host = (gap for layer in layers if layer.bundle not in sharded for gap in layer.gaps)
    from_host = [gap.move if gap.moved else gap.gather for gap in of_host if gap.moved or gap.whole]
    first = [(layer.bundle, *next(layer.pages())) for layer in layers]
    return Moves(
        operations=operations,
        resident=frozenset(bundle for bundle, gap, _, _ in first if gap.stays or gap.gather == 0),
        shards=frozenset(bundle for bundle, gap, _, beside in first if beside and (gap.stays or gap.rests or gap.move == 0)),
        at_start=from_host.count(0),
        later=len(from_host) - from_host.count(0),
        advanced=advanced,
    )


def layer_of(demand: Demand, bundle: int, size: int, part: int) -> Layer:
    """With each move as early, and each gather as late, as can be (lines 3 to 5, and 10 and 11)."""
    length, holds = len(demand), demand.hold_spans[bundle]
    stale = [moment for moment, bundles in enumerate(demand.stale) if bundle in bundles]
    last = holds[-1].end
    first = _gap(bundle, 0, holds[0], length, anew=bool(stale))
    layer = Layer(bundle, size, part, [first])
    if not stale:
        first.tail = min(last + 1, length)
    flushes = demand.gradient_spans.get(bundle, ())
    outdated = flushes[-1].end if flushes else length  # what leaves the device from then on leaves nothing there
    for before, after in pairwise(holds):
        going = [moment for moment in stale if before.end <= moment < after.begin]
        if going and going[0] > before.end:
            layer.ends.append(before.end + 1)
        gap = _gap(bundle, (going[-1] if going else before.end) + 1, after, length, anew=bool(going))
        gap.rests = bool(part) and not going and before.end < outdated
        layer.gaps.append(gap)
    first.rests = bool(part) and not stale
    if stale and last < min((moment for moment in stale if moment >= last), default=last):
        layer.ends.append(last + 1)
    for gap in layer.gaps:
        gap.gather, gap.move, gap.whole = gap.end, gap.begin, not part
    return layer


def _gap(bundle: int, begin: int, use: Span, length: int, *, anew: bool) -> Gap:
    return Gap(bundle, begin, use.begin + 1, min(use.end + 1, length), anew)


Changes = dict[Gap, dict[str, int]]  # of a gap's fields


class _Scheduler:
    def __init__(self, layers: Sequence[Layer], room: Sequence[int]) -> None:
        self._layers, self._of = layers, {layer.bundle: layer for layer in layers}
        self._room = np.array([room[-1], *room[:-1]], dtype=np.int64)
        self._length = len(room)
        self._profiles = {layer.bundle: layer.profile(self._length) for layer in layers}
        self._used = np.zeros(self._length, dtype=np.int64)
        for profile in self._profiles.values():
            self._used += profile

    def prioritise_moves(self) -> None:
        """Phase 1 (lines 1 to 15): all pages are moved as early as can be; where memory is short, movements are popped, the
        last in order of use first, and wait until there is room for the one needed next.
        """
        gaps = [gap for layer in self._layers if layer.part for gap in layer.gaps]
        room = self._beside_the_next()
        waiting: list[Gap] = []
        for position in range(self._length):
            while self._used[position] > room[position]:
                there = ((gap.until(position, self._length), self._of[gap.bundle].part, -gap.bundle, gap) for gap in gaps)
                *_, popped = max((each for each in there if each[0] is not None), key=lambda each: each[:3])
                self._pop(popped, position)
                if position < popped.end and popped.whole:
                    waiting.append(popped)
            waiting = sorted((gap for gap in waiting if gap.end > position), key=lambda gap: (gap.end, gap.bundle))
            while waiting and self._used[position] + self._of[waiting[0].bundle].part <= room[position]:
                pushed = waiting.pop(0)
                self._change({pushed: {"whole": False, "move": position}})

    def _beside_the_next(self) -> Bytes:
        """The room, less what the next use has gathered, which so can be while the one before it computes; never less than what
        is held.
        """
        held, coming = np.zeros(self._length, dtype=np.int64), np.zeros(self._length, dtype=np.int64)
        gathers: dict[int, int] = {}
        for layer in self._layers:
            for gap in layer.gaps:
                held[gap.end : gap.stop] += layer.size
                gathers[gap.end] = gathers.get(gap.end, 0) + layer.size
        ends = sorted(gathers)
        for last, end in pairwise((0, *ends)):
            coming[last:end] = gathers[end]
        return np.maximum(self._room - coming, held)

    def _pop(self, gap: Gap, position: int) -> None:
        """Over the turn of the step pages that cannot stay from the last use on are moved as the next step begins."""
        at_turn = gap.rests and gap.tail is not None and position >= gap.stop
        self._change({gap: {"rests": False, "whole": not at_turn, "move": 0}})

    def advance_gathers(self) -> int:
        """Phase 2 (lines 17 to 22): each gather to the earliest trigger, not before its move, and not before a gather that is
        needed earlier, at which memory suffices from there on. Where it reaches the use before, nothing goes or comes. A layer
        whose pages found no room ahead of the use comes whole, and then as early as it can. Returns by how many triggers in
        all.
        """
        gaps, before = [gap for layer in self._layers for gap in layer.gaps], 0
        for gap in sorted(gaps, key=lambda gap: (gap.end, gap.bundle)):
            floor = gap.move if gap.moved else gap.begin + (gap.tail is None and not gap.anew)
            self._change({gap: {"gather": self._earliest(gap, max(floor, before))}})
            if gap.moved:
                self._join(gap, before)
            if not gap.anew and gap.gather <= gap.begin + (gap.tail is None):
                self._keep(gap)
            before = before if gap.stays else gap.gather
        return sum(gap.end - gap.gather for gap in gaps)

    def _join(self, gap: Gap, before: int) -> None:
        """Move and gather as one, unless the pages stay after the use: to take them out of the layer costs a copy."""
        gaps = self._of[gap.bundle].gaps
        if gap.gather == gap.move and not gaps[(gaps.index(gap) + 1) % len(gaps)].rests:
            self._change({gap: {"whole": True}})
        elif gap.gather == gap.move + 1 and gap.move >= before:
            self._try({gap: {"whole": True, "gather": gap.move}})

    def _keep(self, gap: Gap) -> None:
        """The layer where it is from the use before, without its pages if it could have come so."""
        gaps = self._of[gap.bundle].gaps
        last = gaps[gaps.index(gap) - 1]
        changes: Changes = {gap: {"stays": True, "rests": False, "whole": False, "gather": gap.begin}}
        if last is not gap and last.moved and last.move == last.gather:
            changes[last] = {"whole": True}
        self._try(changes)

    def _earliest(self, gap: Gap, lowest: int) -> int:
        trigger, size = gap.gather, self._of[gap.bundle].size
        while trigger > lowest and self._used[trigger - 1] + size <= self._room[trigger - 1]:
            trigger -= 1
        return trigger

    def _try(self, changes: Changes) -> None:
        """If memory suffices."""
        undo = {gap: {name: getattr(gap, name) for name in fields} for gap, fields in changes.items()}
        self._change(changes)
        if (self._used > self._room).any():
            self._change(undo)

    def _change(self, changes: Changes) -> None:
        """Of gaps of one layer."""
        for gap, fields in changes.items():
            for name, value in fields.items():
                setattr(gap, name, value)
        layer = self._of[gap.bundle]
        self._used -= self._profiles[layer.bundle]
        self._profiles[layer.bundle] = layer.profile(self._length)
        self._used += self._profiles[layer.bundle]


def _operations(layers: Sequence[Layer], length: int, sharded: frozenset[int]) -> tuple[PlannedOperation, ...]:
    """At each moment what goes, then what comes, the one needed first before the others."""
    found: list[tuple[int, int, int, Operation]] = []  # moment, 0 for what goes, order, operation

    def add(position: int, comes: int, order: int, kind: OpKind, bundle: int) -> None:
        found.append(((position - 1) % length, comes, order, Operation(kind, bundle)))

    for layer in layers:
        bundle, home = layer.bundle, layer.bundle in sharded
        for position in layer.ends:
            add(position, 0, bundle, OpKind.SHRINK if home else OpKind.DROP, bundle)
        for gap in layer.gaps:
            if gap.stays:
                continue
            if not gap.anew:
                add(gap.first, 0, bundle, OpKind.SHRINK if gap.rests or home else OpKind.DROP, bundle)
            if gap.moved:
                add(gap.move, 1, gap.end, OpKind.MOVE, bundle)
            add(gap.gather, 1, gap.end, OpKind.FETCH, bundle)
    found.sort(key=lambda entry: (*entry[:3], entry[3].bundle))
    return tuple(PlannedOperation(moment, number, operation) for number, (moment, _, _, operation) in enumerate(found))
