"""`harness export`: records as one table for other programs, a row a run, nested fields as dotted columns."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from harness import store
from harness.output import complain, say_json
from harness.record import Record
from harness.spec import KEPT, TRIALS, BadInputError
from harness.spreadsheet import write_csv
from systems.machine.durable import write_whole
from systems.messages import one_line

CSV, PARQUET = ".csv", ".parquet"


class ExportSpec(BaseModel):
    """Write the records of a folder as one table: a row a run, nested fields as columns such as metrics.tokens_per_s."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    out: str = Field(description="the file to write; its name ends in .csv, or in .parquet where pyarrow is installed")
    results: str | None = Field(None, description=f"folder of the records; default: {KEPT} and {TRIALS}")

    @field_validator("out")
    @classmethod
    def _kind(cls, out: str) -> str:
        if Path(out).suffix not in (CSV, PARQUET):
            raise ValueError(f"the name of the file says what it is to be: end it in {CSV} or {PARQUET}")
        return out


def export(spec: ExportSpec) -> int:
    """Exit code 0. Raises BadInputError where there is nothing to write, or no way to."""
    out = Path(spec.out)
    if out.suffix == PARQUET and importlib.util.find_spec("pyarrow") is None:
        raise BadInputError(f"--out {out}: parquet needs the package pyarrow: pip install pyarrow, or write a {CSV} file")
    records: list[Record] = []
    for folder in store.folders_of(spec.results):
        found, unreadable = store.read_all(folder)
        records += found
        for one in unreadable:
            complain(f"{one.path} is no record: {one.why}")
    rows = rows_of(records)
    if not rows:
        raise BadInputError(f"no record in {store.in_words(store.folders_of(spec.results))}: name the folder with --results")
    try:
        if out.suffix == CSV:
            write_csv(out, rows)
        else:
            import pandas

            write_whole(out, pandas.DataFrame(rows).to_parquet(index=False))
    except OSError as error:
        raise BadInputError(f"--out {out} cannot be written: {error.strerror or one_line(str(error))}") from None
    say_json(json.dumps({"out": str(out), "rows": len(rows), "columns": len(rows[0])}))
    return 0


def rows_of(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Oldest first, each with the same columns; a list is JSON text, and what is not known None."""
    flat = [dict(_flat(r.model_dump(mode="json"))) for r in sorted(records, key=lambda record: record.run_id)]
    columns = dict.fromkeys(name for row in flat for name in row)
    return [{name: row.get(name) for name in columns} for row in flat]


def _flat(tree: Mapping[str, Any], above: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in tree.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping):
            found += _flat(value, f"{name}.")
        else:
            found.append((name, json.dumps(value) if isinstance(value, list) else value))
    return found
