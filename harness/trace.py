"""`--trace FILE`: one more optimizer step, profiled, as a trace for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

It comes after the timed steps and no figure of the record includes it. torch's profiler sees every thread of the process
and, on CUDA, every stream; `arranged` then gives the tracks the names of this project's lanes. What the labels mean is
in systems/device/watch/labels.py.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness.spec import BadInputError
from systems.machine.durable import beside, prove_writable, remove_unfinished, write_whole
from systems.machine.reading import read_bytes

SUFFIXES = (".json", ".json.gz")
MOST_US = 1e18  # of a time: thousands of years
LIMIT = 256 << 20  # bytes of a trace that is read, compressed or not
UNIT_SPAN = re.compile(r"(forward|backward) of .+")
THREAD_NAME = re.compile(r"thread \d+ \((.*)\)")
LANE_PREFIX = "lane-"
STREAM_WORK = ("kernel", "gpu_memcpy", "gpu_memset")

Event = dict[str, Any]
Track = tuple[Any, Any]  # pid, tid


def prepare(path: Path) -> None:
    """Prove that the file can be written, before any work, and leave nothing behind. Raises BadInputError."""
    if not path.name.endswith(SUFFIXES):
        raise BadInputError(f"--trace {path}: name a file that ends in {' or '.join(SUFFIXES)}")
    try:
        if path.is_dir():
            raise BadInputError(f"--trace {path} is a folder: name a file in it")
        path.parent.mkdir(parents=True, exist_ok=True)
        prove_writable(path)
    except OSError as error:
        raise BadInputError(f"--trace {path} cannot be written: {error.strerror}: name another file") from None


def clear(path: Path, pid: int) -> None:
    """Remove what a process that is gone did not finish."""
    remove_unfinished(path, pid=pid)


def take(step: Callable[[], None], path: Path, device: str) -> None:
    """Profile `step`, which drains what it queues, and write the trace. device: cuda or cpu."""
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    every_thread = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=activities, experimental_config=every_thread) as profiler:
        step()

    def export(raw: Path) -> str:
        profiler.export_chrome_trace(str(raw))
        return raw.read_text(encoding="utf-8")

    write(path, json.dumps(arranged(json.loads(beside(path, export)))))


def write(path: Path, text: str) -> None:
    """Whole or not at all, compressed where the name says so. Raises OSError."""
    data = text.encode()
    write_whole(path, gzip.compress(data) if path.name.endswith(".gz") else data)


def read(path: Path) -> list[Event]:
    """The pieces of work of a trace, whoever wrote it: each with name, cat, pid, tid, ts and dur (microseconds, finite).

    Names of tracks and all else is left out. OSError, or ValueError of one line for what is no trace.
    """
    data = read_bytes(path, LIMIT)
    if path.name.endswith(".gz"):
        data = _unpacked(data)
    try:
        tree = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    found = tree.get("traceEvents") if isinstance(tree, dict) else None
    if not isinstance(found, list):
        raise ValueError("it has no list of traceEvents")
    return [event for event in found if isinstance(event, dict) and event.get("ph") == "X" and _is_plain(event)]


def _unpacked(data: bytes) -> bytes:
    unpacking = zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        unpacked = unpacking.decompress(data, LIMIT)
    except zlib.error as error:
        raise ValueError(f"it is not compressed as its name says: {error}") from None
    if unpacking.unconsumed_tail:
        raise ValueError(f"it has more than {LIMIT} bytes")
    return unpacked


def _is_plain(event: Event) -> bool:
    event.setdefault("cat", None)
    tracks, times = (event.get("pid"), event.get("tid")), (event.get("ts"), event.get("dur"))
    named = isinstance(event.get("name"), str) and isinstance(event["cat"], str | None)
    return named and all(isinstance(track, int | str) for track in tracks) and all(map(_is_time, times))


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and abs(value) < MOST_US


def arranged(trace: dict[str, Any]) -> dict[str, Any]:
    """torch's trace with a track for units, and lanes, compute and streams called what they are.

    Forward and backward of a unit begin and end inside other operations, which one track cannot show: they get their own.
    """
    events = [dict(event) for event in trace["traceEvents"]]
    spans = [event for event in events if event.get("cat") == "user_annotation" and UNIT_SPAN.fullmatch(event["name"])]
    if spans:
        track = (spans[0]["pid"], 1 + max(event["tid"] for event in events if isinstance(event.get("tid"), int)))
        for span in spans:
            span["tid"] = track[1]
        events += _named(track, "units", 1)
    names = {**_thread_names(events), **stream_names(events)}
    events = [event for event in events if not (_is_name(event) and (event["pid"], event["tid"]) in names)]
    for track, (name, place) in names.items():
        events += _named(track, name, place)
    return trace | {"traceEvents": events}


def _is_name(event: Event) -> bool:
    return event.get("ph") == "M" and event["name"] in ("thread_name", "thread_sort_index")


def _named(track: Track, name: str, place: int) -> Iterator[Event]:
    """place: where among its process's tracks it is shown, from 0 at the top."""
    pid, tid = track
    yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "ts": 0, "args": {"sort_index": place}}


def _thread_names(events: list[Event]) -> dict[Track, tuple[str, int]]:
    """Lanes by the names their threads gave themselves; the thread that the step was called on."""
    found: dict[Track, tuple[str, int]] = {}
    for event in events:
        if event.get("ph") == "M" and event["name"] == "thread_name":
            match = THREAD_NAME.fullmatch(str(event["args"]["name"]))
            if match and match[1].startswith(LANE_PREFIX):
                found[event["pid"], event["tid"]] = (f"lane {match[1].removeprefix(LANE_PREFIX)}", 2)
        elif event.get("cat") == "user_annotation" and event["name"] == "step":
            found[event["pid"], event["tid"]] = ("compute (the thread that runs the step)", 0)
    return found


def stream_names(events: list[Event]) -> dict[Track, tuple[str, int]]:
    """CUDA streams by what they carry: the one with most kernels is compute, copy engines go by their direction."""
    work: dict[Track, Counter[str]] = {}
    for event in events:
        if event.get("cat") in STREAM_WORK:
            copies = re.search("HtoD|DtoH", event["name"]) if event["cat"] == "gpu_memcpy" else None
            work.setdefault((event["pid"], event["tid"]), Counter())[copies[0] if copies else event["cat"]] += 1
    compute: dict[Any, Track] = {}  # by device
    for track, counts in work.items():
        best = compute.setdefault(track[0], track)
        if counts["kernel"] > work[best]["kernel"]:
            compute[track[0]] = track
    found: dict[Track, tuple[str, int]] = {}
    for track, counts in work.items():
        stream = f"stream {track[1]}"
        if track == compute[track[0]]:
            found[track] = (f"compute ({stream})", 0)
        elif counts["HtoD"] != counts["DtoH"]:
            direction = "h2d" if counts["HtoD"] > counts["DtoH"] else "d2h"
            found[track] = (f"copy engine {direction} ({stream})", 1)
    return found
