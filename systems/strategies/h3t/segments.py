"""From switches to a plan by the paper's workflow (section 3.2.3, appendix A): layers are prepared a segment ahead.

In the segment of a layer the one before it is post-processed and the one behind it prepared, beside the layer's own
computation: see Note [Segments] in `costs.py`. What is queued first there is the layer's economical switch.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from systems.planning.plan import Plan
from systems.planning.trace import ENTER, Phase
from systems.strategies.h3t.barriers import ends
from systems.strategies.h3t.compiling import FETCHES, FIRST, Compiler
from systems.strategies.h3t.switches import Switches


@dataclass(frozen=True)
class PaperCompiler(Compiler):
    """Plans of the paper's workflow, with one queue for copies. Bundles that are no layer's come as in all others."""

    def plan(self, switches: Mapping[int, Switches], *, others: str, on_device: frozenset[int] = frozenset()) -> Plan:
        """See Compiler.plan."""
        return replace(super().plan(switches, others=others, on_device=on_device), one_copy_queue=True)

    @cached_property
    def _begins(self) -> list[int]:
        """Moments at which segments begin: the step's, and where another ends, whether streams are joined there or not."""
        return [0, *(moment for moment, _ in ends(self.trace, self.blocks))]

    def _released(self, begin: int, s: Switches) -> bool:
        """See Compiler._released. A shard that rests stays where gathered parameters are released: of one rank that is all."""
        return super()._released(begin, s) and (s.lazy_prefetch or self.context.ranks > 1)

    def _trigger(self, begin: int, after: int, s: Switches, layers: Mapping[int, Switches]) -> tuple[int, int]:
        """See Compiler._trigger: where the segment before the use's own begins, ahead of post-process there or behind it."""
        if not layers:
            return super()._trigger(begin, after, s, layers)
        mine = bisect_right(self._begins, begin) - 1
        where = self._begins[bisect_left(self._begins, self._begins[mine]) - 1]
        if where <= after:  # its own post-process
            return after, FETCHES
        return where, FETCHES if self._economical(where, begin, layers) else FIRST

    def _economical(self, where: int, begin: int, layers: Mapping[int, Switches]) -> bool:
        """Of the layer whose segment begins at `where`: in its pass that the use at `begin` is of."""
        moments = self.trace.moments
        owner = next(m.unit for m in moments[where:] if m.phase in ENTER and m.unit in layers)
        backward = moments[begin].phase is Phase.BACKWARD_ENTER
        return layers[owner].economical_backward if backward else layers[owner].economical_forward
