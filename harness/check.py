"""`harness check`: whether what is kept holds together. Runs nothing and changes nothing, but for `--add`.

Numbers follow from samples (rederive.py), files are those that digests are of (digests.py), no record was changed after it was
committed, the pages are what the records make of them, and claims were written before what they are judged by (ancestry.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field
from rich.table import Table

from harness import digests, ledger, store, tables
from harness.ancestry import ancestries
from harness.cells import TEXT_LIMIT, read_table
from harness.claims import read_claims
from harness.history import GitHistory, NoHistory, PathHistory, find
from harness.output import complain, gives_json, result_console, say_json
from harness.record import Record
from harness.spec import KEPT, BadInputError
from systems.machine.reading import read_text
from systems.messages import one_line, printable

ROOT = Path(__file__).resolve().parents[1]
HOLDS, BROKEN = 0, 1
SIMULATED = "paper_figures/simulated"


class CheckSpec(BaseModel):
    """Check what is kept: numbers against samples, files against digests, pages against records, claims against history."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    results: str = Field(KEPT, description="folder of the records, with those in folders below it")
    docs: str = Field("docs", description="folder of the pages results.md and claims.md")
    add: bool = Field(False, description="first keep a digest of each file that has none; one that is there is not changed")


@dataclass(frozen=True)
class KeptFinding:
    """where: a file, or a claim. what: is wrong."""

    where: str
    what: str


@dataclass(frozen=True)
class CheckedPart:
    """checked: how many things were looked at. not_checked: why nothing could be, or None."""

    name: str
    of: str
    checked: int
    findings: tuple[KeptFinding, ...] = ()
    not_checked: str | None = None


@dataclass(frozen=True)
class KeptRecords:
    """The folder itself, whose records pages and claims are of, and those of the folders below it."""

    folder: Path
    own: tuple[Record, ...]
    below: tuple[Record, ...]
    unreadable: tuple[store.Unreadable, ...]


def check(spec: CheckSpec, root: Path = ROOT) -> int:
    """Exit code: 0 all of it holds, 1 something does not. Raises BadInputError. root: of the checkout."""
    folder = Path(spec.results)
    if not os.path.isdir(folder):
        raise BadInputError(f"--results {folder} is no folder: name the one that the records are in")
    if not os.path.isdir(spec.docs):
        raise BadInputError(f"--docs {spec.docs} is no folder: name the one with results.md and claims.md")
    try:
        if spec.add:
            added = digests.add_digests(folder)
            complain(f"{folder / digests.DIGESTS}: {added} digests added")
        found = list(checked(spec, root))
    except (OSError, ValueError) as error:
        raise BadInputError(one_line(str(error))) from None
    broken = any(part.findings for part in found)
    _show(found)
    parts = [asdict(part) for part in found]
    say_json(json.dumps({"schema_version": 1, "kind": "check", "holds": not broken, "parts": parts}))
    return BROKEN if broken else HOLDS


def checked(spec: CheckSpec, root: Path = ROOT) -> Iterator[CheckedPart]:
    """Raises OSError, ValueError."""
    kept, history = _read(Path(spec.results)), find(root)
    yield _records(kept)
    yield _derived(kept)
    yield _digests(kept.folder)
    yield _sealed(root)
    yield _unchanged(kept.folder, root, history)
    yield _pages(kept, Path(spec.docs))
    yield _claims(kept, history)


def _read(folder: Path) -> KeptRecords:
    own, unreadable = store.read_all(folder)
    below = list[Record]()
    for each in sorted(path for path in folder.rglob("*") if path.is_dir() and path.name != "traces"):
        found, broken = store.read_all(each)
        below, unreadable = below + found, unreadable + broken
    return KeptRecords(folder, tuple(own), tuple(below), tuple(unreadable))


def _records(kept: KeptRecords) -> CheckedPart:
    found = [KeptFinding(str(one.path), f"it is no record: {one.why}") for one in kept.unreadable]
    records = [*kept.own, *kept.below]
    names = {path.stem for path in kept.folder.rglob("*.json")}
    found += [KeptFinding(r.run_id, "its file has another name than its run id") for r in records if r.run_id not in names]
    where = f"{len(kept.own)} in {kept.folder} itself, of which pages and claims are, {len(kept.below)} in folders below it"
    of = f"files that are records, under the names of their runs: {where}"
    return CheckedPart("records", of, len(records), tuple(found))


def _derived(kept: KeptRecords) -> CheckedPart:
    from harness import rederive  # counts FLOPs, and so imports torch

    records = [*kept.own, *kept.below]
    found = [KeptFinding(record.run_id, line) for record in records for line in rederive.wrong(record)]
    return CheckedPart("derived", "rates and TFLOPS, worked out again from samples", len(records), tuple(found))


