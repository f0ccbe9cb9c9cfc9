"""A comparison as tables for the eye: speed with its spread, then what must be known beside it. Numbers are in the JSON."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.comparison import Comparison, ComparisonRow, Configuration
from harness.stats import MedianFigure
from systems.messages import printable
from systems.sizes import format_size

_NONE = "-"


def show(comparison: Comparison, console: Console) -> None:
    speed = Table("system", "status", "n", "mean step s", "range", "tokens/s", "speed", "interval", "verdict")
    beside = Table("system", "loss first", "last", "max deviation", "device peak", "host peak", "process RSS", "runs on")
    for row in comparison.rows:
        speed.add_row(*map(_plain, _speed(row, comparison.reference)))
        beside.add_row(*map(_plain, _beside(row)))
    console.print(speed)
    console.print(beside)
    for row in comparison.rows:
        if row.reason is not None:
            console.print(printable(f"{row.label}: {row.status}: {row.reason.message}"), markup=False)
    for line in comparison.refusals:
        console.print(printable(f"refused: {line}"), markup=False)
    for line in comparison.marks:
        console.print(printable(f"mark: {line}"), markup=False)


def _plain(text: str) -> str:
    """As it is, for a table that takes markup."""
    return escape(printable(text))


def _speed(row: ComparisonRow, reference: str) -> list[str]:
    ratio = row.speed_ratio
    if ratio is not None:
        judged = [f"{ratio.value:.3f}x", _range(ratio.low, ratio.high), ratio.verdict]
    elif row.label == reference:
        judged = ["1" if row.n else _NONE, _NONE, "reference"]
    elif row.refused:
        judged = [_NONE, _NONE, "refused: " + ", ".join(difference.fact for difference in row.refused)]
    else:
        judged = [_NONE, _NONE, "nothing to compare"]
    step = row.mean_step_time_s
    return [
        row.label,
        row.status,
        str(row.n),
        _median(step),
        _NONE if step is None else _range(step.low, step.high),
        _median(row.tokens_per_s),
        *judged,
    ]


def _beside(row: ComparisonRow) -> list[str]:
    losses, peaks = row.losses, row.peaks
    deviation = losses.max_relative_deviation
    return [
        row.label,
        _number(losses.first),
        _number(losses.last),
        _NONE if deviation is None else f"{deviation:.2g}",
        _size(peaks.device_bytes),
        _size(peaks.host_bytes),
        _size(peaks.host_rss_bytes),
        _runs_on(row.configuration),
    ]


def _runs_on(configuration: Configuration) -> str:
    if configuration.package is None:
        return "this project's own code"
    kind = "the real package" if configuration.real_package else "a re-implementation"
    file = f", with {configuration.config_file}" if configuration.config_file else ""
    return f"{configuration.package}, {kind}{file}"


def _median(figure: MedianFigure | None) -> str:
    return _NONE if figure is None else f"{figure.median:.4g}"


def _range(low: float | None, high: float | None) -> str:
    return _NONE if low is None or high is None else f"{low:.4g} to {high:.4g}"


def _number(value: float | None) -> str:
    return _NONE if value is None else f"{value:.4f}"


def _size(size: int | None) -> str:
    return _NONE if size is None else format_size(size)
