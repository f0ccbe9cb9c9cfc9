"""Records a step as it happens: the trace that the next plan is made of. It is a hint, never a truth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import replace

from systems.device.device import Device
from systems.planning.trace import Moment, Trace
from systems.recipe.recomputation.recompute import Recomputation


class Recorder:
    """Collects the moments of the step in progress with what was measured between them.

    adopted_bytes: gradients kept in autograd's buffers now; those of earlier intervals are not part of an interval's own.
    """

    def __init__(self, device: Device, adopted_bytes: Callable[[], int]) -> None:
        self._device, self._adopted_bytes = device, adopted_bytes
        self.moments: list[Moment] = []
        self._reset()

    def _reset(self) -> None:
        self.moments = []
        self._non_model: list[int] = []
        self._kept: list[int] = []
        self._flushes: list[list[int]] = []
        self._produced: list[int] = []
        self._inputs: list[list[int]] = []
        self._input_bytes: dict[int, int] = {}
        self._waiting: dict[int, tuple[int, frozenset[int]]] = {}
        self._given_up: list[tuple[int, int, int, frozenset[int]]] = []
        self._measuring = False
        self._adopted_before = 0

    def start(self, *, measure: bool) -> None:
        """measure: read memory and time at each moment; without, only the moments are kept."""
        self._reset()
        self._measuring = measure
        self._device.stopwatch.stop()
        if measure:
            self._device.meter.start_interval()
            self._device.stopwatch.start()

    def moment(self, moment: Moment) -> None:
        if self.moments and self._measuring:
            self._measure()
        self.moments.append(moment)
        self._flushes.append([])
        self._inputs.append([])
        self._produced.append(0)

    def _measure(self) -> None:
        self._device.stopwatch.lap()
        peak, kept = self._device.meter.start_interval()
        self._non_model.append(max(peak - self._adopted_before, 0))
        self._kept.append(max(kept - self._adopted_before, 0))
        self._adopted_before = self._adopted_bytes()

    def flushed(self, bundle: int) -> None:
        if self._flushes:
            self._flushes[-1].append(bundle)

    def waits(self, bundle: int, fired: Set[int]) -> None:
        """The bundle's units are done in this micro-step, but not all gradients expected of it have come."""
        self._waiting[bundle] = len(self.moments) - 1, frozenset(fired)

    def gives_up(self, bundle: int, fired: Set[int]) -> None:
        """It is flushed with what has come, at the end of the backward pass."""
        since, then = self._waiting.pop(bundle, (0, frozenset()))
        if then and then == fired:
            self._given_up.append((bundle, len(self.moments) - 1, since, then))

    def produced(self, nbytes: int) -> None:
        """A parameter's first gradient of the step."""
        if self._produced:
            self._produced[-1] += nbytes

    def input_left(self, unit: int, nbytes: int) -> None:
        """A unit's input leaves for the host, behind what compute has been given so far."""
        if self._inputs:
            self._inputs[-1].append(unit)
            self._input_bytes[unit] = nbytes

    def finish(self, expected: Mapping[int, Set[int]], recomputation: Recomputation, offloaded: frozenset[int]) -> Trace | None:
        """None if the step was not measured. recomputation, offloaded: what was in force.

        expected: per bundle the gradients that complete it from now on. Where one waited in vain for more than these, the
        next step will not, so the trace says that it was flushed when they were there.
        """
        if not self._measuring:
            return None
        self._measure()
        for bundle, late, since, fired in self._given_up:
            if fired == expected[bundle]:
                self._flushes[late].remove(bundle)
                self._flushes[since] = sorted([*self._flushes[since], bundle])
        times = self._device.transfers.times
        return Trace(
            moments=tuple(self.moments),
            non_model_bytes=tuple(self._non_model),
            compute_time_s=self._device.stopwatch.stop(),
            flushes=tuple(tuple(f) for f in self._flushes),
            adopted_peak_bytes=tuple(self._kept),
            gradient_bytes=tuple(self._produced),
            recomputed=recomputation.units,
            offloaded=offloaded & (recomputation.units | self._input_bytes.keys()),
            input_bytes=tuple(sorted((recomputation.input_bytes | self._input_bytes).items())),
            inputs_left=tuple(tuple(units) for units in self._inputs),
            lane_times=() if times is None else times.take(),
        )


def merged(old: Trace, new: Trace) -> Trace:
    """Two steps with the same moments: the larger memory, the newer times."""
    assert old.signature == new.signature
    return replace(
        new,
        non_model_bytes=tuple(map(max, old.non_model_bytes, new.non_model_bytes)),
        adopted_peak_bytes=tuple(map(max, old.adopted_peak_bytes, new.adopted_peak_bytes)),
        gradient_bytes=tuple(map(max, old.gradient_bytes, new.gradient_bytes)),
    )
