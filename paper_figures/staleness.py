"""What updates behind the steps (Angel-PTM, 4.3, Algorithm 2) cost in loss: validation on real text at equal samples.

`staleness.toml` has the runs, of the emulated device and a disk held to a rate that lets steps run as far ahead as they may.
They are small, and prove no speed. The paper prints losses of 0.853 and 0.861 (table 6), and no bound on staleness.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from harness import store
from harness.cells import read_table, replicates
from harness.figures import FigureSpec
from harness.paper_table import FigureCell, FigureColumn, MeasuredCell, PaperTable, table
from harness.record import Record
from paper_figures.recorded import machine_of

SHOWS = {"staleness": "loss of updates that run behind the steps, over the synchronous one's, three seeds"}
PICTURES = ("staleness",)
TABLE = Path(__file__).with_name("staleness.toml")
FOLDER = "staleness"  # below that of the records
BOUND = "max_staleness="
ENOUGH = 95.0  # percent of the synchronous decrease
MAKE = "harness sweep paper_figures/staleness.toml --results results/staleness runs what is missing."


@dataclass(frozen=True, kw_only=True)
class Course:
    """Runs of so many steps: of each bound on staleness and each seed the last one that went well, where there is one."""

    steps: int
    bounds: tuple[int, ...]
    seeds: tuple[int, ...]
    there: Mapping[tuple[int, int], Record]

    def of(self, bound: int) -> list[Record]:
        """By seed."""
        return [run for seed in self.seeds if (run := self.there.get((bound, seed))) is not None]


def courses(results: str) -> list[Course]:
    """As many as lengths, the shortest first."""
    asked, (found, _) = read_table(TABLE), store.read_all(Path(results) / FOLDER)
    good = [record for record in found if record.status == "ok"]
    there: dict[int, dict[tuple[int, int], Record]] = {}
    wanted: dict[int, set[tuple[int, int]]] = {}
    for cell in (cell for group in asked.groups for cell in group.cells):
        (bound,) = (int(option.removeprefix(BOUND)) for option in cell.spec.option if option.startswith(BOUND))
        steps, which = cell.spec.steps or 0, (bound, cell.spec.seed)
        wanted.setdefault(steps, set()).add(which)
        mine = there.setdefault(steps, {})
        for run in replicates(good, cell, asked.hardware)[-1:]:
            mine[which] = run
    return [
        Course(
            steps=steps,
            bounds=tuple(sorted({bound for bound, _ in wanted[steps]})),
            seeds=tuple(sorted({seed for _, seed in wanted[steps]})),
            there=there[steps],
        )
        for steps in sorted(wanted)
    ]


def decrease(run: Record) -> float | None:
    """From the first step's loss, which no update has part in, to the last validation. None: one of them is not finite."""
    first, last = run.metrics.loss[:1], run.metrics.eval_loss[-1:]
    return None if None in (*first, *last) or not (first and last) else float(first[0] or 0.0) - float(last[0] or 0.0)


def kept(course: Course, bound: int, seed: int) -> float | None:
    """Percent of the synchronous run's decrease after the same samples; None where one of the two is missing."""
    pair = [course.there.get((each, seed)) for each in (bound, 0)]
    falls = [None if run is None else decrease(run) for run in pair]
    return None if falls[0] is None or not falls[1] else 100 * falls[0] / falls[1]


def tables(name: str, asked: FigureSpec) -> Iterator[PaperTable]:
    for course in courses(asked.results):
        yield _shares(course)
        yield _losses(course)


