"""Algorithm 1 as it is printed, on one rank, page by page: `scheduling` with lives that are cut where memory is short.

Pages of a life that have one trigger and follow each other are a run, and are popped, pushed and moved as few runs as can be.
Pages of a layer that came by several triggers, or of which some wait until its use, are merged at the use. While that is done
they lie beside all of the layer, and may be popped for the want of room there. What is merged is no more then, and what stays
after the use stays where the layer was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from systems.planning.layout import ALIGN_BYTES, Layout, round_up
from systems.planning.plan import Operation, OpKind, Pages, PlannedOperation
from systems.planning.step.demand import Demand
from systems.strategies.angel_ptm.scheduling import Life, LivesOfLayer, Moves, Scheduler

Which = npt.NDArray[np.bool_]  # of a layer's pages


@dataclass(frozen=True)
class LayerPages:
    """pages: what is moved as one, in order. ends: bytes of all before each, and of all."""

    pages: tuple[Pages, ...]
    ends: npt.NDArray[np.int64]

    @classmethod
    def of(cls, layout: Layout, bundle: int, page_bytes: int) -> LayerPages:
        """A bundle's segments, as many neighbours together as fill no more than a page."""
        page_bytes = round_up(page_bytes, ALIGN_BYTES)
        found, sizes = list[Pages](), list[int]()
        for number in layout.bundles[bundle].segments:
            size = layout.segments[number].numel * layout.itemsize
            if found and sizes[-1] + size <= page_bytes:
                found[-1], sizes[-1] = Pages(found[-1].first, number + 1), sizes[-1] + size
            else:
                found.append(Pages(number, number + 1))
                sizes.append(size)
        return cls(tuple(found), np.cumsum([0, *sizes], dtype=np.int64))

    def runs(self, which: Which) -> tuple[Pages, ...]:
        """As few as can be."""
        edges = np.flatnonzero(np.diff(np.concatenate([[False], which, [False]]).astype(np.int8)))
        return tuple(Pages(self.pages[a].first, self.pages[b - 1].stop) for a, b in zip(edges[::2], edges[1::2], strict=True))

    def size(self, which: Which) -> int:
        return int(np.diff(self.ends)[which].sum())


@dataclass(eq=False)
class PagedLife:
    """A life of a layer's pages, each with a trigger of its own."""

    life: Life
    layer: LayerPages

    def __post_init__(self) -> None:
        self.triggers = np.full(len(self.layer.pages), self.life.begin, dtype=np.int64)

    @property
    def whole(self) -> bool:
        """All come at once, if only at the use."""
        return bool((self.triggers == self.triggers[0]).all())

    @property
    def merged(self) -> int:
        """Bytes of pages that the use finds apart."""
        return 0 if self.whole or self.life.is_tail else self.layer.size(self.triggers < self.life.end)


@dataclass(frozen=True)
class PageRun:
    """Pages [first, stop) of a life that are next to each other in S too, the last of them at `last`."""

    of: PagedLife
    first: int
    stop: int
    last: int

    def cut(self, at: int) -> tuple[PageRun, PageRun]:
        """Before a page and from it on."""
        return PageRun(self.of, self.first, at, self.last - self.stop + at), PageRun(self.of, at, self.stop, self.last)


def schedule_pages(demand: Demand, layers: Mapping[int, LayerPages], room: Sequence[int], merging: Sequence[int]) -> Moves:
    """Moves of the pages of layers that come and go. room: see `scheduling.schedule`. merging: the same as a moment begins."""
    scheduler = _PageScheduler(demand, layers, room, merging)
    scheduler.prioritise_moves()
    scheduler.settle_tails()
    operations = scheduler.operations()
    coming = [p for p in operations if p.operation.kind in (OpKind.FETCH, OpKind.MOVE)]
    at_start = sum(p.trigger == len(demand) - 1 for p in coming)
    resident, pages = scheduler.at_start()
    moved = scheduler.moved_bytes()
    return Moves(operations, resident, at_start, len(coming) - at_start, 0, pages=pages, fetched_bytes=moved)


