"""The best of several batches, as the papers take theirs: forecasts at each, of which the one with the highest rate counts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from harness.paper_table import SimulatedCell
from models import registry as models_registry
from paper_figures.kept import ForecastCase, KeptForecasts

TERA = 10**12
PRODUCTS = 8  # floating point operations a parameter and token: two forward, four backward, two again
Rate = Callable[[ForecastCase, float], float]


def tflops(case: ForecastCase, step_s: float) -> float:
    """Of a GPU, recomputation included: Elixir's equation 1, and nearly what PatrickStar counts."""
    parameters = models_registry.parameter_count(models_registry.resolve(case.model))
    assert parameters is not None
    return PRODUCTS * parameters * case.batch_size * case.seq_len / step_s / TERA


def samples_per_s(case: ForecastCase, step_s: float) -> float:
    """Of all GPUs."""
    return case.ranks * case.batch_size / step_s


@dataclass(frozen=True)
class BestBatch:
    case: ForecastCase
    rate: float

    @property
    def cell(self) -> SimulatedCell:
        return SimulatedCell(self.rate, self.case.profile)

    @property
    def batch(self) -> SimulatedCell:
        return SimulatedCell(self.case.batch_size, self.case.profile)


def best_batch(kept: KeptForecasts, cases: Iterable[ForecastCase], rate: Rate = tflops) -> BestBatch | None:
    """None: no batch fits, or none is kept."""
    found = [(case, kept.of(case)) for case in cases]
    made = [BestBatch(case, rate(case, seen.step_s)) for case, seen in found if seen is not None and seen.step_s is not None]
    return max(made, key=lambda one: one.rate, default=None)


def why_not(kept: KeptForecasts, cases: Iterable[ForecastCase]) -> SimulatedCell | None:
    """Why the first of them does not fit, without what a user could change. None: it fits, or is not kept."""
    first = next(iter(cases))
    seen = kept.of(first)
    why = None if seen is None else seen.why_not
    return None if why is None else SimulatedCell(why.partition(": ")[0], first.profile)


def cells_of(found: BestBatch | None) -> list[SimulatedCell | None]:
    """Rate and batch."""
    return [None, None] if found is None else [found.cell, found.batch]


def over(ours: BestBatch | None, theirs: BestBatch | None) -> float | None:
    return None if ours is None or theirs is None else ours.rate / theirs.rate


def ratio_cell(ours: BestBatch | None, theirs: BestBatch | None) -> SimulatedCell | None:
    ratio = over(ours, theirs)
    return None if ratio is None or ours is None else SimulatedCell(f"{ratio:.2f}x", ours.case.profile)


def spread(ratios: Sequence[float | None], profile: str) -> list[SimulatedCell | None]:
    """Least, most and average of those that are known."""
    known = [ratio for ratio in ratios if ratio is not None]
    if not known:
        return [None, None, None]
    return [SimulatedCell(f"{value:.2f}x", profile) for value in (min(known), max(known), statistics.mean(known))]


def together(*kept: KeptForecasts) -> KeptForecasts:
    """Of several figures: what made the first."""
    return KeptForecasts(kept[0].source, {key: found for one in kept for key, found in one.found.items()}, kept[0].revision)
