"""The timeline of `harness report`: which trace is shown, what of it, and what traces and records of others cannot do."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import trace
from harness.report import timeline
from tests.harness.conftest import make_record


def step_of(**changes: Any) -> list[dict[str, Any]]:
    """A trace's events: a step with a kernel, a copy each way and an update; times in microseconds."""

    def event(name: str, cat: str, track: tuple[int, int], ts: float, dur: float) -> dict[str, Any]:
        return {"ph": "X", "name": name, "cat": cat, "pid": track[0], "tid": track[1], "ts": ts, "dur": dur} | changes

    return [
        event("step", "user_annotation", (1, 1), 1e6, 9e5),
        event("a kernel", "kernel", (0, 7), 1.1e6, 2e5),
        event("a kernel", "kernel", (0, 7), 1.3e6, 1e5),
        event("Memcpy HtoD", "gpu_memcpy", (0, 8), 1.2e6, 1e5),
        event("Memcpy DtoH", "gpu_memcpy", (0, 9), 1.5e6, 1e5),
        event("update bundle 3", "user_annotation", (1, 2), 1.6e6, 4e5),
    ]


def keep_trace(folder: Path, events: Any, name: str = "20261128T000000-dummy-opt-tiny.json.gz") -> None:
    (folder / "traces").mkdir(exist_ok=True)
    text = json.dumps({"traceEvents": events}).encode()
    (folder / "traces" / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)


def test_lanes_of_a_trace(tmp_path: Path) -> None:
    keep_trace(tmp_path, step_of())
    found, why = timeline.timeline(tmp_path, [make_record()])
    assert found is not None and not why and found.span_s == pytest.approx(0.9)
    lanes = {strip.lane: strip for strip in found.strips}
    assert {name: round(strip.busy_s, 6) for name, strip in lanes.items()} == {
        "compute": 0.3,
        "host to device": 0.1,
        "device to host": 0.1,
        "updates on the CPU": 0.4,
    }
    (block,) = lanes["compute"].blocks
    assert (block.x, block.what) == (0.0, "a kernel and 1 more") and block.width == pytest.approx(333.33)
    assert "dummy makes no plans" in found.why_not and found.simulated_s is None


def wrong_traces() -> Iterator[tuple[str, bytes, str]]:
    good = json.dumps({"traceEvents": step_of()}).encode()
    yield "20261128T000000-dummy-opt-tiny.json.gz", good, "not compressed as its name says"
    yield "20261128T000000-dummy-opt-tiny.json", b"{", "Expecting"
    yield "20261128T000000-dummy-opt-tiny.json", b"[" * 100_000, "nested too deep"
    yield "20261128T000000-dummy-opt-tiny.json", b"[]", "no list of traceEvents"
    yield "20261128T000000-dummy-opt-tiny.json", b'{"traceEvents": []}', "0 labelled steps"
    yield (
        "20261128T000000-dummy-opt-tiny.json",
        b'{"traceEvents": [7, {"ph": "X"}, {"ph": "X", "name": "step"}]}',
        "0 labelled steps",
    )
    yield "20261128T000000-dummy-opt-tiny.json.gz", gzip.compress(b" " * (2 << 20) + good), "more than"
    yield "20261128T000000-another.json", good, "the beginning of 0 runs' ids"
    yield ".json", good, "the beginning of"


@pytest.mark.parametrize(("name", "data", "told"), list(wrong_traces()))
def test_what_is_no_trace_is_told_and_left_alone(
    name: str, data: bytes, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "LIMIT", 1 << 20)
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / name).write_bytes(data)
    found, why = timeline.timeline(tmp_path, [make_record()])
    assert found is None and len(why) == 1 and told in why[0]


@pytest.mark.parametrize("odd", [{"ts": "1"}, {"dur": math.inf}, {"ts": True}, {"pid": [1]}, {"name": 7}, {"cat": []}])
def test_events_that_are_none_are_passed_over(odd: dict[str, Any], tmp_path: Path) -> None:
    keep_trace(tmp_path, [*step_of(), *step_of(**odd)], "20261128T000000-dummy-opt-tiny.json")
    found, _ = timeline.timeline(tmp_path, [make_record()])
    assert found is not None and found.span_s == pytest.approx(0.9)


def test_a_record_has_no_code_and_no_file_of_its_own_read_for_a_simulation(tmp_path: Path) -> None:
    """What it calls its model, options and machine is a name that is known here, or nothing is simulated."""
    keep_trace(tmp_path, step_of())
    (tmp_path / "code.py").write_text("raise SystemExit(7)")
    resolved = {"device": "cuda", "device_label": "NVIDIA H200"}
    for spec in (
        {"system": "elixir", "model": f"{tmp_path}/code.py:f"},
        {"system": "elixir", "model": "code:f"},
        {"system": "elixir", "model": "opt-tiny", "set": ("num_layers=1000000000",)},
        {"system": "elixir", "model": "opt-tiny", "option": (f"hardware={tmp_path}/x.json",)},
        {"system": "elixir", "model": "opt-tiny", "accumulate": 1_000_000},
        {"system": "../../x", "model": "opt-tiny"},
        {"system": "elixir", "model": "opt-tiny"},
    ):
        found, _ = timeline.timeline(tmp_path, [make_record(spec=spec, resolved=resolved)])
        assert found is not None and found.why_not and found.simulated_s is None, spec
