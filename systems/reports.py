"""What an engine tells of itself: counters, memory, plan, phases, start-up. Nothing here changes anything."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import BaseModel

from systems.errors import UnsupportedError


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
    """What the plan in force predicts; None where the system makes no plan."""

    predicted_step_time_s: float | None = None
    predicted_device_peak_bytes: int | None = None


class Reports(ABC):
    """The part of an Engine that answers questions.

    counters() are totals since construction and only ever grow, so a caller gets a per-step figure from two readings. Every
    strategy has the keys h2d_bytes, d2h_bytes, gather_bytes, reduce_bytes, disk_read_bytes, disk_write_bytes, skipped_steps,
    fallbacks, retraces, host_syncs; a system whose package does not tell one leaves its key out, since unknown is not 0.
    """

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
