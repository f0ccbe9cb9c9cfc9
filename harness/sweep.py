"""`harness sweep`: the runs that a table's cells still want, so that it can be stopped at any moment and gone on with.

Note [Whose turn it is]
    Group by group, in the file's order. In a group the cell with the fewest runs is next, of equals the first: A B C A B C, so
    that what changes slowly falls on all alike, also over several calls. A record counts whatever came of it, but for one that
    was interrupted; a refusal, and a package that is not there, would come again and end a cell's turns. What a forecast says
    does not fit is a refusal without a run. Where a group is gone on with on another machine, or on one that was started anew,
    its reference has another turn there first, beyond what it wants: ratios are of one machine.
"""

from __future__ import annotations

import fcntl
import io
import json
import math
import os
import statistics
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console

from harness import names, store
from harness.cells import (
    MOST_PROCESSES,
    RESOLVED_WORK,
    Group,
    ResultsTable,
    TableCell,
    belongs,
    read_table,
    replicates,
    work_of,
)
from harness.keeping import keep, tracker_of
from harness.launch import launch
from harness.likely import foreseen
from harness.output import complain, progress_console, result_console, say, say_json
from harness.record import Record, build, to_json
from harness.results_page import shown
from harness.run_times import guessed_s
from harness.spec import KEPT, BadInputError, RunSpec, in_flags
from harness.stopping import stop_signals
from harness.store import new_run_id
from harness.tables import FOLDER
from systems.machine.durable import write_whole
from systems.machine.limits import boot_id
from systems.messages import printable, unknown_name

OF_ONE_RUN = ("trace", "checkpoint", "save_every", "resume", "results", "repeat")  # flags that no row may have
COMPLETE, FAILED, MISSING = 0, 1, 3  # exit codes
DECIDED = ("refused", "unavailable")  # before any training, and so again
ALIKE = (("system", "model", "ranks", "accumulate", "steps"), ("system", "model", "ranks"))  # in time; those of one size first


