"""Virtual lanes by hand: order, priorities, fixed times, and flows that share what they pass through."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from systems.planning.clock.clocks import BusySpan, CircularWaitError, Claim, SharedResource, TimedJob, run

DRAM = "dram"


def approx(seconds: float) -> float:
    """A time in a BusySpan that is compared within rounding."""
    return cast(float, pytest.approx(seconds))


def flow(queue: str, size: float, rate: float, *, favoured: bool = False, **more: Any) -> TimedJob:
    return TimedJob(queue, flow_bytes=size, rate=rate, claims=(Claim(DRAM, favoured=favoured),), **more)


def test_two_lanes_by_hand() -> None:
    """Compute 3 s, then 2 s that need the second of two copies of 2 s and 4 s; the third copy waits for compute."""
    jobs = [
        TimedJob("copy", fixed_s=0.5, flow_bytes=30, rate=20.0),
        TimedJob("compute", fixed_s=3.0),
        TimedJob("copy", fixed_s=0.5, flow_bytes=70, rate=20.0),
        TimedJob("compute", waits=(2,), fixed_s=2.0),
        TimedJob("copy", waits=(3,), flow_bytes=10, rate=20.0),
    ]
    assert run(jobs, {}) == [BusySpan(0, 2), BusySpan(0, 3), BusySpan(2, 6), BusySpan(6, 8), BusySpan(8, 8.5)]


def test_flows_that_ask_for_too_much_are_slowed_in_proportion() -> None:
    """10 and 20 a second of 15: 5 and 10 until the second is done with its 60 at 6 s; 70 are left, at 10: 13 s."""
    spans = run([flow("a", 100, 10), flow("b", 60, 20)], {DRAM: SharedResource(15)})
    assert spans == [BusySpan(0, approx(13)), BusySpan(0, approx(6))]


def test_the_favoured_side_gets_its_share_and_what_the_others_leave() -> None:
    """10 and 20 of 15, the first favoured with 0.8: it moves at 10 and the other at 5; 10 are left at 10 s."""
    spans = run([flow("a", 100, 10, favoured=True), flow("b", 60, 20)], {DRAM: SharedResource(15, favoured_share=0.8)})
    assert spans == [BusySpan(0, approx(10)), BusySpan(0, approx(10 + 10 / 15))]
    both = run([flow("a", 100, 30, favoured=True), flow("b", 60, 30)], {DRAM: SharedResource(15, favoured_share=0.8)})
    assert both[0] == BusySpan(0, approx(100 / 12))  # 12 and 3
    alone = run([flow("a", 100, 10, favoured=True)], {DRAM: SharedResource(15, favoured_share=0.8)})
    assert alone == [BusySpan(0, approx(10))]


def test_where_flows_were_measured_together_each_keeps_what_it_kept_there() -> None:
    """Alone 10 and 20 a second, together 6 and 18, though the capacity is 15: a has done its 60 at 10 s, b its 200 at 11."""
    beside = {frozenset({"a"}): {"a": 1.0}, frozenset({"b"}): {"b": 1.0}, frozenset({"a", "b"}): {"a": 0.6, "b": 0.9}}
    resources = {DRAM: SharedResource(15, beside=beside)}
    one = TimedJob("a", flow_bytes=60, rate=10.0, claims=(Claim(DRAM, favoured=True, measured_as="a"),))
    other = TimedJob("b", flow_bytes=200, rate=20.0, claims=(Claim(DRAM, measured_as="b"),))
    assert run([one, other], resources) == [BusySpan(0, approx(10)), BusySpan(0, approx(11))]


@pytest.mark.parametrize(("unmeasured", "seconds"), [(2.0, 60 / 6), (50.0, 60 / (10 * 15 / 60))])
def test_beside_a_flow_that_was_not_measured_the_lower_rate_counts(unmeasured: float, seconds: float) -> None:
    """Measured 6 of 10; with 50 more asked of 15 in all its part is 2.5, with 2 more it would be 10."""
    known = {frozenset({"a"}): {"a": 0.6}}
    one = TimedJob("a", flow_bytes=60, rate=10.0, claims=(Claim(DRAM, measured_as="a"),))
    spans = run([one, flow("c", 1e6, unmeasured)], {DRAM: SharedResource(15, beside=known)})
    assert spans[0] == BusySpan(0, approx(seconds))


def test_a_flow_through_two_resources_moves_at_the_slowest() -> None:
    claims = (Claim("link"), Claim(DRAM, units=2.0))
    job = TimedJob("a", flow_bytes=90, rate=30.0, claims=claims)
    assert run([job], {"link": SharedResource(20), DRAM: SharedResource(30)}) == [BusySpan(0, approx(6))]


def test_a_fixed_time_takes_nothing_of_a_resource() -> None:
    """The second flow begins at 4 s, when the first has 60 of 100 left: 5 each, 40 s, 12 s later both are done."""
    jobs = [flow("a", 100, 10), flow("b", 60, 10, fixed_s=4.0)]
    assert run(jobs, {DRAM: SharedResource(10)}) == [BusySpan(0, approx(16)), BusySpan(0, approx(16))]


def test_queues_keep_their_order_unless_jobs_have_priorities() -> None:
    late = [TimedJob("other", fixed_s=5.0), TimedJob("one", waits=(0,), fixed_s=1.0), TimedJob("one", fixed_s=1.0)]
    assert run(late, {})[1:] == [BusySpan(5, 6), BusySpan(6, 7)]
    jobs = [
        TimedJob("cpu", fixed_s=2.0, priority=9),
        TimedJob("cpu", fixed_s=2.0, priority=5),
        TimedJob("other", fixed_s=1.0),
        TimedJob("cpu", waits=(2,), fixed_s=2.0, priority=1),
    ]
    spans = run(jobs, {})
    assert [span.start_s for span in spans] == [4.0, 0.0, 0.0, 2.0]


def test_jobs_that_wait_for_each_other_are_found() -> None:
    with pytest.raises(CircularWaitError, match="waits for ever"):
        run([TimedJob("a", waits=(1,)), TimedJob("b", waits=(0,))], {})
    assert run([], {}) == []


@st.composite
def job_lists(draw: st.DrawFn) -> list[TimedJob]:
    found = []
    for number in range(draw(st.integers(1, 12))):
        waits = tuple(sorted(draw(st.sets(st.integers(0, number - 1), max_size=2)))) if number else ()
        queue = draw(st.sampled_from(["a", "b", "cpu"]))
        found.append(
            TimedJob(
                queue,
                waits,
                fixed_s=draw(st.integers(0, 4)) / 2,
                flow_bytes=draw(st.integers(0, 20)),
                rate=float(draw(st.integers(1, 9))),
                claims=(Claim(DRAM, favoured=queue == "cpu"),) if draw(st.booleans()) else (),
                priority=draw(st.integers(0, 3)) if queue == "cpu" else None,
            )
        )
    return found


@settings(max_examples=150, deadline=None)
@given(job_lists(), st.sampled_from([0.0, 0.7]))
def test_what_runs_is_in_order_one_at_a_time_and_conserves_bytes(jobs: list[TimedJob], share: float) -> None:
    spans = run(jobs, {DRAM: SharedResource(6.0, favoured_share=share)})
    close = 1e-9
    for job, span in zip(jobs, spans, strict=True):
        alone = job.fixed_s + job.flow_bytes / job.rate
        assert span.end_s - span.start_s >= alone - close
        assert all(spans[other].end_s <= span.start_s + close for other in job.waits)
    for queue in ("a", "b", "cpu"):
        mine = [span for job, span in zip(jobs, spans, strict=True) if job.queue == queue]
        ordered = sorted(mine, key=lambda span: (span.start_s, span.end_s))
        assert all(one.end_s <= other.start_s + close for one, other in pairwise(ordered))
        if queue != "cpu":
            assert [span.start_s for span in mine] == sorted(span.start_s for span in mine)
    shared = sum(job.flow_bytes for job in jobs if job.claims)
    assert max(span.end_s for span in spans) >= shared / 6.0 - close
