"""What tokens take on their way to experts of other ranks: bytes of a forecast are those of runs, and time is by the link."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise, product
from typing import Any, Literal

import pytest

from models import registry
from models.loss import token_loss
from models.objective import OBJECTIVES
from models.shape import ModelShape
from systems.planning import hardware
from systems.planning.clock.clocks import Claim, TimedJob, run
from systems.planning.clock.rates import DEVICE_LINK, NETWORK, THROUGH_HOST, Rates
from systems.planning.clock.simulator import EXCHANGE, clocked, costs_of, simulation_of
from systems.planning.clock.work import Interval, interval_seconds
from systems.planning.hardware import Count, HardwareProfile, SourcedNumber
from systems.planning.plan import LaneKind
from systems.planning.step.operations import Work
from systems.prediction.forecast import Forecast, Observations, Question, _PlansByBudget, forecast
from tests.systems.every import STRATEGIES
from tests.systems.experts import STEPS, on_ranks
from tests.systems.models_small import tokens
from tests.systems.test_ranks import objective_loss

MODELS = ("pr-moe-tiny", "t5-moe-tiny")
SHARED = ((2, 2), (4, 2), (4, 4))  # ranks, and how many share one set
DEVICE, HOST = 1 << 30, 8 << 30
FACTOR, WIDTH = 1.25, 128  # of both models
Recompute = Literal["none", "full"]


def mixture(model: str, expert_ranks: int = 1, expert_rank: int = 0) -> ModelShape:
    return replace(registry.resolve(model), expert_ranks=expert_ranks, expert_rank=expert_rank)  # type: ignore[call-arg]


@cache
def seen(model: str, expert_ranks: int) -> Observations:
    shape = mixture(model, expert_ranks)
    return Observations(registry.build(shape), partial(token_loss, objective=shape.objective))


def asked(profile: HardwareProfile, ranks: int, expert_ranks: int, recompute: Recompute, **given: Any) -> Question:
    work: dict[str, Any] = {"batch_size": 2, "seq_len": 16, "dtype": "fp32"} | given
    where: dict[str, Any] = {"profile": profile, "device_memory": DEVICE, "host_memory": HOST}
    return Question(ranks=ranks, recompute=recompute, expert_ranks=expert_ranks, **where, **work)


def planned(model: str, question: Question, strategy: str = "elixir") -> Forecast:
    system = STRATEGIES[strategy]
    return forecast(system, system.Options(), question, seen(model, question.expert_ranks))


@pytest.mark.parametrize(("model", "shared", "recompute"), list(product(MODELS, SHARED, ("none", "full"))))
@pytest.mark.one_in(6)
def test_a_forecast_has_the_bytes_of_a_run(model: str, shared: tuple[int, int], recompute: Recompute) -> None:
    (ranks, expert_ranks), accumulate, shape = shared, 2, mixture(model)
    found = on_ranks(
        STRATEGIES["elixir"],
        ranks,
        expert_ranks,
        accumulate=accumulate,
        recompute=recompute,
        build=lambda shared, which: registry.build(mixture(model, shared, which)),
        loss=partial(objective_loss, shape),
        initial_weights=registry.initial_weights(shape, 0),
    )
    windows = tokens(1, 1)[0, 0]
    ids = OBJECTIVES[shape.objective].examples(windows, keys=range(len(windows)), vocab_size=shape.vocab_size)["input_ids"]
    given = {"batch_size": ids.shape[0], "seq_len": ids.shape[1], "accumulate": accumulate}
    question = asked(hardware.load("h100-80g-x4"), ranks, expert_ranks, recompute, **given)
    forecast_bytes = planned(model, question).simulation.bytes[EXCHANGE]
    assert [run.counters["exchange_bytes"] for run in found] == [STEPS * forecast_bytes] * ranks


def slots(experts: int, tokens: int) -> int:
    return experts * max(4, math.ceil(FACTOR * tokens / experts))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_each_mixture_goes_out_and_back_and_so_do_its_gradients(recompute: Recompute) -> None:
    """By hand: two of each in four mixtures of four experts, and of recomputed blocks twice of the forward's."""
    question = asked(hardware.load("h100-80g-x4"), 4, 4, recompute)
    passes = 4 if recompute == "none" else 6
    by_hand = 4 * passes * slots(4, 32) * WIDTH * 4 * 3 // 4
    assert planned("t5-moe-tiny", question).simulation.bytes[EXCHANGE] == by_hand


