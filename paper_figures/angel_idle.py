"""Shares of a step in which the device waits, with host memory alone and with a disk (Angel-PTM, section 4.3).

The paper says 10 % and 80 %, of systems before it. Here they are Angel-PTM's own, from runs with --phases: one less what
forward, backward, norm and the device's updates took in a step in which nothing overlaps, over the mean step that was timed.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness.figures import FigureSpec
from harness.paper_table import FigureCell, FigureColumn, PaperTable, table
from harness.record import Record
from paper_figures.recorded import Keep, cells, last_like, measured, records, settings
from paper_figures.sentences import Sentence, sentences

SHOWS = {"angel-idle": "share of a step in which the device waits, without and with a disk (4.3)"}
DEVICE = ("forward", "backward", "norm", "adam_device")  # phases in which it computes
SYSTEM, MODEL = "angel-ptm", "ps-1b"
PLACE = "section 4.3"


def busy_s(run: Record) -> float | None:
    """Seconds of a step in which the device computes. None: the run told no phases."""
    found = [run.phases_s.get(f"phase.{name}") for name in DEVICE]
    return None if None in found else sum(seconds for seconds in found if seconds is not None)


def idle(run: Record) -> float | None:
    """Percent of a step. At least 0: alone, a phase may take longer than beside others."""
    busy, step = busy_s(run), run.metrics.mean_step_time_s
    return None if busy is None or not step else round(100 * max(0.0, 1 - busy / step), 1)


def uses_disk(run: Record) -> bool:
    return bool(run.traffic.disk_read_bytes)


def _of(model: str, *, disk: bool) -> Keep:
    """Runs of Angel-PTM that told their phases."""

    def keep(run: Record) -> bool:
        mine = run.spec.system == SYSTEM and model in (run.spec.model, "")
        return mine and busy_s(run) is not None and uses_disk(run) is disk

    return keep


def tables(name: str, asked: FigureSpec) -> Iterator[PaperTable]:
    found = records(asked.results)
    alone, with_disk = (measured(last_like(found, _of(MODEL, disk=disk)), idle) for disk in (False, True))
    yield sentences(
        "Angel-PTM 4.3: idle time of a step, %",
        (
            Sentence("with CPU memory alone", 10, PLACE, measured=alone),
            Sentence("with CPU memory and SSD", 80, PLACE, measured=with_disk),
        ),
        "The paper's are of systems before it, no model named; here they are Angel-PTM's own, updates not behind the steps.",
        f"Measured: {MODEL}, runs with --phases of harness/results_tables/15-h200-lock-free.toml.",
    )
    every = [group for disk in (False, True) for group in cells(found, _of("", disk=disk))]
    columns, named = settings([runs[-1] for runs in every], ("model", "options", "device budget"))
    rows: list[list[FigureCell]] = []
    for row, runs in zip(named, every, strict=True):
        step = measured(runs, lambda each: each.metrics.mean_step_time_s)
        rows.append([*row, "yes" if uses_disk(runs[-1]) else "no", measured(runs, busy_s), step, measured(runs, idle)])
    columns += [FigureColumn("disk in use")]
    columns += [FigureColumn(each, "measured") for each in ("device busy s", "mean step s", "idle %")]
    yield table("Angel-PTM: idle time of the device, all runs that told their phases", columns, rows)
