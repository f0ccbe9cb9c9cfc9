"""Updates that run behind the steps (Note [Lock-free]): no gradient is lost, no version is mixed, nobody waits for ever."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as asked_of_hypothesis
from hypothesis import strategies as st

import systems
from models.data import open_dataset
from models.loss import count_labels, token_loss
from models.registry import build as build_registered
from models.registry import initial_weights, resolve
from systems.device.memory import disk as disk_module
from systems.errors import BudgetError
from systems.planning import hardware
from systems.planning.clock.simulator import simulation_of
from systems.planning.step.residence import lock_free_bytes
from systems.planning.step.schedule import expand
from systems.substrate.bundle.buffered import BufferedBundle
from systems.substrate.moves.updating import UpdatingThread
from systems.system import Engine
from tests.planning.races import Race, find_races
from tests.systems.models_plain import CASES
from tests.systems.models_plain import build as plain
from tests.systems.models_small import build, next_token_loss, tokens
from tests.systems.running import (
    RESIDENT,
    Run,
    angel_ptm,
    assert_equal,
    finished,
    managed,
    one_step,
    parameters_of,
    settings,
    start,
    train,
)
from tests.systems.setups import Setup, budget_of, reference
from tests.systems.test_memory import check_segments
from tests.systems.test_ordering import as_issued, sleeps

ANGEL = angel_ptm()
SETUPS = [
    Setup("opt"),
    Setup("gpt2", "full", accumulate=2),
    Setup("opt", "non-reentrant", sharing="half-frozen", dtype="bf16"),
]


def lock_free(most: int | None, **given: Any) -> Any:
    """cache: none, so that all is updated on the host."""
    return ANGEL.Options.model_validate({"page": 16384, "cache": 0, "max_staleness": most} | given)


def begun(
    setup: Setup, most: int | None, folder: Path | None = None, jitter: Callable[[], None] | None = None, **more: Any
) -> Engine:
    """At a tight budget. folder: of a disk for all states."""
    asked: dict[str, Any] = {"dtype": setup.dtype, "accumulate": setup.accumulate, "device_memory": budget_of(setup, "tight")}
    if setup.recompute in ("none", "full"):
        asked["recompute"] = setup.recompute
    states = {} if folder is None else {"states": "disk"}
    return start(ANGEL, setup.build(), settings(**(asked | {"disk": folder} | more)), lock_free(most, **states), jitter)


def told(engine: Engine) -> Any:
    return engine.statistics()


# ---- at 0 it is synchronous


@pytest.mark.parametrize("states", ["host", "disk"])
@pytest.mark.parametrize("setup", SETUPS, ids=str)
@pytest.mark.one_in(6)
def test_at_zero_no_bit_changes(setup: Setup, states: str, tmp_path: Path) -> None:
    engine = begun(setup, 0, tmp_path if states == "disk" else None, sleeps(1, 1e-4))
    run = train(engine, tokens(3, setup.accumulate))
    assert_equal(reference(setup), run)
    statistics = told(engine)
    assert statistics.staleness_max == statistics.staleness_mean == 0
    assert statistics.updates_behind > 0, "void: nothing was updated behind the steps"


@cache
def registered(name: str, most: int | None) -> Run:
    """3 steps of a size of the registry on random tokens; most: -1 is resident."""
    shape = resolve(name, {"num_layers": 2})
    data = open_dataset("synthetic", vocab_size=shape.vocab_size, seed=3, objective=shape.objective)
    loss_of = partial(token_loss, objective=shape.objective)
    chosen: Any = RESIDENT if most == -1 else ANGEL
    budget = None if most == -1 else (registered(name, -1).memory.device_peak_bytes or 0) // 2
    asked = settings(initial_weights=initial_weights(shape, 1), device_memory=budget or 1 << 30)
    options = None if most == -1 else lock_free(most, **({"nonfinite": "stop"} if most is None else {}))
    engine, losses = start(chosen, build_registered(shape), asked, options), []
    for step in range(3):
        batch = data.batch(step, micro_step=0, batch_size=2, seq_len=32)
        loss = loss_of(engine, batch, count_labels(batch, objective=shape.objective))
        engine.backward(loss)
        losses.append(loss.item())
        engine.step()
    return finished(engine, losses)


@pytest.mark.parametrize("name", ["opt-tiny", "gpt-tiny", "bert-tiny", "t5-tiny"])
@pytest.mark.one_in(4)
def test_every_family_is_the_same_at_zero_as_without_and_as_resident(name: str) -> None:
    assert_equal(registered(name, -1), registered(name, 0))
    assert_equal(registered(name, None), registered(name, 0))


@pytest.mark.parametrize("model", ["silent", "unused-output", "rounds"])
@pytest.mark.one_in(3)
def test_gradients_that_are_missing(model: str) -> None:
    ids = tokens(4, 1)
    expected = train(start(RESIDENT, plain(model), settings()), ids, CASES[model].loss)
    engine = start(ANGEL, plain(model), settings(device_memory=400_000), lock_free(0))
    assert_equal(expected, train(engine, ids, CASES[model].loss))


def test_a_step_of_fewer_micro_batches() -> None:
    """No bundle is then updated before the step's end, and all are at once."""
    engine, whole = begun(Setup("opt", accumulate=2), 0), start(RESIDENT, build("opt"), settings(accumulate=2))
    steps = [tokens(1, 1 if seed == 3 else 2, seed=seed)[0] for seed in range(5)]
    runs = [finished(each, [one_step(each, batches) for batches in steps]) for each in (whole, engine)]
    assert_equal(*runs)


