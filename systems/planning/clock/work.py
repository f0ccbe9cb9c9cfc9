"""What one micro-step of a model does between its unit events, whatever hardware or layout: the raw material of a trace.

`systems.prediction.meta_step` observes it without any arithmetic. With a layout it becomes a trace, with a profile's speeds
its compute times: so a step is known before any was run, on machines that nobody here owns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from systems.planning.clock.rates import Rates
from systems.planning.hardware import HardwareProfile
from systems.planning.layout import Layout
from systems.planning.trace import Moment, Phase, Trace


@dataclass(frozen=True)
class Interval:
    """From one event of the micro-step to the next.

    matmul_flops: of matrix products; attention: (width of a head, operations) of fused attention; matmul_bytes: of both;
    other_bytes: what all other operations read and write.
    kernels: operations that are launched.
    peak_bytes: highest of activations, temporaries and gradients in autograd's buffers; kept_peak_bytes: the same had the
    gradients made in the interval stayed there. fired: parameters whose gradient came.
    swaps: bytes that pass a port of this rank in each all-to-all of ranks that share experts.
    """

    matmul_flops: int = 0
    attention: tuple[tuple[int, int], ...] = ()
    matmul_bytes: int = 0
    other_bytes: int = 0
    kernels: int = 0
    peak_bytes: int = 0
    kept_peak_bytes: int = 0
    fired: tuple[int, ...] = ()
    swaps: tuple[int, ...] = ()


@dataclass(frozen=True)
class MicroStepWork:
    """One micro-step. events: its (phase, unit), BACKWARD_END last. pending: after each of them, calls of its unit whose
    backward has not ended. intervals: one more than events, the first is what comes before them. gradient_bytes: per
    parameter, of those that get a gradient. buffer_bytes: part of every interval's peak.
    input_bytes: (unit, bytes of its hidden state) of blocks.
    """

    events: tuple[tuple[Phase, int], ...]
    pending: tuple[int, ...]
    intervals: tuple[Interval, ...]
    gradient_bytes: dict[int, int]
    buffer_bytes: int = 0
    input_bytes: tuple[tuple[int, int], ...] = ()


def interval_seconds(
    profile: HardwareProfile, dtype: str, *, ranks: int = 1, expert_ranks: int = 1
) -> Callable[[Interval], float]:
    """Time of compute: products and attention at their rates or at the device's DRAM's, whichever is slower, and the rest at
    what other operations reach of the DRAM's. And what tokens take to other ranks' experts: see Note [All-to-alls] in rates.py.
    """
    fellows = Rates(profile, ranks).link_of(expert_ranks)
    rate, dram = profile.matmul_rate(dtype), profile.device_dram_bytes_per_s.value
    other = dram * (profile.device_dram_efficiency.value if profile.device_dram_efficiency is not None else 1.0)
    launch = profile.kernel_launch_s.value if profile.kernel_launch_s is not None else 0.0

    def attention_rate(width: int) -> float:
        return rate if profile.attention_by_width is None else profile.attention_by_width.rate(width)

    def seconds(interval: Interval) -> float:
        attention = sum(flops / attention_rate(width) for width, flops in interval.attention)
        products = max(interval.matmul_flops / rate + attention, interval.matmul_bytes / dram)
        here = max(products + interval.other_bytes / other, interval.kernels * launch)
        return here + sum(map(fellows.swap_s, interval.swaps)) if interval.swaps else here

    return seconds


def trace_of_work(work: MicroStepWork, layout: Layout, *, accumulate: int, seconds: Callable[[Interval], float]) -> Trace:
    """The steady step's trace: a bundle is flushed at the first exit at which all its gradients are there and none of its
    units is still to come.
    """
    first, *rest = work.intervals
    moments, intervals = [Moment(Phase.STEP_BEGIN)], [first]
    flushes: list[tuple[int, ...]] = [()]
    flushed = _flushes(work, layout)
    for micro_step in range(accumulate):
        if micro_step:
            intervals[-1] = _joined(intervals[-1], first)
        for (phase, unit), interval, bundles in zip(work.events, rest, flushed, strict=True):
            moments.append(Moment(phase, unit, micro_step))
            intervals.append(interval)
            flushes.append(bundles)
    moments.append(Moment(Phase.STEP_END, micro_step=accumulate))
    intervals.append(Interval(peak_bytes=rest[-1].peak_bytes, kept_peak_bytes=rest[-1].peak_bytes))  # what still lives
    flushes.append(())
    return Trace(
        moments=tuple(moments),
        non_model_bytes=tuple(interval.peak_bytes for interval in intervals),
        compute_time_s=tuple(map(seconds, intervals)),
        flushes=tuple(flushes),
        adopted_peak_bytes=tuple(interval.kept_peak_bytes for interval in intervals),
        gradient_bytes=tuple(_produced(work, intervals)),
        input_bytes=work.input_bytes,
        exchange_bytes=tuple(sum(interval.swaps) for interval in intervals) if any(i.swaps for i in intervals) else (),
    )


def _joined(one: Interval, other: Interval) -> Interval:
    """The end of one micro-step and the beginning of the next."""
    return Interval(
        matmul_flops=one.matmul_flops + other.matmul_flops,
        attention=one.attention + other.attention,
        matmul_bytes=one.matmul_bytes + other.matmul_bytes,
        other_bytes=one.other_bytes + other.other_bytes,
        kernels=one.kernels + other.kernels,
        peak_bytes=max(one.peak_bytes, other.peak_bytes),
        kept_peak_bytes=max(one.kept_peak_bytes, other.kept_peak_bytes),
        fired=one.fired + other.fired,
        swaps=one.swaps + other.swaps,
    )


def _produced(work: MicroStepWork, intervals: Sequence[Interval]) -> list[int]:
    """Bytes of each parameter's first gradient of the step."""
    seen: set[int] = set()
    produced = []
    for interval in intervals:
        new = set(interval.fired) - seen
        seen |= new
        produced.append(sum(work.gradient_bytes[p] for p in new))
    return produced


def _flushes(work: MicroStepWork, layout: Layout) -> list[tuple[int, ...]]:
    """Per event the bundles that are flushed there."""
    owner = layout.bundle_of_parameter
    missing: dict[int, set[int]] = {}
    for parameter in work.gradient_bytes:
        missing.setdefault(owner[parameter], set()).add(parameter)
    pending: dict[int, int] = {}
    flushes: list[tuple[int, ...]] = []
    for (phase, unit), left, before in zip(work.events, work.pending, work.intervals[:-1], strict=True):
        pending[unit] = left
        for parameter in before.fired:
            missing[owner[parameter]].discard(parameter)
        bundles: list[int] = []
        if phase is Phase.BACKWARD_EXIT:
            candidates = layout.bundles_of_unit.get(unit, ())
            bundles = [b for b in candidates if b in missing and not missing[b]]
            bundles = [b for b in bundles if not any(pending.get(u) for u in layout.bundles[b].units)]
        elif phase is Phase.BACKWARD_END:
            bundles = sorted(missing)
        for bundle in bundles:
            del missing[bundle]
        flushes.append(tuple(bundles))
    return flushes