class _PageScheduler(Scheduler):
    def __init__(self, demand: Demand, layers: Mapping[int, LayerPages], room: Sequence[int], merging: Sequence[int]) -> None:
        super().__init__(demand, {bundle: int(layer.ends[-1]) for bundle, layer in layers.items()}, room, as_printed=True)
        self._of = {life: PagedLife(life, layers[life.bundle]) for life in self._lifetimes}
        self._merged = np.zeros(self._length, dtype=np.int64)  # at the beginning of each position
        self._room_then = np.array([merging[-1], *merging[:-1]], dtype=np.int64)
        self._places: dict[int, npt.NDArray[np.int64]] = {}  # of each page in S
        self._end = 0
        for bundle in sorted(layers):
            self._places[bundle] = self._behind(len(layers[bundle].pages))

    def _behind(self, count: int) -> npt.NDArray[np.int64]:
        """The next places in S."""
        self._end += count
        return np.arange(self._end - count, self._end)

    def _pushed(self, run: PageRun) -> PageRun:
        """The last of S."""
        self._places[run.of.life.bundle][run.first : run.stop] = self._behind(run.stop - run.first)
        return PageRun(run.of, run.first, run.stop, self._end - 1)

    def _runs(self, paged: PagedLife) -> Iterator[PageRun]:
        places = self._places[paged.life.bundle]
        breaks = np.flatnonzero(np.diff(places) != 1) + 1
        for first, stop in zip([0, *breaks], [*breaks, len(places)], strict=True):
            yield PageRun(paged, int(first), int(stop), int(places[stop - 1]))

    def _move_run(self, run: PageRun, trigger: int) -> None:
        paged, before = run.of, run.of.merged
        life, now = paged.life, int(paged.triggers[run.first])
        size = int(paged.layer.ends[run.stop] - paged.layer.ends[run.first])
        self._used[min(now, trigger) : max(now, trigger)] += size if trigger < now else -size
        paged.triggers[run.first : run.stop] = trigger
        if not life.is_tail:
            self._merged[life.end] += paged.merged - before

    def _short(self, position: int) -> tuple[int, bool]:
        """Bytes by which memory is short. True: while pages are merged alone, so that it helps to take some of those back."""
        used = self._used[position]
        short = int(used - self._room[position])
        return (short, False) if short > 0 else (int(used + self._merged[position] - self._room_then[position]), True)

    def prioritise_moves(self) -> None:
        """Lines 1 to 15."""
        coming = sorted(self._lifetimes, key=lambda life: -life.begin)
        there: list[PageRun] = []
        waiting: list[PageRun] = []
        for position in range(self._length):
            while coming and coming[-1].begin <= position:
                there += self._runs(self._of[coming.pop()])
            there = [r for r in there if r.of.life.end > position or (r.of.life.end == position and r.of.merged)]
            used = dict.fromkeys(run.of for run in waiting if run.of.life.end == position)
            waiting = [run for run in waiting if run.of.life.end > position]
            while (short := self._short(position))[0] > 0:
                run = max((r for r in there if short[1] or r.of.life.end > position), key=lambda run: run.last)
                there.remove(run)
                ends = run.of.layer.ends
                kept = int(np.searchsorted(ends, ends[run.stop] - short[0], side="right")) - 1
                left, popped = run.cut(max(kept, run.first))
                if left.first < left.stop:
                    there.append(left)
                self._move_run(popped, popped.of.life.end)
                if popped.of.life.end == position:
                    used[popped.of] = None
                elif not popped.of.life.is_tail:
                    waiting.append(popped)
            for paged in used:  # what waited waits no longer
                late = np.flatnonzero(paged.triggers == position)
                self._places[paged.life.bundle][late] = self._behind(len(late))
            while waiting:
                ends, top = waiting[-1].of.layer.ends, waiting[-1]
                free = ends[top.first] + self._room[position] - self._used[position]
                pushed, rest = top.cut(min(top.stop, int(np.searchsorted(ends, free, side="right")) - 1))
                if pushed.first >= pushed.stop:
                    break
                self._move_run(pushed, position)
                there.append(self._pushed(pushed))
                waiting[-1:] = [rest] if rest.first < rest.stop else []

    def settle_tails(self) -> None:
        """What lies there after its last use saves a movement only if it stays to the end of the step and to its use in the
        next; and layers of which only a part would stay are moved whole where they have the room.
        """
        for layer in self._layers:
            if layer.tail is None:
                continue
            first, tail = self._of[layer.first], self._of[layer.tail]
            stays = (tail.triggers == tail.life.begin) & (first.triggers == 0)
            if first.whole and not stays.all():
                stays[:] = False
            gone = ~stays & (tail.triggers < tail.life.end)
            self._used[tail.life.begin : tail.life.end] -= tail.layer.size(gone)
            tail.triggers[gone] = tail.life.end

    def _staying(self, layer: LivesOfLayer) -> Which:
        """Pages that are there from the last use to the first of the next step."""
        first = self._of[layer.first]
        if layer.tail is not None:
            tail = self._of[layer.tail]
            return tail.triggers == tail.life.begin
        return (first.triggers == 0) & (not layer.first.anew)

    def at_start(self) -> tuple[frozenset[int], frozenset[Pages]]:
        """Layers that are on the device when a step begins, and pages of others."""
        resident, pages = set[int](), set[Pages]()
        for layer in self._layers:
            first = self._of[layer.first]
            there, stays = first.triggers == 0, self._staying(layer)
            if there.all():
                resident.add(layer.bundle)
            else:
                pages.update(first.layer.runs(there & stays), first.layer.runs(there & ~stays))
        return frozenset(resident), frozenset(pages)

    def moved_bytes(self) -> int:
        """Of pages that were not there, over all uses."""
        lives = [(self._of[layer.first], self._staying(layer)) for layer in self._layers]
        between = (self._of[life] for layer in self._layers for _, life in layer.between)
        lives += [(paged, (paged.triggers == paged.life.begin) & (not paged.life.anew)) for paged in between]
        return sum(paged.layer.size(~stays) for paged, stays in lives)

    def operations(self) -> tuple[PlannedOperation, ...]:
        """At each moment what goes, then what comes, what is needed first before the others."""
        found: list[tuple[int, int, int, Operation]] = []  # moment, 0 for what goes, order, operation
        for layer in self._layers:
            bundle, stays = layer.bundle, self._staying(layer)
            if not layer.first.anew:
                moment = self._length - 1 if layer.tail is None else layer.last.end
                found += self._going(moment, self._of[layer.first], stays)
            found += [(moment, 0, bundle, Operation(OpKind.DROP, bundle)) for moment in layer.ends]
            found += self._coming(self._of[layer.first], stays)
            for before, life in layer.between:
                paged = self._of[life]
                kept = (paged.triggers == life.begin) & (not life.anew)
                if not life.anew:
                    found += self._going(before.end, paged, kept)
                found += self._coming(paged, kept)
        found.sort(key=lambda entry: (*entry[:3], entry[3].bundle))
        return tuple(PlannedOperation(moment, number, operation) for number, (moment, _, _, operation) in enumerate(found))

    def _going(self, moment: int, paged: PagedLife, kept: Which) -> Iterator[tuple[int, int, int, Operation]]:
        bundle, left = paged.life.bundle, paged.layer.runs(kept)
        if not kept.all():
            yield moment, 0, bundle, Operation(OpKind.SHRINK if left else OpKind.DROP, bundle, left)

    def _coming(self, paged: PagedLife, kept: Which) -> Iterator[tuple[int, int, int, Operation]]:
        """kept: pages that are there already."""
        bundle, end, fetch = paged.life.bundle, paged.life.end, Operation(OpKind.FETCH, paged.life.bundle)
        if kept.all():
            return
        if paged.whole and not kept.any():
            yield (int(paged.triggers[0]) - 1) % self._length, 1, end, fetch
            return
        for trigger in np.unique(paged.triggers[~kept & (paged.triggers < end)]):
            for run in paged.layer.runs(~kept & (paged.triggers == trigger)):
                yield (int(trigger) - 1) % self._length, 1, end, Operation(OpKind.MOVE, bundle, (run,))
        yield end - 1, 1, end, fetch
