"""What an engine tells of itself: counters, memory, plan, phases, start-up. Nothing here changes anything."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import BaseModel

from systems.errors import UnsupportedError
from systems.sizes import format_size

if TYPE_CHECKING:
    from torch import nn

    from systems.ranks.ranks import Ranks
    from systems.settings import Settings, StepOutcome


@dataclass(frozen=True)
class MemoryReport:
    """Peaks and budgets in bytes. device covers model data and activations; None is unknown, never a default.

    host_activation_bytes: the part of the host's that waits there for backward (activations=host).
    host_second_version_bytes: the part that lets updates run ahead of the norm.
    disk_direct: files are read and written past the page cache.
    """

    device_peak_bytes: int | None = None
    device_budget_bytes: int | None = None
    device_model_peak_bytes: int | None = None
    host_peak_bytes: int | None = None
    host_pinned_bytes: int | None = None
    host_budget_bytes: int | None = None
    disk_peak_bytes: int | None = None
    disk_direct: bool | None = None
    host_activation_bytes: int | None = None
    host_second_version_bytes: int | None = None


@dataclass(frozen=True)
class PlanReport:
    """What the plan in force predicts; None where the system makes no plan.

    on_device, ahead: shares of the model's elements: updated on the device; updated ahead of the norm, into second versions on
    the host.
    """

    predicted_step_time_s: float | None = None
    predicted_device_peak_bytes: int | None = None
    on_device: float | None = None
    ahead: float | None = None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What an engine is and has come to; as text, lines for a person. Of this rank.

    parameters, trained: elements, a tied parameter's once. steps: done. memory, plan: as their own reports.
    """

    system: str
    parameters: int
    trained: int
    dtype: str
    device: str
    rank: int
    ranks: int
    steps: int
    closed: bool
    memory: MemoryReport
    plan: PlanReport

    @property
    def bounded_by(self) -> tuple[str, float] | None:
        """The memory whose peak is nearest to its budget, and the share of it; None where no budget is known."""
        memory = self.memory
        tiers = {
            "device": (memory.device_peak_bytes, memory.device_budget_bytes),
            "host": (memory.host_peak_bytes, memory.host_budget_bytes),
        }
        shares = {name: peak / budget for name, (peak, budget) in tiers.items() if peak is not None and budget}
        return max(shares.items(), key=lambda each: each[1]) if shares else None

    @property
    def line(self) -> str:
        """All in short."""
        of = f", rank {self.rank} of {self.ranks}" if self.ranks > 1 else ""
        return f"{self.system} on {self.device}{of}: {self.parameters:,} parameters in {self.dtype}, {self._steps}"

    @property
    def _steps(self) -> str:
        return f"{self.steps} step{'' if self.steps == 1 else 's'}{', closed' if self.closed else ''}"

    def __str__(self) -> str:
        memory, plan = self.memory, self.plan
        second = memory.host_second_version_bytes
        lines = [
            self.line,
            f"  trained {self.trained:,} of them",
            f"  device  {_of_budget(memory.device_peak_bytes, memory.device_budget_bytes)}",
            f"  host    {_of_budget(memory.host_peak_bytes, memory.host_budget_bytes)}"
            + (f", {format_size(second)} of it second versions" if second else ""),
        ]
        if memory.disk_peak_bytes:
            lines.append(f"  disk    {_of_budget(memory.disk_peak_bytes, None)}")
        if plan.on_device is not None:
            told = [f"{plan.on_device:.0%} of the model is updated on the device"]
            told += [f"{plan.ahead:.0%} ahead of the norm"] if plan.ahead else []
            if plan.predicted_device_peak_bytes is not None:
                told.append(f"{format_size(plan.predicted_device_peak_bytes)} of device memory foreseen")
            if plan.predicted_step_time_s is not None:
                told.append(f"{plan.predicted_step_time_s:.4g} s a step foreseen")
            lines.append(f"  plan    {', '.join(told)}")
        if self.bounded_by is not None:
            lines.append("  bounded by {} memory: {:.0%} of its budget at the peak".format(*self.bounded_by))
        return "\n".join(lines)


def _of_budget(peak: int | None, budget: int | None) -> str:
    used = "not known" if peak is None else f"{format_size(peak)} at the peak"
    return used if budget is None else f"{used}, of {format_size(budget)}"


class Reports(ABC):
    """The part of an Engine that answers questions. system: its name; empty where the class says it.

    counters() are totals since construction and only ever grow, so a caller gets a per-step figure from two readings. Every
    strategy has the keys h2d_bytes, d2h_bytes, gather_bytes, reduce_bytes, disk_read_bytes, disk_write_bytes, skipped_steps,
    fallbacks, retraces, host_syncs; a system whose package does not tell one leaves its key out, since unknown is not 0.
    """

    system: str = ""
    module: nn.Module
    settings: Settings
    outcomes: list[StepOutcome]
    ranks: Ranks
    _closed = False

    @abstractmethod
    def counters(self) -> dict[str, int]:
        """Totals since construction."""

    @abstractmethod
    def memory(self) -> MemoryReport:
        """Peaks since construction."""

    def plan_report(self) -> PlanReport:
        return PlanReport()

    def statistics(self) -> BaseModel | None:
        """The strategy's own figures (chunks, pages, switches), typed by the system."""
        return None

    def startup_s(self) -> dict[str, float]:
        """Seconds spent before the first step, by phase."""
        return {}

    def phases_s(self, step: Callable[[], None]) -> dict[str, float]:
        """Seconds of each phase of one optimizer step, which `step` runs and drains. Nothing overlaps in it.

        Only of systems whose abilities say `phases`; UnsupportedError from all others.
        """
        raise UnsupportedError(f"{type(self).__name__} cannot be run phase by phase: only this project's own strategies can")

    def summary(self) -> Summary:
        """What this engine is and has come to, to be printed: after close() too, and of this rank alone."""
        parameters = list(self.module.parameters())
        return Summary(
            system=self.system or type(self).__name__,
            parameters=sum(p.numel() for p in parameters),
            trained=sum(p.numel() for p in parameters if p.requires_grad),
            dtype=self.settings.dtype,
            device=self.settings.device,
            rank=self.ranks.rank,
            ranks=self.ranks.size,
            steps=len(self.outcomes),
            closed=self._closed,
            memory=self.memory(),
            plan=self.plan_report(),
        )

    def __repr__(self) -> str:
        try:
            return f"<{self.summary().line}>"
        except Exception as error:  # noqa: BLE001 - a debugger shows engines that are half made, too
            return f"<{type(self).__name__}: {type(error).__name__}>"
