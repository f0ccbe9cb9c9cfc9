"""What a checkpoint is of: the state of an engine between two steps, parameter by parameter, and its model's buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from systems.errors import UnsupportedError
from systems.messages import one_line
from systems.ranks.ranks import Ranks
from systems.state_dicts import buffers_by_every_name

Part = str  # of a parameter: its value, or a moment by the name that the optimizer has for it
VALUE = "value"
SQUARES = "exp_avg_sq"  # the moment that is never negative
ADAM_MOMENTS = 2


class CheckpointError(UnsupportedError):
    """A checkpoint cannot be read, is damaged, or is not one of this model. Nothing was restored of it.

    One line, whatever names somebody else may have put into the checkpoint.
    """

    def __init__(self, message: str) -> None:
        super().__init__("".join(each if each.isprintable() else "?" for each in one_line(message)))


class SaveError(OSError):
    """A checkpoint was not written. errno and filename are of what failed."""

    def __str__(self) -> str:
        return str(self.strerror)


@dataclass(frozen=True)
class SavedParameter:
    """fp32 tensors on the CPU in the parameter's shape; moments, in the optimizer's order, are None where it is frozen."""

    value: torch.Tensor
    moments: tuple[torch.Tensor, ...] | None


@dataclass(frozen=True)
class LoopState:
    """steps: of the optimizer, with those that were skipped. good_steps: since the loss scale last changed."""

    steps: int
    skipped_steps: int
    loss_scale: float
    good_steps: int
    skips_in_a_row: int


@dataclass(frozen=True)
class Described:
    """What is known of a parameter without its values."""

    name: str
    shape: tuple[int, ...]
    trainable: bool


class Control(Protocol):
    """updates: steps that each parameter took."""

    loop: LoopState
    updates: list[int]


class TrainingState(Protocol):
    """What outlives a step of an engine, between two steps. A tied parameter is one, under its first name.

    optimizer: name of its rule; moments: of what that keeps of a trained parameter.
    """

    optimizer: str
    moments: tuple[Part, ...]

    @property
    def control(self) -> Control: ...

    @property
    def parameters(self) -> Sequence[Described]: ...

    def meet(self) -> None:
        """All ranks call it before they save, once they have it."""

    def updates(self, parameter: int) -> int:
        """Steps that it took."""

    def read(self, parameter: int, part: Part) -> torch.Tensor:
        """One at a time, since each is a copy: as in SavedParameter. Of a frozen parameter there is only the value.

        On all ranks alike, each of which gets the whole.
        """

    def bring(self, parameter: int, part: Part, onto: int) -> torch.Tensor | None:
        """As `read` on rank `onto`; the others give it what they have of it and get None. If it takes a collective, all ranks
        raise what keeps one of them from it.
        """

    def write(self, parameter: int, state: SavedParameter, updates: int) -> None:
        """All of it, with the steps that it took; nothing where only other ranks have it."""


class Trained(Protocol):
    """An engine, as far as checkpoints know it."""

    module: torch.nn.Module
    ranks: Ranks

    def training_state(self) -> TrainingState:
        """UnsupportedError within a step, and from engines whose package keeps its state to itself."""


def parts_of(state: TrainingState, trainable: bool) -> tuple[Part, ...]:
    return (VALUE, *state.moments) if trainable else (VALUE,)


def unsound(part: Part, values: torch.Tensor) -> str | None:
    """What is wrong with a parameter's values or moments, if training could not go on from them."""
    if not values.numel():
        return None
    least, most = values.aminmax()  # NaN goes through both
    if not (least.isfinite() and most.isfinite()):
        return "has values that are not finite"
    if part == SQUARES and least < 0:
        return "is a mean of squares and has negative values"
    return None


def persistent_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """By name; one that has several is there under the first."""
    found: dict[str, torch.Tensor] = {}
    for name, buffer in buffers_by_every_name(module):
        if not any(buffer is other for other in found.values()):
            found[name] = buffer
    return found


def dense(buffers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for name, buffer in buffers.items():
        if buffer.layout is not torch.strided:
            raise UnsupportedError(f"checkpoint: buffer {name} is sparse, which no file takes: make it dense or not persistent")
    return buffers


def copy_into(saved: torch.Tensor, buffer: torch.Tensor) -> None:
    """Into a buffer that may be expanded: it has one place then for all its elements along a dimension."""
    for dim, (size, stride) in enumerate(zip(buffer.shape, buffer.stride(), strict=True)):
        if size > 1 and stride == 0:
            saved, buffer = saved.narrow(dim, 0, 1), buffer.narrow(dim, 0, 1)
    buffer.copy_(saved)