def test_without_divided_experts_nothing_is_exchanged() -> None:
    found = planned("t5-moe-tiny", asked(hardware.load("h100-80g-x4"), 4, 1, "none"))
    assert EXCHANGE not in found.simulation.bytes


# ---- rates

SIZE = 10**9


def test_within_a_node_it_goes_as_a_gather_does() -> None:
    measured = hardware.load("h200-141g-x2")
    assert measured.gathers_by_size is not None
    link = Rates(measured, 2).link_of(2)
    assert link.swap_s(SIZE) == pytest.approx(SIZE / measured.gathers_by_size.best)
    small = 1 << 19
    assert link.swap_s(small) == pytest.approx(small / dict(measured.gathers_by_size.points)[small])
    profile = hardware.load("angel-a100-40g-x8")
    assert profile.device_link_bytes_per_s is not None
    assert Rates(profile, 8).link_of(8).swap_rate == profile.device_link_bytes_per_s.value


@pytest.mark.parametrize(("expert_ranks", "near"), [(64, 8), (16, 8), (4, 4), (2, 2), (12, 4), (3, 1)])
def test_between_nodes_all_devices_of_one_share_its_network(expert_ranks: int, near: int) -> None:
    """By hand, of a rank with `near` ranks of its group on its node."""
    profile = hardware.load("angel-a100-40g-x256")
    assert profile.network_bytes_per_s is not None and profile.device_link_bytes_per_s is not None
    ranks = 192
    part = SIZE / (expert_ranks - 1)
    there = (expert_ranks - near) * part * 8 / profile.network_bytes_per_s.value
    here = (near - 1) * part / profile.device_link_bytes_per_s.value
    fixed = math.ceil(math.log2(expert_ranks)) * profile.copy_latency_s.value
    assert Rates(profile, ranks).link_of(expert_ranks).swap_s(SIZE) == pytest.approx(max(there, here) + fixed)


def test_it_is_time_of_compute() -> None:
    profile = hardware.load("h100-80g-x4")
    work: dict[str, Any] = {"matmul_flops": 10**12, "matmul_bytes": 10}
    alone, seconds = (interval_seconds(profile, "bf16", ranks=4, expert_ranks=shared) for shared in (1, 4))
    link = Rates(profile, 4).link_of(4)
    swaps = (SIZE, SIZE // 7)
    assert seconds(Interval(**work)) == alone(Interval(**work))
    assert seconds(Interval(**work, swaps=swaps)) == pytest.approx(alone(Interval(**work)) + sum(map(link.swap_s, swaps)))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.one_in(4)
def test_no_step_is_shorter_than_its_all_to_alls(strategy: str) -> None:
    """On a link so slow that nothing else counts. They can hide collectives and copies, and nothing hides them."""
    slow, slower = (
        hardware.load("angel-a100-40g-x8").model_copy(
            update={"device_link_bytes_per_s": SourcedNumber(value=rate, source="of this test")}
        )
        for rate in (2e6, 1e6)
    )
    found = [planned("t5-moe-tiny", asked(each, 8, 2, "full"), strategy).simulation for each in (slow, slower)]
    size = found[0].bytes[EXCHANGE]
    assert found[0].bounds_s["compute"] > size / 2e6 and found[1].bounds_s["compute"] > size / 1e6
    assert found[1].bounds_s["compute"] - found[0].bounds_s["compute"] == pytest.approx(size / 2e6)
    assert all(each.step_time_s >= each.bounds_s["compute"] * (1 - 1e-9) for each in found)


def test_without_a_link_they_share_the_host_s_with_copies() -> None:
    profile = hardware.load("elixir-a100-80g-pcie-x4")
    assert profile.device_link_bytes_per_s is None
    question, system = asked(profile, 4, 4, "none"), STRATEGIES["elixir"]
    plan = _PlansByBudget(system, system.Options(), question, seen("t5-moe-tiny", 4)).at(DEVICE)
    schedule = plan.schedule()  # type: ignore[union-attr]
    costs = costs_of(schedule, profile)
    swapping = [(o, costs.job(o, ())) for o in schedule.operations if o.kind is Work.COMPUTE and o.bytes]
    assert sum(o.bytes for o, _ in swapping) == sum(plan.trace.exchange_bytes)  # type: ignore[union-attr]
    rate = Rates(profile, 4).link_of(4).swap_rate
    for operation, job in swapping:
        assert job.flow_bytes == operation.bytes and job.claims == THROUGH_HOST
        assert Claim("host-link", units=2.0) in job.claims, "out and in at once"
        assert job.fixed_s + job.flow_bytes / job.rate == pytest.approx(operation.seconds)
        assert job.rate == rate and job.fixed_s > 0
    linked = profile.model_copy(update={"device_link_bytes_per_s": SourcedNumber(value=rate, source="of this test")})
    for operation, _ in swapping:
        job = costs_of(schedule, linked).job(operation, ())
        assert job.fixed_s + job.flow_bytes / job.rate == pytest.approx(operation.seconds)
        assert job.claims == (Claim(DEVICE_LINK),), "nothing of the host's"
    made = simulation_of(schedule, plan.trace, plan.plan, profile)  # type: ignore[union-attr]
    assert made.bounds_s["compute"] == pytest.approx(sum(plan.trace.compute_time_s), rel=0.01)  # type: ignore[union-attr]


# ---- beside collectives


def passing(question: Question, strategy: str, resource: str) -> list[tuple[float, float, float]]:
    """Of a step's jobs that claim it: begin, end, and what they take of it in all."""
    system, known = STRATEGIES[strategy], seen("t5-moe-tiny", question.expert_ranks)
    plan = _PlansByBudget(system, system.Options(), question, known).at(question.device_memory)
    schedule = plan.schedule()  # type: ignore[union-attr]
    timed = clocked(schedule.operations, len(schedule.demand), costs_of(schedule, question.profile))
    claimed = {o.ticket: sum(j.flow_bytes * c.units for c in j.claims if c.resource == resource) for o, j in timed.work}
    return [(span.start_s, span.end_s, claimed[o.ticket]) for o, span in timed.operations if claimed[o.ticket]]


def overlap(jobs: list[tuple[float, float, float]]) -> bool:
    ordered = sorted(jobs)
    return any(later[0] < earlier[1] for earlier, later in pairwise(ordered))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("nodes", "resource"), [(1, DEVICE_LINK), (2, NETWORK)])
