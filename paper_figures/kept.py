"""Forecasts on the papers' machines, kept as data: they take minutes, and what they were made by is kept with them.

A file of `simulated/` has the forecasts of one figure and the digest of the source that made them. `harness figure NAME --fresh`
makes it anew. Nothing here is measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from harness.environment import source_sha256
from harness.output import counted
from harness.plan import Unfilled
from models import registry as models_registry
from models.loss import token_loss
from systems import registry
from systems.errors import UnsupportedError
from systems.machine.durable import write_whole
from systems.machine.reading import read_json
from systems.planning import hardware
from systems.planning.allowance import CUDA
from systems.prediction.forecast import Observations, Question, forecast
from systems.settings import DType

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(__file__).with_name("simulated")


@dataclass(frozen=True, kw_only=True)
class ForecastCase:
    """A forecast's question. device_memory: bytes, 0: all of the profile's device. batch_size: of a rank."""

    system: str
    model: str
    profile: str
    ranks: int
    batch_size: int
    option: tuple[str, ...] = ()
    seq_len: int = 1024
    dtype: DType = "fp16"
    device_memory: int = 0

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True)
class ForecastFound:
    """step_s: None where it does not fit, and why_not says why. statistics: numbers that the strategy tells."""

    step_s: float | None
    why_not: str | None
    statistics: Mapping[str, float] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        return self.why_not is None


@dataclass(frozen=True)
class KeptForecasts:
    """source: digest of what made them."""

    source: str
    found: Mapping[str, ForecastFound]

    def of(self, case: ForecastCase) -> ForecastFound | None:
        """None: it is not kept."""
        return self.found.get(case.key)

    def remark(self, name: str) -> str:
        """Where the numbers are from, and whether by today's source."""
        same = self.source == source_sha256(ROOT)
        now = "this source" if same else f"source {self.source[:12]}, which has changed since"
        return f"simulated by {now}: harness figure {name} --fresh makes it anew."


def asked(case: ForecastCase, seen: Observations) -> ForecastFound:
    """The forecast. seen: of the case's model."""
    system, profile = registry.get(case.system), hardware.load(case.profile)
    question = Question(
        profile=profile,
        device_memory=case.device_memory or profile.device_memory_bytes.value,
        host_memory=profile.host_memory_bytes.value,
        ranks=case.ranks,
        batch_size=case.batch_size,
        seq_len=case.seq_len,
        dtype=case.dtype,
        recompute="full",
        allowance=CUDA,
    )
    try:
        made = forecast(system, registry.parse_options(system, case.option), question, seen)
    except UnsupportedError as error:
        return ForecastFound(None, str(error))
    numbers = {name: value for name, value in made.statistics.items() if type(value) in (int, float)}
    return ForecastFound(made.simulation.step_time_s if made.fits else None, made.why_not, numbers)


def observations(model: str) -> Observations:
    shape = models_registry.resolve(model)
    with Unfilled():
        return Observations(models_registry.build(shape), partial(token_loss, objective=shape.objective))


def simulated(name: str, cases: Sequence[ForecastCase], *, fresh: bool) -> KeptForecasts:
    """What is kept of a figure's forecasts. fresh: make them all, and keep them. Raises OSError, ValueError."""
    path = FOLDER / f"{name}.json"
    if fresh:
        ordered = sorted(cases, key=lambda case: case.model)
        found, seen = dict[str, ForecastFound](), ("", observations("gpt-tiny"))
        for case in counted(ordered, len(ordered), lambda case: f"{case.system} {case.model} {case.profile} x{case.ranks}"):
            seen = seen if seen[0] == case.model else (case.model, observations(case.model))
            found[case.key] = asked(case, seen[1])
        tree = {"source_sha256": source_sha256(ROOT), "cells": [_as_tree(case, found[case.key]) for case in cases]}
        FOLDER.mkdir(exist_ok=True)
        write_whole(path, (json.dumps(tree, indent=1) + "\n").encode(), over="file", mode=0o644)
    kept: Any = read_json(path)
    cells = {json.dumps(cell["case"], sort_keys=True): ForecastFound(**cell["found"]) for cell in kept["cells"]}
    return KeptForecasts(kept["source_sha256"], cells)


def _as_tree(case: ForecastCase, found: ForecastFound) -> dict[str, Any]:
    return {"case": asdict(case), "found": asdict(found)}
