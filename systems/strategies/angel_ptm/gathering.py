"""Algorithm 1 on several ranks, where move_to_gpu and all_gather are two tasks: a MOVE of this rank's pages of a layer, and a
FETCH that gathers the layer from all ranks' pages. What both take when: `gaps`. Of one rank: `scheduling`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from systems.planning.plan import Operation, OpKind, PlannedOperation
from systems.planning.step.demand import Demand
from systems.strategies.angel_ptm.gaps import Bytes, Gap, PagedLayer, layer_of
from systems.strategies.angel_ptm.popping import Popping
from systems.strategies.angel_ptm.scheduling import Moves


def schedule_on_ranks(
    demand: Demand,
    sizes: Mapping[int, int],
    parts: Mapping[int, int],
    room: Sequence[int],
    sharded: frozenset[int],
    *,
    as_printed: bool = False,
) -> Moves:
    """Moves and gathers of the layers in `sizes` (bytes), which come and go; parts: bytes of this rank's pages of each.

    room: bytes for both, one entry a moment, never less than what is held. sharded: those whose pages are at home on the
    device, and take none of the room. as_printed: see `popping`; then phase 1 fills all of the room with moves, phase 2
    brings no move forward, and a gather comes no earlier than its pages.
    """
    length = len(demand)
    layers = [
        layer_of(demand, bundle, size, 0 if bundle in sharded else parts[bundle])
        for bundle, size in sizes.items()
        if demand.hold_spans.get(bundle)
    ]
    scheduler = _GatherScheduler(layers, room, as_printed=as_printed)
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


Changes = dict[Gap, dict[str, int]]  # of a gap's fields


class _GatherScheduler:
    def __init__(self, layers: Sequence[PagedLayer], room: Sequence[int], *, as_printed: bool) -> None:
        self._popping = Popping((layer.bundle for layer in layers), as_printed=as_printed)
        self._layers, self._of = layers, {layer.bundle: layer for layer in layers}
        self._room = np.array([room[-1], *room[:-1]], dtype=np.int64)
        self._length = len(room)
        self._profiles = {layer.bundle: layer.profile(self._length) for layer in layers}
        self._used = np.zeros(self._length, dtype=np.int64)
        for profile in self._profiles.values():
            self._used += profile

    def prioritise_moves(self) -> None:
        """Phase 1 (lines 1 to 15): all pages are moved as early as can be; where memory is short, movements are popped, and
        wait until there is room.
        """
        gaps = [gap for layer in self._layers if layer.part for gap in layer.gaps]
        room, last = self._room if self._popping.as_printed else self._beside_the_next(), self._popping.last
        waiting: list[Gap] = []
        for position in range(self._length):
            for gap in waiting:
                if gap.end == position:  # it waits no longer, for it is used
                    self._popping.pushed(gap.bundle)
            waiting = [gap for gap in waiting if gap.end > position]
            while self._used[position] > room[position]:
                there = ((gap.until(position, self._length), self._of[gap.bundle].part, gap) for gap in gaps)
                found = [(last(gap.bundle, (until, part, -gap.bundle)), gap) for until, part, gap in there if until is not None]
                _, popped = max(found, key=lambda each: each[0])
                self._pop(popped, position)
                if position < popped.end and popped.whole:
                    waiting.append(popped)
            waiting = self._popping.in_turn(waiting, lambda gap: (gap.end, gap.bundle))
            while waiting and self._used[position] + self._of[waiting[-1].bundle].part <= room[position]:
                pushed = waiting.pop()
                self._popping.pushed(pushed.bundle)
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
        needed earlier, at which memory suffices from there on. One that reaches its move goes on with it; one that reaches the
        use before is none. A layer whose pages found no room ahead of the use comes whole. Returns by how many triggers in all.
        """
        gaps = sorted((gap for layer in self._layers for gap in layer.gaps), key=lambda gap: (gap.end, gap.bundle))
        for _ in range(2):  # pages of layers that stay are not there any more the second time
            self._advance([gap for gap in gaps if not gap.stays])
        return sum(gap.end - gap.gather for gap in gaps)

    def _advance(self, gaps: Sequence[Gap]) -> None:
        before, as_printed = 0, self._popping.as_printed
        for gap in gaps:
            floor = max(before, gap.begin + (gap.tail is None and not gap.anew))
            if as_printed and gap.whole and self._of[gap.bundle].part:
                floor = gap.end  # its pages come with it, at its layer's trigger
            self._change({gap: {"gather": self._earliest(gap, max(floor, gap.move) if gap.moved else floor)}})
            if gap.moved and gap.gather <= gap.move + 1 and not as_printed:
                self._join(gap, before)
                trigger = self._earliest(gap, floor) if gap.gather == gap.move else gap.gather
                self._change({gap: {"gather": trigger, "move": min(trigger, gap.move)}})
            if not gap.anew and gap.gather <= gap.begin + (gap.tail is None):
                self._keep(gap)
            before = before if gap.stays else gap.gather

    def _join(self, gap: Gap, before: int) -> None:
        """Move and gather as one, unless the pages stay after the use: to take them out of the layer costs a copy."""
        gaps = self._of[gap.bundle].gaps
        if gap.gather == gap.move and not gaps[(gaps.index(gap) + 1) % len(gaps)].rests:
            self._change({gap: {"whole": True}})
        elif gap.gather > gap.move >= before:
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
        """With the move, if the gather has reached that."""
        layer, trigger = self._of[gap.bundle], gap.gather
        size = layer.size + layer.part * (gap.moved and gap.gather == gap.move)
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


def _operations(layers: Sequence[PagedLayer], length: int, sharded: frozenset[int]) -> tuple[PlannedOperation, ...]:
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
