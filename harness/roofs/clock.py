"""How a roof is timed: again and again, the median taken, the first call left out."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

LEAST_CALLS = 3


def nothing() -> None:
    """Nothing to wait for: the call itself does the work."""


def median_s(work: Callable[[], object], *, wait: Callable[[], object] = nothing, over_s: float) -> float:
    """Median seconds of one call of `work` with all that it queues, called for about `over_s` seconds after a first one."""
    work()
    wait()
    times: list[float] = []
    until = time.perf_counter() + over_s
    while len(times) < LEAST_CALLS or time.perf_counter() < until:
        began = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