class SweepSpec(BaseModel):
    """Run what a table's cells still want: a TOML file of groups of runs, or one of the results tables by its name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    table: str = Field(description="a TOML file (docs/harness.md says what is in it), or the name of a results table")
    results: str = Field(KEPT, min_length=1, description="folder of the records, those that count and those that are made")
    for_: float | None = Field(None, gt=0, description="minutes: no run begins that would likely end after them")
    processes: int | None = Field(None, ge=1, le=MOST_PROCESSES, description="runs of each cell; default: what the table says")
    group: str | None = Field(None, min_length=1, description="part of a group's title: only groups that have it")
    dry_run: bool = Field(False, description="run nothing, and list what would be, with what is known of its time")
    archive: str | None = Field(None, min_length=1, description="a .tar.gz to put the records of this call in")


@dataclass(frozen=True)
class Turn:
    """replicate: how many runs the cell had before."""

    group: Group
    cell: TableCell
    replicate: int

    def __str__(self) -> str:
        return f"{self.group.title}: {self.cell.name}, run {self.replicate + 1}"


@dataclass
class Sweep:
    """A table and the records that there are. here: the boot id of this machine, None where it has none. closed: cells that can
    have no run any more, by their work, and why.
    """

    table: ResultsTable
    records: list[Record]
    here: str | None = None
    made: list[Record] = field(default_factory=list)
    closed: dict[str, str] = field(default_factory=dict)

    def runs(self, cell: TableCell) -> list[Record]:
        """Those that count."""
        return list(filter(self._counts, replicates(self.records, cell, self.table.hardware)))

    def _counts(self, record: Record) -> bool:
        """What was unavailable to an earlier call may be installed by now: each call asks once."""
        if record.status == "unavailable":
            return any(record is one for one in self.made)
        return record.status != "interrupted"

    def wanted(self, cell: TableCell) -> int:
        """Runs that are missing."""
        runs = self.runs(cell)
        return 0 if self._decided(cell, runs) else max(0, cell.processes - len(runs))

    def _decided(self, cell: TableCell, runs: Sequence[Record]) -> bool:
        return any(r.status in DECIDED for r in runs) or work_of(cell) in self.closed

    @property
    def waiting(self) -> list[tuple[Group, TableCell, int]]:
        """Cells with what they want. One of several groups is in the first that wants it, with the most that one wants."""
        found: dict[str, tuple[Group, TableCell, int]] = {}
        for group in self.table.groups:
            for cell in group.cells:
                if wanted := self.wanted(cell):
                    first = found.get(work_of(cell), (group, cell, 0))
                    found[work_of(cell)] = (*first[:2], max(wanted, first[2]))
        return list(found.values())

    @property
    def missing(self) -> int:
        return sum(wanted for _, _, wanted in self.waiting)

    def untried(self, seconds: float) -> Iterator[RunSpec]:
        """Of cells without a run, in the order of their turns, those that will likely have one in so many seconds."""
        for group, cell, _ in self.waiting:
            if self.runs(cell):
                continue
            if (seconds := seconds - self.expected_s(cell, group)) < 0:
                return
            yield cell.spec

    def next(self) -> Turn | None:
        """See Note [Whose turn it is]. None: nothing is missing."""
        for group in self.table.groups:
            waiting = [cell for cell in group.cells if self.wanted(cell)]
            if not waiting:
                continue
            reference = self.runs(group.reference)
            elsewhere = bool(reference) and self.here is not None and not any(map(self._is_here, reference))
            if elsewhere and not self._decided(group.reference, reference):
                return Turn(group, group.reference, len(reference))
            cell = min(waiting, key=lambda each: len(self.runs(each)))
            return Turn(group, cell, len(self.runs(cell)))
        return None

    def _is_here(self, record: Record) -> bool:
        return record.environment.hardware.boot_id in (None, self.here) or any(record is one for one in self.made)

    def add(self, record: Record) -> None:
        self.records.append(record)
        self.made.append(record)

    def put_aside(self, record: Record, cell: TableCell) -> str | None:
        """Why a run just made does not count, and so would be made for ever; None if it counts, or was interrupted."""
        if not self._counts(record) or any(record is one for one in self.runs(cell)):
            return None
        last = max(r.run_id for r in self.records if belongs(r, cell, self.table.hardware))
        return f"{last} seems to be later than the run just made, and puts it aside: its clock was ahead; move that record away"

    def expected_s(self, cell: TableCell, group: Group) -> float:
        """Of one run: as this cell's took, else as those of its system and model with other options, else as its group's, else
        as any of the table's; where none was made, as its model and work say.
        """
        every = [each for one in self.table.groups for each in one.cells]
        took = _times(self.runs(cell))
        for fields in ALIKE:
            took = took or _times(r for r in self.records if r.status == "ok" and self._is_alike(r, cell, fields))
        for cells in (group.cells, every):
            took = took or _times(record for each in cells for record in self.runs(each))
        return statistics.median(took) if took else guessed_s(cell.spec, self.table.hardware)

    def _is_alike(self, record: Record, cell: TableCell, fields: Sequence[str]) -> bool:
        spec, resolved = record.spec, record.resolved
        sizes = RESOLVED_WORK if fields is ALIKE[0] else ()
        return (
            resolved.device_label == self.table.hardware
            and all(getattr(spec, field) == getattr(cell.spec, field) for field in fields)
            and all(getattr(resolved, field) == getattr(cell.spec, field) for field in sizes)
        )

    @property
    def left_s(self) -> float:
        """All that is missing, as far as is known."""
        return sum(wanted * self.expected_s(cell, group) for group, cell, wanted in self.waiting)


def _times(records: Iterable[Record]) -> list[float]:
    """Wall times of runs that were begun."""
    return [record.wall_s for record in records if record.wall_s and record.status not in DECIDED]


def _named(folder: Path = FOLDER) -> dict[str, Path]:
    """Results tables."""
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def table_of(spec: SweepSpec, folder: Path = FOLDER) -> ResultsTable:
    """Raises BadInputError for one that is not there, or cannot be read, or has nothing of what is asked for."""
    named = _named(folder)
    path = named.get(spec.table, Path(spec.table))
    if path.suffix != ".toml" and not path.exists():
        raise BadInputError(f"{unknown_name('results table', spec.table, named)}; a file's name ends in .toml")
    try:
        table = read_table(path)
    except ValueError as error:
        raise BadInputError(str(error)) from None
    for cell in (cell for group in table.groups for cell in group.cells):
        given = [field for field in OF_ONE_RUN if field in cell.spec.model_fields_set]
        if given:
            raise BadInputError(f"{path.name}: a row of {cell.spec.system} has {given[0]}, which is of one run: leave it out")
    groups = tuple(group for group in table.groups if spec.group is None or spec.group in group.title)
    if not groups:
        raise BadInputError(f"--group {spec.group}: no group is called so: {', '.join(g.title for g in table.groups)}")
    if spec.processes is not None:
        groups = tuple(_with_processes(group, spec.processes) for group in groups)
    return replace(table, groups=groups)


def _with_processes(group: Group, processes: int) -> Group:
    cells = tuple(replace(cell, processes=processes) for cell in group.cells)
    return replace(group, cells=cells, reference=cells[group.cells.index(group.reference)])


def as_run(turn: Turn, results: str) -> RunSpec:
    return turn.cell.spec.model_copy(update={"results": results})


def refused(spec: RunSpec, why: str, phase: str) -> Record:
    """What is refused before there is a process to make its record."""
    now = datetime.now(UTC)
    told = {"message": why, "phase": phase}
    run_id = new_run_id(spec.system, spec.model, now)
    return build({"run_id": run_id, "started_at": now.isoformat(), "status": "refused", "reason": told, "spec": spec})


def _attempt(turn: Turn, spec: RunSpec, why: str | None, execute: Callable[[RunSpec, int], Record]) -> Record:
    """why: its forecast refuses it. What a run calls bad input is a refusal too: it would be so again."""
    if why is not None:
        return refused(spec, f"by its forecast, before any run: {in_flags(why)}", "plan")
    try:
        return execute(spec, turn.replicate)
    except BadInputError as error:
        return refused(spec, f"bad input: {error}", "resolve")


def as_of(cell: TableCell, record: Record, hardware: str) -> Record:
    """A record that ended before it knew its device and sizes gets those of its cell, and says so."""
    if record.resolved.device_label is not None:
        return record
    sizes = {"device_label": hardware, "batch_size": cell.spec.batch_size, "seq_len": cell.spec.seq_len}
    notes = [*record.notes, "device and sizes are those of the table: it ended before it knew them"]
    return record.model_copy(update={"resolved": record.resolved.model_copy(update=sizes), "notes": notes})


def sweep(
    done: Sweep,
    *,
    results: str,
    minutes: float | None,
    foreseen: Callable[[Sequence[RunSpec]], Mapping[RunSpec, str | None]],
    execute: Callable[[RunSpec, int], Record],
    keep: Callable[[Record, RunSpec], bool],
    console: Console,
    stopped: Callable[[], bool],
) -> str | None:
    """Until nothing is missing: None; or why it ends before. execute: makes the record of a run; keep: False where it cannot be
    kept. foreseen: why a run would be refused, of the first spec and of any others that cost little beside it; a spec is asked
    about once. Raises BadInputError where the machine is not the table's.
    """
    ends = math.inf if minutes is None else time.monotonic() + 60 * minutes
    verdicts: dict[RunSpec, str | None] = {}
    while (turn := done.next()) is not None:
        if stopped():
            return "it was stopped"
        spec, expected = as_run(turn, results), done.expected_s(turn.cell, turn.group)
        if minutes is not None and time.monotonic() + expected > ends:
            return f"the next run would likely take {expected:.0f} s, and {minutes:g} minutes would be over"
        console.print(printable(f"{done.missing} missing, {_time(done.left_s)} or so: {turn}"), markup=False)
        if turn.replicate == 0 and turn.cell.spec not in verdicts:
            ahead = done.untried(ends - time.monotonic())
            verdicts |= foreseen(list(dict.fromkeys([turn.cell.spec, *(each for each in ahead if each not in verdicts)])))
        why = verdicts.get(turn.cell.spec) if turn.replicate == 0 else None
        record = as_of(turn.cell, _attempt(turn, spec, why, execute), done.table.hardware)
        if not keep(record, spec):
            return "its record could not be kept"
        if here := belongs(record, turn.cell, done.table.hardware):
            done.add(record)
            if why := done.put_aside(record, turn.cell):
                return why
        if stopped():
            return "it was stopped"
        if not here:
            label = record.resolved.device_label
            raise BadInputError(f"the table is of {done.table.hardware}, and this run was on {label}: run it there")
    return None


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def listed(done: Sweep) -> Iterator[str]:
    """A line a cell: what there is, what it wants, and how long that would likely take."""
    for group in done.table.groups:
        yield group.title
        for cell in group.cells:
            runs, wanted = done.runs(cell), done.wanted(cell)
            said = ", ".join(f"{sum(r.status == status for r in runs)} {status}" for status in sorted({r.status for r in runs}))
            more = f"{wanted} to run, {_time(wanted * done.expected_s(cell, group))} or so" if wanted else "nothing to run"
            more = f"cannot be run again: {why}" if (why := done.closed.get(work_of(cell))) else more
            yield f"  {cell.name}: {said or 'no run yet'}; {more}"
    yield f"{done.missing} runs are missing: {_time(done.left_s)} or so"


def closed(done: Sweep) -> Iterator[str]:
    """A line for each of those cells, of the first group that it is in."""
    left = dict(done.closed)
    for group in done.table.groups:
        for cell in group.cells:
            if why := left.pop(work_of(cell), None):
                yield f"{group.title}: {cell.name}: cannot be run again: {why}"


def _empty(path: Path) -> bool:
    """An archive of no records, which a call that was killed leaves."""
    try:
        with tarfile.open(path) as archive:
            return not archive.getnames()
    except (OSError, tarfile.TarError):
        return False


def write_archive(records: Sequence[Record], path: Path) -> None:
    """The records as files of one .tar.gz. Raises BadInputError where it cannot be written."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz") as archive:
        for record in records:
            text = to_json(record).encode() + b"\n"
            entry = tarfile.TarInfo(f"{record.run_id}.json")
            entry.size, entry.mtime = len(text), int(datetime.fromisoformat(record.started_at).timestamp())
            archive.addfile(entry, io.BytesIO(text))
    try:
        write_whole(path, held.getvalue())
    except OSError as error:
        raise BadInputError(f"--archive {path} cannot be written: {error.strerror}") from None


