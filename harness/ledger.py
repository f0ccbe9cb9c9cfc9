"""`harness ledger`: the claims of the four papers, and what the kept records say of each. Runs nothing.

How a verdict is found is in claims.py. With `--out` the page docs/claims.md is written, between two marks, and with `--check`
it is only compared with what the records make of it.
"""

from __future__ import annotations

import html
import json
import os
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field
from rich.table import Table

from harness import store
from harness.cells import TEXT_LIMIT
from harness.claims import FILE, ClaimData, ForecastStep, Judged, LedgerData, Paper, PartOutcome, judge, read_claims
from harness.output import complain, result_console, say_json
from harness.record import Record
from harness.spec import KEPT, BadInputError
from harness.tables import STALE, UP_TO_DATE, replaced
from systems.machine.durable import write_whole
from systems.machine.reading import read_json, read_text
from systems.messages import one_line, printable

BEGIN, END = "<!-- written by harness ledger, not by hand: begin -->", "<!-- written by harness ledger: end -->"
FORECASTS = FILE.with_name("claims_forecast.json")
NAMES: dict[Paper, str] = {"angel-ptm": "Angel-PTM", "patrickstar": "PatrickStar", "elixir": "Elixir", "h3t": "H3T"}
WIDTH = 120  # of a line that is no row
COLUMNS = ("claim", "printed in", "what", "seen before", "verdict", "measured")


