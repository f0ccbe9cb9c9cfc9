"""What every engine does that drives a package: counts micro-batches, reads norms late, keeps outcomes."""

from __future__ import annotations

import contextlib
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from systems.baselines.external.budget import BudgetInForce
from systems.baselines.external.package import PackageStatistics
from systems.errors import DivergedError
from systems.ranks.ranks import Ranks
from systems.recipe.model.giving_back import leave_without
from systems.recipe.model.taken import take
from systems.recipe.step.control import MAX_SKIPS_IN_A_ROW
from systems.reports import MemoryReport
from systems.settings import Settings, StepOutcome
from systems.system import Engine

KEEP = "copy them out of engine.summon() before close(), and build the model anew"
NO_OTHER_RANK = {"gather_bytes": 0, "reduce_bytes": 0}
NO_DISK = {"disk_read_bytes": 0, "disk_write_bytes": 0}


class LateNumber:
    """A number on its way from the device: copied without waiting, read when the device has long computed it."""

    def __init__(self, number: torch.Tensor | float) -> None:
        self._number, self._event = number, None
        if isinstance(number, torch.Tensor) and number.is_cuda:
            self._number = torch.empty((), dtype=number.dtype, pin_memory=True).copy_(
                number.detach().reshape(()), non_blocking=True
            )
            self._event = torch.cuda.Event()
            self._event.record()

    def __call__(self) -> float:
        if self._event is not None:
            self._event.synchronize()  # work queued after the copy goes on meanwhile
        return float(self._number)


@dataclass(frozen=True)
class Update:
    """What a package says of one step, read when the next one begins. norm: before clipping, None if it computed none."""

    norm: Callable[[], float] | None
    loss_scale: float = 1.0
    skipped: bool = False


class PackageEngine(Engine):
    """known: counters whose totals are known without counting; the others a package does not tell are left out.

    ranks: this one and the others, all of which call it alike. averages: the package divides gradients by their number.
    """

    averages = True

    def __init__(
        self, model: nn.Module, settings: Settings, limits: BudgetInForce, known: dict[str, int], ranks: Ranks
    ) -> None:
        take(model)
        self.module, self.settings, self.limits, self.ranks = model, settings, limits, ranks
        self.outcomes: list[StepOutcome] = []
        self._startup: dict[str, float] = {}
        self._known = known | (NO_OTHER_RANK if ranks.size == 1 else {})
        self._micro_step = 0
        self._skipped = self._skips_in_a_row = 0
        self._unread: Update | None = None
        self._closed = False

    @abstractmethod
    def _forward(self, *args: Any, **kwargs: Any) -> Any: ...

    @abstractmethod
    def _backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """loss: as the package wants it (Note [Averages and sums] in process.py). last: no micro-batch of this step comes
        after it.
        """

    @abstractmethod
    def _update(self) -> Update: ...

    @abstractmethod
    def _shut_down(self) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with record_function("forward"):
            return self._forward(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        last = self._begin_backward()
        with record_function("backward"):
            self._backward(loss * self.ranks.size if self.averages and self.ranks.size > 1 else loss, last=last)

    def _begin_backward(self) -> bool:
        """Count a micro-batch; whether it is the step's last."""
        accumulate = self.settings.accumulate
        if self._micro_step >= accumulate:
            raise ValueError(f"backward was called more than accumulate={accumulate} times: call step()")
        self._micro_step += 1
        return self._micro_step == accumulate

    def step(self) -> None:
        if self._micro_step != self.settings.accumulate:
            raise ValueError(
                f"step: {self._micro_step} of {self.settings.accumulate} micro-batches had their backward, and a package takes "
                "whole steps only: call backward for the others, or set accumulate"
            )
        self._read()
        with record_function("step"):
            self._unread = self._update()
        self._micro_step = 0
        self.limits.look()

    def _read(self) -> None:
        """The outcome of the step before, whose norm the device has long computed."""
        update, self._unread = self._unread, None
        if update is None:
            return
        norm = None if update.norm is None else update.norm()
        skipped = update.skipped
        factor, clip = 1.0, self.settings.clip
        if clip > 0 and norm is not None and math.isfinite(norm):
            factor = min(1.0, clip / (norm + 1e-6))
        self.outcomes.append(StepOutcome(len(self.outcomes) + 1, norm, factor, update.loss_scale, skipped))
        self._skipped += skipped
        self._skips_in_a_row = self._skips_in_a_row + 1 if skipped else 0
        if self._skips_in_a_row >= MAX_SKIPS_IN_A_ROW:
            raise DivergedError(
                f"{self._skips_in_a_row} steps in a row were skipped for a non-finite gradient, the last at step "
                f"{len(self.outcomes)}: lower the learning rate, set `clip`, or check the data"
            )

    def drain(self) -> None:
        if self.settings.device == "cuda":
            torch.cuda.synchronize()
        self._read()

    def counters(self) -> dict[str, int]:
        return {**self._known, "skipped_steps": self._skipped}

    def memory(self) -> MemoryReport:
        return self.limits.report()

    def startup_s(self) -> dict[str, float]:
        return dict(self._startup)

    def close(self, *, keep: bool = True) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as ends:  # the last one first
            ends.callback(self.ranks.leave)
            ends.callback(
                leave_without, self.module, f"the weights of this model went with {type(self).__name__}, which is closed", KEEP
            )
            ends.callback(self.limits.lift)
            if self.settings.device == "cuda":
                torch.cuda.synchronize()
            self._shut_down()

    def _edited(self, values: Mapping[str, torch.Tensor], name: str, shape: torch.Size) -> torch.Tensor:
        """The first rank's value, on all ranks, whose packages are about to take it over."""
        mine = values[name].float() if self.ranks.rank == 0 else torch.empty(shape)
        return self.ranks.of_first(f"summon(write=True) of {name}", mine)

    @abstractmethod
    def statistics(self) -> PackageStatistics: ...

    @abstractmethod
    def masters(self, *, write: bool = False) -> AbstractContextManager[dict[str, torch.Tensor]]: ...
