"""The step one expects before any was run: units forward in module order, then backward in reverse.

Good for what must be known before the warm-up step, such as the least memory a layout needs; nothing is measured, so
activations and times are zero. The real order comes with the trace.
"""

from __future__ import annotations

from systems.planning.layout import Layout
from systems.planning.trace import Moment, Phase, Trace


def nominal_trace(layout: Layout, *, accumulate: int = 1) -> Trace:
    """All units that read a bundle, forward and backward once a micro-step; a bundle is flushed after its last unit."""
    units = sorted(layout.bundles_of_unit)
    moments, flushes = [Moment(Phase.STEP_BEGIN)], [()]  # type: tuple[list[Moment], list[tuple[int, ...]]]
    for micro_step in range(accumulate):
        for unit in units:
            moments += [Moment(Phase.FORWARD_ENTER, unit, micro_step), Moment(Phase.FORWARD_EXIT, unit, micro_step)]
            flushes += [(), ()]
        for unit in reversed(units):
            moments += [Moment(Phase.BACKWARD_ENTER, unit, micro_step), Moment(Phase.BACKWARD_EXIT, unit, micro_step)]
            done = tuple(b for b in layout.bundles_of_unit[unit] if _flushed_by(layout, b, unit))
            flushes += [(), done]
        moments.append(Moment(Phase.BACKWARD_END, micro_step=micro_step))
        flushes.append(())
    moments.append(Moment(Phase.STEP_END))
    flushes.append(())
    zeros = (0,) * len(moments)
    return Trace(tuple(moments), zeros, tuple(0.0 for _ in moments), tuple(flushes))


def _flushed_by(layout: Layout, bundle: int, unit: int) -> bool:
    return layout.bundles[bundle].trainable and min(layout.bundles[bundle].units) == unit
