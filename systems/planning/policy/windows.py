"""What blocks keep for their backward, read from a trace, and what a trace's memory and times become under other switches.

Only for units that a strategy may recompute (Strategy.rematerialised). What comes out is never too low.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from systems.errors import UnsupportedError
from systems.planning.trace import ENTER, Phase, Trace


@dataclass(frozen=True)
class Window:
    """Moments of one call of a unit: forward [enter, exit), backward [back, done)."""

    enter: int
    exit: int
    back: int
    done: int


def windows(trace: Trace, unit: int) -> Iterator[Window]:
    """One a micro-step in which the unit ran forward and backward."""
    places: dict[int, dict[Phase, int]] = {}
    for number, moment in enumerate(trace.moments):
        if moment.unit == unit:
            places.setdefault(moment.micro_step, {}).setdefault(moment.phase, number)
    for found in places.values():
        if len(found) == 4:
            order = (Phase.FORWARD_ENTER, Phase.FORWARD_EXIT, Phase.BACKWARD_ENTER, Phase.BACKWARD_EXIT)
            yield Window(*(found[phase] for phase in order))


def kept_bytes(trace: Trace, unit: int) -> int:
    """What the unit's forward keeps if it is not recomputed. Measured where it was not; else a bound, from its backward's
    peak, in which all of it is made again beside that backward's temporaries.
    """
    memory, most = trace.non_model_bytes, 0
    for w in windows(trace, unit):
        if unit in trace.recomputed:
            most = max(most, max(memory[w.back : w.done]) - min(memory[w.exit : w.back]))
        else:
            most = max(most, memory[w.exit] - memory[w.enter - 1])
    return most


def under(trace: Trace, kept: Mapping[int, int], *, recomputed: frozenset[int], offloaded: frozenset[int]) -> Trace:
    """The trace of a step with these switches. kept: per unit that is no longer recomputed, its kept_bytes.

    recomputed: part of what the trace recomputed. Inputs may leave that stayed, and stay that left.
    """
    assert recomputed <= trace.recomputed, "what was not recomputed gives no measure of what is freed"
    sizes = dict(trace.input_bytes)
    added = [0] * len(trace)
    seconds, exchanged = list(trace.compute_time_s), list(trace.exchange_bytes)
    for unit in trace.recomputed - recomputed:
        for w in windows(trace, unit):
            _add(added, w.enter, w.back, kept[unit])
            seconds[w.back] = max(seconds[w.back] - sum(seconds[w.enter : w.exit]), 0.0)
            if exchanged:
                exchanged[w.back] = max(exchanged[w.back] - sum(exchanged[w.enter : w.exit]), 0)
    offloaded = offloaded & recomputed
    for unit in trace.offloaded - offloaded:
        for w in windows(trace, unit):
            _add(added, w.exit, w.back, sizes.get(unit, 0))
    gone = [w for unit in offloaded for w in windows(trace, unit)]
    for unit in offloaded - trace.offloaded:
        for w in windows(trace, unit):
            left = next(m for m in range(w.exit, len(trace)) if trace.moments[m].phase in ENTER)
            _add(added, left + 1, _comes_back(trace, w, gone), -sizes.get(unit, 0))
    return replace(
        trace,
        non_model_bytes=tuple(max(a + b, 0) for a, b in zip(trace.non_model_bytes, added, strict=True)),
        adopted_peak_bytes=tuple(max(a + b, 0) for a, b in zip(trace.adopted_peak_bytes, added, strict=False)),
        compute_time_s=tuple(seconds),
        exchange_bytes=tuple(exchanged),
        recomputed=recomputed,
        offloaded=offloaded,
    )


def leaving(units: frozenset[int], recomputed: frozenset[int]) -> frozenset[int]:
    """Those of `units`, whose inputs are to wait on the host, that are recomputed.

    Raises UnsupportedError if none is: inputs are then the least of what they keep.
    """
    if units and not units & recomputed:
        raise UnsupportedError(
            "`options=dict(activations='host')` moves the inputs of recomputed blocks, and no block is recomputed: use "
            "`recompute='full'` (or block numbers), or leave activations on the device"
        )
    return units & recomputed


def _comes_back(trace: Trace, mine: Window, gone: Sequence[Window]) -> int:
    """The moment at which an input is fetched: where the backward begins whose input left next after it, or, of the last that
    left, the first backward of all (`schedule` and the substrate's offloaded_inputs).
    """
    later = [w for w in gone if mine.enter < w.enter < mine.back]
    if later:
        return min(min(later, key=lambda w: w.enter).back, mine.back)
    return next(m for m in range(mine.exit, mine.back + 1) if trace.moments[m].phase is Phase.BACKWARD_ENTER)


def _add(added: list[int], begin: int, end: int, size: int) -> None:
    for moment in range(begin, end):
        added[moment] += size
