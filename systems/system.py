"""The protocol every system obeys, strategies and baselines alike: settings in, an engine out.

The harness knows nothing else of a system. All sizes are bytes, all times seconds.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, Self, cast

import torch
from pydantic import BaseModel

from systems import export
from systems.checkpoint import TrainingState
from systems.errors import UnsupportedError
from systems.ranks.ranks import Ranks, SingleRank
from systems.reports import Reports
from systems.settings import DType, Settings, StepOutcome


class Engine(Reports):
    """A model under a system: call it, `backward(loss)` once per micro-batch, then `step()`.

    Gradients of a step's micro-batches are summed, not averaged: divide each loss by what all of them count together.

    ranks: this one and the others. On several, all of them initialize, step, drain, save, load, hand values out or take them
    in, and close alike, and each gets the whole values.
    """

    module: torch.nn.Module
    outcomes: list[StepOutcome]
    ranks: Ranks = SingleRank()

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward pass; arguments are on the compute device already."""

    @abstractmethod
    def backward(self, loss: torch.Tensor) -> None:
        """One micro-batch's backward pass. loss: scalar, already divided by the global label count."""

    def forward_backward(
        self, loss: Callable[..., torch.Tensor], batch: Mapping[str, torch.Tensor], label_count: int
    ) -> torch.Tensor:
        """One micro-batch, its loss returned detached. loss: called with (model, batch, label_count), returns a scalar.

        For packages that run both passes in one call; every other engine is called and then goes backward.
        """
        value = loss(self, batch, label_count)
        self.backward(value)
        return value.detach()

    @abstractmethod
    def step(self) -> None:
        """Clip, check for overflow, update. Work may go on behind the next step; `drain` waits for it.

        With fewer micro-batches than Settings.accumulate, but one at least, the step is taken with what is there.
        """

    def discard(self) -> None:
        """Drop the micro-batches of the step so far, be it complete. UnsupportedError where there is no way back."""
        raise UnsupportedError(f"{type(self).__name__} hands gradients to its own package, which cannot drop them: call step()")

    @abstractmethod
    def drain(self) -> None:
        """Wait until all work queued so far is done, deferred optimizer work included; fills in `outcomes`."""

    @abstractmethod
    def set_lr(self, lr: float) -> None:
        """The learning rate from the next step on, of every parameter group."""

    @abstractmethod
    def close(self, *, keep: bool = True) -> None:
        """Free every pool and thread. Safe to call twice. An unfinished step is dropped.

        The model has its values again: plain parameters on the CPU in the engine's dtype, buffers where they came from. With
        keep=False, after an error, from packages, and where the host has no room, it gets nothing, and its forward says so.
        Values that were edited past the engine are given back as they were trained, which is raised unless it was told.
        What went wrong behind the last step and was not told is raised: DivergedError where nonfinite=stop finds only now that
        it was not finite, RuntimeError where parameters belong to two steps.
        """

    def training_state(self) -> TrainingState:
        """For systems.checkpoint: waits for the last step's work. UnsupportedError within a step, and where there is no way."""
        raise UnsupportedError(f"{type(self).__name__} keeps its state in its own package: save it by that package's means")

    @property
    def has_training_state(self) -> bool:
        """Whether values are read one by one; else all at once, as a package hands them out."""
        return type(self).training_state is not Engine.training_state

    @abstractmethod
    def masters(self, *, write: bool = False) -> AbstractContextManager[dict[str, torch.Tensor]]:
        """Every parameter once, under its first name, as an fp32 value on the CPU; with write=True changes are taken over on
        exit, rank 0's on all ranks.
        """

    @contextmanager
    def summon(self, *, write: bool = False) -> Iterator[dict[str, torch.Tensor]]:
        """Parameters as fp32 master values and persistent buffers, on the CPU, by all names that the model has for them.

        Without write a tied weight is one tensor under its names. With write=True what has changed is taken over on exit; each
        name then has a tensor of its own, one edited name speaks for all, and several have to agree (ValueError); of several
        ranks, the first one's edits are taken over on all.
        Until then nothing else may be asked of the engine (UnsupportedError).
        """
        with (
            self.masters(write=write) as values,
            export.by_all_names(self.module, values, write=write, ranks=self.ranks) as found,
        ):
            yield found

    def make_host_room(self, nbytes: int) -> None:
        """So many bytes are wanted by others: host memory that the engine can do without goes, where they are not free."""
        return

    def state_dict(self, *, dtype: DType | torch.dtype = "fp32") -> dict[str, Any]:
        """What the model's own state_dict() would give, on the CPU: every name of tied weights, buffers, extra state.

        dtype: of the parameters; fp32 gives the masters as they are. It takes as much host memory as it holds: BudgetError
        where that is not free. UnsupportedError within a step. Each of several ranks gets all of it.
        """
        return export.state_dict(self, dtype)

    def save_pretrained(self, folder: str | os.PathLike[str], *, dtype: DType | torch.dtype = "fp32", **more: Any) -> None:
        """Have a transformers model write itself into a folder; dtype: as in state_dict, and what the folder's config says.

        more: arguments of the model's own save_pretrained. Until they are written the values are in host memory if half of what
        is free there holds them, otherwise in a scratch file in the folder, as large as the result. BudgetError (disk) where
        the folder lacks the room, UnsupportedError for a model that has no such method, and within a step. All ranks call it,
        and the first one writes.
        """
        export.save_pretrained(self, folder, dtype, more)

    def train(self, mode: bool = True) -> None:
        self.module.train(mode)

    def eval(self) -> None:
        self.module.eval()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "an engine is not copied or pickled: systems.save_checkpoint(engine, folder) keeps all of it, engine.state_dict() "
            "its weights"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """What some systems can do and others cannot, and what a system needs.

    trace: its engines label their phases for a profile (systems/device/watch/labels.py). phases: they know `phases_s`
    (systems/reports.py).
    disk: optimizer states can be kept in Settings.disk.
    optimizers: it trains with any of systems/optimizers, not with Adam alone.
    ranks: several of them train one model; its system is a RankedSystem.
    model: it runs a model, so that the harness builds one for it.
    package: name by which the outside package that trains is imported; install: the command that brings it.
    """

    trace: bool = False
    phases: bool = False
    disk: bool = False
    optimizers: bool = False
    ranks: bool = False
    model: bool = True
    package: str | None = None
    install: str | None = None

    def __post_init__(self) -> None:
        if self.package is not None and self.install is None:
            object.__setattr__(self, "install", f"pip install {self.package}")


