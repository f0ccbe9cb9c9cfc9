"""What is asked of a system, resolved, and what a step gives back: data, known to every layer."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

DType = Literal["bf16", "fp16", "fp32"]

LARGEST = sys.float_info.max  # an int may be larger, and then is no float

TORCH_DTYPE: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _one_of(name: str, given: object, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise ValueError(f"{name} is {given!r}: give {' or '.join(repr(each) for each in allowed)}")


def check_whole(name: str, given: object, least: int) -> int:
    """The number. ValueError, by the argument's name, for what is no whole number of at least `least`; True is none."""
    if type(given) is not int or given < least:
        raise ValueError(f"{name} is {given!r}: give a whole number of at least {least}")
    return given


@dataclass(frozen=True)
class Hyperparameters:
    """Those of one optimizer: a class each, see systems/optimizers. lr: the learning rate, which all have."""

    lr: float = 1e-4


@dataclass(frozen=True)
class AdamSettings(Hyperparameters):
    """Hyperparameters of AdamW (decoupled decay) or Adam (decay added to the gradient), as torch.optim names them."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    decoupled: bool = True


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is asked of a system, resolved: no field is a guess of the system's.

    device_memory, host_memory: budgets in bytes, of one device and of the whole host; None means the smallest limit of the
    machine.
    disk: folder for optimizer states that the host has no room for; disk_memory: its budget, None means what is free there.
    disk_rate: bytes a second of each way that steps' reads and writes there are held to, None means no limit.
    recompute: "none", "full" or the block numbers whose activations are recomputed.
    clip: gradient norm to clip to, 0 for off.
    ranks: of them all; local_ranks: of those on this host, whose memory and disk are one; None means all of them.
    expert_ranks: ranks that share one set of experts: see Note [Experts in groups] in systems/ranks/group_names.py.
    initial_weights: fills (name, fp32 tensor) in place for models built on the meta device; None keeps the model's own.
    optimizer: a torch optimizer of which systems/optimizers has a rule: its parameter groups, read at each step, replace
    `adam`; or the hyperparameters of another than Adam, for good; None uses `adam`.
    log_events: keep every event of the run in memory (tests), not only counters.
    """

    device: Literal["cuda", "cpu"] = "cpu"
    device_memory: int | None = None
    host_memory: int | None = None
    disk: str | os.PathLike[str] | None = None
    disk_memory: int | None = None
    disk_rate: int | None = None
    dtype: DType = "bf16"
    accumulate: int = 1
    clip: float = 0.0
    recompute: Literal["none", "full"] | tuple[int, ...] = "none"
    seed: int = 0
    ranks: int = 1
    local_ranks: int | None = None
    expert_ranks: int = 1
    adam: AdamSettings = field(default_factory=AdamSettings)
    optimizer: torch.optim.Optimizer | Hyperparameters | None = None
    initial_weights: Callable[[str, torch.Tensor], None] | None = None
    log_events: bool = False

    def __post_init__(self) -> None:
        _one_of("device", self.device, ("cuda", "cpu"))
        _one_of("dtype", self.dtype, tuple(TORCH_DTYPE))
        budgets = (("device_memory", 0), ("host_memory", 0), ("disk_memory", 0))
        for name, least in (*budgets, ("accumulate", 1), ("seed", 0), ("expert_ranks", 1)):
            value = getattr(self, name)
            if value is None and name.endswith("memory"):
                continue
            check_whole(name, value, least)
        if self.disk_memory is not None and self.disk is None:
            raise ValueError("disk_memory is a budget of files in a folder: name it with disk")
        if self.disk_rate is not None:
            check_whole("disk_rate", self.disk_rate, 1)
            if self.disk is None:
                raise ValueError("disk_rate is of files in a folder: name it with disk")
        if isinstance(self.clip, bool) or not isinstance(self.clip, int | float) or not 0 <= self.clip <= LARGEST:
            raise ValueError(f"clip is {self.clip!r}: give the finite norm to clip gradients to, or 0 for off")
        if isinstance(self.recompute, str):
            _one_of("recompute", self.recompute, ("none", "full"))

    @property
    def ranks_here(self) -> int:
        """On this host."""
        return self.ranks if self.local_ranks is None else self.local_ranks


@dataclass(frozen=True)
class StepOutcome:
    """What one optimizer step did. norm is before clipping, over all trainable parameters; None if not computed."""

    step: int
    norm: float | None
    clip_factor: float
    loss_scale: float
    skipped: bool
