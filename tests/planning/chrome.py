"""A trace for Perfetto read again, to be compared with the events that it was made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from systems.planning.clock.perfetto import TimedEvent


def read_chrome_trace(trace: Mapping[str, Any]) -> dict[str, list[TimedEvent]]:
    """The inverse of `systems.planning.clock.perfetto.chrome_trace`, up to rounding of times."""
    names: dict[tuple[str, int, int], str] = {}
    found: dict[str, list[TimedEvent]] = {}
    for event in trace["traceEvents"]:
        pid, tid = event["pid"], event["tid"]
        if event["ph"] == "M":
            names[event["name"], pid, tid] = event["args"]["name"]
            if event["name"] == "process_name":
                found[event["args"]["name"]] = []
        else:
            lane = names["thread_name", pid, tid]
            timed = TimedEvent(lane, event["name"], event["ts"] / 1e6, event["dur"] / 1e6)
            found[names["process_name", pid, 0]].append(timed)
    return found
