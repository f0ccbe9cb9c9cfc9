"""Weak scaling by simulation: as many tokens a GPU on one H200 and on two of one host, and when the host stops being the bound.

    python -m paper_figures.weak_scaling [--system NAME] [--hardware PROFILE] [--model NAME ...] [--out FILE.csv]

Nothing is measured here. Every cell is a forecast of `harness plan` on the same machine, with one of its devices and with all:
the same device budget, the same host memory in all, recomputation of everything, the system's defaults. Scaling is tokens a
second a GPU beside those with one. What two GPUs share is the host: its memory's rate, CPU Adam, its memory's size.

The host stops being the bound at so many tokens a GPU that a step takes at most NEAR times what the device computes, of the
batches that are shown.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.output import counted
from harness.plan import Unfilled
from harness.spreadsheet import write_csv
from models import registry as models_registry
from models.loss import token_loss
from systems import registry
from systems.errors import UnsupportedError
from systems.messages import one_line, printable
from systems.planning import hardware
from systems.planning.allowance import CUDA
from systems.planning.hardware import HardwareProfile
from systems.prediction.forecast import Observations, Question, forecast
from systems.sizes import format_size, parse_size

NEAR = 1.05
SEQUENCE = 1024
BATCHES = (1, 4, 8, 16, 32)
BUDGETS = MappingProxyType({"ps-4b": "20GiB", "ps-10b": "78GiB"})
"""Of a device, as measured runs had them; of other models all of it."""


@dataclass(frozen=True)
class ScalingSpec:
    """Simulate one device of a machine and all of them.

    system: whose plans. hardware: a profile of several devices. model: names. host_memory: of the node. out: CSV to write.
    """

    system: str = "elixir"
    hardware: str = "h200-141g-x2"
    model: tuple[str, ...] = ("ps-4b", "ps-10b", "opt-30b")
    host_memory: str = "240GiB"
    out: str | None = None


@dataclass(frozen=True)
class Cell:
    """ranks of one model. tokens: of a rank in a step. step_s: None where it does not fit, and why_not says why."""

    model: str
    ranks: int
    device_budget: int
    tokens: int
    step_s: float | None
    compute_s: float
    bound: str
    host_bytes: int
    link_s: float
    why_not: str | None

    @property
    def tokens_per_s(self) -> float | None:
        """Of a rank."""
        return None if self.step_s is None else self.tokens / self.step_s

    @property
    def host_is_no_bound(self) -> bool:
        return self.step_s is not None and self.step_s <= NEAR * self.compute_s


def cells(spec: ScalingSpec, profile: HardwareProfile, model: str, batches: Sequence[int] = BATCHES) -> Iterator[Cell]:
    """Batch by batch, one rank and then as many as there are devices."""
    shape = models_registry.resolve(model)
    with Unfilled():
        built = models_registry.build(shape)
    seen = Observations(built, partial(token_loss, objective=shape.objective))
    for batch in batches:
        for ranks in sorted({1, profile.devices}):
            yield _cell(spec, profile, model, seen, batch, ranks)


def _cell(spec: ScalingSpec, profile: HardwareProfile, model: str, seen: Observations, batch: int, ranks: int) -> Cell:
    system, whole = registry.get(spec.system), profile.device_memory_bytes.value
    question = Question(
        profile=profile,
        device_memory=parse_size(BUDGETS[model]) if model in BUDGETS else whole,
        host_memory=parse_size(spec.host_memory),
        ranks=ranks,
        batch_size=batch,
        seq_len=SEQUENCE,
        recompute="full",
        allowance=CUDA,
    )
    tokens = batch * SEQUENCE
    try:
        found = forecast(system, system.Options(), question, seen)
    except UnsupportedError as error:
        return Cell(model, ranks, question.device_memory, tokens, None, 0.0, "", 0, 0.0, str(error))
    bounds = found.simulation.bounds_s
    return Cell(
        model=model,
        ranks=ranks,
        device_budget=question.device_memory,
        tokens=tokens,
        step_s=found.simulation.step_time_s if found.fits else None,
        compute_s=bounds["compute"],
        bound=found.simulation.bound,
        host_bytes=found.tiers["host"].need_bytes,
        link_s=bounds.get("link", 0.0),
        why_not=found.why_not,
    )


def scaling(cell: Cell, among: Sequence[Cell]) -> float | None:
    """Tokens a second of a rank, beside those of one rank alone with as many tokens; None where one of both does not fit."""
    for alone in among:
        if (alone.model, alone.tokens, alone.ranks) == (cell.model, cell.tokens, 1):
            mine, theirs = cell.tokens_per_s, alone.tokens_per_s
            return None if mine is None or theirs is None else mine / theirs
    return None


def enough_tokens(model: str, ranks: int, among: Sequence[Cell]) -> int | None:
    """The fewest of those shown at which the host is no bound; None if it always is."""
    return min((c.tokens for c in among if (c.model, c.ranks) == (model, ranks) and c.host_is_no_bound), default=None)


def table(found: Sequence[Cell]) -> Table:
    shown = Table("model", "device", "tokens a GPU", "GPUs", "step s", "compute s", "link s", "host", "bound", "scaling")
    for cell in found:
        times = (None if cell.step_s is None else cell.compute_s, None if cell.step_s is None else cell.link_s)
        factor = scaling(cell, found)
        shown.add_row(
            escape(printable(cell.model)),
            format_size(cell.device_budget),
            f"{cell.tokens:,}",
            str(cell.ranks),
            "does not fit" if cell.step_s is None else f"{cell.step_s:.3f}",
            *("" if seconds is None else f"{seconds:.3f}" for seconds in times),
            format_size(cell.host_bytes),
            "" if cell.step_s is None else cell.bound,
            "" if factor is None or cell.ranks == 1 else f"{factor:.2f}",
        )
    return shown


def summary(found: Sequence[Cell]) -> Iterator[str]:
    for model, ranks in dict.fromkeys((cell.model, cell.ranks) for cell in found):
        tokens = enough_tokens(model, ranks, found)
        gpus = "one GPU" if ranks == 1 else f"{ranks} GPUs"
        if tokens is None:
            fits = any(c.step_s is not None for c in found if (c.model, c.ranks) == (model, ranks))
            most = max(c.tokens for c in found if c.model == model)
            yield f"{model} on {gpus}: " + (f"the host is the bound up to {most:,} tokens" if fits else "does not fit")
        else:
            yield f"{model} on {gpus}: the host is no bound from {tokens:,} tokens a GPU on"


def main(arguments: Sequence[str]) -> int:
    spec = tyro.cli(ScalingSpec, args=arguments, prog="python -m paper_figures.weak_scaling")
    console = Console(width=160)
    try:
        profile = hardware.load(spec.hardware)
        total = len(spec.model) * len(BATCHES) * len({1, profile.devices})
        made = (cell for model in spec.model for cell in cells(spec, profile, model))
        found = list(counted(made, total, lambda cell: f"{cell.model}, {cell.tokens:,} tokens, GPUs: {cell.ranks}"))
        if spec.out is not None:
            write_csv(Path(spec.out), [vars(cell) | {"scaling": scaling(cell, found)} for cell in found])
    except (OSError, ValueError) as error:
        console.print(printable(one_line(str(error))), markup=False)
        return 2
    console.print(table(found))
    for line in summary(found):
        console.print(printable(line), markup=False)
    for cell in found:
        if cell.why_not is not None:
            console.print(f"{cell.model}, {cell.tokens:,} tokens, {cell.ranks} GPUs: {cell.why_not}", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
