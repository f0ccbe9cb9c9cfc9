"""The simulator: a step worked out by hand, what no step can beat, and what more hardware can never cost."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from systems.planning import hardware
from systems.planning.clock.rates import Rates
from systems.planning.clock.simulator import Simulation, step_time_of
from systems.planning.hardware import BySize
from systems.planning.layout import Layout
from systems.planning.plan import COPY_LANES, Operation, OpKind, Plan, PlannedOperation, Tier, UpdateRule
from systems.planning.step.schedule import expand
from systems.planning.step.timeline import timeline
from systems.planning.trace import Trace
from tests.planning.machines import BANDWIDTHS, figure, machine, scaled, simulate
from tests.planning.synthetic import Case, cases, context, layout_of, trace_of
from tests.planning.test_timeline import planned, plans

NUMEL = 1000 * 128
BYTES = 2 * NUMEL
FORWARD_ENTER, BACKWARD_ENTER, LAST = 1, 3, 6


def one_bundle(ranks: int = 1) -> tuple[Layout, Trace]:
    layout = layout_of([(1000, [0])], ranks=ranks)
    return layout, trace_of(layout, seconds=1.0)


def by_hand(rule: UpdateRule = UpdateRule.AFTER_NORM, *, tier: Tier = Tier.HOST, ranks: int = 1) -> Plan:
    _, trace = one_bundle(ranks)
    on_device = tier is Tier.DEVICE
    fetch = PlannedOperation(FORWARD_ENTER, 0, Operation(OpKind.FETCH, 0))
    resident = frozenset({0} if on_device else ())
    return Plan(trace.signature, () if on_device else (fetch,), (tier,), resident, rule)


def simulated(plan: Plan, *, ranks: int = 1, devices: int = 1, nodes: int = 1, **figures: Any) -> Simulation:
    layout, trace = one_bundle(ranks)
    profile = machine(devices=devices, nodes=nodes, **figures)
    return simulate(layout, trace, plan, context(ranks=ranks), profile)


def rates(**more: Any) -> dict[str, Any]:
    """Fetch 1 s, offload 2 s, each 0.5 s before; Adam 3 s; sum of squares 0.25 s."""
    given: dict[str, Any] = {
        "h2d_bytes_per_s": BYTES,
        "d2h_bytes_per_s": BYTES / 2,
        "copy_latency_s": 0.5,
        "cpu_adam_bytes_per_s": 28 * NUMEL / 3,
        "device_dram_bytes_per_s": BYTES / 0.25,
    }
    return given | more


def test_a_step_by_hand() -> None:
    """Backward ends at 0. Squares to 0.25, then the norm; the gradient leaves from 0 to 2.5; Adam to 5.5; the fetch to 7;
    forward, its end and backward to 10. Compute of 6 s a step hides behind none of it but for what is left of the last step.
    """
    found = simulated(by_hand(), **rates())
    assert found.step_time_s == pytest.approx(10.0, rel=1e-6)
    assert found.busy_s == pytest.approx({"compute": 6.25, "h2d": 1.5, "d2h": 2.5, "cpu": 3.0, "host": 1e-9}, rel=1e-6)
    assert found.bytes == {"h2d": BYTES, "d2h": BYTES}
    assert found.bound == "compute" and found.bounds_s["norm"] == pytest.approx(3 + 1 + 1 + 0.25 + 1)
    at = {event.label: (event.start_s, event.start_s + event.duration_s) for event in found.events}
    fetched, offloaded, updated = at["fetch bundle 0 (unit 0)"], at["offload bundle 0 (unit 0)"], at["update bundle 0 (unit 0)"]
    assert updated[0] == pytest.approx(offloaded[1]) and at["forward of unit 0"][0] == pytest.approx(fetched[1])
    assert offloaded[0] == pytest.approx(at["backward of unit 0"][1])


def test_without_the_norm_nothing_changes_where_the_offload_is_later() -> None:
    early = simulated(by_hand(UpdateRule.WHEN_REDUCED), **rates())
    assert early.step_time_s == pytest.approx(10.0, rel=1e-6)
    assert "norm" not in early.bounds_s and "host" not in early.busy_s


def test_slow_squares_hold_updates_back_only_where_they_wait_for_the_norm() -> None:
    """Squares of 4 s end after the offload of 2.5 s: 1.5 s more for the step that waits. Compute then takes 10 s."""
    slow = rates(device_dram_bytes_per_s=BYTES / 4.0)
    waits, goes = (simulated(by_hand(rule), **slow).step_time_s for rule in (UpdateRule.AFTER_NORM, UpdateRule.WHEN_REDUCED))
    assert waits == pytest.approx(4 + 3 + 1.5 + 3, rel=1e-6)
    assert goes == pytest.approx(10.0, rel=1e-6)


def test_an_update_that_runs_ahead_does_not_wait_for_slow_squares() -> None:
    """As above, one and a half seconds less; the norm is read all the same, and no update is left that it could bound."""
    slow = rates(device_dram_bytes_per_s=BYTES / 4.0)
    waits, ahead = (simulated(replace(by_hand(), ahead=frozenset(b)), **slow) for b in ([], [0]))
    assert waits.step_time_s - ahead.step_time_s == pytest.approx(1.5) and ahead.step_time_s == pytest.approx(10.0, rel=1e-6)
    assert "norm" in waits.bounds_s and "norm" not in ahead.bounds_s
    assert ahead.busy_s == pytest.approx(waits.busy_s) and ahead.bytes == waits.bytes
    at = {event.label: (event.start_s, event.start_s + event.duration_s) for event in ahead.events}
    update, offload = at["update-ahead bundle 0 (unit 0)"], at["offload bundle 0 (unit 0)"]
    assert update[0] == pytest.approx(offload[1]) and update[0] < at["norm"][0]


def test_the_norm_bounds_what_waits_for_it_and_no_accumulator_that_is_cleared() -> None:
    layout = layout_of([(1000, [0]), (1000, [1])])
    trace = trace_of(layout, seconds=1.0, accumulate=2)
    case = Case(layout, trace, context(accumulate=2))
    slow = machine(cpu_adam_bytes_per_s=34 * NUMEL / 3)
    both, one, none = (
        simulate(layout, trace, planned(case, ahead=frozenset(range(count, 2))), case.context, slow).bounds_s
        for count in (2, 1, 0)
    )
    assert both["norm"] - one["norm"] == pytest.approx(3.0) and "norm" not in none
    assert both["cpu-adam"] == pytest.approx(one["cpu-adam"]) == pytest.approx(none["cpu-adam"])  # with clearing, as many bytes


@pytest.mark.parametrize("name", ["h100-80g-x1", "h100-80g-x4", "hai-pcie-a100-40g-x8", "h3t-a100-40g-x64"])
def test_the_more_runs_ahead_the_faster_and_never_slower_than_waiting(name: str) -> None:
    """Of one micro-batch, where as many bytes are moved either way; and no faster than where no update waits at all. Where
    collectives pass through the host they bind, and the norm holds nothing back."""
    profile, faster = hardware.load(name), 0
    ranks = min(profile.devices, 8)
    layout = layout_of([(200_000, [unit]) for unit in range(8)], ranks=ranks)
    for seconds in (1e-4, 1e-3, 1e-2):
        case = Case(layout, trace_of(layout, seconds=seconds), context(ranks=ranks))
        choices: dict[str, Any] = dict(prefetch=3, spare=2 * layout.bundle_bytes(0), on_device=frozenset({0}))
        early = planned(case, **choices, rule=UpdateRule.WHEN_REDUCED)
        some = [planned(case, **choices, ahead=frozenset(range(first, 8))) for first in (8, 6, 4, 1)]
        times = [simulate(layout, case.trace, plan, case.context, profile).step_time_s for plan in some]
        assert all(b <= a * (1 + 1e-6) for a, b in pairwise(times))
        assert times[-1] >= min(times[0], simulate(layout, case.trace, early, case.context, profile).step_time_s) * (1 - 1e-6)
        faster += times[-1] < 0.99 * times[0]
    assert faster or Rates(profile, ranks).link.through_host, "void: the norm never held anything back"


def test_copies_and_adam_share_the_hosts_dram() -> None:
    """Two bundles: Adam on one while the other's gradient leaves. Both are slowed alike while they overlap."""
    layout = layout_of([(1000, [0]), (1000, [1])])
    trace = trace_of(layout, seconds=1.0)
    plan = Plan(
        trace.signature,
        tuple(PlannedOperation(m, 0, Operation(OpKind.FETCH, b)) for m, b in ((1, 0), (3, 1))),
        (Tier.HOST, Tier.HOST),
        frozenset(),
        UpdateRule.WHEN_REDUCED,
    )
    shared: dict[str, Any] = {"d2h_bytes_per_s": BYTES / 3.0, "cpu_adam_bytes_per_s": 28 * NUMEL / 4.0}

    def spans(capacity: float) -> dict[str, tuple[float, float]]:
        found = simulate(layout, trace, plan, context(), machine(**shared, host_dram_bytes_per_s=capacity))
        return {e.label: (e.start_s, e.duration_s) for e in found.events}

    apart = spans(1e18)
    assert apart["offload bundle 0 (unit 0)"][1] == pytest.approx(3.0)
    assert apart["update bundle 1 (unit 1)"][1] == pytest.approx(4.0)
    capacity = shared["cpu_adam_bytes_per_s"]  # one alone has what it wants, both together do not
    factor = capacity / (capacity + shared["d2h_bytes_per_s"])
    together = spans(capacity)
    # The gradient of unit 1 leaves first, in 3 s; then Adam on it begins together with the offload of unit 0.
    assert together["offload bundle 1 (unit 1)"][1] == pytest.approx(3.0)
    assert together["update bundle 1 (unit 1)"][0] == pytest.approx(together["offload bundle 0 (unit 0)"][0])
    assert together["offload bundle 0 (unit 0)"][1] == pytest.approx(3.0 / factor)
    # Until then Adam has done 3 s of its 4; the last one is its own again.
    assert together["update bundle 1 (unit 1)"][1] == pytest.approx(3.0 / factor + 1.0)


