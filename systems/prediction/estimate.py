"""What `systems.estimate` tells: will a model of the user's own fit, and how fast, before it has any weights.

The forecasts, and the changes that would make one fit, are those of `harness plan`; here are the question in words of
arguments, the loss that is assumed where none is given, and the answer as a table of plain text.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

import torch
from pydantic import BaseModel
from torch import nn
from torch.nn.functional import cross_entropy

from systems.errors import UnsupportedError
from systems.optimizers.choice import chosen, chosen_by, hyperparameters
from systems.planning import hardware
from systems.planning.hardware import Count, HardwareProfile
from systems.prediction.bounds import LIMITS
from systems.prediction.forecast import Forecast, Observations, Question, forecast
from systems.prediction.language_models import without_weights
from systems.prediction.needs import TierNeed
from systems.prediction.ranking import ranked
from systems.prediction.remedies import DiskRoom, Remedy, remedies
from systems.settings import Settings
from systems.sizes import exact_size, format_size
from systems.system import System

WIDTH = 120  # columns of what is printed below the table
LONGEST = 1024  # tokens of a sequence, where nothing is said and the model takes as many
COLUMNS = ("system", "fits", "step s", "tokens/s", "bound by")


@dataclass(frozen=True)
class SystemEstimate:
    """One system's answer.

    tiers: what "device", "host" and, if it was asked about, "disk" must hold and have, in bytes; the host's is a node's.
    step_s, tokens_per_s: predicted; bound: what limits the step, a key of systems.prediction.bounds.LIMITS;
    least_device_bytes: the smallest device that would do. Where it does not fit, all of these are of a device and a host with
    memory enough.
    why_not: None if it fits, else one line. remedies: what would make it fit, each by itself, planned before it is named;
    `changes` are arguments of `estimate`. A system that cannot do what is asked on any machine has why_not alone.
    """

    system: str
    why_not: str | None = None
    tiers: Mapping[str, TierNeed] | None = None
    step_s: float | None = None
    tokens_per_s: float | None = None
    bound: str | None = None
    least_device_bytes: int | None = None
    remedies: tuple[Remedy, ...] = ()

    @property
    def fits(self) -> bool:
        return self.why_not is None


@dataclass(frozen=True)
class Estimate:
    """rows: one a system, those that fit first, the fastest of them first. Print it for a table; `found[system]` is a row."""

    title: str
    rows: tuple[SystemEstimate, ...]

    @property
    def fits(self) -> bool:
        """One of the systems does."""
        return self.best.fits

    @property
    def best(self) -> SystemEstimate:
        return self.rows[0]

    def __getitem__(self, system: str) -> SystemEstimate:
        """KeyError for one that was not asked."""
        return {row.system: row for row in self.rows}[system]

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def estimated(
    model: nn.Module | Any,
    systems: Sequence[System],
    options: BaseModel | None,
    question: Question,
    loss: Callable[..., torch.Tensor] | None,
) -> Estimate:
    """model: a module, of whose tensors shapes alone are read, or a transformers config. options: None for each one's defaults.
    Raises UnsupportedError for a model that cannot be observed.
    """
    if loss is not None and not callable(loss):
        raise ValueError(f"loss is {type(loss).__name__}: give a function, called with (model, batch, label_count)")
    module = model if isinstance(model, nn.Module) else _built(model)
    _check_work(module, question)
    observations = Observations(module, loss or own_loss(module))
    observations.of(question)  # what it says of the model is no system's refusal
    if options is None:
        found, refused = ranked(systems, question, observations)
    else:
        found, refused = _of_one(systems[0], options, question, observations)
    by_name = {system.name: system for system in systems}
    rows = [_told(one, by_name[one.system], options, observations) for one in found]
    rows += [SystemEstimate(name, why) for name, why in refused.items()]
    return Estimate(_title(module, question), tuple(rows))


def profile_of(given: str | None) -> HardwareProfile:
    """By name or path; None: that of this machine's GPU. ValueError where there is none."""
    if given is None and torch.cuda.is_available():
        given = hardware.of_device(torch.cuda.get_device_name())
    if given is None:
        raise ValueError(f"this machine has no device with a profile: name one with `hardware`: {', '.join(hardware.names())}")
    return hardware.load(given)


def either(given: int | None, there: Count) -> int:
    """A budget, or the profile's."""
    return there.value if given is None else given


def moments_of(optimizer: torch.optim.Optimizer | str) -> tuple[str, ...]:
    """See PlanningContext.moments. ValueError for a name that no rule has, UnsupportedError for an optimizer without one."""
    if isinstance(optimizer, str):
        return chosen_by(hyperparameters(optimizer, {})).moments
    return chosen(Settings(optimizer=optimizer)).moments


def longest(model: nn.Module | Any) -> int:
    """Tokens of a sequence where nothing is said."""
    return min(_positions(model) or LONGEST, LONGEST)


