"""`harness max-scale` and `harness max-batch`: the largest model, and the largest batch, that trains on this machine.

A size counts when three full steps, optimizer included, end in a fresh process; every try leaves its record. What fits is
taken to fit at every smaller size too. The search begins with what the forecast says fits, else with the model's own layers,
one sample or the smallest size, goes on in steps that double until it has a size that fits and one that does not, and halves
what lies between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationInfo, field_validator, model_validator
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness import names
from harness.candidates import LAYERS, Candidates, largest
from harness.likely import likely
from harness.listing import short_count
from harness.record import Record
from harness.spec import BadInputError, RunSpec, flag
from systems.messages import printable
from systems.registry import split_assignments
from systems.sizes import format_size

FITS = ("ok", "diverged")  # a loss that is not finite took as much memory
_NO_PLAN = "its last steps had no plan yet, and so say nothing of those to come: raise --steps (h3t: above profile_steps)"
Launch = Callable[[RunSpec], Record | None]


class _SearchSpec(RunSpec):
    steps: int | None = Field(3, ge=1, description="optimizer steps that a size must end, warm-up included")
    most: int = Field(4096, ge=1, description="the largest number to try")

    @field_validator("trace", "checkpoint", "resume", "weights")
    @classmethod
    def _of_one_run(cls, path: str | None, info: ValidationInfo) -> str | None:
        if path is not None:
            raise ValueError(f"it is of one run, and this makes several: use harness run {flag(str(info.field_name))}")
        return path

    @field_validator("repeat")
    @classmethod
    def _once(cls, repeat: int) -> int:
        if repeat > 1:
            raise ValueError("a size is tried once: leave it out")
        return repeat


class ScaleSpec(_SearchSpec):
    """Find the largest model that trains here: of a family by its named sizes, or a model with more and more layers."""

    model: str | None = Field(None, description="a model whose layers are counted up")  # type: ignore[assignment]
    family: str | None = Field(None, description="or a family of models, whose named sizes are tried")

    @model_validator(mode="after")
    def _one_of_them(self) -> ScaleSpec:
        if (self.model is None) == (self.family is None):
            raise ValueError("give a --model, whose layers are counted up, or a --family, whose sizes are tried: one of them")
        if self.model is not None and LAYERS in split_assignments("set", self.set):
            raise ValueError(f"--set {LAYERS} is what is searched for: leave it out")
        return self


class BatchSpec(_SearchSpec):
    """Find the largest batch that a model trains with here."""

    @field_validator("batch_size")
    @classmethod
    def _not_given(cls, size: int | None) -> int | None:
        if size is not None:
            raise ValueError("the batch size is what is searched for: leave it out, or bound it with --most")
        return size


class Trial(BaseModel):
    """One size in one process. number: layers, place among the family's sizes (from 1), or samples."""

    number: int
    model: str
    set: tuple[str, ...]
    batch_size: int | None
    parameters: int | None
    status: str
    tier: str | None
    message: str | None
    device_peak_bytes: int | None
    host_rss_peak_bytes: int | None
    run_id: str


class Found(BaseModel):
    """searched: what was counted. largest: that fits; smallest_too_large: the next one, or, of a search that was ended, the
    smallest that was tried and does not; None where there is none.

    bounded_by: the memory that the next one lacks, timeout, or most and family where none larger was to be tried; None if the
    search was ended.
    failed: a try that ended in another way, and with it the search.
    """

    spec: dict[str, Any]
    searched: Literal["layers", "sizes", "samples"]
    largest: Trial | None
    smallest_too_large: Trial | None
    bounded_by: str | None
    failed: Trial | None
    trials: list[Trial]


class _EndedError(Exception):
    """The search cannot go on: a try failed for another reason than memory, or the user wants no more."""


def search(spec: ScaleSpec | BatchSpec, launch: Launch, console: Console, stopped: Callable[[], bool]) -> Found:
    """launch: makes and keeps the record of one run, None if there shall be no further one. stopped: whether the user wants
    no more. Raises BadInputError.
    """
    candidates = _candidates(spec)
    guess = likely(candidates, stopped)
    first, step = (candidates.first, candidates.first) if guess is None else (guess, 1)
    trials: dict[int, Trial] = {}
    failed: list[Trial] = []

    def fits(number: int) -> bool:
        asked = candidates.spec(number)
        told = f"try {len(trials) + 1}: {_told(candidates, number, asked)}"
        console.print(printable(f"{told}: does it train?"), markup=False)
        record = launch(asked)
        if record is None:
            raise _EndedError
        trial = trials[number] = _trial(number, record)
        console.print(printable(f"{told}: {_outcome(trial, record.wall_s)}"), markup=False)
        if record.status in FITS and _still_measures(record):
            failed.append(trial.model_copy(update={"message": _NO_PLAN}))
            raise _EndedError
        if not _decides(trial):
            failed.append(trial)
            raise _EndedError
        return record.status in FITS

    ended = False
    try:
        largest(fits, first=first, step=step, most=candidates.most)
    except _EndedError:
        ended = True
    return _found(spec, candidates, trials, failed[0] if failed else None, ended=ended)


