"""The profiled step: what its trace shows, and that no figure of the record includes it."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from harness import cli, trace
from harness.record import Record
from harness.spec import BadInputError
from systems.machine.durable import beside
from tests.harness.conftest import make_spec

NAME = re.compile(r" \([\w. ]+\)$")  # of the units
COMPUTE = "compute (the thread that runs the step)"
SMALL = {"model": "opt-tiny", "device": "cpu", "set": ("num_layers=2",), "steps": 4, "warmup": 2, "option": ()}
PHASES: Mapping[str, set[str]] = {
    COMPUTE: {
        "forward", "backward", "step", "norm", "norm of gradients", "wait for bundles", "drop bundle N",
        "update N segments from N on",
        "issue fetch bundle N", "issue offload bundle N", "issue update-ahead bundle N",
    },
    "units": {"forward of model.decoder.layers.N", "backward of model.decoder.layers.N"},
    "lane h2d": {"fetch bundle N"},
    "lane d2h": {"offload bundle N"},
    "lane cpu": {"update-ahead bundle N"},
}  # fmt: skip


def tracks(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Labels by the name of their track, in order of time."""
    data = path.read_bytes()
    events = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[str, list[dict[str, Any]]] = {}
    for event in sorted((e for e in events if e.get("cat") == "user_annotation"), key=lambda e: e["ts"]):
        found.setdefault(names[event["pid"], event["tid"]], []).append(event)
    return found


def nested(events: list[dict[str, Any]]) -> bool:
    """Whether of any two spans one lies in the other, or they do not meet; events: by their start."""
    ends: list[float] = []
    for event in events:
        while ends and ends[-1] <= event["ts"]:
            ends.pop()
        if ends and event["ts"] + event["dur"] > ends[-1]:
            return False
        ends.append(event["ts"] + event["dur"])
    return True


def test_every_phase_and_every_lane_is_there_and_no_figure_is_changed(tmp_path: Path, run_here: Callable[..., Record]) -> None:
    spec = make_spec(**SMALL | {"system": "elixir", "device_memory": "3MiB"})
    plain = run_here(spec)
    path = tmp_path / "step.json"
    traced = run_here(spec.model_copy(update={"trace": str(path)}))
    assert (plain.status, traced.status) == ("ok", "ok"), traced.reason
    shown = tracks(path)
    for track, phases in PHASES.items():
        labels = {re.sub(r"\d+", "N", NAME.sub("", event["name"])) for event in shown[track]}
        assert phases <= labels, f"{track} lacks {phases - labels}"
    units = Counter(event["name"] for event in shown["units"])
    forwards = {name for name in units if name.startswith("forward")}
    assert {name.replace("forward", "backward") for name in forwards} <= set(units)
    assert nested(shown["units"])
    fetched = {event["name"] for event in shown["lane h2d"]}
    assert {f"issue {name}" for name in fetched} <= {event["name"] for event in shown[COMPUTE]}
    assert len(traced.samples.step_time_s) == len(traced.samples.norm) == 4
    assert traced.metrics.loss == plain.metrics.loss
    assert (traced.counters, traced.timed_counters) == (plain.counters, plain.timed_counters)
    assert (traced.traffic, traced.memory.device_peak_bytes) == (plain.traffic, plain.memory.device_peak_bytes)
    assert traced.phases_s["trace"] > 0
    of_the_clock = "lie behind the last step boundary"
    plainly, said = ([note for note in each.notes if of_the_clock not in note] for each in (plain, traced))
    assert said == [*plainly, f"a trace of one more step is in {path}"]


