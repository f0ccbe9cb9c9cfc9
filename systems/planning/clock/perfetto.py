"""Timed events as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open: one track a lane.

The simulator and the runtime both export through here, so that what was predicted can be laid beside what was.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TimedEvent:
    """A piece of work on a lane. start_s: from the beginning of what is shown."""

    lane: str
    label: str
    start_s: float
    duration_s: float


def chrome_trace(processes: Mapping[str, Sequence[TimedEvent]]) -> dict[str, Any]:
    """Trace Event Format: complete events ("X") in microseconds. processes: a name, such as simulated, to its events.

    Lanes are tracks in order of their first event.
    """
    found: list[dict[str, Any]] = []
    for pid, (process, events) in enumerate(processes.items(), start=1):
        found.append(_name("process_name", pid, 0, process))
        tracks = {lane: tid for tid, lane in enumerate(dict.fromkeys(event.lane for event in events), start=1)}
        found += [_name("thread_name", pid, tid, lane) for lane, tid in tracks.items()]
        found += [_complete(event, pid, tracks[event.lane]) for event in events]
    return {"traceEvents": found, "displayTimeUnit": "ms"}


def to_json(processes: Mapping[str, Iterable[TimedEvent]]) -> str:
    return json.dumps(chrome_trace({name: tuple(events) for name, events in processes.items()}))


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _complete(event: TimedEvent, pid: int, tid: int) -> dict[str, Any]:
    return {"ph": "X", "name": event.label, "pid": pid, "tid": tid, "ts": event.start_s * 1e6, "dur": event.duration_s * 1e6}