def test_updates_on_the_device_take_its_dram_and_move_nothing() -> None:
    found = simulated(by_hand(tier=Tier.DEVICE), device_dram_bytes_per_s=28 * NUMEL / 2.0)
    assert found.step_time_s == pytest.approx(6 + 2 + 2 * 2 / 28, rel=1e-6)  # squares read 2 bytes an element
    assert found.bytes == {} and found.bound == "compute"


@pytest.mark.parametrize(("link", "nodes", "network", "seconds"), [(2.0, 1, None, 0.5), (2.0, 2, 0.5, 2.0), (8.0, 2, 2.0, 0.5)])
def test_collectives_go_by_the_link_or_the_network(link: float, nodes: int, network: float | None, seconds: float) -> None:
    """Of 4 ranks each bundle moves three quarters through every port; figures are in bundles a second, times 4/3."""
    part = BYTES * 3 / 4
    figures = {"device_link_bytes_per_s": link * part, "network_bytes_per_s": None if network is None else network * part}
    found = simulated(by_hand(ranks=4), ranks=4, devices=4 // nodes, nodes=nodes, **figures)
    assert found.busy_s["gather"] == pytest.approx(seconds, rel=1e-6)
    assert found.busy_s["reduce"] == pytest.approx(seconds, rel=1e-6)
    assert found.bytes["gather"] == part and found.bounds_s["link"] == pytest.approx(2 * seconds)  # which is one queue


def test_without_a_link_collectives_pass_the_host_twice() -> None:
    part = BYTES * 3 / 4
    given: dict[str, Any] = {"h2d_bytes_per_s": part, "host_dram_bytes_per_s": 4 * part}  # a quarter each
    found = simulated(by_hand(ranks=4), ranks=4, devices=4, device_link_bytes_per_s=None, **given)
    assert found.busy_s["gather"] == pytest.approx(2.0, rel=1e-6)
    narrow = simulated(by_hand(ranks=4), ranks=4, devices=4, device_link_bytes_per_s=None, both_ways_bytes_per_s=part)
    assert narrow.busy_s["gather"] == pytest.approx(2.0, rel=1e-6)  # what comes in and what goes out share it


def test_a_fetch_beside_a_gather_without_a_link_shares_the_way_to_the_device() -> None:
    """Of two units of one shape: the second is fetched while the first is gathered, each at half of the rate."""
    layout = layout_of([(1000, [0]), (1000, [1])], ranks=2)
    trace = trace_of(layout, seconds=1e-6)
    fetches = [PlannedOperation(1, place, Operation(OpKind.FETCH, place)) for place in range(2)]
    plan = Plan(trace.signature, tuple(fetches), (Tier.HOST, Tier.HOST), frozenset(), UpdateRule.WHEN_REDUCED)
    profile = machine(devices=2, device_link_bytes_per_s=None, h2d_bytes_per_s=BYTES / 2, d2h_bytes_per_s=BYTES / 2)
    found = simulate(layout, trace, plan, context(ranks=2), profile)
    at = {e.label: (e.start_s, e.start_s + e.duration_s) for e in found.events}
    gathered, fetched = list(at["gather bundle 0 (unit 0)"]), list(at["fetch bundle 1 (unit 1)"])
    assert gathered == pytest.approx(fetched)
    assert found.busy_s["gather"] == pytest.approx(2.0 + 1.0, rel=1e-5)


def test_gathers_and_reductions_are_one_queue() -> None:
    layout = layout_of([(1000, [unit]) for unit in range(4)], ranks=2)
    case = Case(layout, trace_of(layout, seconds=0.1), context(ranks=2))
    plan = planned(case, prefetch=2, spare=BYTES, rule=UpdateRule.WHEN_REDUCED)
    found = simulate(layout, case.trace, plan, case.context, machine(devices=2, device_link_bytes_per_s=BYTES / 2))
    spans = sorted((e.start_s, e.start_s + e.duration_s) for e in found.events if e.lane in ("gather", "reduce"))
    assert len(spans) > 6 and all(one[1] <= other[0] + 1e-9 for one, other in pairwise(spans))
    assert found.step_time_s >= found.busy_s["gather"] + found.busy_s["reduce"] - 1e-9


def test_collectives_take_what_was_measured_at_their_size() -> None:
    """Two ranks: half of a bundle passes a port. Gathers and reductions apart, whatever the link could."""
    half = BYTES // 2
    curves = [BySize(points=((half, half / seconds), (16 * half, half)), source="test") for seconds in (3.0, 4.0)]
    profile = machine(devices=2).model_copy(update=dict(zip(("gathers_by_size", "reductions_by_size"), curves, strict=True)))
    layout, trace = one_bundle(2)
    found = simulate(layout, trace, by_hand(ranks=2), context(ranks=2), profile)
    assert [found.busy_s["gather"], found.busy_s["reduce"]] == pytest.approx([3.0, 4.0])
    assert found.bounds_s["link"] == pytest.approx(7.0)


@pytest.mark.parametrize(("rule", "waited_for"), [(UpdateRule.AFTER_NORM, 1), (UpdateRule.WHEN_REDUCED, 0)])
def test_ranks_tell_each_other_twice_a_step(rule: UpdateRule, waited_for: int) -> None:
    """The update waits for what is told behind the norm; what is told before is the host's, which is ahead of the device."""
    layout, trace = one_bundle(2)
    plain = machine(devices=2, **rates(device_dram_bytes_per_s=BYTES / 4.0))  # squares end after the offload
    told = plain.model_copy(update={"exchange_s": figure(0.5)})
    times = [simulate(layout, trace, by_hand(rule, ranks=2), context(ranks=2), profile) for profile in (told, plain)]
    for label, later in (("update bundle 0 (unit 0)", 0.5 * waited_for), ("offload bundle 0 (unit 0)", 0.0)):
        begun = [next(e.start_s for e in found.events if e.label == label) for found in times]
        assert begun[0] - begun[1] == pytest.approx(later, abs=1e-6)
    assert times[0].bounds_s["issue"] - times[1].bounds_s["issue"] == pytest.approx(1.0)
    assert simulated(by_hand(rule), **rates()).events == simulated(by_hand(rule), **rates(exchange_s=0.5)).events  # alone


def test_what_the_node_shares_is_divided_by_its_ranks() -> None:
    alone = simulated(by_hand(), **rates())
    crowded = simulated(by_hand(ranks=4), ranks=4, devices=4, **rates())
    assert crowded.busy_s["cpu"] == pytest.approx(alone.busy_s["cpu"])  # a quarter of the shard at a quarter of the rate
    narrow = simulated(by_hand(ranks=4), ranks=4, devices=4, **rates(node_copy_bytes_per_s=BYTES / 4))
    assert narrow.busy_s["h2d"] == pytest.approx(0.5 + 4.0)  # a quarter of the bytes at a sixteenth of the rate


def test_copies_may_be_one_queue() -> None:
    """H3T's three streams: calculation, GPU to GPU, and host copies in both directions."""
    layout = layout_of([(1000, [unit]) for unit in range(4)])
    trace = trace_of(layout, seconds=0.1)
    plan = planned(Case(layout, trace, context()), prefetch=2, spare=2 * BYTES, rule=UpdateRule.WHEN_REDUCED)
    slow = machine(h2d_bytes_per_s=BYTES, d2h_bytes_per_s=BYTES)
    apart = simulate(layout, trace, plan, context(), slow)
    together = simulate(layout, trace, replace(plan, one_copy_queue=True), context(), slow)
    copies = sorted((e.start_s, e.start_s + e.duration_s) for e in together.events if e.lane in ("h2d", "d2h"))
    assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(copies))
    assert together.step_time_s > apart.step_time_s
    assert together.step_time_s >= together.bounds_s["pcie"] - 1e-9
    assert together.bounds_s["pcie"] == pytest.approx(together.busy_s["h2d"] + together.busy_s["d2h"])
    assert apart.bounds_s["pcie"] < together.bounds_s["pcie"]
    by_start = sorted((e for e in together.events if e.lane in ("h2d", "d2h")), key=lambda e: e.start_s)
    issued = [o.label for o in expand(layout, trace, plan, context()).bare if o.lane in COPY_LANES and o.bytes]
    assert [e.label for e in by_start] == issued