def told(done: Sweep, why: str | None) -> str:
    """The result as one line of JSON."""
    found: dict[str, Any] = {
        "missing": done.missing,
        "ended": why,
        "ran": [record.run_id for record in done.made],
        "statuses": {record.run_id: record.status for record in done.made},
        "closed": sorted(closed(done)),
    }
    return json.dumps(found)


def sweep_table(spec: SweepSpec) -> int:
    """Run what is missing of a table. The exit code: 1 if a run failed, else 3 if runs are missing still, else 0."""
    folder, table = Path(spec.results), table_of(spec)
    if spec.dry_run:
        for line in listed(_so_far(spec, table, folder)):
            say(printable(line))
        return COMPLETE
    store.prepare(folder)
    with _alone(folder):
        return _go_on(spec, _so_far(spec, table, folder))


def _so_far(spec: SweepSpec, table: ResultsTable, folder: Path) -> Sweep:
    """Raises BadInputError for a cell that wants its first run, and cannot have it. One that has runs may be of old options,
    and so may any of a results table.
    """
    records, unreadable = store.read_all(folder)
    for one in unreadable:
        complain(f"{one.path} is no record: {one.why}")
    done = Sweep(table, records, boot_id())
    for group, cell, _ in done.waiting:
        try:
            names.check_run(cell.spec)
        except BadInputError as error:
            if not done.runs(cell) and spec.table not in _named():
                raise BadInputError(f"{group.title}: {cell.name}: {error}") from None
            done.closed[work_of(cell)] = str(error)
    return done


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """BadInputError where another sweep writes there: each would make the other's runs too, and disturb them."""
    held = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # of a file system without locks
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                why = "another sweep is at work there: wait until it has ended, or name another folder"
                raise BadInputError(f"--results {folder}: {why}") from None
        yield
    finally:
        os.close(held)


