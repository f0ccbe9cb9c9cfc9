"""The largest models that records hold: of each system on a machine the one of most parameters that trained, and the smallest
above it that ended for want of memory. What was tried, not a search: a system may train more than anybody asked it to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.claims import trains
from harness.record import Record


@dataclass(frozen=True)
class LargestModel:
    """device_peak_bytes and the others: of its last run, by default if it was run so. account: whether the host's is what the
    system itself counts, or the resident memory of the process. beyond: parameters of what did not fit, None: nothing that is
    larger was tried and refused. options: as given.
    """

    machine: str
    ranks: int
    system: str
    options: tuple[str, ...]
    model: str
    changes: tuple[str, ...]
    parameters: int
    device_peak_bytes: int | None
    host_peak_bytes: int | None
    account: bool
    disk_peak_bytes: int | None
    beyond: int | None
    runs: tuple[str, ...]

    @property
    def place(self) -> tuple[str, int]:
        return self.machine, self.ranks


def largest_models(records: Sequence[Record]) -> list[LargestModel]:
    """By machine and number of ranks, the largest first. An emulated device has no say."""
    tried: dict[tuple[str, int, str], list[Record]] = {}
    for record in sorted(records, key=lambda record: record.run_id):
        label = record.resolved.device_label
        if record.resolved.device == "cuda" and label is not None and record.resolved.parameters is not None:
            tried.setdefault((label, record.spec.ranks, record.spec.system), []).append(record)
    found = [one for (machine, ranks, _), runs in tried.items() if (one := _largest(machine, ranks, runs)) is not None]
    return sorted(found, key=lambda one: (one.machine, one.ranks, -one.parameters, one.system))


def _largest(machine: str, ranks: int, runs: Sequence[Record]) -> LargestModel | None:
    trained = [record for record in runs if trains([record])]
    if not trained:
        return None
    most = max(_parameters(record) for record in trained)
    best = sorted((r for r in trained if _parameters(r) == most), key=lambda r: (not r.spec.option, r.run_id))[-1]
    short = [record for record in runs if trains([record]) is False and _parameters(record) > most]
    beyond = min(short, key=_parameters, default=None)
    return LargestModel(
        machine=machine,
        ranks=ranks,
        system=best.spec.system,
        options=best.spec.option,
        model=best.spec.model,
        changes=best.spec.set,
        parameters=most,
        device_peak_bytes=best.memory.device_peak_bytes or best.memory.device_allocated_peak_bytes,
        host_peak_bytes=best.memory.host_peak_bytes or best.memory.host_rss_peak_bytes,
        account=bool(best.memory.host_peak_bytes),
        disk_peak_bytes=best.memory.disk_peak_bytes,
        beyond=None if beyond is None else _parameters(beyond),
        runs=(best.run_id, *(() if beyond is None else (beyond.run_id,))),
    )


def _parameters(record: Record) -> int:
    return record.resolved.parameters or 0
