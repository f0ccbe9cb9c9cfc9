"""`harness tables`: docs/results.md, written from the records of a folder and from nothing else.

Which runs belong to a cell is in cells.py, how they look in results_page.py. With `--check` nothing is written: the
file must be what the records make of it, which a test asks for, so that it cannot go stale.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from harness import store
from harness.cells import TEXT_LIMIT, ResultsTable, read_table, replicates
from harness.output import complain, say
from harness.record import Record
from harness.results_page import page
from harness.spec import KEPT, BadInputError
from systems.machine.durable import write_whole
from systems.machine.reading import read_text
from systems.messages import one_line, printable

FOLDER = Path(__file__).with_name("results_tables")
BEGIN, END = "<!-- written by harness tables, not by hand: begin -->", "<!-- written by harness tables: end -->"
UP_TO_DATE, STALE = 0, 1


class TablesSpec(BaseModel):
    """Write the results tables from the records that are kept, or check that they are what the records say."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    results: str = Field(KEPT, description="folder of the records")
    out: str = Field("docs/results.md", description="file that has the two marks between which the tables are written")
    check: bool = Field(False, description="write nothing; exit code 1 if the file differs from the records")


def rendered(tables: Sequence[ResultsTable], records: Sequence[Record]) -> str:
    """What stands between the two marks, with them."""
    return "\n".join([BEGIN, "", *page(tables, records), "", END])


def replaced(text: str, block: str, where: str, marks: tuple[str, str] = (BEGIN, END)) -> str:
    """The text with the block in the place of what its marks enclose. Raises BadInputError if they are not there once."""
    begin, end = marks
    if (text.count(begin), text.count(end)) != (1, 1) or text.index(begin) > text.index(end):
        raise BadInputError(f"--out {where}: it needs the lines {begin} and {end} once each, in this order")
    before, rest = text.split(begin)
    return before + block + rest.split(end)[1]


def write_tables(spec: TablesSpec, folder: Path = FOLDER) -> int:
    """Exit code: 0, or 1 if `check` finds the file to differ. Raises BadInputError. folder: where the tables are."""
    out, results = Path(spec.out), Path(spec.results)
    try:
        tables = [read_table(path) for path in sorted(folder.glob("*.toml"))]
    except ValueError as error:
        raise BadInputError(str(error)) from None
    try:
        text = read_text(out, TEXT_LIMIT)
    except (OSError, ValueError) as error:
        raise BadInputError(f"--out {out} cannot be read: {one_line(str(error))}") from None
    records, unreadable = store.read_all(results)
    if not results.is_dir():
        raise BadInputError(f"--results {results} is no folder: name the one that the records are in")
    for one in unreadable:
        complain(f"{one.path} is no record: {one.why}")
    made = replaced(text, rendered(tables, records), spec.out)
    _tell_runs(tables, records)
    if made == text:
        return UP_TO_DATE
    if spec.check:
        complain(f"{out} is not what the records in {results} say: run harness tables")
        return STALE
    try:
        write_whole(out, made.encode())
    except OSError as error:
        raise BadInputError(f"--out {out} cannot be written: {error.strerror}") from None
    return UP_TO_DATE


def _tell_runs(tables: Sequence[ResultsTable], records: Sequence[Record]) -> None:
    """Every row that has records, with them: which runs a number is of."""
    for table in tables:
        for group in table.groups:
            for cell in group.cells:
                runs = [record.run_id for record in replicates(records, cell, table.hardware)]
                if runs:
                    say(printable(f"{table.hardware}: {group.title}: {cell.name}: {' '.join(runs)}"))