def _shares(course: Course) -> PaperTable:
    rows: list[list[FigureCell]] = []
    for bound in course.bounds:
        mine = course.of(bound)
        shares = [kept(course, bound, seed) for seed in course.seeds]
        known = [share for share in shares if share is not None]
        stale = [float(run.strategy["staleness_mean"]) for run in mine if run.strategy]
        cells = [_cell(mine, statistics.fmean(stale)) if stale else None]
        cells += [
            None if share is None else _cell([course.there[bound, seed]], round(share, 1))
            for seed, share in zip(course.seeds, shares, strict=True)
        ]
        cells += [_cell(mine, round(of(known), 1)) if known else None for of in (statistics.fmean, min, max)]
        rows.append([bound, *cells])
    data = next((run.resolved.data for run in course.there.values()), None)
    columns = [FigureColumn("steps behind, at most"), FigureColumn("steps behind, mean", "measured")]
    columns += [FigureColumn(f"seed {seed}, %", "measured") for seed in course.seeds]
    below = [f"{row[0]}" for row in rows if isinstance(row[-3], MeasuredCell) and float(row[-3].value) < ENOUGH]
    return table(
        f"Decrease of the validation loss in {course.steps} steps, of the synchronous one's",
        [*columns, *(FigureColumn(each, "measured") for each in ("mean, %", "least, %", "most, %"))],
        rows,
        *([] if data is None else [f"{data.source}, sha256 {(data.sha256 or '')[:12]}; a token is a byte."]),
        f"Below {ENOUGH:.0f} % in the mean: {', '.join(below) if below else 'none'}.",
        "The paper's 0.861 over 0.853 (table 6) is of a bound that it does not name, and of no seeds that it names.",
        MAKE,
    )


def _cell(found: list[Record], value: float) -> MeasuredCell:
    return MeasuredCell(value, tuple(run.run_id for run in found), machine_of(found[-1]))


def _losses(course: Course) -> PaperTable:
    steps = sorted({step for run in course.there.values() for step in run.metrics.eval_step})
    rows: list[list[FigureCell]] = []
    for step in steps:
        row: list[FigureCell] = [step]
        for bound in course.bounds:
            mine = [run for run in course.of(bound) if step in run.metrics.eval_step]
            values = [run.metrics.eval_loss[run.metrics.eval_step.index(step)] for run in mine]
            finite = [value for value in values if value is not None]
            row.append(_cell(mine, statistics.fmean(finite)) if mine and len(finite) == len(mine) else None)
        rows.append(row)
    columns = [FigureColumn(f"at most {bound} behind", "measured") for bound in course.bounds]
    title = f"Validation loss after a step of {course.steps}, mean of the seeds"
    return table(title, [FigureColumn("step"), *columns], rows)


def picture(name: str, asked: FigureSpec) -> Figure:
    """Validation over steps, a colour a bound and a line a seed; beside it what is kept of the decrease. A row a length."""
    found = courses(asked.results)
    figure = Figure(figsize=(10, 4.5 * len(found)), layout="constrained")
    for course, (losses, shares) in zip(found, figure.subplots(len(found), 2, squeeze=False), strict=True):
        for number, bound in enumerate(course.bounds):
            for seed in course.seeds:
                run = course.there.get((bound, seed))
                if run is None:
                    continue
                label = f"at most {bound} behind" if seed == course.seeds[0] else None
                values = [float("nan") if loss is None else loss for loss in run.metrics.eval_loss]
                losses.plot(run.metrics.eval_step, values, color=f"C{number}", marker="o", ms=3, lw=1, alpha=0.8, label=label)
                share = kept(course, bound, seed)
                if share is not None:
                    shares.plot([number], [share], color=f"C{number}", marker="o", ls="")
        losses.set_xlabel("step, each of as many samples")
        losses.set_ylabel("validation loss, nats a token")
        if losses.lines:
            losses.legend(fontsize=8)
        shares.axhline(ENOUGH, color="gray", lw=0.8)
        shares.set_xticks(range(len(course.bounds)), [str(bound) for bound in course.bounds])
        shares.set_xlabel("steps behind, at most")
        shares.set_ylabel("decrease of the loss, % of the synchronous one's")
        losses.set_title(f"measured on the emulated device, opt-tiny, {course.steps} steps, three seeds", fontsize=9)
    return figure