def test_resident_is_traced_too(tmp_path: Path, run_here: Callable[..., Record]) -> None:
    path = tmp_path / "step.json.gz"
    record = run_here(make_spec(**SMALL | {"system": "resident", "trace": str(path)}))
    assert record.status == "ok", record.reason
    (labels,) = tracks(path).values()
    assert {"forward", "backward", "step", "norm", "update"} == {event["name"] for event in labels}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (RuntimeError("the profiler gave up"), "the profiler gave up"),
    ],
)
def test_what_befalls_the_traced_step_takes_no_figure_away(
    error: Exception, told: str, tmp_path: Path, run_here: Callable[..., Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(*_: Any) -> None:
        raise error

    monkeypatch.setattr(trace, "take", take)
    record = run_here(make_spec(**SMALL | {"system": "elixir", "trace": str(tmp_path / "step.json"), "phases": True}))
    assert record.status == "ok" and record.metrics.mean_step_time_s is not None and record.memory.device_peak_bytes
    notes = [note for note in record.notes if note.startswith("--")]  # there may be one of how the steps' time is spread
    assert notes == [f"--trace: none was taken: {told}", "--phases: none was taken, for the same reason"]
    assert record.phases_s["close"] >= 0


def test_a_system_without_labels_says_so_before_the_work(tmp_path: Path, run_here: Callable[..., Record]) -> None:
    with pytest.raises(BadInputError, match="--trace: dummy does not label its phases: use resident or"):
        run_here(make_spec(trace=str(tmp_path / "x.json")))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("trace.txt", "name a file that ends in .json or .json.gz"),
        ("folder.json", "is a folder: name a file in it"),
        ("file/below.json", "cannot be written: "),
    ],
)
def test_a_file_that_cannot_be_written_is_found_before_the_work(
    name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "launch", lambda *_, **__: pytest.fail("a process was started"))
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "file").touch()
    run = ["run", "--system", "elixir", "--model", "opt-tiny", "--results", str(tmp_path / "results")]
    assert cli.main([*run, "--trace", str(tmp_path / name)]) == 2
    _, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert said in err


def test_preparing_leaves_nothing_behind(tmp_path: Path) -> None:
    trace.prepare(tmp_path / "x.json")
    assert not list(tmp_path.iterdir())


def test_a_link_leads_to_where_a_trace_is_written(tmp_path: Path) -> None:
    link, file = tmp_path / "step.json", tmp_path / "disk" / "big.json"
    link.symlink_to(file)
    with pytest.raises(BadInputError, match="cannot be written: No such file or directory: name another file"):
        trace.prepare(link)
    file.parent.mkdir()
    trace.prepare(link)
    assert not list(file.parent.iterdir())
    for text in ("{}", "[]"):
        trace.write(link, text)
        assert link.is_symlink() and file.read_text() == text
    assert len(list(tmp_path.rglob("*"))) == 3


def gpu_event(cat: str, name: str, stream: int) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": stream, "ts": 1.0, "dur": 1.0}


def test_streams_are_called_what_they_carry() -> None:
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "ts": 0, "args": {"name": f"stream {tid}"}}
        for tid in (7, 13, 17, 21)
    ]
    events += [gpu_event("kernel", "gemm", 7)] * 3 + [gpu_event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 7)]
    events += [gpu_event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 13)] * 2
    events += [gpu_event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 17), gpu_event("kernel", "fill", 17)]
    events += [gpu_event("gpu_memset", "Memset (Device)", 21)]
    made = trace.arranged({"traceEvents": events, "schemaVersion": 1})
    assert made["schemaVersion"] == 1
    names = {e["tid"]: e["args"]["name"] for e in made["traceEvents"] if e["name"] == "thread_name"}
    assert names == {
        7: "compute (stream 7)",
        13: "copy engine h2d (stream 13)",
        17: "copy engine d2h (stream 17)",
        21: "stream 21",
    }


def test_what_a_killed_process_did_not_finish_is_removed(tmp_path: Path) -> None:
    """Beside the trace, and beside the file that it is a link to; what is another process's, or another file's, stays."""
    path, disk = tmp_path / "step.json", tmp_path / "disk"
    disk.mkdir()
    path.symlink_to(disk / "big.json")
    left = [beside(place, lambda unfinished: unfinished) for place in (path, disk / "big.json")]
    other = beside(tmp_path / "other.json", lambda unfinished: unfinished)
    foreign = tmp_path / left[0].name.replace(f".{os.getpid()}-", f".{os.getpid()}0-")
    for each in (*left, other, foreign):
        each.touch()
    trace.clear(path, os.getpid())
    assert set(tmp_path.iterdir()) == {path, disk, other, foreign} and not list(disk.iterdir())
