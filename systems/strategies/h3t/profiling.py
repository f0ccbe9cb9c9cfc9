"""The profiler (paper, section 3.3.1 and appendix C.3): what the first S steps tell of every layer, kept as a file if asked.

The first step has every layer rematerialised and its hidden state offloaded. Each later one opens some layers, as many as fit,
so that what their forward keeps is measured and not only bounded by what their backward took.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError, model_validator

from systems.machine.durable import prove_writable, write_whole
from systems.machine.reading import read_text
from systems.messages import invalid_value, one_line
from systems.planning.policy.windows import kept_bytes, windows
from systems.planning.trace import LaneTime, Moment, Phase, Trace
from systems.strategies.h3t.rates import summed

FORMAT = 1
_MOST_BYTES = 256 << 20  # of a file


@dataclass
class MeasuredLayers:
    """Of one kind of step. base: every layer rematerialised, with median times. kept: per layer's unit what its forward keeps.

    times: per moment what was measured where the layer that runs there was rematerialised.
    """

    base: Trace
    layers: tuple[int, ...]
    kept: dict[int, int] = field(default_factory=dict)
    opened: set[int] = field(default_factory=set)
    times: list[list[float]] = field(default_factory=list)
    steps: int = 0

    def add(self, trace: Trace) -> None:
        self.steps += 1
        self.times = self.times or [[] for _ in trace.moments]
        saved = set(self.layers) - trace.recomputed
        strange = {m for unit in saved for w in windows(trace, unit) for m in range(w.back, w.done)}
        for moment, seconds in enumerate(trace.compute_time_s):
            if moment not in strange:
                self.times[moment].append(seconds)
        for unit in self.layers:
            if unit in saved:
                self.kept[unit] = max(kept_bytes(trace, unit), self.kept[unit] if unit in self.opened else 0)
                self.opened.add(unit)
            elif unit not in self.opened:
                self.kept[unit] = max(kept_bytes(trace, unit), self.kept.get(unit, 0))
        if not saved and trace.offloaded == self.base.offloaded:
            memory = tuple(map(max, self.base.non_model_bytes, trace.non_model_bytes))
            self.base = replace(self.base, non_model_bytes=memory)
        medians = tuple(
            median(found) if found else old for found, old in zip(self.times, self.base.compute_time_s, strict=True)
        )
        seen = trace.lane_times if self.steps == 1 else summed(self.base.lane_times, trace.lane_times)
        self.base = replace(self.base, compute_time_s=medians, input_bytes=trace.input_bytes, lane_times=seen)


class Profiler:
    """steps: S. path: the file, or None."""

    def __init__(self, steps: int, path: str | None) -> None:
        self._steps, self._path = steps, None if path is None else Path(path)
        self._known: dict[tuple[Moment, ...], MeasuredLayers] = {}
        self._from_file = (
            {} if self._path is None or not self._path.exists() else {m.base.moments: m for m in read_profile(self._path)}
        )

    def add(self, trace: Trace, layers: Sequence[int]) -> MeasuredLayers:
        """What is known of steps like this one, this one included (unless a file knew all)."""
        kept = self._from_file.get(trace.moments)
        if kept is not None and kept.layers == tuple(layers) and _alike(kept.base, trace):
            return kept
        if trace.moments not in self._known:
            self._known[trace.moments] = MeasuredLayers(trace, tuple(layers))
        found = self._known[trace.moments]
        found.add(trace)
        if found.steps == self._steps and self._path is not None:
            _write(self._path, [*self._from_file.values(), *self._known.values()])
        return found

    def can_use(self, trace: Trace, layers: Sequence[int]) -> bool:
        """False for the first step of its kind if it began under another kind's plan, with layers not rematerialised: what that
        would free it does not tell.
        """
        return trace.moments in {**self._known, **self._from_file} or trace.recomputed.issuperset(layers)

    def wants_more(self, found: MeasuredLayers) -> bool:
        return found.steps < self._steps and found is self._known.get(found.base.moments)

    def to_open(self, found: MeasuredLayers, steps: int) -> tuple[int, ...]:
        """Layers for the next step: those not measured yet, spread over the steps that are left of so many."""
        waiting = [unit for unit in found.layers if unit not in found.opened]
        left = steps - found.steps
        return tuple(waiting[: -(-len(waiting) // left)]) if left > 0 else ()


def _alike(kept: Trace, trace: Trace) -> bool:
    """Of steps with equal moments: true if batch and layout are the same too."""
    return kept.input_bytes == trace.input_bytes and kept.flushes == trace.flushes


def _write(path: Path, found: Iterable[MeasuredLayers]) -> None:
    content = {"format": FORMAT, "steps": [_plain(each) for each in found]}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(content).encode())
    except OSError as error:
        raise ValueError(f"profile {path}: cannot be written: {error.strerror or error}") from None


def prepare(path: Path) -> None:
    """Prove that the file can be written, before any step, and leave nothing but its folder. ValueError, one line, if not."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        prove_writable(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"profile {path}: cannot be written: {getattr(error, 'strerror', None) or error}") from None


