"""H3T on the emulated device: any mix of switches trains as resident does, bit for bit, within its budget."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.data import open_dataset
from models.loss import count_labels, token_loss
from models.registry import build, initial_weights, resolve
from systems.errors import BudgetError
from systems.planning.plan import Tier
from systems.planning.trace import Trace
from systems.strategies.h3t import STRATEGY, profiling
from systems.strategies.h3t.options import H3TOptions, H3TStatistics
from systems.strategies.h3t.profiling import read_profile
from systems.strategies.h3t.switches import NAMES
from systems.substrate.engine import ManagedEngine
from systems.substrate.system import ManagedSystem
from tests.systems.models_plain import Stack, squared_error
from tests.systems.models_small import tokens
from tests.systems.running import RESIDENT, Run, assert_equal, finished, one_step, start
from tests.systems.running import settings as settings_of
from tests.systems.setups import Setup, reference

H3T = ManagedSystem(STRATEGY)
STEPS = 3


def trained(system: Any, name: str, chosen: H3TOptions | None = None, **given: Any) -> Run:
    """A size of the registry, of three blocks a stack, on random tokens."""
    shape = resolve(name, {"num_layers": 3})
    data = open_dataset("synthetic", vocab_size=shape.vocab_size, seed=3, objective=shape.objective)
    engine = start(system, build(shape), settings_of(initial_weights=initial_weights(shape, 1), **given), chosen)
    losses: list[float] = []
    per_step: list[dict[str, int]] = []
    for step in range(STEPS):
        batch, before = data.batch(step, micro_step=0, batch_size=2, seq_len=16), engine.counters()
        loss = token_loss(engine, batch, count_labels(batch, objective=shape.objective), objective=shape.objective)
        engine.backward(loss)
        losses.append(loss.item())
        engine.step()
        per_step.append({key: value - before.get(key, 0) for key, value in engine.counters().items()})
    return finished(engine, losses, per_step)


@cache
def resident(name: str) -> Run:
    return trained(RESIDENT, name)


def told(run: Run) -> H3TStatistics:
    assert isinstance(run.engine, ManagedEngine)
    found = run.engine.statistics()
    assert isinstance(found, H3TStatistics)
    return found


def options(**given: Any) -> H3TOptions:
    return H3TOptions(**({"profile_steps": 2} | given))


@pytest.mark.parametrize(
    "name", ["opt-tiny", "t5-tiny", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bert-tiny", "albert-tiny"))]
)
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10_000), share=st.sampled_from([0.5, 0.7, 1.0]))
def test_any_mix_of_switches_changes_no_bit(name: str, seed: int, share: float) -> None:
    peak = resident(name).memory.device_peak_bytes or 0
    budget = int(share * peak)
    run = trained(H3T, name, options(solver="drawn", profile_steps=1), seed=seed, device_memory=budget)
    assert_equal(resident(name), run)
    assert (run.memory.device_peak_bytes or 0) <= budget
    assert not run.per_step[-1]["fallbacks"]
    ratios = told(run).switch_on_ratios
    assert ratios is not None and set(ratios) == set(NAMES)


@pytest.mark.parametrize("solver", ["best", "on", "off", "greedy", "manual", "random"])
@pytest.mark.one_in(2)
def test_every_solver_trains_within_its_budget(solver: str) -> None:
    setup = Setup("opt", clip=0.5)
    budget = int(0.5 * (reference(setup).memory.device_peak_bytes or 0))
    run = setup.run(H3T, budget, options(solver=solver, samples=200))
    assert_equal(reference(setup), run)
    assert (run.memory.device_peak_bytes or 0) <= budget
    predicted = predicted_peak(run)
    assert predicted <= budget


def predicted_peak(run: Run) -> int:
    assert isinstance(run.engine, ManagedEngine)
    plan = run.engine.cursor.plan
    assert plan is not None and plan.predicted_device_peak_bytes is not None
    return plan.predicted_device_peak_bytes


@pytest.mark.parametrize(
    "setup", [Setup("gpt2", accumulate=2), Setup("opt", sharing="half-frozen"), Setup("opt", dtype="bf16")]
)
@pytest.mark.one_in(2)
def test_micro_batches_frozen_and_tied_parameters(setup: Setup) -> None:
    budget = int(0.55 * (reference(setup).memory.device_peak_bytes or 0))
    for solver in ("best", "drawn"):
        run = setup.run(H3T, budget, options(solver=solver), seed=3)
        assert_equal(reference(setup), run)


def test_with_everything_off_the_global_offload_is_all_that_moves() -> None:
    """What moves, to the byte: one gradient down and one updated parameter up for each parameter and step."""
    setup = Setup("opt", dtype="bf16")
    run = setup.run(H3T, None, options(solver="off", variant="global-offload"))
    assert isinstance(run.engine, ManagedEngine)
    layout = run.engine.layout
    step = run.per_step[-1]
    assert step["d2h_bytes"] == step["h2d_bytes"] == layout.param_bytes
    used = sum(s.used for s in layout.segments)
    assert layout.param_bytes - 2 * used == 2 * sum(s.numel - s.used for s in layout.segments)
    assert told(run).switch_on_ratios == dict.fromkeys(NAMES, 0.0)


def test_the_optimizer_stays_on_the_device_where_it_fits() -> None:
    setup = Setup("opt")
    run = setup.run(H3T, None, options())
    assert_equal(reference(setup), run)
    assert (told(run).optimizer_share_on_device or 0) > 0
    assert isinstance(run.engine, ManagedEngine) and run.engine.cursor.plan is not None
    assert Tier.DEVICE in run.engine.cursor.plan.optimizer_tier


def test_what_the_user_wants_recomputed_is_recomputed() -> None:
    setup = Setup("opt", recompute="full")
    run = setup.run(H3T, None, options(solver="off"))
    assert_equal(reference(setup), run)
    assert (told(run).switch_on_ratios or {})["rematerialise"] == 1.0


def test_a_profile_is_kept_and_used_again(tmp_path: Path) -> None:
    setup, path = Setup("opt"), tmp_path / "deep" / "profile.json"
    first = setup.run(H3T, None, options(profile=str(path)))
    assert told(first).profiled_steps == 2
    content = json.loads(path.read_text())
    assert len(content["steps"][0]["layers"]) == 4
    again = setup.run(H3T, None, options(profile=str(path), profile_steps=50))
    assert told(again).solver is not None, "solved after the first step"
    assert_equal(reference(setup), again)
    content["steps"][0]["base"]["flushes"].reverse()
    path.write_text(json.dumps(content))
    foreign = setup.run(H3T, None, options(profile=str(path)))
    assert told(foreign).profiled_steps == 2, "of another layout, so measured anew"
    path.write_text('{"format": 1}')
    with pytest.raises(ValueError, match="steps: field required: remove the file to measure anew"):
        setup.run(H3T, None, options(profile=str(path)))


def test_all_that_a_step_s_trace_has_is_kept() -> None:
    assert profiling._Base.model_fields.keys() == {field.name for field in fields(Trace)}


def test_a_profile_that_cannot_be_written_is_refused_before_any_step(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for path in (file / "profile.json", tmp_path / ("long" * 100)):
        with pytest.raises(ValueError, match="cannot be written"):
            options(profile=str(path))
    options(profile=str(tmp_path / "new" / "profile.json"))
    assert list((tmp_path / "new").iterdir()) == []


def profile_of_one_layer() -> dict[str, Any]:
    base = {
        "moments": [["step-begin", -1, 0], ["step-end", -1, 0]],
        "non_model_bytes": [1, 2],
        "compute_time_s": [0.5, 0.0],
        "flushes": [[], [0]],
        "adopted_peak_bytes": [],
        "gradient_bytes": [3, 4],
        "recomputed": [5],
        "offloaded": [5],
        "input_bytes": [[5, 8]],
        "inputs_left": [[5], []],
    }
    return {"format": 1, "steps": [{"base": base, "layers": [5], "kept": [[5, 9]], "times": [[0.5], []], "steps": 2}]}


def fields_of(content: Any, *before: str | int) -> Iterator[tuple[str | int, ...]]:
    """Ways to everything in a file that has a name."""
    if isinstance(content, dict):
        for name, value in content.items():
            yield (*before, name)
            yield from fields_of(value, *before, name)
    elif before == ("steps",):
        yield from fields_of(content[0], *before, 0)


LEFT_OUT = object()
WRONG: tuple[Any, ...] = ("x", {}, -1, None, [None], [[]], ["x"], [-1], [float("nan")], [[-1]], [], LEFT_OUT)
MAY_BE_EMPTY = {("steps",), *(("steps", 0, "base", name) for name in ("offloaded", "input_bytes"))}
MAY_BE_LEFT_OUT = {("steps", 0, "base", name) for name in ("adopted_peak_bytes", "gradient_bytes", "inputs_left")}


def broken(way: tuple[Any, ...], wrong: object) -> str:
    content = place = profile_of_one_layer()
    for step in way[:-1]:
        place = place[step]
    if wrong is LEFT_OUT:
        del place[way[-1]]
    else:
        place[way[-1]] = wrong
    return json.dumps(content)


def test_a_broken_profile_names_the_field(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile_of_one_layer()))
    (read,) = read_profile(path)
    assert (read.base.gradient_bytes, read.kept, read.times, read.steps) == ((3, 4), {5: 9}, [[0.5], []], 2)
    for way, wrong in product(fields_of(profile_of_one_layer()), WRONG):
        path.write_text(broken(way, wrong))
        if (wrong == [] and way in MAY_BE_EMPTY | MAY_BE_LEFT_OUT) or (wrong is LEFT_OUT and way in MAY_BE_LEFT_OUT):
            read_profile(path)
            continue
        with pytest.raises(ValueError) as refused:
            read_profile(path)
        said = str(refused.value)
        assert str(path) in said and str(way[-1]) in said and "\n" not in said, (way, wrong)


def test_a_device_that_is_too_small_is_refused() -> None:
    with pytest.raises(BudgetError, match="h3t needs at least"):
        Setup("opt").run(H3T, 100_000, options())


def test_a_wrong_hardware_profile_is_named() -> None:
    with pytest.raises(ValueError, match="hardware profile"):
        options(hardware="h100-80g")


class Shorter(Stack):
    """Leaves its last block out when it is told to."""

    left_out = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[: len(self.blocks) - self.left_out]:
            x = block(x)
        return self.head(x)


def test_a_kind_of_step_met_under_another_s_plan_is_measured_with_every_switch_on_and_then_solved() -> None:
    """Its first step had layers that were not rematerialised, and one layer less: it tells too little for the cost model."""
    torch.manual_seed(0)
    model = Shorter()
    engine = start(H3T, model, settings_of(), options(profile_steps=1))
    assert isinstance(engine, ManagedEngine)
    seen = []
    for number, batch in enumerate(tokens(6, 1)):
        model.left_out = number >= 2
        before = engine.counters()["fallbacks"]
        one_step(engine, batch, squared_error)
        plan = engine.cursor.plan
        assert plan is not None
        seen.append((engine.counters()["fallbacks"] - before, plan.provisional, len(plan.rematerialise or ())))
    engine.close()
    assert seen == [(0, False, 0), (0, False, 0), (1, True, 3), (0, False, 0), (0, False, 0), (0, False, 0)]