def own_loss(module: nn.Module) -> Callable[..., torch.Tensor]:
    """That of a loop which calls the model with labels, if its forward takes them, else cross entropy of all logits in fp32."""
    with_labels = "labels" in inspect.signature(module.forward).parameters
    has_decoder = getattr(getattr(module, "config", None), "is_encoder_decoder", False)

    def loss(model: Callable[..., Any], batch: Mapping[str, torch.Tensor], label_count: int) -> torch.Tensor:
        more = {"decoder_input_ids": batch["labels"]} if has_decoder else {}
        output = model(**batch, **more) if with_labels else model(batch["input_ids"])
        found: torch.Tensor | None = getattr(output, "loss", None)
        if found is not None:
            return found
        logits = output if isinstance(output, torch.Tensor) else getattr(output, "logits", None)
        if logits is None:
            raise UnsupportedError(
                f"{type(module).__name__} gives neither a loss nor logits: give `loss`, called with (model, batch, label_count)"
            )
        total: torch.Tensor = cross_entropy(logits.flatten(0, -2).float(), batch["labels"].flatten(), reduction="sum")
        return total / label_count

    return loss


def in_arguments(changes: Mapping[str, int | str]) -> str:
    """A remedy's changes as they are written in a call."""
    return ", ".join(
        f"{name}={exact_size(value)!r}" if name.endswith("_memory") and isinstance(value, int) else f"{name}={value!r}"
        for name, value in changes.items()
    )


def _built(config: Any) -> nn.Module:
    import transformers

    if not isinstance(config, transformers.PretrainedConfig):
        raise ValueError(f"model is {type(config).__name__}: give a torch.nn.Module, or a config of transformers")
    return without_weights(config)


def _positions(model: nn.Module | Any) -> int | None:
    config = getattr(model, "config", model)
    found = getattr(config, "max_position_embeddings", None)
    return found if type(found) is int and found > 0 else None


def _check_work(module: nn.Module, question: Question) -> None:
    """On the meta device no table of positions is too short."""
    most = _positions(module)
    if most is not None and question.seq_len > most:
        raise ValueError(f"the model has positions for {most} tokens, `seq_len` is {question.seq_len}: lower it")


def _of_one(
    system: System, options: BaseModel, question: Question, observations: Observations
) -> tuple[list[Forecast], dict[str, str]]:
    try:
        return [forecast(system, options, question, observations)], {}
    except UnsupportedError as error:
        return [], {system.name: str(error)}


def _told(found: Forecast, system: System, options: BaseModel | None, observations: Observations) -> SystemEstimate:
    there = found.question.profile.disk_bytes
    disk = None if there is None or not system.abilities.disk else DiskRoom("FOLDER", there.value)
    options = system.Options() if options is None else options
    return SystemEstimate(
        system=found.system,
        why_not=found.why_not,
        tiers=found.tiers,
        step_s=found.simulation.step_time_s,
        tokens_per_s=found.tokens_per_s,
        bound=found.simulation.bound,
        least_device_bytes=found.least_device_bytes,
        remedies=tuple(remedies(system, options, found, observations, disk=disk)),
    )


def _title(module: nn.Module, question: Question) -> str:
    parameters = sum(parameter.numel() for parameter in module.parameters())
    ranks = f"{question.ranks} {'rank' if question.ranks == 1 else 'ranks'}"
    work = f"batch {question.batch_size} x {question.seq_len} tokens"
    work += f" x {question.accumulate} micro-batches" if question.accumulate > 1 else ""
    name = type(module).__name__
    return f"{name}, {parameters:,} parameters, {ranks} of {question.profile.device_name}: {work}, {question.dtype}"


def _lines(found: Estimate) -> Iterator[str]:
    yield found.title
    known = [row for row in found.rows if row.tiers is not None]
    names = list(dict.fromkeys(name for row in known for name in row.tiers or {}))
    table = [[*COLUMNS, *(f"{name} needs, has" for name in names), "least device"]]
    table += [[*_cells(row), *(_tier(row, name) for name in names), format_size(row.least_device_bytes or 0)] for row in known]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    if known:
        yield from ("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip() for cells in table)
    for sentence in _sentences(found, known):
        yield from wrap(sentence, WIDTH, subsequent_indent="    ", break_on_hyphens=False)


def _sentences(found: Estimate, known: Sequence[SystemEstimate]) -> Iterator[str]:
    for row in found.rows:
        if row.why_not is not None:
            yield f"{row.system} {'cannot' if row.tiers is None else 'does not fit'}: {row.why_not}"
        for remedy in row.remedies:
            yield f"{row.system} would fit with {in_arguments(remedy.changes)}: {remedy.what}"
    for bound in dict.fromkeys(row.bound for row in known if row.bound is not None):
        yield f"{bound}: {LIMITS[bound]}"


def _cells(row: SystemEstimate) -> tuple[str, ...]:
    return row.system, "yes" if row.fits else "no", f"{row.step_s:.4g}", f"{row.tokens_per_s:.4g}", str(row.bound)


def _tier(row: SystemEstimate, name: str) -> str:
    need = (row.tiers or {}).get(name)
    return "" if need is None else f"{format_size(need.need_bytes)}, {format_size(need.have_bytes)}"
