"""Forecasts that claims are decided by: `harness ledger --forecast` makes those that are lacking and keeps them, as data.

They take minutes each. What made them is kept beside them; one that is to be made anew is taken out of the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from harness.cells import TableCell
from harness.claims import FILE, ClaimData, ForecastStep, LedgerData, cell_name, cells_of
from harness.digests import SEAL, seal
from harness.environment import source_sha256
from harness.output import counted
from harness.plan import question_of
from harness.plan_spec import PlanSpec
from harness.spec import BadInputError, RunSpec
from models.flops import relative_tflops
from systems import registry
from systems.errors import UnsupportedError
from systems.machine.durable import write_whole
from systems.prediction.forecast import forecast

ROOT = Path(__file__).resolve().parents[1]


def lacking(data: LedgerData, claims: Sequence[ClaimData], known: dict[str, ForecastStep]) -> Iterator[tuple[TableCell, str]]:
    """Cells without a forecast, and their profiles."""
    for claim in claims:
        for part in claim.parts:
            for _, cell in cells_of(data, claim, part):
                if part.profile is not None and cell_name(cell, part.profile) not in known:
                    yield cell, part.profile


def make(data: LedgerData, claims: Sequence[ClaimData], known: dict[str, ForecastStep], path: Path) -> None:
    """All that is lacking, each kept as soon as it is there: known grows. Raises OSError."""
    wanted = {cell_name(cell, profile): (cell.spec, profile) for cell, profile in lacking(data, claims, known)}
    for name, (spec, profile) in counted(wanted.items(), len(wanted), lambda pair: pair[0]):
        known[name] = asked(spec, profile)
        kept = {each: asdict(step) for each, step in sorted(known.items())}
        text = json.dumps({"source_sha256": source_sha256(ROOT), SEAL: seal(kept), "forecasts": kept}, indent=1)
        write_whole(path, f"{text}\n".encode())


def asked(spec: RunSpec, profile_name: str) -> ForecastStep:
    """Of a cell. A budget that it does not name is all of the profile's. Raises BadInputError for what no machine could do."""
    given = {"ranks": spec.ranks, "hardware": profile_name.format(ranks=spec.ranks)}
    question, seen = question_of(PlanSpec.model_validate(spec.model_dump(exclude_unset=True) | given))
    system = registry.get(spec.system)
    try:
        made = forecast(system, registry.parse_options(system, spec.option), question, seen)
    except UnsupportedError as error:
        raise BadInputError(f"{FILE.name}: {cell_name(TableCell('', spec), profile_name)}: {error}") from None
    if not made.fits:
        return ForecastStep(None, None, made.why_not)
    parameters = sum(each.numel() for each in seen.model.parameters())
    step_s, tokens = made.simulation.step_time_s, question.tokens // question.ranks
    return ForecastStep(made.tokens_per_s, relative_tflops(parameters=parameters, tokens=tokens, step_time_s=step_s))
