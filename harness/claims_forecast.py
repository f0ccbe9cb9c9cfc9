"""Forecasts that claims are decided by: `harness ledger --forecast` makes those that are lacking and keeps them, as data.

They take minutes each. What made them is kept beside them; one that is to be made anew is taken out of the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from harness.cells import TableCell
from harness.claims import FILE, ClaimData, ForecastStep, LedgerData, cell_name, cells_of
from harness.environment import source_sha256
from harness.output import counted
from harness.spec import BadInputError, RunSpec
from models import registry as models_registry
from models.flops import relative_tflops
from models.loss import token_loss
from systems import registry
from systems.errors import UnsupportedError
from systems.machine.durable import write_whole
from systems.planning import hardware
from systems.planning.allowance import CUDA
from systems.prediction.forecast import Observations, Question, forecast
from systems.prediction.meta_step import Unfilled

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
        text = json.dumps({"source_sha256": source_sha256(ROOT), "forecasts": kept}, indent=1)
        write_whole(path, f"{text}\n".encode())


def asked(spec: RunSpec, profile_name: str) -> ForecastStep:
    """Of a cell. A budget that it does not name is all of the profile's. Raises BadInputError for what no machine could do."""
    system, profile = registry.get(spec.system), hardware.load(profile_name.format(ranks=spec.ranks))
    shape = models_registry.resolve(str(spec.model), registry.split_assignments("set", spec.set))
    assert spec.batch_size is not None and spec.seq_len is not None, "a cell names both"
    question = Question(
        profile=profile,
        device_memory=spec.device_memory or profile.device_memory_bytes.value,
        host_memory=profile.host_memory_bytes.value,
        ranks=spec.ranks,
        batch_size=spec.batch_size,
        seq_len=spec.seq_len,
        accumulate=spec.accumulate,
        dtype=spec.dtype,
        recompute=spec.recompute,
        allowance=CUDA,
    )
    with Unfilled():
        model = models_registry.build(shape)
        seen = Observations(model, partial(token_loss, objective=shape.objective))
    try:
        made = forecast(system, registry.parse_options(system, spec.option), question, seen)
    except UnsupportedError as error:
        raise BadInputError(f"{FILE.name}: {cell_name(TableCell('', spec), profile_name)}: {error}") from None
    if not made.fits:
        return ForecastStep(None, None, made.why_not)
    parameters = sum(each.numel() for each in model.parameters())
    step_s, tokens = made.simulation.step_time_s, spec.batch_size * spec.seq_len * spec.accumulate
    return ForecastStep(made.tokens_per_s, relative_tflops(parameters=parameters, tokens=tokens, step_time_s=step_s))
