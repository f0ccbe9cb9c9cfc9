"""How a run ended, for a person: what it was, how fast, what it held and moved, what to doubt, and where its record is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.record import Metrics, Record
from systems.messages import printable
from systems.sizes import format_size

STYLES = {"ok": "green", "interrupted": "yellow", "diverged": "yellow"}
MOVED = {
    "h2d_bytes": "to the device",
    "d2h_bytes": "from it",
    "gather_bytes": "gathered",
    "reduce_bytes": "reduced",
    "exchange_bytes": "of tokens exchanged",
    "disk_read_bytes": "read from the disk",
    "disk_write_bytes": "written to it",
}


def show(record: Record, path: Path, console: Console) -> None:
    """A few lines; what a run does not know has none."""
    console.print(f"[bold {STYLES.get(record.status, 'red')}]{record.status}[/]{_plain(_why(record))}")
    grid = Table.grid(padding=(0, 2))
    for name, text in facts(record, path):
        grid.add_row(name, _plain(text))
    console.print(grid)


def facts(record: Record, path: Path) -> Iterator[tuple[str, str]]:
    """All but how it ended: what each line is of, and the line."""
    yield from _rows(record)
    yield from (("try", line) for line in (record.reason.advice if record.reason else ()))
    yield from (("doubt", f"{each.code}: {each.seen}; may be {each.cause}; {each.advice}") for each in record.doubts)
    yield "record", str(path)


def ended(record: Record) -> str:
    """ok, or oom: why."""
    return f"{record.status}: {record.reason.message}" if record.reason else record.status


def _plain(text: str) -> str:
    """As it is, where markup is read and a terminal obeys."""
    return escape(printable(text))


def _why(record: Record) -> str:
    return f": {record.reason.message}" if record.reason else ""


def _rows(record: Record) -> Iterator[tuple[str, str]]:
    spec, resolved, metrics = record.spec, record.resolved, record.metrics
    size = "" if resolved.parameters is None else f", {resolved.parameters:,} parameters"
    changed = "".join(f", {text}" for text in spec.set)
    yield "model", f"{spec.model}{changed}{size}"
    options = f" ({', '.join(spec.option)})" if spec.option else ""
    ranks = f", {spec.ranks} ranks" if spec.ranks > 1 else ""
    yield "system", f"{spec.system}{options}, {spec.dtype}{ranks}, on {resolved.device_label or 'a device not known'}"
    if spec.tag is not None:
        yield "tag", spec.tag
    if (text := _step(metrics)) is not None:
        yield "step", text
    if metrics.tokens_per_s is not None:
        yield "speed", f"{metrics.tokens_per_s:,.1f} tokens/s"
    losses = [loss for loss in metrics.loss if loss is not None]
    if losses:
        yield "loss", f"{losses[0]:.4f} to {losses[-1]:.4f}"
    yield from _peaks(record)
    moved = [(getattr(record.traffic, field), what) for field, what in MOVED.items()]
    said = [f"{format_size(int(size))} {what}" for size, what in moved if size]
    if said:
        yield "traffic", f"{', '.join(said)}, a step"
    if record.plan.predicted_step_time_s is not None:
        yield "plan", f"{record.plan.predicted_step_time_s:.4g} s a step by simulation"
    for note in record.notes:
        yield "note", note


def _step(metrics: Metrics) -> str | None:
    """The mean, which tokens/s are of too; where the timed region was not completed, the median."""
    mean, median, times = metrics.mean_step_time_s, metrics.median_step_time_s, metrics.step_time_s
    if median is None:
        return None
    spread = f", {min(times):.4g} to {max(times):.4g} s in {len(times)} timed steps" if times else ""
    return f"{median:.4g} s (median{spread})" if mean is None else f"{mean:.4g} s (mean; median {median:.4g} s{spread})"


def _peaks(record: Record) -> Iterator[tuple[str, str]]:
    """Of each tier beside its budget; of the host the process too, where the system keeps no account."""
    memory = record.memory
    for tier, peak, budget in (
        ("device", memory.device_peak_bytes, memory.device_budget_bytes),
        ("host", memory.host_peak_bytes, memory.host_budget_bytes),
        ("disk", memory.disk_peak_bytes, record.spec.disk_memory),
    ):
        if peak is None or (tier == "disk" and not peak):  # of most runs: none is used
            continue
        yield tier, f"{format_size(peak)} at most" + ("" if budget is None else f" of {format_size(budget)}")
    if memory.host_rss_peak_bytes is not None:
        yield "process", f"{format_size(memory.host_rss_peak_bytes)} resident at most"
