"""What a managed engine tells of itself, out of its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from pydantic import BaseModel

from systems.device.device import Device
from systems.device.memory.disk import Disk
from systems.device.memory.host import HostSlots
from systems.device.watch.events import EventLog
from systems.device.watch.phases import PhaseClock
from systems.planning.layout import Layout
from systems.planning.plan import Tier
from systems.planning.strategy import Strategy
from systems.recipe.step.stepping import SteppingEngine
from systems.reports import MemoryReport, PlanReport
from systems.substrate.bundle.store import Store
from systems.substrate.bundle.versions import SecondVersions
from systems.substrate.cursor import Cursor
from systems.substrate.moves.lock_free import LockFree


class ManagedReports(SteppingEngine):
    """input_slots: host memory where inputs of blocks wait (activations=host). disk: None without one."""

    log: EventLog
    layout: Layout
    device: Device
    store: Store
    versions: SecondVersions
    cursor: Cursor
    strategy: Strategy
    input_slots: HostSlots
    disk: Disk | None
    lock_free: LockFree | None
    _startup: dict[str, float]

    def counters(self) -> dict[str, int]:
        return dict(self.log.totals)

    def memory(self) -> MemoryReport:
        device, host = self.device, self.store.host
        behind = [] if self.lock_free is None else self.lock_free.mappings
        return MemoryReport(
            device_peak_bytes=device.meter.peak_bytes(),
            device_budget_bytes=device.account.budget,
            device_model_peak_bytes=device.account.pool_peak,
            host_peak_bytes=host.peak,
            host_pinned_bytes=self.store.pinned_bytes
            + self.versions.pinned_bytes
            + self.input_slots.pinned_bytes
            + sum(mapping.nbytes for mapping in behind if mapping.pinned),
            host_second_version_bytes=self.versions.peak_bytes,
            host_activation_bytes=self.input_slots.peak_bytes,
            host_budget_bytes=host.budget,
            disk_peak_bytes=0 if self.disk is None else self.disk.account.peak,
            disk_direct=None if self.disk is None else self.disk.direct,
        )

    def plan_report(self) -> PlanReport:
        plan = self.cursor.plan
        if plan is None:
            return PlanReport()
        return PlanReport(
            plan.predicted_step_time_s,
            plan.predicted_device_peak_bytes,
            on_device=self._share(s.index for s in self.layout.segments if plan.optimizer_tier[s.index] is Tier.DEVICE),
            ahead=self._share(s for bundle in plan.ahead for s in self.layout.bundles[bundle].segments),
        )

    def _share(self, segments: Iterable[int]) -> float:
        """Of the model's elements."""
        return sum(self.layout.segments[s].used for s in segments) / max(1, sum(s.used for s in self.layout.segments))

    def phases_s(self, step: Callable[[], None]) -> dict[str, float]:
        self._check_open()
        self.drain()
        with _phased(self.device) as seconds:
            step()
        return {**seconds, "step": sum(seconds.values())}

    def statistics(self) -> BaseModel | None:
        found, behind = self.strategy.statistics(), self.lock_free
        return found if behind is None else found.model_copy(update=behind.staleness())

    def startup_s(self) -> dict[str, float]:
        return {**self._startup, **({"second_versions": self.versions.seconds} if self.versions.seconds else {})}


@contextmanager
def _phased(device: Device) -> Iterator[dict[str, float]]:
    """Steps inside are phased (Note [Phased steps]); gives the seconds of each phase."""
    clock = PhaseClock(device.drain)
    try:
        device.watch_phases(clock)
        with clock.of("other"):
            yield clock.seconds
    finally:
        device.watch_phases(None)
