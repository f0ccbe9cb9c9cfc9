"""The protocol every system obeys, strategies and baselines alike: settings in, an engine out.

The harness knows nothing else of a system. All sizes are bytes, all times seconds.
"""

from __future__ import annotations

import math
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self

import torch
from pydantic import BaseModel

from systems import export
from systems.checkpoint import TrainingState
from systems.errors import UnsupportedError
from systems.reports import Reports

DType = Literal["bf16", "fp16", "fp32"]
TORCH_DTYPE: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class AdamSettings:
    """Hyperparameters of AdamW (decoupled decay) or Adam (decay added to the gradient), as torch.optim names them."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    decoupled: bool = True


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is asked of a system, resolved: no field is a guess of the system's.

    device_memory, host_memory: budgets in bytes; None means the smallest limit of the machine.
    disk: folder for optimizer states that the host has no room for; disk_memory: its budget, None means what is free there.
    recompute: "none", "full" or the block numbers whose activations are recomputed.
    clip: gradient norm to clip to, 0 for off.
    initial_weights: fills (name, fp32 tensor) in place for models built on the meta device; None keeps the model's own.
    optimizer: a torch AdamW or Adam whose parameter groups, read at each step, replace `adam`; None uses `adam`.
    log_events: keep every event of the run in memory (tests), not only counters.
    """

    device: Literal["cuda", "cpu"] = "cpu"
    device_memory: int | None = None
    host_memory: int | None = None
    disk: str | os.PathLike[str] | None = None
    disk_memory: int | None = None
    dtype: DType = "bf16"
    accumulate: int = 1
    clip: float = 0.0
    recompute: Literal["none", "full"] | tuple[int, ...] = "none"
    seed: int = 0
    rank: int = 0
    ranks: int = 1
    adam: AdamSettings = field(default_factory=AdamSettings)
    optimizer: torch.optim.Optimizer | None = None
    initial_weights: Callable[[str, torch.Tensor], None] | None = None
    log_events: bool = False

    def __post_init__(self) -> None:
        _one_of("device", self.device, ("cuda", "cpu"))
        _one_of("dtype", self.dtype, tuple(TORCH_DTYPE))
        for name, least in (("device_memory", 0), ("host_memory", 0), ("disk_memory", 0), ("accumulate", 1), ("seed", 0)):
            value = getattr(self, name)
            if value is None and name.endswith("memory"):
                continue
            if type(value) is not int or value < least:
                raise ValueError(f"{name} is {value!r}: give a whole number of at least {least}")
        if self.disk_memory is not None and self.disk is None:
            raise ValueError("disk_memory is a budget of files in a folder: name it with disk")
        if isinstance(self.clip, bool) or not isinstance(self.clip, int | float) or not 0 <= self.clip < math.inf:
            raise ValueError(f"clip is {self.clip!r}: give the finite norm to clip gradients to, or 0 for off")
        if isinstance(self.recompute, str):
            _one_of("recompute", self.recompute, ("none", "full"))


def _one_of(name: str, given: object, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise ValueError(f"{name} is {given!r}: give {' or '.join(repr(each) for each in allowed)}")


@dataclass(frozen=True)
class StepOutcome:
    """What one optimizer step did. norm is before clipping, over all trainable parameters; None if not computed."""

    step: int
    norm: float | None
    clip_factor: float
    loss_scale: float
    skipped: bool


class Engine(Reports):
    """A model under a system: call it, `backward(loss)` once per micro-batch, then `step()`.

    Gradients of a step's micro-batches are summed, not averaged: divide each loss by what all of them count together.
    """

    module: torch.nn.Module
    outcomes: list[StepOutcome]

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

    @abstractmethod
    def masters(self, *, write: bool = False) -> AbstractContextManager[dict[str, torch.Tensor]]:
        """Every parameter once, under its first name, as an fp32 value on the CPU; with write=True changes are taken over on
        exit.
        """

    @contextmanager
    def summon(self, *, write: bool = False) -> Iterator[dict[str, torch.Tensor]]:
        """Parameters as fp32 master values and persistent buffers, on the CPU, by all names that the model has for them.

        Without write a tied weight is one tensor under its names. With write=True what has changed is taken over on exit; each
        name then has a tensor of its own, one edited name speaks for all, and several have to agree (ValueError).
        """
        with self.masters(write=write) as values, export.by_all_names(self.module, values, write=write) as found:
            yield found

    def state_dict(self, *, dtype: DType | torch.dtype = "fp32") -> dict[str, Any]:
        """What the model's own state_dict() would give, on the CPU: every name of tied weights, buffers, extra state.

        dtype: of the parameters; fp32 gives the masters as they are. It takes as much host memory as it holds: BudgetError
        where that is not free. UnsupportedError within a step.
        """
        return export.state_dict(self, dtype)

    def save_pretrained(self, folder: str | os.PathLike[str], *, dtype: DType | torch.dtype = "fp32", **more: Any) -> None:
        """Have a transformers model write itself into a folder; dtype: as in state_dict, and what the folder's config says.

        more: arguments of the model's own save_pretrained. Until they are written the values are in host memory if half of what
        is free there holds them, otherwise in a scratch file in the folder, as large as the result. BudgetError (disk) where
        the folder lacks the room, UnsupportedError for a model that has no such method, and within a step.
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

    trace: its engines label their phases for a profile (systems/substrate/labels.py). phases: they know Engine.phases_s.
    disk: optimizer states can be kept in Settings.disk.
    model: it runs a model, so that the harness builds one for it.
    package: name by which the outside package that trains is imported; install: the command that brings it.
    """

    trace: bool = False
    phases: bool = False
    disk: bool = False
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