def _digests(folder: Path) -> CheckedPart:
    found = tuple(KeptFinding(str(folder / name), what) for name, what in digests.wrong_digests(folder))
    return CheckedPart("digests", "records and traces, as their digests say", len(digests.kept_files(folder)), found)


def _sealed(root: Path) -> CheckedPart:
    files = [(path, "cells") for path in sorted((root / SIMULATED).glob("*.json"))]
    if (path := root / "harness" / ledger.FORECASTS.name).exists():
        files.append((path, "forecasts"))
    found = [
        KeptFinding(path.relative_to(root).as_posix(), what)
        for path, content in files
        if (what := digests.wrong_seal(path, content))
    ]
    return CheckedPart("simulations", "kept forecasts, as their digests say", len(files), tuple(found))


def _unchanged(folder: Path, root: Path, history: GitHistory | NoHistory) -> CheckedPart:
    of = "records that nobody changed or took away once they were committed"
    if isinstance(history, NoHistory):
        return CheckedPart("history", of, 0, not_checked=history.why)
    if not folder.resolve().is_relative_to(root.resolve()):
        return CheckedPart("history", of, 0, not_checked=f"{folder} is not in this checkout")
    inside = folder.resolve().relative_to(root.resolve()).as_posix()
    there = digests.kept_files(folder)
    now = {Path(name).name: blob for name, blob in zip(there, history.blobs_of([folder / name for name in there]), strict=True)}
    found = []
    ever = dict[str, set[str]]()
    for path, past in history.paths_below(inside, digests.KEPT_FILES).items():
        name, blobs = Path(path).name, ever.setdefault(Path(path).name, set())
        blobs |= past.blobs  # a file may be put into another folder
        if name not in now:
            if any(_is_evidence(history.git("cat-file", "blob", blob)) for blob in past.blobs):
                found.append(KeptFinding(path, f"{_who(past, 'D')} took it away: what was measured stays"))
        elif blobs != {now[name]}:
            found.append(KeptFinding(path, f"{_who(past, 'M', 'T')} changed it: a record is never edited"))
    return CheckedPart("history", of, len(there), tuple(sorted(found, key=lambda one: one.where)))


def _who(past: PathHistory, *letters: str) -> str:
    commits = [past.by[letter] for letter in letters if letter in past.by]
    return f"commit {commits[0][:12]}" if commits else "it is committed, and somebody"


def _is_evidence(text: str | None) -> bool:
    """Whatever was no run on an emulated device, which is a trial."""
    try:
        return not (text and json.loads(text)["resolved"]["device"] == "cpu")
    except (ValueError, LookupError, TypeError):
        return True


def _pages(kept: KeptRecords, docs: Path) -> CheckedPart:
    made: dict[str, tuple[Callable[[], str], tuple[str, str], str]] = {
        "results.md": (lambda: _results_block(kept.own), (tables.BEGIN, tables.END), "harness tables"),
        "claims.md": (lambda: _claims_block(kept.own), (ledger.BEGIN, ledger.END), "harness ledger --out docs/claims.md"),
    }
    found = []
    for name, (block, marks, command) in made.items():
        path = docs / name
        text = read_text(path, TEXT_LIMIT)
        if tables.replaced(text, block(), str(path), marks) != text:
            found.append(KeptFinding(str(path), f"it is not what the records in {kept.folder} say: {command} writes it"))
    return CheckedPart("pages", "tables and ledger, made again from the records", len(made), tuple(found))


def _results_block(records: Sequence[Record]) -> str:
    return tables.rendered([read_table(path) for path in sorted(tables.FOLDER.glob("*.toml"))], records)


def _claims_block(records: Sequence[Record]) -> str:
    return ledger.rendered(ledger.judged(read_claims(), records, ledger.read_forecasts()))


def _claims(kept: KeptRecords, history: GitHistory | NoHistory) -> CheckedPart:
    of = "claims, committed before what they are judged by or marked as seen"
    if isinstance(history, NoHistory):
        return CheckedPart("claims", of, 0, not_checked=history.why)
    found = list(ancestries(read_claims(), kept.own, ledger.read_forecasts().found, history))
    findings = [KeptFinding(f"claim {one.number}", one.finding) for one in found if one.finding]
    return CheckedPart("claims", of, len(found), tuple(findings))


def _show(found: Sequence[CheckedPart]) -> None:
    console = result_console()
    table = Table("what", "checked", "wrong", "")
    for part in found:
        state = part.not_checked and f"not checked: {part.not_checked}"
        table.add_row(part.name, str(part.checked), str(len(part.findings)), printable(state or part.of))
    console.print(table)
    if gives_json():
        return
    for part in found:
        for one in part.findings:
            console.print(printable(f"{part.name}: {one.where}: {one.what}"), markup=False)
