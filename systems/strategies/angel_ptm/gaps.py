"""Where the layers of Algorithm 1 on several ranks may come, and what of the device they take then.

A gap is the time before one of a layer's uses in which it may be brought: from where it was used last, or was made anew by an
update, to that use. In it the layer comes in one of four ways:

    rests   the pages stay as the rest goes (SHRINK), or go nowhere, and the layer is gathered
    moved   the pages are moved at one trigger, and the layer is gathered at that or a later one
    whole   both at one trigger as one: a FETCH from the host, in place, and no page lies beside the layer
    stays   nothing went, nothing comes

A moved layer takes its pages' bytes until it is gathered, and then, until it is let go of, those and the layer's: a gather is a
copy, beside the pages, which the next use may gather anew. Positions are trigger ids as in `scheduling`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from systems.planning.step.demand import Demand, Span

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
class PagedLayer:
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


def layer_of(demand: Demand, bundle: int, size: int, part: int) -> PagedLayer:
    """With each move as early, and each gather as late, as can be (lines 3 to 5, and 10 and 11)."""
    length, holds = len(demand), demand.hold_spans[bundle]
    stale = [moment for moment, bundles in enumerate(demand.stale) if bundle in bundles]
    last = holds[-1].end
    first = _gap(bundle, 0, holds[0], length, anew=bool(stale))
    layer = PagedLayer(bundle, size, part, [first])
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
