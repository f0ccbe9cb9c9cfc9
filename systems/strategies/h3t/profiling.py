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
from typing import Any

from systems.messages import one_line
from systems.planning.activations import kept_bytes, windows
from systems.planning.trace import Moment, Phase, Trace

FORMAT = 1


@dataclass
class Measured:
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
        self.base = replace(self.base, compute_time_s=medians, input_bytes=trace.input_bytes)


class Profiler:
    """steps: S. path: the file, or None."""

    def __init__(self, steps: int, path: str | None) -> None:
        self._steps, self._path = steps, None if path is None else Path(path)
        self._known: dict[tuple[Moment, ...], Measured] = {}
        self._from_file = (
            {} if self._path is None or not self._path.exists() else {m.base.moments: m for m in read_profile(self._path)}
        )

    def add(self, trace: Trace, layers: Sequence[int]) -> Measured:
        """What is known of steps like this one, this one included (unless a file knew all)."""
        kept = self._from_file.get(trace.moments)
        if kept is not None and kept.layers == tuple(layers) and kept.base.input_bytes == trace.input_bytes:
            return kept
        if trace.moments not in self._known:
            self._known[trace.moments] = Measured(trace, tuple(layers))
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

    def wants_more(self, found: Measured) -> bool:
        return found.steps < self._steps and found is self._known.get(found.base.moments)

    def to_open(self, found: Measured, steps: int) -> tuple[int, ...]:
        """Layers for the next step: those not measured yet, spread over the steps that are left of so many."""
        waiting = [unit for unit in found.layers if unit not in found.opened]
        left = max(1, steps - found.steps)
        return tuple(waiting[: -(-len(waiting) // left)])


def _write(path: Path, found: Iterable[Measured]) -> None:
    content = {"format": FORMAT, "steps": [_plain(each) for each in found]}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"profile {path}: cannot be written: {error.strerror or error}") from None


def _plain(each: Measured) -> dict[str, Any]:
    base = asdict(each.base)
    base["moments"] = [[m.phase.value, m.unit, m.micro_step] for m in each.base.moments]
    base |= {name: sorted(base[name]) for name in ("recomputed", "offloaded")}
    return {"base": base, "layers": each.layers, "kept": sorted(each.kept.items()), "times": each.times, "steps": each.steps}


def read_profile(path: Path) -> list[Measured]:
    """ValueError, one line, naming what is wrong with the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"format is {content['format']}, {FORMAT} is read")
        return [_measured(each) for each in content["steps"]]
    except KeyError as error:
        raise ValueError(f"profile {path}: field {error} is missing: remove the file to measure anew") from None
    except (OSError, ValueError, TypeError) as error:
        reason = one_line(str(error))
        raise ValueError(f"profile {path} cannot be read: {reason}: remove the file to measure anew") from None


def _measured(plain: dict[str, Any]) -> Measured:
    base = dict(plain["base"])
    base["moments"] = tuple(Moment(Phase(phase), unit, step) for phase, unit, step in base["moments"])
    base |= {name: frozenset(base[name]) for name in ("recomputed", "offloaded")}
    pairs = ("flushes", "input_bytes")
    base |= {name: tuple(tuple(each) for each in base[name]) for name in pairs}
    base |= {name: tuple(value) for name, value in base.items() if isinstance(value, list)}
    kept = {int(unit): int(size) for unit, size in plain["kept"]}
    return Measured(Trace(**base), tuple(plain["layers"]), kept, set(kept), plain["times"], int(plain["steps"]))