# ---- no gradient is lost, and none is counted twice


def elements(buffered: BufferedBundle, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of parameters, without what lies between them."""
    pieces = zip(buffered.stretches, tensors, strict=True)
    return [tensor[p.here].clone() for stretch, tensor in pieces for p in stretch.placements]


def key_of(buffered: BufferedBundle) -> tuple[int, int]:
    return id(buffered._behind), buffered.index


class Kept:
    """Every gradient that was added, by engine and bundle, and every sum that an update took: what each is, element by
    element.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.added: dict[tuple[int, int], list[list[torch.Tensor]]] = {}
        self.taken: dict[tuple[int, int], list[tuple[int, list[torch.Tensor]]]] = {}
        add, end = BufferedBundle.add, UpdatingThread._end

        def adding(buffered: BufferedBundle, *given: Any) -> None:
            gradients = [s.slot if s.accumulator is None else s.accumulator for s in buffered.stretches]
            self.added.setdefault(key_of(buffered), []).append(elements(buffered, gradients))
            add(buffered, *given)

        def ending(thread: UpdatingThread, bundle: Any, taken: Any, tickets: Any) -> None:
            for ticket in tickets:
                ticket.wait()
            found = taken.steps, elements(bundle, taken.tensors)
            self.taken.setdefault(key_of(bundle), []).append(found)
            end(thread, bundle, taken, tickets)

        monkeypatch.setattr(BufferedBundle, "add", adding)
        monkeypatch.setattr(UpdatingThread, "_end", ending)

    def check(self) -> int:
        """The most that one update took."""
        assert self.added, "void: nothing was added"
        assert self.added.keys() == self.taken.keys()
        most = 0
        for key, gradients in self.added.items():
            left, bundle = iter(gradients), key[1]
            for steps, total in self.taken[key]:
                expected = [each.clone() for each in next(left)]
                for _ in range(steps - 1):
                    for mine, more in zip(expected, next(left), strict=True):
                        mine.add_(more)
                assert all(map(torch.equal, expected, total)), f"bundle {bundle}: an update took another sum"
                most = max(most, steps)
            assert next(left, None) is None, f"bundle {bundle}: a gradient is in no update"
        return most


def races_of(engine: Engine) -> list[Race]:
    """Of what tickets order. States on the disk change hands at rest, with the updating thread's own tickets for them."""
    found = find_races(as_issued(managed(engine).log.operations))
    return [race for race in found if not race.resource.startswith("disk:")]


@contextmanager
def slow_updates(engine: Engine, seconds: float) -> Iterator[None]:
    """Each takes so long beside; what it writes is NaN until it is done."""
    kernel = managed(engine).device.host_kernel
    update = kernel.update

    def slow(*states: torch.Tensor, out: torch.Tensor, **given: Any) -> None:
        behind = out.data_ptr() != given["gradient"].data_ptr()
        if behind:
            out.fill_(torch.nan)
        time.sleep(seconds)
        update(*states, out=out, **given)

    kernel.update = slow
    try:
        yield
    finally:
        kernel.update = update


@asked_of_hypothesis(
    max_examples=4,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    seed=st.integers(0, 99),
    most=st.integers(1, 4),
    setup=st.sampled_from(SETUPS),
    on_disk=st.booleans(),
    update_s=st.sampled_from([0.0, 0.001, 0.004]),
)
def test_gradients_consumed_are_gradients_produced(
    seed: int, most: int, setup: Setup, on_disk: bool, update_s: float, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        kept = Kept(monkeypatch)
        engine = begun(setup, most, tmp_path if on_disk else None, sleeps(seed, 1e-3))
        with slow_updates(engine, update_s):
            run = train(engine, tokens(6, setup.accumulate))
        assert 1 <= kept.check() <= most + 1
    assert all(loss == loss for loss in run.losses), "a version was read while it was written"
    assert told(engine).staleness_max <= most


@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.one_in(2)
def test_steps_run_ahead_as_far_as_they_may(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no further: a fetch waits for its layer's version."""
    kept = Kept(monkeypatch)
    engine = begun(SETUPS[0], most, tmp_path)
    for batch in tokens(2, 1):
        one_step(engine, batch)
    with slow_updates(engine, 0.003):
        for batch in tokens(8, 1):
            one_step(engine, batch)
        engine.drain()
    assert told(engine).staleness_max == most
    assert 0 < told(engine).staleness_mean <= most
    assert kept.check() > 1
    updates = engine.control.updates  # type: ignore[attr-defined]
    assert max(updates) <= 10 and min(updates) < 10, "an update is one step of the optimizer, whatever its sum holds"
    engine.close()


def test_an_update_has_the_learning_rate_of_its_newest_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, float]] = []
    update = UpdatingThread._update

    def updating(thread: UpdatingThread, bundle: Any, taken: Any, *more: Any) -> Any:
        seen.append((bundle.included + taken.steps, taken.inside.hyper[0].lr))
        return update(thread, bundle, taken, *more)

    monkeypatch.setattr(UpdatingThread, "_update", updating)
    engine = begun(SETUPS[0], 2)
    one_step(engine, tokens(1, 1)[0])  # has no plan yet, and no update behind it
    with slow_updates(engine, 0.003):
        for step, batch in enumerate(tokens(5, 1), start=1):
            engine.set_lr(step / 1000)
            one_step(engine, batch)
        engine.drain()
    assert {rate for _, rate in seen} > {0.005}
    assert all(rate == newest / 1000 for newest, rate in seen)
    engine.close()


@pytest.mark.slow
def test_a_disk_that_is_slow_holds_steps_up_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples a second are 0.9 x min(K + 1, disk step / compute step) of the synchronous ones, and more."""
    move, delay_s = disk_module.Disk._move, [0.0]

    def slow(disk: disk_module.Disk, *given: Any) -> None:
        time.sleep(delay_s[0])
        move(disk, *given)

    monkeypatch.setattr(disk_module.Disk, "_move", slow)

    def step_s(most: int | None, delay: float, steps: int) -> float:
        delay_s[0] = delay
        options = lock_free(most, states="disk", nonfinite="stop")
        asked = settings(device_memory=budget_of(SETUPS[0], "tight"), disk=tmp_path)
        with start(ANGEL, SETUPS[0].build(), asked, options) as engine:
            for batch in tokens(4, 1):
                one_step(engine, batch)
            engine.drain()
            began = time.perf_counter()
            for batch in tokens(steps, 1):
                one_step(engine, batch)
            engine.drain()
            return (time.perf_counter() - began) / steps

    compute, synchronous = step_s(16, 0.0, 20), step_s(None, 0.02, 6)
    for most in (1, 2, 4):
        expected = min(most + 1, synchronous / compute)
        assert synchronous / step_s(most, 0.02, 12 * (most + 1)) >= 0.9 * expected


def test_a_forecast_is_the_longer_of_two_steps_that_none_beats(tmp_path: Path) -> None:
    engine = begun(SETUPS[0], 0, tmp_path)
    train(engine, tokens(2, 1))
    ours, profile = managed(engine), hardware.load("h200-141g-x1")
    rates = {way: getattr(profile, way) for way in ("disk_read_bytes_per_s", "disk_write_bytes_per_s")}
    slow = {way: rate.model_copy(update={"value": 1e6}) for way, rate in rates.items()}
    (trace, plan), *_ = ours.planner.plans.values()
    found = {}
    for most in (None, 0, 1, 4, 1 << 20):
        layout = dataclasses.replace(ours.layout, max_staleness=most)
        schedule = expand(layout, trace, plan, ours.strategy._context)
        found[most] = simulation_of(schedule, trace, plan, profile.model_copy(update=slow))
        assert max(found[most].bounds_s.values()) <= found[most].step_time_s * (1 + 1e-9)
    assert found[None].step_time_s == found[0].step_time_s
    least = found[1 << 20].step_time_s
    assert found[0].bound == "disk"
    assert 0 < least < found[0].step_time_s
    for most in (1, 4):
        assert found[most].step_time_s == max(least, found[0].step_time_s / (most + 1))


@pytest.mark.parametrize("options", [{}, {"cache": 0}])
def test_a_forecast_needs_no_disk(options: dict[str, object]) -> None:
    """Nor any update on the host, where the device holds all."""
    model = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=64, n_positions=16)
    given: dict[str, Any] = {
        "hardware": "h200-141g-x1",
        "batch_size": 2,
        "seq_len": 16,
        "options": options | {"max_staleness": 2},
    }
    assert systems.estimate(model, system="angel-ptm", **given).fits


# ---- what others see is at rest


def test_who_looks_at_weights_finds_all_gradients_in_them(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    engine = begun(SETUPS[0], 4, tmp_path / "disk")
    ours = managed(engine)
    with slow_updates(engine, 0.003):
        for batch in tokens(4, 1):
            one_step(engine, batch)
        assert any(b.uncleared for b in ours.lock_free._made.values()), "void: nothing ran behind"
        with torch.no_grad():
            next_token_loss(engine, tokens(1, 1)[0, 0], 30)
        assert not ours.lock_free.active
        values = parameters_of(engine)
        check_segments(ours)
        one_step(engine, tokens(1, 1)[0])
        systems.save_checkpoint(engine, tmp_path / "saved")
        check_segments(ours)
        saved = parameters_of(engine)
        one_step(engine, tokens(1, 1)[0])
        model = ours.module
        engine.close()
    assert any(not torch.equal(values[name], saved[name]) for name in values)
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    other = begun(SETUPS[0], 4, tmp_path / "disk")
    systems.load_checkpoint(other, tmp_path / "saved")
    assert all(torch.equal(saved[name], value) for name, value in parameters_of(other).items())
    other.close()


def test_edits_are_what_the_next_step_reads(tmp_path: Path) -> None:
    engine, whole = begun(SETUPS[0], 0, tmp_path), start(RESIDENT, SETUPS[0].build(), settings())
    runs = []
    for each in (engine, whole):
        losses = [one_step(each, batch) for batch in tokens(3, 1)]
        with each.summon(write=True) as values:
            for value in values.values():
                value.mul_(0.5)
        losses += [one_step(each, batch) for batch in tokens(2, 1)]
        runs.append(finished(each, losses))
    assert_equal(runs[1], runs[0])


def test_a_step_of_another_shape_is_synchronous(tmp_path: Path) -> None:
    """It has no plan; and with a plan states move, which takes them out of the updating thread's hands."""
    lengths = (8, 8, 8, 16, 16, 8, 8)
    engine, whole = begun(SETUPS[0], 0, tmp_path), start(RESIDENT, SETUPS[0].build(), settings())
    runs = [finished(e, [one_step(e, tokens(1, 1, 1, n, seed=n)[0]) for n in lengths]) for e in (whole, engine)]
    assert_equal(*runs)


def test_what_the_device_updates_is_updated_there_as_ever() -> None:
    """And sent home in the middle of a step it is updated on the host, beside the updating thread."""
    asked = settings(device_memory=4_500_000)
    engine = start(ANGEL, build("opt", positions=158), asked, lock_free(2, cache="auto"))
    for length in (8, 8, 128, 8, 8):
        one_step(engine, tokens(1, 1, 1, length, seed=length)[0])
    engine.drain()
    check_segments(managed(engine))
    engine.close()


def test_the_host_holds_what_the_plan_says(tmp_path: Path) -> None:
    for setup in SETUPS[:2]:
        engine = begun(setup, 1, tmp_path)
        train(engine, tokens(3, setup.accumulate))
        ours = managed(engine)
        layout, context = ours.layout, ours.strategy._context
        need = lock_free_bytes(layout, context, [b.index for b in layout.bundles if b.trainable])
        twice = 2 * (4 + 4)  # fp32
        numel = sum(layout.shard_numel(b.index) for b in layout.bundles if b.trainable)
        assert twice * numel <= need <= twice * numel + 2 * 4096
        assert (engine.memory().host_peak_bytes or 0) >= need
    least = managed(engine).store.host.peak
    with pytest.raises(BudgetError, match="host memory"):
        begun(setup, 1, host_memory=least // 2)