class System(Protocol):
    """One entry of the registry. `Options` is the pydantic model that `--option key=value` is checked against."""

    name: str
    summary: str
    Options: type[BaseModel]
    abilities: Abilities

    def look_for_room(self, model: torch.nn.Module, settings: Settings, options: BaseModel) -> Settings:
        """The settings, with the budgets that hold where those are known before anything is built.

        Raises BudgetError where memory is certain to be short. A system that cannot tell hands back what it was given.
        """
        return settings

    def initialize(self, model: torch.nn.Module, settings: Settings, options: BaseModel) -> Engine:
        """Take over `model`. Raises BudgetError or UnsupportedError before training if the request cannot be met."""


class RankedSystem(System, Protocol):
    """One whose engines run on several ranks too (Abilities.ranks)."""

    @abstractmethod
    def initialize(
        self, model: torch.nn.Module, settings: Settings, options: BaseModel, *, ranks: Ranks | None = None
    ) -> Engine:
        """ranks: this one and the others, of whom Settings.ranks says how many there are; None: there is one.

        All of them initialize, step, evaluate, read values and close alike; `drain` is each one's own. They stay their maker's,
        who closes them after the engine, unless they are of one engine.
        """


def on_ranks(system: System) -> RankedSystem:
    """UnsupportedError for a system that runs on one rank alone."""
    if not system.abilities.ranks:
        raise UnsupportedError(
            f"{system.name} runs on one rank so far: start one process, without torchrun, leave `ranks` at 1, or use one of "
            "this project's own strategies"
        )
    return cast(RankedSystem, system)