def _go_on(spec: SweepSpec, done: Sweep) -> int:
    console = progress_console()
    if spec.archive is not None:
        if os.path.lexists(spec.archive) and not _empty(Path(spec.archive)):
            raise BadInputError(f"--archive {spec.archive} is there already: name another, for nothing is written over")
        write_archive([], Path(spec.archive))  # it can be
    for line in closed(done):
        complain(line)
    tracker = tracker_of("off", console)
    with stop_signals() as stop:
        try:
            ended = sweep(
                done,
                results=spec.results,
                minutes=spec.for_,
                foreseen=lambda asked: foreseen(asked, lambda: stop.number is not None),
                execute=lambda asked, number: launch(asked, replicate=number, console=console, stop=stop),
                keep=lambda record, asked: keep(record, asked, console, tracker),
                console=console,
                stopped=lambda: stop.number is not None,
            )
        finally:
            if spec.archive is not None:
                write_archive(done.made, Path(spec.archive))
    for line in chain.from_iterable(lines.split("\n") for lines in shown(done.table, done.records)):
        result_console().print(printable(line), markup=False)
    if ended is not None:
        console.print(printable(f"{done.missing} runs are missing still: {ended}"), markup=False)
    say_json(told(done, ended))
    failed = any(record.status not in ("ok", *DECIDED) for record in done.made)
    return stop.code or (FAILED if failed else MISSING if done.missing else COMPLETE)
