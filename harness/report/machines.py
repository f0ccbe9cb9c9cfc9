"""The machines that the records come from: alike ones are one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.likeness import NOT_KNOWN, machine
from harness.record import Record


@dataclass(frozen=True)
class MachineKind:
    """machines: how many, as far as records say; None: none does. torch: its versions."""

    device: str
    devices: int | None
    device_memory_bytes: int | None
    driver: str
    cpu: str
    cores: int | None
    machines: int | None
    first: str
    last: str
    torch: tuple[str, ...]
    runs: tuple[str, ...]


def machine_kinds(records: Sequence[Record]) -> list[MachineKind]:
    """Those of most records first."""
    alike: dict[tuple[str, int | None, int | None, str, str, int | None], list[Record]] = {}
    for record in records:
        hardware, limits = record.environment.hardware, record.environment.limits
        key = (
            record.resolved.device_label or NOT_KNOWN,
            hardware.device_count,
            hardware.device_memory_bytes,
            hardware.device_driver or NOT_KNOWN,
            hardware.cpu_model or NOT_KNOWN,
            limits.cores if limits is not None else None,
        )
        alike.setdefault(key, []).append(record)
    found = [_kind(key, of_it) for key, of_it in alike.items()]
    return sorted(found, key=lambda one: (-len(one.runs), one.device, one.devices or 0))


def _kind(key: tuple[str, int | None, int | None, str, str, int | None], records: Sequence[Record]) -> MachineKind:
    known = {name for record in records if (name := machine(record)) is not None}
    times = sorted(record.started_at for record in records)
    versions = {version for record in records if (version := record.environment.versions.get("torch")) is not None}
    runs = tuple(sorted(record.run_id for record in records))
    return MachineKind(*key, len(known) or None, times[0], times[-1], tuple(sorted(versions)), runs)
