"""Segment synchronisation (paper, appendix A.2) as barriers of a plan."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from systems.planning.trace import ENTER, EXIT, Moment, Phase, Trace
from systems.strategies.h3t.switches import Switches


def barriers(trace: Trace, switches: Mapping[int, Switches]) -> frozenset[int]:
    """Moments at which a segment ends whose layer has the switch on. switches: per layer's unit.

    A layer's own segments end with its computation: its post-process, issued there, belongs to the next. The short ones
    (Note [Segments] in `costs.py`) end where the layer behind them begins, and where backward does.
    """
    return frozenset(moment for moment, layer in ends(trace, switches) if switches[layer].synchronise)


def ends(trace: Trace, layers: Collection[int]) -> Iterator[tuple[int, int]]:
    """(moment at which a segment ends, the layer whose switch decides there)."""
    last: int | None = None
    for number, moment in enumerate(trace.moments):
        if _leaves(moment, layers):
            last = moment.unit
            yield number, last
        elif moment.phase in ENTER and moment.unit in layers and not _leaves(trace.moments[number - 1], layers):
            yield number, moment.unit
        elif moment.phase is Phase.BACKWARD_END and last is not None:
            yield number, last


def _leaves(moment: Moment, layers: Collection[int]) -> bool:
    return moment.phase in EXIT and moment.unit in layers