def _plain(each: MeasuredLayers) -> dict[str, Any]:
    base = asdict(each.base)
    base["moments"] = [[m.phase.value, m.unit, m.micro_step] for m in each.base.moments]
    base |= {name: sorted(base[name]) for name in ("recomputed", "offloaded")}
    return {"base": base, "layers": each.layers, "kept": sorted(each.kept.items()), "times": each.times, "steps": each.steps}


def read_profile(path: Path) -> list[MeasuredLayers]:
    """ValueError, one line, naming the field that is wrong in the file."""
    try:
        found = _File.model_validate(json.loads(read_text(path, _MOST_BYTES)))
    except ValidationError as error:
        where = ".".join(map(str, error.errors(include_url=False)[0]["loc"]))
        told = invalid_value(error, lambda *_: where) if where else f"the file: {invalid_value(error, lambda *_: where)}"
    except (OSError, ValueError, RecursionError) as error:
        told = f"cannot be read: {one_line(str(error))}"
    else:
        return [each.measured() for each in found.steps]
    raise ValueError(f"profile {path}: {told}: remove the file to measure anew")


_Seconds = Annotated[float, Field(ge=0)]


class _Read(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class _Base(_Read):
    """A Trace as it lies in the file."""

    moments: tuple[tuple[Phase, int, NonNegativeInt], ...] = Field(min_length=2)
    non_model_bytes: tuple[NonNegativeInt, ...]
    compute_time_s: tuple[_Seconds, ...]
    flushes: tuple[tuple[NonNegativeInt, ...], ...]
    adopted_peak_bytes: tuple[NonNegativeInt, ...] = ()
    gradient_bytes: tuple[NonNegativeInt, ...] = ()
    recomputed: frozenset[NonNegativeInt]
    offloaded: frozenset[NonNegativeInt]
    input_bytes: tuple[tuple[NonNegativeInt, NonNegativeInt], ...]
    inputs_left: tuple[tuple[NonNegativeInt, ...], ...] = ()
    lane_times: tuple[tuple[str, NonNegativeInt, _Seconds], ...] = ()
    exchange_bytes: tuple[NonNegativeInt, ...] = ()

    @model_validator(mode="after")
    def _whole(self) -> Self:
        for name in ("non_model_bytes", "compute_time_s", "flushes"):
            _one_a_moment(name, getattr(self, name), self)
        for name in ("adopted_peak_bytes", "gradient_bytes", "inputs_left", "exchange_bytes"):
            _one_a_moment(name, getattr(self, name) or self.moments, self)  # empty: not measured
        return self

    def trace(self) -> Trace:
        moments, times = (Moment(*each) for each in self.moments), (LaneTime(*each) for each in self.lane_times)
        return Trace(**{**dict(self), "moments": tuple(moments), "lane_times": tuple(times)})


def _one_a_moment(name: str, given: Sequence[Any], base: _Base) -> None:
    if len(given) != len(base.moments):
        raise ValueError(f"{name} has {len(given)} entries, one for each of the {len(base.moments)} moments is needed")


class _StoredStep(_Read):
    """A MeasuredLayers as it lies in the file."""

    base: _Base
    layers: tuple[NonNegativeInt, ...]
    kept: tuple[tuple[NonNegativeInt, NonNegativeInt], ...]
    times: tuple[tuple[_Seconds, ...], ...]
    steps: PositiveInt

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if {unit for unit, _ in self.kept} != set(self.layers):
            raise ValueError("kept needs one entry for each of layers")
        if not self.base.recomputed.issuperset(self.layers):
            raise ValueError("base.recomputed needs all of layers")
        _one_a_moment("times", self.times, self.base)
        return self

    def measured(self) -> MeasuredLayers:
        kept = dict(self.kept)
        return MeasuredLayers(self.base.trace(), self.layers, kept, set(kept), [list(each) for each in self.times], self.steps)


class _File(_Read):
    format: Literal[1]
    steps: tuple[_StoredStep, ...]