def _found(
    spec: ScaleSpec | BatchSpec, candidates: Candidates, trials: dict[int, Trial], failed: Trial | None, *, ended: bool
) -> Found:
    fitting = [t for t in trials.values() if t.status in FITS]
    others = [t for t in trials.values() if _decides(t) and t.status not in FITS]
    best = max(fitting, key=lambda t: t.number, default=None)
    lowest = min(others, key=lambda t: t.number, default=None)
    if ended:  # what did not fit need not be the next one
        bounded_by = None
    elif lowest is not None:
        bounded_by = "timeout" if lowest.status == "timeout" else lowest.tier
    else:
        bounded_by = "family" if candidates.searched == "sizes" else "most"
    return Found(
        spec=spec.model_dump(mode="json"),
        searched=candidates.searched,
        largest=best,
        smallest_too_large=lowest,
        bounded_by=bounded_by,
        failed=failed,
        trials=list(trials.values()),
    )


def _still_measures(record: Record) -> bool:
    """Its last steps had no plan, and not because none fits the budget."""
    return bool(record.timed_counters.get("steps_without_plan")) and not record.counters.get("unplanned_steps")


def _decides(trial: Trial) -> bool:
    """It fits, or lacks memory or time. A refusal for another reason would be one at every size."""
    return trial.status in (*FITS, "timeout") or (trial.status in ("oom", "refused") and trial.tier is not None)


def _candidates(spec: ScaleSpec | BatchSpec) -> Candidates:
    """Raises BadInputError for a model or a family that is not there."""
    from models import registry

    if isinstance(spec, BatchSpec):
        return Candidates("samples", spec, 1, spec.most)
    if spec.family is not None:
        sizes = _sizes(spec.family)
        return Candidates("sizes", spec, 1, min(spec.most, len(sizes)), tuple(sizes))
    assert spec.model is not None
    try:
        own = registry.resolve(spec.model, split_assignments("set", spec.set)).num_layers
    except ValueError as error:
        raise BadInputError(str(error)) from None
    return Candidates("layers", spec, min(own, spec.most), spec.most)


def _sizes(family: str) -> list[str]:
    """Names, fewest parameters first; those whose experts are divided among more ranks than one are left out."""
    from models import registry
    from models.mixture_shape import divided_among

    names.check_family(family)
    known = (size for size in registry.families()[family].sizes if divided_among(size) == 1)
    return [size.name for size in sorted(known, key=registry.parameter_count)]


def _told(candidates: Candidates, number: int, spec: RunSpec) -> str:
    if candidates.searched == "sizes":
        return spec.model
    return f"{spec.model} with {number} {candidates.searched if number > 1 else candidates.searched[:-1]}"


def _trial(number: int, record: Record) -> Trial:
    reason, memory = record.reason, record.memory
    return Trial(
        number=number,
        model=record.spec.model,
        set=record.spec.set,
        batch_size=record.resolved.batch_size if record.resolved else record.spec.batch_size,
        parameters=record.resolved.parameters if record.resolved else None,
        status=record.status,
        tier=reason.tier if reason else None,
        message=reason.message if reason else None,
        device_peak_bytes=memory.device_peak_bytes if memory else None,
        host_rss_peak_bytes=memory.host_rss_peak_bytes if memory else None,
        run_id=record.run_id,
    )


def _outcome(trial: Trial, wall_s: float | None) -> str:
    """'1.26M parameters, refused, lacks device memory, 4.1 s'."""
    parts = [] if trial.parameters is None else [f"{short_count(trial.parameters)} parameters"]
    parts.append("trains" if trial.status in FITS else trial.status)
    parts += [] if trial.tier is None else [f"lacks {trial.tier} memory"]
    parts += [] if wall_s is None else [f"{wall_s:.1f} s"]
    return ", ".join(parts)


def show(found: Found, console: Console) -> None:
    table = Table(found.searched, "model", "batch", "parameters", "status", "lacks", "device peak", "host peak")
    for t in sorted(found.trials, key=lambda t: t.number):
        size = "-" if t.parameters is None else short_count(t.parameters)
        peaks = ["-" if peak is None else format_size(peak) for peak in (t.device_peak_bytes, t.host_rss_peak_bytes)]
        table.add_row(
            str(t.number), escape(printable(t.model)), str(t.batch_size or "-"), size, t.status, t.tier or "-", *peaks
        )
    console.print(table)
    console.print(printable(_sentence(found)), markup=False)


def _sentence(found: Found) -> str:
    if found.failed is not None:
        return f"the search ended: {found.failed.status}: {found.failed.message}"
    if found.largest is None:
        too_large = found.smallest_too_large
        if found.bounded_by is None or too_large is None:
            return "nothing was seen to train; the search was ended"
        return f"nothing fits: {too_large.message}"
    best = found.largest.model
    if found.searched != "sizes":
        best += f" with {found.largest.number} {found.searched}"
    if found.bounded_by is None:
        return f"largest seen to train: {best}; the search was ended"
    why = {"most": "nothing larger was tried: raise --most", "family": "the family has none larger"}
    return f"largest that trains: {best}; {why.get(found.bounded_by, _lack(found.bounded_by))}"


def _lack(what: str) -> str:
    return "the next took too long" if what == "timeout" else f"the next lacks {what} memory"


def to_json(found: Found) -> str:
    return found.model_dump_json()
