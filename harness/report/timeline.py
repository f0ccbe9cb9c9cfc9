"""One step's timeline: a trace that is kept beside the records, and the same run simulated, lane by lane on one axis.

A trace belongs to the run whose id its name begins with: 20261128T071138-elixir-opt-1-3b.json.gz. Of those that hold one
labelled step the one is shown whose step took nearest to what the run's record says: profiling lengthens some.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import trace
from harness.record import Record
from harness.trace import Event, Track
from systems.messages import one_line

FOLDER = "traces"  # of a folder of records
WIDE = 1000.0  # of a drawing, in its own units
FINE = 0.25  # what is nearer than this on a lane is drawn as one
LANES: Mapping[str, str] = {"compute": "compute", "h2d": "host to device", "d2h": "device to host", "cpu": "updates on the CPU"}
UPDATE = "update "
STEP = "step"
Work = tuple[float, float, str]  # start and length in seconds, and what it is
Lanes = Mapping[str, Sequence[Work]]


@dataclass(frozen=True)
class Block:
    """x, width: in the drawing's units. what: is in it. kind: forward, backward, or "" where no name says."""

    x: float
    width: float
    what: str
    kind: str


@dataclass(frozen=True)
class Strip:
    """A lane of one of the two. busy_s: in sum, pieces that overlap counted once."""

    lane: str
    source: str
    busy_s: float
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Timeline:
    """span_s: of the axis. measured_s, simulated_s: of a step, the first by the run's record. system, model and the rest are
    of its record. other: traces that are not shown, and why.
    """

    file: str
    system: str
    model: str
    options: tuple[str, ...]
    machine: str
    span_s: float
    measured_s: float | None
    simulated_s: float | None
    profile: str
    why_not: str
    strips: tuple[Strip, ...]
    other: tuple[str, ...]
    runs: tuple[str, ...]


def timeline(folder: Path, records: Sequence[Record]) -> tuple[Timeline | None, list[str]]:
    """folder: of the records. None, and why, file by file, where no trace can be shown."""
    found: list[tuple[float, Path, Record, dict[str, list[Work]]]] = []
    why: list[str] = []
    for path in _files(folder / FOLDER):
        try:
            record = _run_of(path, records)
            lanes = measured(trace.read(path))
        except (OSError, ValueError) as error:
            why.append(one_line(f"{path.name}: {error}"))
            continue
        taken = max(start + length for work in lanes.values() for start, length, _ in work)
        found.append((abs(taken - (record.metrics.mean_step_time_s or math.inf)), path, record, lanes))
    if not found:
        return None, why
    found.sort(key=lambda one: (one[0], one[1].name))
    why += [f"{path.name}: its step is further from what its run's record says" for _, path, _, _ in found[1:]]
    _, path, record, lanes = found[0]
    return _laid(path, record, lanes, why), why


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.name.endswith(trace.SUFFIXES))
    except OSError:
        return []


def _run_of(path: Path, records: Sequence[Record]) -> Record:
    begun, _, work = path.name.removesuffix(".gz").removesuffix(".json").partition("-")
    hits = [record for record in records if record.run_id.startswith(f"{begun}.") and f"-{work}-" in record.run_id]
    if len(hits) != 1 or not work:
        raise ValueError(f"its name is the beginning of {len(hits)} runs' ids, of one it should be")
    return hits[0]


def measured(events: Sequence[Event]) -> dict[str, list[Work]]:
    """By lane, from the first piece of work on. Raises ValueError for a trace that is not of one labelled step on a GPU."""
    steps = sum(event["name"] == STEP and event["cat"] == "user_annotation" for event in events)
    if steps != 1:
        raise ValueError(f"it has {steps} labelled steps, not one")
    lanes: dict[str, list[Event]] = {}
    streams = trace.stream_names(list(events))
    for event in events:
        lane = _lane(event, streams)
        if lane is not None:
            lanes.setdefault(lane, []).append(event)
    if "compute" not in lanes:
        raise ValueError("it has no work of a GPU")
    first = min(event["ts"] for lane in lanes.values() for event in lane)
    return {
        lane: [((event["ts"] - first) / 1e6, max(event["dur"], 0.0) / 1e6, event["name"]) for event in work]
        for lane, work in lanes.items()
    }


