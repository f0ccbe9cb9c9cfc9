"""Runs of several systems as one comparison: a row each, figures over its processes, and what sets it apart.

Nothing here runs anything: records in, a comparison out, the same whether they were just made or read from a folder.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from harness.likeness import Difference, differences, elsewhere, of_one_machine
from harness.record import Part, Reason, Record
from harness.stats import ENOUGH_PROCESSES, LARGEST, MedianFigure, Ratio, compare_rates, summarize

# How far the losses of one training may drift apart between systems, relative: larger and it is another training.
LOSS_TOLERANCE: Mapping[str, float] = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-2}

REGION_SHARE = 0.1  # by which a region's step time may differ from the median step before it is said


class Losses(Part):
    """Of the first good process; deviation: the largest of all steps and processes, relative to the reference's loss."""

    first: float | None = None
    last: float | None = None
    max_relative_deviation: float | None = Field(None, description="null: no step to compare")


class Peaks(Part):
    """Bytes, the largest over the processes; the first two are the system's own accounts, or torch's for the device."""

    device_bytes: int | None = None
    host_bytes: int | None = None
    host_rss_bytes: int | None = Field(None, description="resident memory of the process, as the kernel counts it")


class Configuration(Part):
    """How the system was set up. package: the outside package that trained; null: this project's own code did."""

    package: str | None = None
    real_package: bool | None = Field(None, description="whether it is that package itself, not a re-implementation")
    config_file: str | None = Field(None, description="the user's own file, merged over the baseline's configuration")
    options: dict[str, Any] | None = None
    statistics: dict[str, Any] | None = Field(None, description="the system's own, with a baseline's configuration verbatim")


class ComparisonRow(Part):
    """One system. n counts the processes that ended well: all figures are of these. status: ok if all of them did."""

    label: str
    system: str
    status: str
    reason: Reason | None = None
    n: int = 0
    runs: list[str] = Field([], description="run ids, failed ones included")
    median_step_time_s: MedianFigure | None = Field(None, description="of the processes' median step times")
    mean_step_time_s: MedianFigure | None = Field(None, description="of the processes' timed regions over their steps")
    skipped_steps: int = Field(0, description="timed steps of the processes that updated nothing")
    tokens_per_s: MedianFigure | None = Field(None, description="of the timed regions' steps that updated the model")
    relative_tflops: MedianFigure | None = None
    speed_ratio: Ratio | None = Field(
        None, description="tokens/s, of the whole region, over the reference's; null: refused, or nothing to compare"
    )
    left_out: int = Field(0, description="runs of either side that the speed leaves out, of machines that the other has not")
    losses: Losses = Losses()
    peaks: Peaks = Peaks()
    configuration: Configuration = Configuration()
    differences: list[Difference] = Field([], description="from the reference; one that is refused leaves no ratio")
    doubts: list[str] = Field([], description="codes, from any of the processes")

    @property
    def refused(self) -> list[Difference]:
        return [difference for difference in self.differences if difference.refused]


class Comparison(Part):
    """The last line of `harness compare`. spec: null where kept records were compared."""

    schema_version: int = 1
    kind: Literal["comparison"] = "comparison"
    spec: dict[str, Any] | None = None
    reference: str
    rows: list[ComparisonRow]
    refusals: list[str] = Field([], description="pairs that get no ratio, and why, a line each")
    marks: list[str] = Field([], description="what to know beside the ratios, a line each")

    @property
    def failed(self) -> bool:
        return any(row.status != "ok" for row in self.rows)


def to_json(comparison: Comparison) -> str:
    return json.dumps(comparison.model_dump(mode="json"), allow_nan=False)


def compare(
    groups: Mapping[str, Sequence[Record]], *, spec: dict[str, Any] | None = None, intended: Collection[str] = ()
) -> Comparison:
    """groups: label to the runs of one system, the reference first. An empty group is a system that was never run.

    intended: facts that the comparison is about, such as a budget: there a difference is marked and refuses nothing.
    """
    labels = list(groups)
    good = {label: [record for record in groups[label] if record.status == "ok"] for label in labels}
    reference = good[labels[0]]
    unlike = {label: _differences(good[label], reference, intended) for label in labels}
    rows = [_row(label, groups[label], good[label], reference, unlike[label], label == labels[0]) for label in labels]
    refusals = [
        f"{row.label} is not set against {labels[0]}: " + "; ".join(str(difference) for difference in row.refused)
        for row in rows
        if row.refused
    ]
    return Comparison(spec=spec, reference=labels[0], rows=rows, refusals=refusals, marks=_marks(rows, reference))


def _row(
    label: str,
    records: Sequence[Record],
    good: Sequence[Record],
    reference: Sequence[Record],
    unlike: list[Difference],
    is_reference: bool,
) -> ComparisonRow:
    bad = next((record for record in records if record.status != "ok"), None)
    rates = _figures(good, "tokens_per_s")
    there, theirs = of_one_machine(good, reference)
    ratio = None if is_reference or any(difference.refused for difference in unlike) else _ratio(there, theirs)
    shown = good[0] if good else bad
    return ComparisonRow(
        label=label,
        system=shown.spec.system if shown else label.partition(":")[0],
        status=bad.status if bad else "ok" if good else "failed",
        reason=bad.reason if bad else None if good else Reason(message="it was not run: the comparison was stopped before"),
        n=len(good),
        runs=[record.run_id for record in records],
        median_step_time_s=summarize(_figures(good, "median_step_time_s")),
        mean_step_time_s=summarize(_figures(good, "mean_step_time_s")),
        skipped_steps=sum(map(_skipped, good)),
        tokens_per_s=summarize(rates),
        relative_tflops=summarize(_figures(good, "relative_tflops")),
        speed_ratio=ratio,
        left_out=0 if ratio is None else len(good) - len(there) + len(reference) - len(theirs),
        losses=_losses(good, reference),
        peaks=_peaks(records),
        configuration=_configuration(shown),
        differences=unlike,
        doubts=list(dict.fromkeys(doubt.code for record in good for doubt in record.doubts)),
    )