class LedgerSpec(BaseModel):
    """Show the papers' claims with their verdicts, the runs behind them, and what would have to be run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    results: str = Field(KEPT, description="folder of the records")
    paper: Paper | None = Field(None, description="of this paper only")
    claim: int | None = Field(None, description="this claim only, by its number, with all that is known of it")
    out: str | None = Field(None, description="page that has the two marks between which all claims are written")
    forecast: bool = Field(False, description="first make the forecasts that are lacking, minutes each, and keep them")
    check: bool = Field(False, description="with --out: write nothing; exit code 1 if the page differs from the records")


@dataclass(frozen=True)
class KeptSteps:
    """Forecasts by name of cell and profile. source: digest of the program that made the last, None where there are none."""

    source: str | None
    found: dict[str, ForecastStep]


def read_forecasts(path: Path = FORECASTS) -> KeptSteps:
    kept = read_json(path)
    return KeptSteps(kept["source_sha256"], {name: ForecastStep(**step) for name, step in kept["forecasts"].items()})


def judged(data: LedgerData, records: Sequence[Record], kept: KeptSteps) -> list[Judged]:
    return [judge(data, claim, records, kept.found) for claim in data.claims]


def show_ledger(spec: LedgerSpec, data: LedgerData | None = None, forecasts: Path = FORECASTS) -> int:
    """Exit code: 0, or 1 if `check` finds the page to differ. Raises BadInputError. data: other claims than those kept."""
    if spec.out is not None and (spec.paper is not None or spec.claim is not None):
        raise BadInputError("--out is a page of all claims: leave --paper and --claim out")
    if spec.check and spec.out is None:
        raise BadInputError("--check needs --out: name the page that is to be checked")
    folder = Path(spec.results)
    if not os.path.isdir(folder):
        raise BadInputError(f"--results {folder} is no folder: name the one that the records are in")
    records, unreadable = store.read_all(folder)
    for one in unreadable:
        complain(f"{one.path} is no record: {one.why}")
    try:
        data, kept = data or read_claims(), read_forecasts(forecasts)
        if spec.forecast:
            from harness import claims_forecast

            claims_forecast.make(data, [one for one in data.claims if _wanted(spec, one)], kept.found, forecasts)
            kept = read_forecasts(forecasts)
    except ValueError as error:
        raise BadInputError(str(error)) from None
    except OSError as error:
        raise BadInputError(f"{forecasts} cannot be used: {error.strerror}") from None
    found = judged(data, records, kept)
    if spec.out is not None:
        return _write(spec.out, found, check=spec.check, results=spec.results)
    wanted = [one for one in found if _wanted(spec, one)]
    if not wanted:
        numbers = [one.number for one in found if spec.paper in (None, one.paper)]
        raise BadInputError(f"--claim {spec.claim} is none of {min(numbers)} to {max(numbers)}: use one of these")
    _show(wanted, in_full=spec.claim is not None)
    say_json(json.dumps({"schema_version": 1, "kind": "ledger", "claims": [one.model_dump(mode="json") for one in wanted]}))
    return UP_TO_DATE


def _wanted(spec: LedgerSpec, one: ClaimData | Judged) -> bool:
    return spec.paper in (None, one.paper) and spec.claim in (None, one.number)


def _write(out: str, found: Sequence[Judged], *, check: bool, results: str) -> int:
    try:
        text = read_text(Path(out), TEXT_LIMIT)
    except (OSError, ValueError) as error:
        raise BadInputError(f"--out {out} cannot be read: {one_line(str(error))}") from None
    made = replaced(text, rendered(found), out, (BEGIN, END))
    if made == text:
        return UP_TO_DATE
    if check:
        complain(f"{out} is not what the records in {results} say: run harness ledger --out {out}")
        return STALE
    try:
        write_whole(Path(out), made.encode())
    except OSError as error:
        raise BadInputError(f"--out {out} cannot be written: {error.strerror}") from None
    return UP_TO_DATE


def _show(found: Sequence[Judged], *, in_full: bool) -> None:
    console = result_console()
    table = Table("claim", "paper", "what", "verdict", "measured")
    for one in found:
        table.add_row(*(printable(text) for text in (str(one.number), NAMES[one.paper], one.claim, verdict(one), known(one))))
    console.print(table)
    for one in found if in_full else ():
        for line in details(one):
            console.print(printable(line), markup=False)


def verdict(one: Judged) -> str:
    """With "(simulated)" where it is that."""
    return f"{one.verdict}{' (simulated)' if one.simulated and one.verdict != 'open' else ''}"


def known(one: Judged) -> str:
    """What is known of the parts that have a number or a verdict, those beside the claim told apart."""
    known = [part for part in one.parts if part.value is not None or part.verdict != "open"]
    return "; ".join(f"{'beside it: ' if part.beside else ''}{part.what}: {outcome(part)}" for part in known)


def outcome(part: PartOutcome) -> str:
    """too few runs, 1.15 (so far: better)."""
    spread = "" if part.low is None or part.high is None else f" ({part.low:.3g} to {part.high:.3g})"
    number = "" if part.value is None else f", {part.value:.3g}{spread}"
    simulated = " by simulation" if part.simulated and part.verdict != "open" else ""
    return f"{part.verdict}{simulated}{number}{f' ({part.remark})' if part.remark else ''}"


def rendered(found: Sequence[Judged]) -> str:
    """What stands between the two marks, with them."""
    lines = [BEGIN, "", *counted(found), ""]
    for paper, name in NAMES.items():
        lines += [
            f"## {name}",
            "",
            _line(["claim", "printed in", "what", "seen before", "verdict", "measured"]),
            _line(["---"] * 6),
        ]
        mine = [one for one in found if one.paper == paper]
        for one in mine:
            seen = "yes" if one.seen else "no"
            lines.append(_line([str(one.number), one.place, one.claim, seen, verdict(one), known(one) or "-"]))
        for one in mine:
            lines += ["", f"### Claim {one.number}", "", *(_plain(line) for line in details(one))]
        lines.append("")
    return "\n".join([*lines, END])


def counted(found: Sequence[Judged]) -> list[str]:
    """How many claims have which verdict."""
    numbers = dict[str, int]()
    for one in found:
        numbers[verdict(one)] = numbers.get(verdict(one), 0) + 1
    told = ", ".join(f"{number} {name}" for name, number in sorted(numbers.items(), key=lambda pair: (-pair[1], pair[0])))
    return _wrapped(f"Of {len(found)} claims: {told}.")


def details(one: Judged) -> Iterator[str]:
    """All that is known of a claim, a list; no line is longer than WIDTH, but for what has no blank in it."""
    lines = [f"Printed ({one.place}): {one.printed}", f"Confirmed by: {one.confirms}", f"Refuted by: {one.refutes}"]
    lines += [f"Not testable here: {one.untestable}"] if one.untestable else []
    lines += [f"Waits for {one.waits}."] if one.waits else []
    for part in one.parts:
        where = f"Beside it ({part.beside}): " if part.beside else ""
        lines.append(f"{where}{part.what}, {part.kind}: {outcome(part)}.")
        lines += [f"  Lacking: {'; '.join(part.wants)}."] if part.wants else []
        lines += [f"  Runs: {', '.join(part.runs)}."] if part.runs else []
    for line in lines:
        inner = len(line) - len(line.lstrip())
        yield from _wrapped(f"{' ' * inner}* {line.lstrip()}", " " * (inner + 2))


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _line(texts: Sequence[str]) -> str:
    return "| " + " | ".join(_plain(text).replace("|", "\\|") for text in texts) + " |"


def _plain(text: str) -> str:
    return html.escape(printable(text), quote=False)
