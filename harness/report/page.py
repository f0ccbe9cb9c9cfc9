"""The page itself: one file that asks nothing of anybody else, whatever its records hold.

No script, no link that leaves it, and a policy that lets a browser load nothing but this page's own style, named by its
hash. All text from records is escaped by the template engine; what a reader would not see (control characters, directions of
writing) stands as an escape, and what is too long for any reader is cut.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from pydantic import BaseModel, ConfigDict, Field

from harness import ledger, store, tables
from harness.cells import read_table
from harness.claims import read_claims
from harness.ledger import NAMES, read_forecasts
from harness.listing import short_count
from harness.output import complain, result_console, say_json
from harness.report import losses, timeline
from harness.report.answers import DECIDED, DIGITS, of_device
from harness.report.content import ReportContent, gathered
from harness.results_page import COLUMNS, ratio_text
from harness.spec import KEPT, BadInputError
from systems.machine.durable import prove_writable, write_whole
from systems.messages import printable

HERE = Path(__file__).parent
LONGEST = 2000  # characters of one text
SECTIONS: Mapping[str, str] = {
    "machines": "The machines",
    "leaders": "Which strategy when",
    "core": "Speed and memory, row by row",
    "paper_rules": "By the papers' own rules, and by default",
    "largest": "The largest models that trained",
    "memory": "Memory by tier",
    "timeline": "One step, measured and simulated",
    "losses": "Losses over each other",
    "energy": "Energy of the GPU",
    "claims": "The papers' claims",
    "missing": "What is missing",
    "runs": "The runs behind the numbers",
}


class ReportSpec(BaseModel):
    """Write one HTML page of what the kept records say: which strategy when, and which of the papers' claims hold."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    results: str = Field(KEPT, description="folder of the records")
    out: str = Field("report.html", description="file to write, which opens in any browser without a network")


def write_report(spec: ReportSpec) -> int:
    """Exit code 0. Raises BadInputError."""
    folder, out = Path(spec.results), Path(spec.out)
    records, unreadable = store.read_all(folder)
    if not folder.is_dir():
        raise BadInputError(f"--results {folder} is no folder: name the one that the records are in")
    for one in unreadable:
        complain(f"{one.path} is no record: {one.why}")
    try:
        prove_writable(out)
        shown = [read_table(path) for path in sorted(tables.FOLDER.glob("*.toml"))]
        claims = ledger.judged(read_claims(), records, read_forecasts())
        content = gathered(folder, records, unreadable, shown, claims)
        write_whole(out, rendered(content).encode())
    except OSError as error:
        raise BadInputError(f"--out {out} cannot be written: {error.strerror}: name another file") from None
    except ValueError as error:
        raise BadInputError(str(error)) from None
    console = result_console()
    for answer in content.answers:
        console.print(printable(f"{answer.question} {answer.text}"), markup=False)
    below = f"; {content.below}, of which it is not" if content.below else ""
    console.print(printable(f"The page is {out}, of {len(content.runs)} records in {folder} itself{below}."), markup=False)
    counts = {"records": len(content.runs), "below": store.counts_below(folder)}
    told = {"schema_version": 1, "kind": "report", "out": str(out), **counts}
    say_json(json.dumps({**told, "answers": {one.question: one.text for one in content.answers}}))
    return 0


def rendered(content: ReportContent) -> str:
    """The whole page."""
    css = (HERE / "page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    order = {id_: number for number, id_ in enumerate(SECTIONS, start=1)}
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            content=content,
            numbers=content.number_of(),
            data=_plain(content),
            css=Markup(css),  # this package's own file
            policy=f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
            sections=SECTIONS.items(),
            titles=SECTIONS,
            place=order,
            columns=COLUMNS,
            papers=NAMES,
            decided=DECIDED,
            wide=timeline.WIDE,
            loss_wide=losses.WIDE,
            loss_high=losses.HIGH,
        )
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "size": _size,
        "count": short_count,
        "ratio": partial(ratio_text, digits=DIGITS),
        "of_device": of_device,
        "known": ledger.known,
        "verdict": ledger.verdict,
        "outcome": ledger.outcome,
    }
    return environment


def _shown(value: Any) -> Any:
    """Of what a record says, as a reader can take it. Markup is the template's own."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return printable(value if len(value) <= LONGEST else f"{value[:LONGEST]}… ({len(value)} characters)")


def _size(size: int) -> str:
    """In GiB, as the tables of results have it, or in the unit that shows what is smaller."""
    return f"{size / (1 << 30):.2f}GiB" if size >= 1 << 28 else f"{size / (1 << 20):.1f}MiB"


def _plain(value: Any) -> Any:
    """Nested data classes and models as what JSON can hold; a configuration, which may hold anything, is left out."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude={"configuration"})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
