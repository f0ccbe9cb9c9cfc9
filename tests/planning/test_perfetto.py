"""The exported trace is what Perfetto reads, and says what the events say."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from systems.planning.clock.perfetto import TimedEvent, chrome_trace, to_json
from tests.planning.chrome import read_chrome_trace

events = st.lists(
    st.builds(TimedEvent, st.sampled_from(["h2d", "compute", "cpu"]), st.text(max_size=5), st.floats(0, 9), st.floats(0, 9))
)


@given(st.dictionaries(st.sampled_from(["simulated", "measured"]), events))
def test_what_is_read_back_is_what_was_written(processes: dict[str, list[TimedEvent]]) -> None:
    found = read_chrome_trace(json.loads(to_json(processes)))
    assert found.keys() == processes.keys()
    for name, expected in processes.items():
        assert [(e.lane, e.label) for e in found[name]] == [(e.lane, e.label) for e in expected]
        for one, other in zip(found[name], expected, strict=True):
            assert (one.start_s, one.duration_s) == pytest.approx((other.start_s, other.duration_s))


def test_the_format_by_hand() -> None:
    trace = chrome_trace({"simulated": [TimedEvent("h2d", "fetch bundle 1", 0.5, 0.25), TimedEvent("cpu", "update", 1.0, 2.0)]})
    named = [e for e in trace["traceEvents"] if e["ph"] == "M"]
    assert [(e["name"], e["args"]["name"]) for e in named] == [
        ("process_name", "simulated"),
        ("thread_name", "h2d"),
        ("thread_name", "cpu"),
    ]
    first = next(e for e in trace["traceEvents"] if e["ph"] == "X")
    assert first == {"ph": "X", "name": "fetch bundle 1", "pid": 1, "tid": 1, "ts": 500_000.0, "dur": 250_000.0}