def check_floor(found: Simulation, trace: Trace) -> None:
    for what in (found.busy_s, found.bounds_s):
        for name, seconds in what.items():
            assert found.step_time_s >= seconds * (1 - 1e-6) - 1e-9, name
    assert found.step_time_s >= sum(trace.compute_time_s[:-1]) * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(cases(ranks=True), plans, st.integers(0, 3))
def test_no_step_beats_its_lanes_and_memory_is_the_timelines(case: Case, choices: dict[str, object], speed: int) -> None:
    plan = planned(case, **choices)  # type: ignore[arg-type]
    rate = 10.0 ** (speed + 4)
    names: dict[str, Any] = dict.fromkeys(BANDWIDTHS, rate)
    profile = machine(devices=2, **names)
    found = simulate(case.layout, case.trace, plan, case.context, profile)
    check_floor(found, case.trace)
    assert found.memory == timeline(case.layout, case.trace, plan, case.context)
    schedule = expand(case.layout, case.trace, plan, case.context)
    assert step_time_of(schedule, profile) == found.step_time_s
    assert [o._replace(waits=(), room_waits=(), previous_waits=()) for o in schedule.operations] == list(schedule.bare)


@pytest.mark.parametrize("name", ["h100-80g-x1", "h100-80g-x4", "hai-pcie-a100-40g-x8", "h3t-a100-40g-x64"])
@pytest.mark.parametrize("rule", UpdateRule)
def test_more_bandwidth_never_makes_a_step_slower(name: str, rule: UpdateRule) -> None:
    """All bandwidths together, on the host or between devices, at several speeds of compute: copies or Adam may bind."""
    profile = hardware.load(name)
    ranks = min(profile.devices, 8)
    layout = layout_of([(200_000, [unit]) for unit in range(8)], ranks=ranks)
    for seconds in (1e-4, 1e-3, 1e-2):
        trace = trace_of(layout, seconds=seconds)
        case = Case(layout, trace, context(ranks=ranks))
        plan = planned(case, prefetch=3, spare=2 * layout.bundle_bytes(0), on_device=frozenset({0}), rule=rule)
        times = [
            simulate(layout, trace, plan, case.context, scaled(profile, BANDWIDTHS, factor)).step_time_s
            for factor in (0.5, 1.0, 1.3, 2.0, 8.0)
        ]
        assert times == sorted(times, reverse=True)


def test_a_trace_of_longer_computation_takes_longer() -> None:
    layout, trace = one_bundle()
    longer = replace(trace, compute_time_s=tuple(2 * s for s in trace.compute_time_s))
    short, long = (simulate(layout, t, by_hand(), context(), machine(**rates())).step_time_s for t in (trace, longer))
    assert long == pytest.approx(short + 3, rel=1e-6)
