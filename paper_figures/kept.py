"""Forecasts on the papers' machines, kept as data: they take minutes, and what they were made by is kept with them.

A file of `simulated/` has the forecasts of one figure and the digest of the source that made them. `harness figure NAME
--fresh` makes it anew. Nothing here is measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from harness.digests import SEAL, seal
from harness.environment import code, source_sha256
from harness.output import counted
from harness.plan import Unfilled
from models import registry as models_registry
from models.loss import token_loss
from models.mixture_shape import divided_among
from models.shape import ModelShape
from systems import registry
from systems.errors import UnsupportedError
from systems.machine.durable import write_whole
from systems.machine.reading import read_json
from systems.planning import hardware
from systems.planning.allowance import CUDA
from systems.planning.hardware import HardwareProfile
from systems.prediction.forecast import Observations, Question, forecast
from systems.settings import DType

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(__file__).with_name("simulated")
STATISTICS = ("margin_bytes", "margin_chunks", "non_model_peak_bytes")  # of a strategy, that a figure may show
MADE_BY = ("systems", "models")  # whose source decides what a forecast says

_Case = TypeVar("_Case", bound="DataclassInstance")


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

    def __str__(self) -> str:
        return f"{self.system} {self.model} {self.profile} x{self.ranks}, batch {self.batch_size}"

    @property
    def changed(self) -> tuple[str, ...]:
        """Of the model's shape, field=value each."""
        return ()

    def disk_memory(self, profile: HardwareProfile) -> int:
        """Bytes of a node; 0: none is used."""
        return 0


@dataclass(frozen=True, kw_only=True)
class MixtureCase(ForecastCase):
    """Of a model with experts. expert_ranks: that divide them; None: as the model's own shape says. disk: all of the profile's
    may hold states.
    """

    expert_ranks: int | None = None
    disk: bool = False

    @property
    def changed(self) -> tuple[str, ...]:
        return () if self.expert_ranks is None else (f"expert_ranks={self.expert_ranks}",)

    def disk_memory(self, profile: HardwareProfile) -> int:
        return profile.disk_bytes.value if self.disk and profile.disk_bytes is not None else 0


@dataclass(frozen=True)
class ForecastFound:
    """step_s: None where it does not fit, and why_not says why. statistics: STATISTICS, or what else a figure asks for."""

    step_s: float | None
    why_not: str | None
    statistics: Mapping[str, float] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        return self.why_not is None


@dataclass(frozen=True)
class KeptForecasts:
    """source: digest of what made them. revision: the commit, None where it is not known."""

    source: str
    found: Mapping[str, ForecastFound]
    revision: str | None = None

    def of(self, case: Any) -> ForecastFound | None:
        """None: it is not kept."""
        return self.found.get(_key(case))

    def remark(self, name: str) -> str:
        """Where the numbers are from, and whether by today's source."""
        same = self.source == source_sha256(ROOT, MADE_BY)
        made = f"source {self.source[:12]}{f' of commit {self.revision[:12]}' if self.revision else ''}"
        now = "this source" if same else f"{made}, which has changed since"
        return f"simulated by {now}: harness figure {name} --fresh makes it anew."


def asked(
    case: ForecastCase, seen: Observations, statistics: Sequence[str] = STATISTICS, *, lanes: bool = False
) -> ForecastFound:
    """The forecast. seen: of the case's model. statistics: names of those that are kept. lanes: with the seconds of a step that
    each lane is busy, as `busy.h2d`.
    """
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
        disk_memory=case.disk_memory(profile),
        expert_ranks=divided_among(shape_of(case.model, case.changed)),
    )
    try:
        made = forecast(system, registry.parse_options(system, case.option), question, seen)
    except UnsupportedError as error:
        return ForecastFound(None, str(error))
    numbers = {name: made.statistics[name] for name in statistics if made.statistics.get(name) is not None}
    if lanes:
        numbers |= {f"busy.{lane}": seconds for lane, seconds in made.simulation.busy_s.items()}
    return ForecastFound(made.simulation.step_time_s if made.fits else None, made.why_not, numbers)


_Forecast = TypeVar("_Forecast", bound=ForecastCase)


def shape_of(model: str, changed: Sequence[str] = ()) -> ModelShape:
    return models_registry.resolve(model, registry.split_assignments("set", changed))


def observations(model: str, changed: Sequence[str] = ()) -> Observations:
    shape = shape_of(model, changed)
    with Unfilled():
        return Observations(models_registry.build(shape), partial(token_loss, objective=shape.objective))


def ask_all(
    cases: Sequence[_Forecast], statistics: Sequence[str] = STATISTICS, *, lanes: bool = False
) -> Iterator[tuple[_Forecast, ForecastFound]]:
    """Model by model, each of which is observed once for a batch."""
    built, seen = None, None
    for case in sorted(cases, key=lambda case: (case.model, case.changed)):
        if seen is None or built != (case.model, case.changed):
            built, seen = (case.model, case.changed), observations(case.model, case.changed)
        yield case, asked(case, seen, statistics, lanes=lanes)


def simulated(
    name: str,
    cases: Sequence[_Case],
    *,
    fresh: bool,
    ask: Callable[[Sequence[_Case]], Iterator[tuple[_Case, ForecastFound]]],
) -> KeptForecasts:
    """What is kept of a figure's simulations. cases: dataclasses. fresh: ask for all, and keep them. Raises OSError."""
    path = FOLDER / f"{name}.json"
    if fresh:
        made = {_key(case): found for case, found in counted(ask(cases), len(cases), lambda pair: str(pair[0]))}
        cells = [{"case": asdict(case), "found": asdict(made[_key(case)])} for case in cases]
        FOLDER.mkdir(exist_ok=True)
        write_whole(path, _text(source_sha256(ROOT, MADE_BY), cells, code().revision).encode(), over="file", mode=0o644)
    kept: Any = read_json(path)
    found = {json.dumps(cell["case"], sort_keys=True): ForecastFound(**cell["found"]) for cell in kept["cells"]}
    return KeptForecasts(kept["source_sha256"], found, kept.get("revision"))


def _text(source: str, cells: Sequence[Mapping[str, Any]], revision: str | None) -> str:
    """JSON with a cell a line. revision: the commit that it was made from."""
    head = {"source_sha256": source, "revision": revision, SEAL: seal(json.loads(json.dumps(cells)))}
    lines = ",\n".join(json.dumps(cell) for cell in cells)
    return f'{json.dumps(head)[:-1]}, "cells": [\n{lines}\n]}}\n'


def _key(case: Any) -> str:
    return json.dumps(asdict(case), sort_keys=True)
