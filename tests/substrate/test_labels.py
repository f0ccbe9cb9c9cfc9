"""Labels of phases: nothing without a profile, nested spans with one."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from systems.device.watch import labels
from systems.device.watch.labels import UnitSpans, issuing, labelled, profiling, working
from systems.planning.plan import LaneKind
from systems.planning.step.operations import LaneOperation, Work

FETCH = LaneOperation(Work.FETCH, LaneKind.H2D, "model.layers.5", 3)


def unit_name(unit: int) -> str:
    return f"unit {unit}"


def test_without_a_profile_no_label_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels, "record_function", lambda name: pytest.fail("a label was made"))
    spans = UnitSpans(unit_name)
    assert not profiling()
    with labelled("a"), issuing(FETCH), working(FETCH):
        spans.begin("forward", 1)
        spans.end("forward", 1)
        spans.end_all()


def test_with_one_it_is_in_the_profile() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler, labelled("a"), issuing(FETCH), working(FETCH):
        assert profiling()
        torch.ones(1)
    label = "fetch bundle 3 (model.layers.5)"
    assert {"a", label, f"issue {label}"} <= {event.name for event in profiler.events()}


def test_a_span_may_end_on_another_thread_than_it_began() -> None:
    """On CUDA backward runs on autograd's thread, and what is still open at its end is ended by the caller's."""
    spans = UnitSpans(unit_name)
    every_thread = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=every_thread) as profiler:
        thread = threading.Thread(target=lambda: spans.begin("backward", 3))
        thread.start()
        thread.join()
        torch.ones(1)
        spans.end_all()
    assert [event.name for event in profiler.events()].count("backward of unit 3") == 1


class Recorded:
    """Stands in for record_function and keeps the order in which spans open and close."""

    def __init__(self, log: list[tuple[str, str]], name: str) -> None:
        self.log, self.name = log, name

    def __enter__(self) -> Recorded:
        self.log.append(("begin", self.name))
        return self

    def __exit__(self, *_: object) -> None:
        self.log.append(("end", self.name))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=24))
def test_spans_are_nested_in_whatever_order_hooks_fire(events: list[tuple[bool, int]]) -> None:
    log: list[tuple[str, str]] = []
    open_units: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(labels, "record_function", lambda name: Recorded(log, name))
        patch.setattr(labels, "profiling", lambda: True)
        spans = UnitSpans(unit_name)
        for begins, unit in events:
            if begins and unit not in open_units:
                spans.begin("backward", unit)
                open_units.append(unit)
            elif not begins:
                spans.end("backward", unit)
                open_units = [other for other in open_units if other != unit]
            stack: list[str] = []
            for what, name in log:
                if what == "begin":
                    stack.append(name)
                else:
                    assert stack.pop() == name
            assert sorted(stack) == sorted(f"backward of unit {number}" for number in open_units)
        spans.end_all()
    assert sum(what == "begin" for what, _ in log) == sum(what == "end" for what, _ in log)