def _lane(event: Event, streams: Mapping[Track, tuple[str, int]]) -> str | None:
    if event["cat"] in trace.STREAM_WORK:
        name = streams[event["pid"], event["tid"]][0]
        return next((lane for lane in ("compute", "h2d", "d2h") if lane in name.partition(" (")[0]), None)
    return "cpu" if event["cat"] == "user_annotation" and event["name"].startswith(UPDATE) else None


def _laid(path: Path, record: Record, lanes: Lanes, other: Sequence[str]) -> Timeline:
    simulated, step_s, profile, why_not = _simulated(record)
    work = [piece for each in (lanes, simulated) for lane in each.values() for piece in lane]
    span_s = max(start + length for start, length, _ in work)
    strips = [
        _strip(lane, source, given[lane], span_s)
        for lane in LANES
        for source, given in (("measured", lanes), ("simulated", simulated))
        if given.get(lane)
    ]
    return Timeline(
        file=path.name,
        system=record.spec.system,
        model=record.spec.model,
        options=record.spec.option,
        machine=record.resolved.device_label or "",
        span_s=span_s,
        measured_s=record.metrics.mean_step_time_s,
        simulated_s=step_s,
        profile=profile,
        why_not=why_not,
        strips=tuple(strips),
        other=tuple(other),
        runs=(record.run_id,),
    )


def _strip(lane: str, source: str, work: Sequence[Work], span_s: float) -> Strip:
    kinds: dict[str, list[Work]] = {}
    for piece in work:
        kinds.setdefault(_kind(piece[2]), []).append(piece)
    blocks = [
        Block(round(WIDE * b / span_s, 2), round(max(WIDE * (e - b) / span_s, FINE), 2), what, kind)
        for kind, pieces in kinds.items()
        for b, e, what in _joined(pieces, FINE * span_s / WIDE)
    ]
    return Strip(LANES[lane], source, sum(end - start for start, end, _ in _joined(work, 0.0)), tuple(blocks))


def _kind(name: str) -> str:
    word = name.removeprefix("behind ").partition(" ")[0]
    return word if word in ("forward", "backward") else ""


def _joined(work: Iterable[Work], gap_s: float) -> Iterator[tuple[float, float, str]]:
    """Begin, end and name; of several pieces that are at most so far apart the first one's name, and how many there are."""
    begin, end, names = 0.0, -math.inf, list[str]()
    for start, length, name in sorted(work):
        if names and start > end + gap_s:
            yield begin, end, _said(names)
            names = []
        begin, end = (begin, max(end, start + length)) if names else (start, start + length)
        names.append(name)
    if names:
        yield begin, end, _said(names)


def _said(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _simulated(record: Record) -> tuple[dict[str, list[Work]], float | None, str, str]:
    """Lanes, seconds a step and the profile's name; or why there are none.

    A record may be anybody's: it names no file and no code that is then read, and asks for no work without an end.
    """
    from models import registry as models_registry  # torch is imported with it: seconds that a folder without traces needs not
    from systems import registry
    from systems.planning import hardware

    spec, nothing = record.spec, dict[str, list[Work]]()
    profile = hardware.of_device(record.resolved.device_label or "")
    plain = spec.accumulate == spec.ranks == 1 and not spec.set and not any("hardware=" in option for option in spec.option)
    if spec.model not in models_registry.names() or not plain:
        return nothing, None, "", "only a named model as it is, one rank and one micro-batch are simulated here"
    if spec.system not in {system.name for system in registry.planners()}:
        return nothing, None, "", f"{spec.system} makes no plans"
    if profile is None:
        return nothing, None, "", f"no hardware profile is of {record.resolved.device_label}"
    from harness.hindcast import hindcast

    try:
        found = hindcast(record, hardware.load(profile))
    except ValueError as error:
        return nothing, None, profile, one_line(str(error))
    lanes: dict[str, list[Work]] = {}
    for event in found.simulation.events:
        lanes.setdefault(event.lane, []).append((event.start_s, event.duration_s, event.label))
    return lanes, found.simulation.step_time_s, profile, ""
