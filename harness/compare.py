"""`harness compare`: several systems at the same work, by the same clock, their processes interleaved; or kept records.

A B C A B C: what changes slowly on a machine (clocks, page cache, neighbours) falls on all systems alike. Each process
leaves its record as with `harness run`. A system that fails is a row of the result, and the others go on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from harness import store
from harness.likeness import alike
from harness.record import Record
from harness.spec import KEPT, TRIALS, BadInputError, RunSpec, flag
from systems import registry
from systems.errors import UnavailableError
from systems.registry import split_assignments

DECIDED_BEFORE_TRAINING = ("refused", "unavailable")
_NEXT_OPTION = re.compile(r",(?=\s*[A-Za-z_][\w-]*\s*=)")  # so that a value may hold commas: NAME:blocks=0,3,depth=2


class CompareSpec(RunSpec):
    """The same work under several systems, their processes interleaved; the first --system is the reference.

    harness compare --runs ID ID ... compares records that are kept already.
    """

    system: tuple[str, ...] = Field(  # type: ignore[assignment]  # run's flags, several systems
        description="NAME, or NAME:key=value,key=value with options of its own; repeat the flag for each system"
    )
    option: tuple[str, ...] = Field((), description="key=value: an option that every system of this comparison takes")
    repeat: int = Field(3, ge=1, description="processes of each system, interleaved, each with its own record")

    @field_validator("trace", "checkpoint")
    @classmethod
    def _of_one_run(cls, path: str | None, info: ValidationInfo) -> str | None:
        if path is not None:
            raise ValueError(f"a {info.field_name} is of one run: use harness run {flag(str(info.field_name))}")
        return path

    @field_validator("system")
    @classmethod
    def _several(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        if len(texts) < 2:
            raise ValueError("a comparison needs two systems or more: repeat --system")
        if len(set(texts)) < len(texts):
            raise ValueError("the same system with the same options is given twice: use --repeat for more processes")
        return texts


class StoredSpec(BaseModel):
    """Compare records that are kept already; the first run's system is the reference."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    runs: tuple[str, ...] = Field(description="run ids, or parts of ids that only one run has")
    results: str | None = Field(None, description=f"folder of the records; default: {KEPT} and {TRIALS}")


@dataclass(frozen=True)
class Contender:
    """One system of a comparison. label: as given to --system."""

    label: str
    spec: RunSpec


def entries(spec: CompareSpec) -> list[Contender]:
    """A run's spec for each system. Raises BadInputError for a system that cannot be read."""
    work = spec.model_dump(exclude={"system", "option"})
    found = []
    for text in spec.system:
        name, colon, rest = text.partition(":")
        own = [part.strip() for part in _NEXT_OPTION.split(rest)] if colon else []
        try:
            options = split_assignments("option", spec.option) | split_assignments("option", own)
        except ValueError as error:
            raise BadInputError(f"--system {text}: {str(error).removeprefix('`option` ')}") from None
        given = {"system": name.strip(), "option": tuple(f"{key}={value}" for key, value in options.items())}
        found.append(Contender(text, RunSpec.model_validate(work | given)))
    return found


def check_options(found: Sequence[Contender]) -> None:
    """Before the first run: a wrong option of the last system must not cost the runs of the others."""
    for entry in found:
        if not entry.spec.option:
            continue
        try:
            registry.parse_options(registry.face(entry.spec.system), entry.spec.option)
        except UnavailableError:
            continue  # its run says so
        except ValueError as error:
            raise BadInputError(str(error)) from None


def interleave(found: Sequence[Contender], repeat: int) -> Iterator[tuple[int, Contender]]:
    """(replicate, entry): A B C A B C."""
    return ((replicate, entry) for replicate in range(repeat) for entry in found)


def collect(
    found: Sequence[Contender], repeat: int, execute: Callable[[Contender, int], Record | None]
) -> dict[str, list[Record]]:
    """Runs of each system by label. execute: a record, or None to stop here.

    A system that is refused or unavailable is so again: it is asked once. Other failures may not come twice.
    """
    records: dict[str, list[Record]] = {entry.label: [] for entry in found}
    for replicate, entry in interleave(found, repeat):
        if any(record.status in DECIDED_BEFORE_TRAINING for record in records[entry.label]):
            continue
        record = execute(entry, replicate)
        if record is None:
            break
        records[entry.label].append(record)
    return records


def read_runs(spec: StoredSpec) -> dict[str, list[Record]]:
    """Kept runs by label: those of one system that differ in nothing are its replicates. Raises BadInputError."""
    groups: dict[str, list[Record]] = {}
    for record in store.find(store.folders_of(spec.results), spec.runs):
        label = ":".join(filter(None, [record.spec.system, ",".join(record.spec.option)]))
        _group_of(record, label, groups).append(record)
    if len(groups) < 2:
        raise BadInputError(f"--runs: all of them are runs of {next(iter(groups))}: name runs of another system too")
    return groups


def _group_of(record: Record, label: str, groups: dict[str, list[Record]]) -> list[Record]:
    """The group of that label which this run is like; a further one is numbered: elixir, elixir #2."""
    number = 1
    while True:
        group = groups.setdefault(label if number == 1 else f"{label} #{number}", [])
        if not group or alike(record, group[0]):
            return group
        number += 1