@pytest.mark.one_in(4)
def test_no_more_passes_in_a_time_than_the_rate_allows(strategy: str, nodes: int, resource: str) -> None:
    """Collectives go on while tokens are on their way; what lies within any time is at most what fits into it."""
    field = "device_link_bytes_per_s" if resource is DEVICE_LINK else "network_bytes_per_s"
    rate = 2e6  # so slow that nothing else counts
    counts = {"nodes": Count(value=nodes, source="of this test"), "devices_per_node": Count(value=2, source="of this test")}
    slow = {field: SourcedNumber(value=rate, source="of this test")}
    profile = hardware.load("angel-a100-40g-x16").model_copy(update=counts | slow)
    jobs = passing(asked(profile, 2 * nodes, 2 * nodes, "full"), strategy, resource)
    assert overlap(jobs), "void: nothing runs beside anything"
    for begin, _, _ in jobs:
        within, last = 0.0, begin
        for first, end, size in sorted(jobs, key=lambda job: job[1]):
            if first >= begin:
                within, last = within + size, end
                assert within <= rate * (last - begin) * (1 + 1e-9)


def test_what_collectives_take_beside_each_other_s_tokens_by_hand() -> None:
    """A gather and an all-to-all that each have a port's measured rate take, both at once, as long as their bytes over what the
    port can; alone, as long as ever."""
    profile = hardware.load("h200-141g-x2")
    assert profile.device_link_bytes_per_s is not None
    link, port = Rates(profile, 2).link, profile.device_link_bytes_per_s.value
    gather = TimedJob("link", flow_bytes=SIZE, rate=link.rate(LaneKind.GATHER), claims=link.claims)
    swap = TimedJob("compute", flow_bytes=SIZE, rate=link.swap_rate, claims=link.swap_claims)
    resources = Rates(profile, 2).resources()
    assert [run([one], resources)[0].end_s for one in (gather, swap)] == [SIZE / gather.rate, SIZE / swap.rate]
    assert [span.end_s for span in run([gather, swap], resources)] == pytest.approx([2 * SIZE / port] * 2)
