"""Whether what confirms and refutes a claim was committed before what it is judged by.

Note [Ancestry of claims]
    A record says from which commit it ran, and a claim's text has to be in that commit as it is today: what would confirm and
    what would refute it, and the numbers of the parts that decide it. A record without a commit, and a forecast, is taken as
    made in the commit that first has it as it is kept, so the one before must have the text. Where it does not the claim is
    one that was seen before, and has to say so. What stands beside a claim decides nothing and needs no proof.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from harness.cells import replicates
from harness.claims import ClaimData, ForecastStep, LedgerData, PartData, cell_name, cells_of
from harness.history import GitHistory
from harness.record import Record

CLAIMS, FORECASTS, RECORDS = "harness/claims.toml", "harness/claims_forecast.json", "results"
RULE = ("what", "kind", "figure", "low", "high", "largest", "sizes", "ranks")  # of a part, beside its claim's two sentences


@dataclass(frozen=True)
class ClaimAncestry:
    """sources: run ids and names of forecasts that the claim is judged by. early: those that the text does not precede."""

    number: int
    seen: bool
    sources: tuple[str, ...]
    early: tuple[str, ...]

    @property
    def finding(self) -> str | None:
        if self.seen or not self.early:
            return None
        shown = ", ".join(self.early[:3]) + (", ..." if len(self.early) > 3 else "")
        return f"what confirms and refutes it was not committed before {shown}: mark it seen, or judge it by later runs"

    @property
    def state(self) -> str:
        """In words."""
        if not self.sources:
            return "nothing to judge it by yet"
        return "seen before" if self.seen else "committed before" if not self.early else "not committed before"


def ancestries(
    data: LedgerData, records: Sequence[Record], forecasts: Mapping[str, ForecastStep], history: GitHistory
) -> Iterator[ClaimAncestry]:
    texts = _Texts(history)
    for claim in data.claims:
        sources, early = list[str](), list[str]()
        for part in claim.parts:
            if part.beside:
                continue
            for name, before in _sources(data, claim, part, records, forecasts, texts):
                sources.append(name)
                if before is None or not texts.has(before, claim, part):
                    early.append(name)
        yield ClaimAncestry(claim.number, claim.seen, tuple(dict.fromkeys(sources)), tuple(dict.fromkeys(early)))


def _sources(
    data: LedgerData,
    claim: ClaimData,
    part: PartData,
    records: Sequence[Record],
    forecasts: Mapping[str, ForecastStep],
    texts: _Texts,
) -> Iterator[tuple[str, str | None]]:
    """What decides a part, and the commit in which the text has to be; None: no commit that is known."""
    for _, cell in cells_of(data, claim, part):
        if part.profile is not None:
            name = cell_name(cell, part.profile)
            if name in forecasts:
                yield name, texts.before_forecast(name, forecasts[name])
        else:
            for record in replicates(records, cell, data.hardware):
                yield record.run_id, texts.before_record(record)


class _Texts:
    """What the commits have, each read once."""

    def __init__(self, history: GitHistory) -> None:
        self._history = history
        self._claims = cache(self._read_claims)
        self._first = cache(self._first_commit)
        self._forecasts: list[tuple[str, Mapping[str, Any]]] | None = None

    def has(self, commit: str, claim: ClaimData, part: PartData) -> bool:
        then = self._claims(commit).get(claim.number)
        if then is None or (then.get("confirms"), then.get("refutes")) != (claim.confirms, claim.refutes):
            return False
        return _rule(part.model_dump()) in [_rule(each) for each in then.get("parts", ())]

    def before_record(self, record: Record) -> str | None:
        revision = record.environment.code.revision
        if revision is not None:
            return revision if revision in self._history.ancestors else None
        first = self._first(f"{RECORDS}/{record.run_id}.json")
        return "HEAD" if first is None else f"{first}^"

    def before_forecast(self, name: str, kept: ForecastStep) -> str:
        if self._forecasts is None:
            commits = self._history.commits_of(FORECASTS)
            texts = [(commit, self._history.text_at(commit, FORECASTS)) for commit in commits]
            self._forecasts = [(commit, json.loads(text).get("forecasts", {})) for commit, text in texts if text]
        first = next((commit for commit, then in self._forecasts if then.get(name) == asdict(kept)), None)
        return "HEAD" if first is None else f"{first}^"

    def _first_commit(self, path: str) -> str | None:
        return next(iter(self._history.commits_of(path)), None)

    def _read_claims(self, commit: str) -> dict[int, dict[str, Any]]:
        text = self._history.text_at(commit, CLAIMS)
        try:
            return {} if text is None else {claim["number"]: claim for claim in tomllib.loads(text).get("claims", ())}
        except (tomllib.TOMLDecodeError, KeyError, TypeError):
            return {}


def _rule(part: Mapping[str, Any]) -> tuple[Any, ...]:
    """With what a part leaves out as its default."""
    defaults = {name: field.get_default() for name, field in PartData.model_fields.items()}
    values = [part.get(name, defaults[name]) for name in RULE]
    return tuple(tuple(value) if isinstance(value, list | tuple) else value for value in values)
