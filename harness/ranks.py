"""Several ranks of one run, inside their processes: how they meet, and what their figures are together.

What is told while a run measures is in measure.py. Here is what is told once, at the end, while all of them are there: device
figures are the maximum over ranks, those of a host's memory and disk the sum over its ranks, of the host with the most.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from pydantic import BaseModel

from harness.channel import LAUNCHED, LISTEN_S, Channel, WorkerJob
from harness.measure import RawResults
from harness.record import MemoryPeaks, Reason, Status, Traffic
from harness.spec import MAX_SEED, Device
from models.counter import stream_key
from systems.ranks.ranks import Ranks
from systems.settings import Settings
from systems.system import Engine, System, on_ranks

TRAFFIC_KEYS = tuple(Traffic.model_fields)


def meet(job: WorkerJob, device: Device, system: System, channel: Channel) -> Ranks:
    """This process's ranks, which it closes. All of a run call this. UnsupportedError for a system that runs on one rank."""
    on_ranks(system)
    from systems.ranks.joining import begun  # and with it torch.distributed, which one rank does not need

    assert job.meet is not None, "the parent says where"
    return begun(
        device,
        rank=job.rank,
        size=job.ranks,
        local_rank=job.local_rank,
        where=job.meet,
        timeout_s=job.rank_timeout_s,
        stuck_s=job.stuck_s,
        on_stuck=partial(_tell_stuck, channel),
    )


def expected(job: WorkerJob) -> AbstractContextManager[None]:
    """Around what comes before `meet`: see systems.ranks.joining.expected."""
    if job.meet != LAUNCHED:
        return contextlib.nullcontext()
    from systems.ranks import joining

    return joining.expected()


def _tell_stuck(channel: Channel, told: str) -> None:
    """From a thread of its own, while all others wait: nobody would be there to make a record."""
    channel.stuck(told)
    os._exit(1)


def share_end(job: WorkerJob, ranks: Ranks, status: Status, reason: Reason) -> tuple[Status, Reason]:
    """Of a rank that a launcher started, on a host of its own maybe: no parent hears all of them, so they tell each other.

    One that only saw that another was gone takes that one's end for its own, if it finds it.
    """
    from systems.ranks.processes import Processes

    if job.meet != LAUNCHED or not isinstance(ranks, Processes):
        return status, reason
    with contextlib.suppress(RuntimeError):  # whoever keeps what they tell is gone too
        if not reason.follows:
            ranks.ends.write(json.dumps({"status": status, "reason": reason.model_dump(mode="json")}))
            return status, reason
        until = time.monotonic() + LISTEN_S
        while time.monotonic() < until:
            for told in filter(None, ranks.ends.read()):
                found = json.loads(told)
                return found["status"], Reason.model_validate(found["reason"])
            time.sleep(LISTEN_S / 20)
    return status, reason


def initialize(system: System, model: torch.nn.Module, settings: Settings, options: BaseModel, ranks: Ranks) -> Engine:
    if ranks.size == 1:
        return system.initialize(model, settings, options)
    return on_ranks(system).initialize(model, settings, options, ranks=ranks)


def seed_dropout(seed: int, rank: int) -> None:
    """Of torch's generators, by seed and rank. One rank has the seed itself."""
    torch.manual_seed(seed if rank == 0 else stream_key("dropout", seed, rank) & MAX_SEED)


@dataclass(frozen=True, kw_only=True)
class _RankFigures:
    """Of one rank. host: the number of its host."""

    host: int
    memory: dict[str, Any]
    counters: dict[str, int]
    joules: float | None


def join_figures(ranks: Ranks, mine: MemoryPeaks, measured: RawResults) -> list[MemoryPeaks]:
    """What each rank tells of its memory, by rank, with [] for one alone; the rest becomes all ranks' in `measured`."""
    if ranks.size == 1:
        return []
    told = ranks.exchange(
        "figures",
        _RankFigures(
            host=ranks.host,
            memory=mine.model_dump(),
            counters=dict(measured.timed_counters),
            joules=measured.timed_joules,
        ),
    )
    highest = {key: max(each.counters.get(key, 0) for each in told) for key in TRAFFIC_KEYS if key in measured.timed_counters}
    measured.timed_counters = Counter({**measured.timed_counters, **highest})
    joules = [each.joules for each in told if each.joules is not None]
    measured.timed_joules = sum(joules) if len(joules) == len(told) else None
    return [MemoryPeaks.model_validate(each.memory | {"host": each.host}) for each in told]


def together(by_rank: Sequence[MemoryPeaks]) -> dict[str, Any]:
    """Fields of `MemoryPeaks` over all ranks. What a rank does not know is left out."""
    found: dict[str, Any] = {}
    for name in MemoryPeaks.model_fields:
        known = [(each.host or 0, value) for each in by_rank if (value := getattr(each, name)) is not None]
        if not known or name == "host":
            continue
        if name.startswith("device_"):
            found[name] = max(value for _, value in known)
        elif name == "disk_direct":
            found[name] = all(value for _, value in known)
        else:
            hosts: Counter[int] = Counter()
            for host, value in known:
                hosts[host] += value
            found[name] = max(hosts.values())
    return found
