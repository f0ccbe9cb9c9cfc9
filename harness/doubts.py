"""Warnings about a run, from a closed list: what was seen, what may cause it, what to do."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from harness.nvml import PcieLink
from harness.record import Doubt
from harness.spec import DEFAULT_TIMED_STEPS
from systems.sizes import format_size

SLOW_FIRST_STEP = 1.2
SPREAD = 0.05
MIN_TIMED_STEPS = DEFAULT_TIMED_STEPS  # a run that was told nothing of steps has enough of them
LONG_STEP_S = 20.0

# code: (cause, advice)
CLOSED_LIST: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "first_timed_step_slow": ("tracing, first touches or caches not warm yet", "raise --warmup"),
        "step_time_spread": (
            "other load, clocks, or work that some steps do not have",
            "free the machine, use more --steps",
        ),
        "short_timed_region": (
            "few steps let one odd step decide",
            f"time {MIN_TIMED_STEPS} steps or more with --steps",
        ),
        "steps_without_plan": (
            "a strategy that still measures, as h3t does in its profile_steps, or a budget in which no plan fits",
            "raise --warmup above those steps, or --device-memory",
        ),
        "other_processes_on_device": ("someone else computes there", "run when the device is free"),
        "clocks_throttled": ("power or temperature limits", "compare only runs made under the same limit"),
        "pcie_link_below_maximum": ("power saving, a wrong slot or a riser", "check the slot, run a transfer test"),
        "swap_in_use": ("host memory is short", "lower --host-memory or the model, or turn swap off"),
        "page_cache": (
            "a file system that cannot do direct I/O: memory is timed in place of a disk",
            "name a folder on a local disk with --disk",
        ),
        "fewer_threads_than_cores": ("OMP_NUM_THREADS, or a limit set by a launcher", "unset OMP_NUM_THREADS"),
        "more_threads_than_cores": (
            "OMP_NUM_THREADS, or fewer cores for this process than the machine has",
            "unset OMP_NUM_THREADS: threads that share a core wait for each other",
        ),
        "utilisation_above_peak": (
            "a wrong peak for this device, or a wrong FLOPs count",
            "do not use this record's TFLOPS",
        ),
    }
)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the doubts are judged by. None: not known, and then no doubt is raised.

    steps_without_plan: of the timed ones, those under a provisional plan included.
    """

    timed_step_s: Sequence[float]
    threads: int
    cores: int
    steps_without_plan: int = 0
    swap_bytes: int | None = None
    other_processes: int | None = None
    throttled_by: Sequence[str] | None = None
    link: PcieLink | None = None
    mfu: float | None = None
    disk_direct: bool | None = None


def _doubt(code: str, seen: str) -> Doubt:
    cause, advice = CLOSED_LIST[code]
    return Doubt(code=code, seen=seen, cause=cause, advice=advice)


def _timing(step_s: Sequence[float]) -> list[Doubt]:
    """Doubts about the single step times. The spread leaves out the first step, which has a doubt of its own."""
    found: list[Doubt] = []
    if not step_s:
        return found
    first, rest = step_s[0], step_s[1:]
    if len(rest) >= 2:
        median = statistics.median(rest)
        if median > 0 and first > SLOW_FIRST_STEP * median:
            found.append(_doubt("first_timed_step_slow", f"{first:.4g} s, median of the others {median:.4g} s"))
        if median > 0 and max(rest) - min(rest) > SPREAD * median:
            found.append(_doubt("step_time_spread", f"{min(rest):.4g} to {max(rest):.4g} s, median {median:.4g} s"))
    if len(step_s) < MIN_TIMED_STEPS and statistics.median(step_s) < LONG_STEP_S:
        found.append(_doubt("short_timed_region", f"{len(step_s)} timed steps of {statistics.median(step_s):.4g} s"))
    return found


def judge(seen: Evidence) -> list[Doubt]:
    """The doubts that apply, in the order of the list."""
    found = _timing(seen.timed_step_s)
    if seen.steps_without_plan:
        several = f"{seen.steps_without_plan} of {len(seen.timed_step_s)} timed steps, or under a provisional plan"
        found.append(_doubt("steps_without_plan", several))
    if seen.other_processes:
        found.append(_doubt("other_processes_on_device", f"{seen.other_processes} of them"))
    if seen.throttled_by:
        found.append(_doubt("clocks_throttled", "by " + ", ".join(seen.throttled_by)))
    link = seen.link or PcieLink()
    if link.generation is not None and link.generation_max is not None and link.generation < link.generation_max:
        found.append(_doubt("pcie_link_below_maximum", f"generation {link.generation} of {link.generation_max}"))
    elif link.width is not None and link.width_max is not None and link.width < link.width_max:
        found.append(_doubt("pcie_link_below_maximum", f"{link.width} of {link.width_max} lanes"))
    if seen.swap_bytes:
        found.append(_doubt("swap_in_use", f"{format_size(seen.swap_bytes)} swapped out"))
    if seen.disk_direct is False:
        found.append(_doubt("page_cache", "optimizer states go through it on their way to the disk"))
    if seen.threads < seen.cores:
        found.append(_doubt("fewer_threads_than_cores", f"{seen.threads} threads on {seen.cores} cores"))
    if seen.threads > seen.cores:
        found.append(_doubt("more_threads_than_cores", f"{seen.threads} threads on {seen.cores} cores"))
    if seen.mfu is not None and seen.mfu > 1:
        found.append(_doubt("utilisation_above_peak", f"{seen.mfu:.0%} of the device's peak"))
    return found