def _skipped(record: Record) -> int:
    timed, useful = record.resolved.timed_steps, record.metrics.useful_steps
    return 0 if timed is None or useful is None else max(0, timed - useful)


def asides(row: ComparisonRow) -> Iterator[str]:
    """What keeps a row's columns from being of the same steps of the same runs, a line each."""
    if row.skipped_steps:
        yield f"{row.skipped_steps} of the timed steps were skipped: the mean step time counts them, tokens/s and speed do not"
    if row.left_out:
        yield f"speed leaves out {row.left_out} of the two rows' runs: their machines have none of the other row"


def _ratio(records: Sequence[Record], reference: Sequence[Record]) -> Ratio | None:
    return compare_rates(_figures(records, "tokens_per_s"), _figures(reference, "tokens_per_s"))


def _figures(records: Sequence[Record], metric: str) -> list[float]:
    """Those that a machine may have: a file may hold any number, and of some no mean can be taken."""
    found = [getattr(record.metrics, metric) for record in records]
    return [figure for figure in found if figure is not None and abs(figure) < LARGEST]


def _differences(records: Sequence[Record], reference: Sequence[Record], intended: Collection[str]) -> list[Difference]:
    """Of any of the runs from any of the reference's, each fact once: a fact that refuses in one pair refuses all."""
    found: dict[str, Difference] = {}
    for record in records:
        for other in reference:
            for difference in differences(record, other):
                if difference.fact not in found or (difference.refused and not found[difference.fact].refused):
                    found[difference.fact] = difference
    if (other_machine := elsewhere(records, reference)) is not None:
        found[other_machine.fact] = other_machine
    return [one.model_copy(update={"refused": one.refused and one.fact not in intended}) for one in found.values()]


def _losses(records: Sequence[Record], reference: Sequence[Record]) -> Losses:
    if not records:
        return Losses()
    course = [loss for loss in records[0].metrics.loss if loss is not None]
    deviations = [loss_deviation(record, reference[0]) for record in records if reference]
    known = [deviation for deviation in deviations if deviation is not None]
    return Losses(
        first=course[0] if course else None,
        last=course[-1] if course else None,
        max_relative_deviation=max(known, default=None),
    )


def loss_deviation(record: Record, reference: Record) -> float | None:
    """The largest |loss - reference| / |reference| of a step; a step that only one of the two knows is left out."""
    pairs = zip(record.metrics.loss, reference.metrics.loss, strict=False)
    deviations = (abs(a - b) / abs(b) for a, b in pairs if a is not None and b)
    return max((deviation for deviation in deviations if math.isfinite(deviation)), default=None)


def _peaks(records: Sequence[Record]) -> Peaks:
    def largest(read: Callable[[Record], int | None]) -> int | None:
        found = (read(record) for record in records)
        return max((size for size in found if size is not None), default=None)

    def device(record: Record) -> int | None:
        own = record.memory.device_peak_bytes
        return record.memory.device_allocated_peak_bytes if own is None else own

    return Peaks(
        device_bytes=largest(device),
        host_bytes=largest(lambda record: record.memory.host_peak_bytes),
        host_rss_bytes=largest(lambda record: record.memory.host_rss_peak_bytes),
    )


def _configuration(record: Record | None) -> Configuration:
    if record is None:
        return Configuration()
    said = record.strategy or {}
    package = record.resolved.package
    if package is None and said.get("package"):
        package = " ".join(str(part) for part in (said["package"], said.get("version")) if part)
    return Configuration(
        package=package,
        real_package=None if package is None else bool(said.get("real_package", True)),
        config_file=said.get("config_file"),
        options=record.resolved.options,
        statistics=record.strategy,
    )


def _marks(rows: Sequence[ComparisonRow], reference: Sequence[Record]) -> list[str]:
    found: list[str] = []
    if few := [row.label for row in rows if 0 < row.n < ENOUGH_PROCESSES]:
        found.append(f"fewer than {ENOUGH_PROCESSES} processes of {', '.join(few)}: no figures for a table, use --repeat")
    for row in rows:
        found += [f"{row.label}: {difference}" for difference in row.differences if not difference.refused]
        deviation = row.losses.max_relative_deviation
        allowed = LOSS_TOLERANCE[reference[0].spec.dtype] if reference else None
        if deviation is not None and allowed is not None and deviation > allowed and not row.refused:
            found.append(
                f"{row.label}: its losses are up to {deviation:.2%} from the reference's, more than {allowed:.3%}: "
                "it may not be the same training"
            )
        median, mean = row.median_step_time_s, row.mean_step_time_s
        if median is not None and mean is not None and abs(mean.median - median.median) > REGION_SHARE * median.median:
            found.append(
                f"{row.label}: its timed region comes to {mean.median:.4g} s a step, its median step takes "
                f"{median.median:.4g} s: step time, tokens/s and speed are of the whole region"
            )
        found += [f"{row.label}: {aside}" for aside in asides(row)]
        found += [f"{row.label}: {note}" for note in (row.configuration.statistics or {}).get("notes") or []]
        if row.doubts:
            found.append(f"{row.label}: doubts in its records: {', '.join(row.doubts)}")
    return found
