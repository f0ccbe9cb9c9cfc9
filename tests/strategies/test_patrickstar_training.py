"""Training under PatrickStar: resident's bits at half of its memory, the traced curve, memory as promised, departures."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

from models.data import open_dataset
from models.loss import count_labels, token_loss
from models.registry import build as build_registered
from models.registry import initial_weights, resolve
from systems.planning.trace import Phase
from systems.strategies.patrickstar import STRATEGY
from systems.strategies.patrickstar.options import PatrickStarOptions, PatrickStarStatistics, Variant
from systems.substrate.system import ManagedSystem
from systems.system import Engine
from tests.planning.races import find_races, issued_operations
from tests.systems.models_plain import CASES
from tests.systems.models_plain import build as build_plain
from tests.systems.models_small import build, next_token_loss, tokens
from tests.systems.running import (
    RESIDENT,
    Run,
    assert_equal,
    evict_at_once,
    finished,
    managed,
    one_step,
    settings,
    start,
    train,
    train_as,
)
from tests.systems.setups import in_turn

PATRICKSTAR = ManagedSystem(STRATEGY)
STEPS = 3
SETUPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate and clip": {"accumulate": 2, "clip": 1.0},
    "recompute": {"recompute": "full"},
    "bf16": {"dtype": "bf16", "clip": 1.0},
}


@cache
def reference(model: str, setup: str) -> Run:
    given = dict(SETUPS[setup])
    return train_as(RESIDENT, build(model), tokens(STEPS, given.pop("accumulate", 1)), **given)


def under(model: str, setup: str, share: float, **options: Any) -> Run:
    given = dict(SETUPS[setup])
    budget = int(share * (reference(model, setup).memory.device_peak_bytes or 0)) + 1
    ids = tokens(STEPS, given.pop("accumulate", 1))
    return train_as(
        PATRICKSTAR, build(model), ids, PatrickStarOptions(**options), device_memory=budget, log_events=True, **given
    )


def told(run: Run) -> PatrickStarStatistics:
    statistics = run.engine.statistics()
    assert isinstance(statistics, PatrickStarStatistics)
    return statistics


def check_bytes(run: Run) -> None:
    """The pool of planned steps peaked where the plan said, nothing raced, the budget held."""
    engine: Any = run.engine
    plan = engine.cursor.plan
    assert plan is not None
    log = [entry for entry in engine.log.bytes if entry.tier == "device"]
    begin = max(i for i, entry in enumerate(log) if entry.label == "test: last step")
    assert max(entry.pool for entry in log[begin:]) == plan.predicted_model_peak_bytes
    assert max(entry.live for entry in log[begin:]) <= plan.predicted_device_peak_bytes
    assert (run.memory.device_peak_bytes or 0) <= (run.memory.device_budget_bytes or 0)
    assert find_races(issued_operations(engine.log.operations)) == []


def mark_last_step(step: int, engine: Any) -> None:
    if step == STEPS - 1:
        managed(engine).device.account.add_pool(0, "test: last step")


@pytest.mark.parametrize(
    ("setup", "variant"), in_turn(SETUPS, [("base",), ("paper",), ("spongebob",), ("static-partition",), ("osc",)], each=2)
)
@pytest.mark.one_in(2)
def test_half_of_residents_memory_gives_its_bits(setup: str, variant: Variant) -> None:
    given = dict(SETUPS[setup])
    expected = reference("opt", setup)
    budget = int(0.5 * (expected.memory.device_peak_bytes or 0))
    ids = tokens(STEPS, given.pop("accumulate", 1))
    asked = settings(device_memory=budget, accumulate=ids.shape[1], log_events=True, **given)
    engine = start(PATRICKSTAR, build("opt"), asked, PatrickStarOptions(variant=variant))
    run = train(engine, ids, each_step=mark_last_step)
    assert_equal(expected, run)
    assert run.per_step[-1]["h2d_bytes"] > 0, "void: nothing moved"
    assert run.per_step[-1]["on_demand_fetches"] == 0
    check_bytes(run)
    statistics = told(run)
    assert (statistics.optimizer_share_on_device or 0) > 0 or variant in ("static-partition", "osc")
    if ids.shape[1] == 1:
        assert statistics.gradients == "in the parameters' chunks"
        assert run.counters.get("gradient_detours", 0) == 0
    else:
        assert "micro-batches" in statistics.gradients


@pytest.mark.parametrize("prefetch", ["off", 2])
def test_prefetching_changes_no_bit(prefetch: Any) -> None:
    run = under("gpt2", "plain", 0.36, prefetch=prefetch)
    assert_equal(reference("gpt2", "plain"), run)


@pytest.mark.parametrize("setup", ["plain", "recompute", "bf16"])
def test_with_enough_memory_nothing_moves(setup: str) -> None:
    run = under("opt", setup, 1.03)  # parameters start on 256-byte boundaries, which a tiny model feels in bf16
    expected = reference("opt", setup)
    assert_equal(expected, run)
    assert run.per_step[-1]["h2d_bytes"] == run.per_step[-1]["d2h_bytes"] == 0
    peak = expected.memory.device_peak_bytes or 1
    assert abs((run.memory.device_peak_bytes or 0) - peak) <= 0.05 * peak


@cache
def registered(name: str, system: str, budget: int | None, accumulate: int, clip: float) -> Run:
    """3 steps of a size of the registry on random tokens."""
    shape = resolve(name, {"num_layers": 3})
    data = open_dataset("synthetic", vocab_size=shape.vocab_size, seed=3, objective=shape.objective)
    loss_of = partial(token_loss, objective=shape.objective)
    asked = settings(
        initial_weights=initial_weights(shape, 1), accumulate=accumulate, clip=clip, device_memory=budget or (1 << 30)
    )
    chosen: Any = RESIDENT if system == "resident" else PATRICKSTAR
    engine, losses = start(chosen, build_registered(shape), asked), []
    for step in range(3):
        batches = [data.batch(step, micro_step=m, batch_size=2, seq_len=32) for m in range(accumulate)]
        count, total = sum(count_labels(b, objective=shape.objective) for b in batches), 0.0
        for batch in batches:
            loss = loss_of(engine, batch, count)
            engine.backward(loss)
            total += loss.item()
        engine.step()
        losses.append(total)
    return finished(engine, losses)


@pytest.mark.parametrize(
    ("accumulate", "clip"), [pytest.param(1, 0.0, id="plain"), pytest.param(2, 1.0, id="clipped", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", ["opt-tiny", "gpt-tiny", "bert-tiny", "t5-tiny", "albert-tiny"])
@pytest.mark.one_in(2)
def test_every_family_at_half_of_residents_memory(name: str, accumulate: int, clip: float) -> None:
    expected = registered(name, "resident", None, accumulate, clip)
    budget = (expected.memory.device_peak_bytes or 0) // 2
    run = registered(name, "patrickstar", budget, accumulate, clip)
    assert_equal(expected, run)
    assert run.counters["h2d_bytes"] > 0


def with_one_bad_step(system: Any, budget: int) -> Run:
    """The gradients of the third step are not finite."""
    calls = [0]

    def loss(model: Any, ids: torch.Tensor, count: int) -> torch.Tensor:
        calls[0] += 1
        value = next_token_loss(model, ids, count)
        return value * torch.inf if calls[0] == 3 else value

    engine = start(system, build("opt"), settings(device_memory=budget, dtype="bf16", clip=1.0))
    return train(engine, tokens(5, 1), loss)


@pytest.mark.parametrize("share", [0.4, 0.6])
def test_a_step_that_is_skipped_changes_nothing_though_gradients_were_over_the_parameters(share: float) -> None:
    expected = with_one_bad_step(RESIDENT, 1 << 30)
    run = with_one_bad_step(PATRICKSTAR, int(share * (expected.memory.device_peak_bytes or 0)))
    assert repr(run.losses) == repr(expected.losses)
    assert run.skipped == expected.skipped == [False, False, True, False, False]
    assert all(torch.equal(value, run.parameters[name]) for name, value in expected.parameters.items())


@pytest.mark.parametrize("share", [0.4, 1.03])
def test_updates_during_backward_give_the_same_bits(share: float) -> None:
    run = under("opt", "recompute", share, nonfinite="stop")
    assert_equal(reference("opt", "recompute"), run)
    assert find_races(issued_operations(run.engine.log.operations)) == []  # type: ignore[attr-defined]


def test_spilled_chunks_are_written_back_and_counted() -> None:
    run = under("gpt2", "plain", 0.36)
    assert_equal(reference("gpt2", "plain"), run)
    statistics, layout = told(run), run.engine.layout  # type: ignore[attr-defined]
    assert statistics.margin_chunks is not None
    assert statistics.margin_chunks < 0 < (statistics.written_back_bytes_per_step or 0)
    gradients = sum(layout.bundle_bytes(b.index) for b in layout.bundles if b.trainable)
    assert run.per_step[-1]["d2h_bytes"] == gradients + (statistics.written_back_bytes_per_step or 0)
    assert run.per_step[-1]["h2d_bytes"] == statistics.fetched_bytes_per_step


# ---- user models


@cache
def plain_reference(case: str) -> Run:
    return train(start(RESIDENT, build_plain(case), settings(dtype="bf16", clip=1.0)), tokens(STEPS, 1), CASES[case].loss)


@pytest.mark.parametrize("variant", ["base", pytest.param("spongebob", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.one_in(3)
def test_user_models_at_half_of_residents_memory(case: str, variant: Variant) -> None:
    expected = plain_reference(case)
    budget = int(0.5 * (expected.memory.device_peak_bytes or 0))
    asked = settings(dtype="bf16", clip=1.0, device_memory=budget)
    engine = start(PATRICKSTAR, build_plain(case), asked, PatrickStarOptions(variant=variant))
    assert_equal(expected, train(engine, tokens(STEPS, 1), CASES[case].loss))


@pytest.mark.parametrize("case", ["stack", "root-owner", "called-twice", "late-leaf", "reentrant-rounds"])
def test_nothing_is_used_after_its_release(case: str) -> None:
    budget = int(0.6 * (plain_reference(case).memory.device_peak_bytes or 0))
    engine = start(PATRICKSTAR, build_plain(case), settings(dtype="bf16", clip=1.0, device_memory=budget))
    evict_at_once(engine)
    assert_equal(plain_reference(case), train(engine, tokens(STEPS, 1), CASES[case].loss))


# ---- memory


class Ramp(nn.Module):
    """Block i leaves WIDTHS[i] floats a row for its backward, and next to nothing else."""

    WIDTHS = (64, 16, 128, 32)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Widen(width) for width in self.WIDTHS])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Widen(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.gain).exp().sum(1, keepdim=True)  # exp keeps its result for backward; x is one float a row


def test_the_traced_curve_is_that_of_the_activations() -> None:
    rows = 8192

    def loss(model: Any, ids: torch.Tensor, count: int) -> torch.Tensor:
        return model(torch.linspace(-1, 1, rows).unsqueeze(1)).square().mean()

    engine: Any = start(PATRICKSTAR, Ramp(), settings(), PatrickStarOptions(prefetch=0))
    run = train(engine, tokens(2, 1), loss)
    plan, curve = engine.cursor.plan, told(run).non_model_bytes
    assert curve is not None
    at = {(m.phase, m.unit): n for m, n in zip(plan.signature, curve, strict=True)}
    kept = 0
    for unit, width in enumerate(Ramp.WIDTHS):
        before, kept = kept, kept + rows * width * 4
        inside = before + 2 * rows * width * 4  # the product, and its exponential
        assert at[Phase.FORWARD_ENTER, unit] == pytest.approx(inside, rel=0.05)
        assert at[Phase.FORWARD_EXIT, unit] == pytest.approx(kept, rel=0.05)
    for unit, width in reversed(list(enumerate(Ramp.WIDTHS))):
        assert at[Phase.BACKWARD_ENTER, unit] >= kept
        assert at[Phase.BACKWARD_ENTER, unit] <= (kept + 2 * rows * width * 4) * 1.05
        kept -= rows * width * 4
        if unit:
            assert at[Phase.BACKWARD_EXIT, unit] == pytest.approx(kept, rel=0.05)
    assert told(run).non_model_peak_bytes == max(curve)


def test_chunks_take_the_warm_up_share_and_no_more() -> None:
    budget = 4 << 20
    options = PatrickStarOptions(warmup_share=0.1)
    engine: Any = start(PATRICKSTAR, build("opt"), settings(device_memory=budget, log_events=True), options)
    one_step(engine, tokens(1, 1)[0])
    layout, log = engine.layout, engine.log
    largest = max(sum(map(layout.bundle_bytes, bundles)) for bundles in layout.bundles_of_unit.values())
    tied = sum(layout.bundle_bytes(b.index) for b in layout.bundles if b.index not in layout.in_place)
    entries = [entry for entry in log.bytes if entry.tier == "device"]
    first_plan = next(i for i, entry in enumerate(entries) if entry.label.startswith("optimizer state"))
    warm_up = max(entry.pool for entry in entries[:first_plan])  # fetches for the plan come after its optimizer chunks
    assert warm_up <= max(0.1 * budget, largest) + 2 * tied
    assert max(entry.pool for entry in entries) > 0.2 * budget
    assert engine.counters()["evictions"] > 0
    engine.close()


def test_model_data_takes_fourteen_bytes_a_parameter() -> None:
    """Each byte counted once: what the device holds of parameters is a copy of host memory, and is told as such."""
    run = under("opt", "bf16", 0.5, variant="osc", run_ahead=False)
    statistics = told(run)
    numel = sum(p.numel() for p in run.parameters.values())
    layout = run.engine.layout  # type: ignore[attr-defined]
    tied = sum(layout.bundle_bytes(b.index) for b in layout.bundles if b.index not in layout.in_place)
    allowed = 14.1 / statistics.utilization
    assert run.memory.device_model_peak_bytes is not None
    pages = 4 * 4096
    assert 0 < (run.memory.host_peak_bytes or 0) <= allowed * numel + pages
    assert run.memory.device_model_peak_bytes - tied <= layout.param_bytes  # copies; the tied weight has a range beside
    assert (statistics.model_bytes_per_parameter or 0) * numel <= allowed * numel + tied
    assert statistics.copied_bytes == 0, "nothing is fetched ahead of a step"
    assert 0 < (told(under("opt", "bf16", 0.5)).copied_bytes or 0) <= layout.param_bytes


# ---- departures (cases C03 and C04)


def train_lengths(system: Any, lengths: Sequence[int], budget: int, evaluate: Sequence[int] = ()) -> Run:
    """One step a length, of two sequences; evaluation of another batch size before the steps in `evaluate`."""
    engine: Engine = start(system, build("opt"), settings(device_memory=budget, clip=1.0))
    losses = []
    for step, length in enumerate(lengths):
        if step in evaluate:
            engine.eval()
            with torch.no_grad():
                losses.append(next_token_loss(engine, tokens(1, 1, batch=3, length=24, seed=9)[0, 0], 69).item())
            engine.train()
        losses.append(one_step(engine, tokens(1, 1, length=length, seed=step)[0]))
    return finished(engine, losses)


@pytest.mark.parametrize("lengths", [(8, 8, 60, 16, 48, 48), (4, 32, 32, 32)])
def test_other_lengths_are_made_room_for(lengths: tuple[int, ...]) -> None:
    """The budget just fits the longest when chunks are evicted; the warm-up step has seen the shortest."""
    expected = train_lengths(RESIDENT, lengths, 1 << 30)
    budget = int(0.6 * (expected.memory.device_peak_bytes or 0))
    run = train_lengths(PATRICKSTAR, lengths, budget)
    assert_equal(expected, run)
    counted = ("fallbacks", "retraces", "demotions", "on_demand_fetches", "evictions")
    assert sum(run.counters.get(name, 0) for name in counted) > 0
    assert (run.memory.device_peak_bytes or 0) <= budget


def test_evaluation_between_steps_leaves_the_plan_in_force() -> None:
    lengths = (16,) * 5
    expected = train_lengths(RESIDENT, lengths, 1 << 30, evaluate=(2, 4))
    budget = int(0.55 * (expected.memory.device_peak_bytes or 0))
    run = train_lengths(PATRICKSTAR, lengths, budget, evaluate=(2, 4))
    assert_equal(expected, run)
    assert run.counters["fallbacks"] == run.counters.get("demotions", 0) == 0
