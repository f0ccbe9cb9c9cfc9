"""Budgets hold at every event, a plan's prediction is kept, nothing is lost or left behind (invariants 4 and 5)."""

from __future__ import annotations

import gc
import mmap
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from systems.device.emulated import EmulatedDevice
from systems.device.watch.events import LoggedBytes
from systems.errors import BudgetError, OutOfMemoryError
from systems.planning.allowance import EXACT
from systems.planning.plan import Tier
from systems.planning.trace import Phase
from systems.substrate.bundle.segments import OptimizerState
from systems.substrate.engine import ManagedEngine
from systems.system import Engine
from tests.systems import models_plain
from tests.systems.every import MANAGED, STRATEGIES
from tests.systems.models_plain import CASES
from tests.systems.models_small import tokens
from tests.systems.running import AMPLE, HOST, RANDOM, elixir, managed, one_step, settings, start
from tests.systems.setups import STEPS, SYSTEMS, Setup, budget_of, in_turn

SETUPS = [
    Setup("opt", "none", 1, "tied", "fp32"),
    Setup("gpt2", "full", 2, "untied", "bf16", clip=0.5),
    Setup("gpt2", "reentrant", 1, "half-frozen", "bf16"),
    Setup("opt", "non-reentrant", 2, "tied", "fp32", clip=0.5),
]


OFFLOADS_ALL = {"random", "random write-back"}  # the optimizer of every segment is on the host
PLACES_SOME = {name for name in SYSTEMS if name.split()[0] in ("angel-ptm", "elixir", "patrickstar")}  # of some on the device


def engine_of(setup: Setup, system: str, budget: int, **more: Any) -> Engine:
    chosen, options = SYSTEMS[system]
    recompute: Any = setup.recompute if setup.recompute in ("none", "full") else "none"
    given = dict(dtype=setup.dtype, clip=setup.clip, accumulate=setup.accumulate, recompute=recompute)
    return start(chosen, setup.build(), settings(device_memory=budget, **given, **more), options)


@pytest.mark.parametrize("system", STRATEGIES)
def test_a_refusal_names_no_option_that_the_system_has_not(system: str) -> None:
    with pytest.raises(BudgetError) as refused:
        engine_of(Setup("opt"), system, 10_000)
    named = re.findall(r"a smaller (\w+) in `options`", str(refused.value))
    assert set(named) <= SYSTEMS[system][0].Options.model_fields.keys()


def run_steps(engine: Engine, setup: Setup, after: Callable[[int], None], steps: int = STEPS) -> None:
    for number, batch in enumerate(tokens(steps, setup.accumulate)):
        one_step(engine, batch)
        after(number)


@pytest.mark.parametrize(
    ("system", "setup", "level"),
    [
        *in_turn(["elixir"], [(setup, "above") for setup in SETUPS], each=2),
        *in_turn(STRATEGIES, [(setup, "tight") for setup in SETUPS], each=2),
        *product(["random"], SETUPS[1:3], ["tight"]),
    ],
    ids=str,
)
@pytest.mark.one_in(4)
def test_live_bytes_stay_within_the_budget_and_the_prediction(system: str, setup: Setup, level: str) -> None:
    budget = budget_of(setup, level)
    with engine_of(setup, system, budget, log_events=True) as engine:
        events: list[LoggedBytes] = engine.log.bytes  # type: ignore[attr-defined]
        ends: list[int] = []
        plans: list[Any] = []

        def after(number: int) -> None:
            ends.append(len(events))
            plans.append(engine.cursor.plan)  # type: ignore[attr-defined]

        run_steps(engine, setup, after)
        for event in events:
            most = budget if event.tier == "device" else HOST
            assert 0 <= event.pool <= event.live <= most, event
        device = [e for e in events[ends[-2] :] if e.tier == "device"]
        assert len(device) > 50, "void: the last step left no events"
        assert max(e.live for e in events if e.tier == "device") == engine.memory().device_peak_bytes
        if system == "random":
            assert plans == [None] * STEPS
            return
        plan = plans[-2]
        assert plan is not None and plan is plans[-1]
        before = [e for e in events[: ends[-2]] if e.tier == "device"][-1]
        assert plan.predicted_model_peak_bytes == max(e.pool for e in (before, *device))
        assert max(e.live for e in (before, *device)) <= plan.predicted_device_peak_bytes <= budget


@pytest.mark.parametrize("case", CASES)
@pytest.mark.one_in(2)
def test_a_plan_for_an_odd_model_is_kept_to_the_byte(case: str) -> None:
    """Unused parameters, several calls, late gradients: after one step it is known when each gradient is complete."""
    model = models_plain.build(case)
    budget = 12 * sum(p.numel() for p in model.parameters())  # of the 20 bytes a parameter that resident takes
    with start(elixir(), model, settings(device_memory=budget, log_events=True)) as engine:
        for batch in tokens(2, 1):
            events: list[LoggedBytes] = engine.log.bytes  # type: ignore[attr-defined]
            begin, plan = len(events), engine.cursor.plan  # type: ignore[attr-defined]
            one_step(engine, batch, CASES[case].loss)
        last = [e for e in events[begin - 1 :] if e.tier == "device"]
        assert plan is not None and engine.counters()["fallbacks"] == 0
        assert plan.predicted_model_peak_bytes == max(e.pool for e in last)
        assert max(e.live for e in last) <= plan.predicted_device_peak_bytes <= budget


@pytest.mark.parametrize("model", ["opt", "gpt2"])
def test_recomputation_lets_no_gradient_pile_up(model: str) -> None:
    """Each block's gradients leave when its own backward ends, whichever way its activations came."""
    flushes = {}
    for recompute in ("none", "full", "reentrant", "non-reentrant"):
        setup = Setup(model, recompute)  # type: ignore[arg-type]
        engine = engine_of(setup, "elixir", budget_of(setup, "half"))
        run_steps(engine, setup, lambda _: None, steps=1)
        ((trace, _),) = engine.planner.plans.values()  # type: ignore[attr-defined]
        flushes[recompute] = list(zip(trace.moments, trace.flushes, strict=True))
        engine.close()
    for recompute, found in flushes.items():
        where = {moment.phase for moment, bundles in found if bundles}
        assert where == {Phase.BACKWARD_EXIT}, recompute
        assert found == flushes["none"]


def test_an_activation_that_finds_no_room_leaves_the_account_right() -> None:
    """What never came into the account must not be taken from it when it dies, or the budget would no longer hold."""
    engine = start(RANDOM, models_plain.build("stack"), settings(device_memory=150_000))
    account, buffers = managed(engine).device.account, managed(engine).device.account.live
    for _ in range(3):
        with pytest.raises(OutOfMemoryError):
            CASES["stack"].loss(engine, tokens(1, 1, batch=700)[0, 0], 1)
        gc.collect()
        assert account.live - account.pool == buffers
    engine.close()


def check_segments(checked: Engine) -> None:
    """Each segment has one authoritative copy, its master or, frozen, its value at rest, and every other copy agrees with it.
    What never leaves the device has no slot.
    """
    engine = managed(checked)
    for stored in engine.store.segments:
        assert not stored.slot_holds_gradient
        bundle = engine.residency.bundles[engine.layout.bundle_of_segment[stored.segment.index]]
        assert stored.has_slot is (bundle.movable and stored.segment.shard_numel > 0)  # a model may have empty parameters
        rest = bundle.at_rest()[bundle.segments.index(stored)]
        truth = rest if stored.state is None else engine.store.part(stored, "master")
        for place in stored.placements:
            where = place.here
            rounded = truth[where].to(engine.store.dtype)
            if stored.tier is not Tier.DEVICE and stored.has_slot:
                assert torch.equal(stored.slot[where], rounded), "the host slot is outdated"
            block, shard = bundle.block, bundle.shard.block
            copies = [] if block is None else [bundle.own_pieces(block)]
            copies += [] if shard is None else [bundle.shard.pieces(shard)]
            for pieces in copies:
                mine = pieces[bundle.segments.index(stored)]
                assert torch.equal(mine[where], rounded), "the device copy is outdated"
        if stored.tier is Tier.DEVICE:
            rests = bundle.shard.block if bundle.shard.at_home else bundle.block
            assert rests is not None and isinstance(stored.state, OptimizerState) and stored.state.allocation is not None
        assert bundle.block is not None or not bundle.storage.resident
        assert not bundle.holds


def pool_bytes(engine: ManagedEngine) -> int:
    """What the device pool's account should say between steps: resident bundles and optimizer states, no gradient."""
    there = [s.state for s in engine.store.segments if isinstance(s.state, OptimizerState)]
    states = [state.allocation.nbytes for state in there if state.allocation]
    return sum(states) + sum(engine.layout.bundle_bytes(i) for i in engine.residency.resident())


@pytest.mark.parametrize(
    ("system", "setup", "level"),
    [("elixir", SETUPS[0], "above"), *in_turn(SYSTEMS, [(SETUPS[0], "tight"), (SETUPS[1], "half")])],
    ids=str,
)
@pytest.mark.one_in(4)
def test_every_segment_has_one_authoritative_copy_after_every_step(system: str, setup: Setup, level: str) -> None:
    tiers: set[Tier] = set()
    with engine_of(setup, system, budget_of(setup, level)) as engine:
        ours = managed(engine)

        def after(number: int) -> None:
            engine.drain()
            check_segments(ours)
            assert ours.device.account.pool == pool_bytes(ours)
            tiers.update(s.tier for s in ours.store.segments if s.state is not None)

        run_steps(engine, setup, after)
        told = getattr(ours.strategy.statistics(), "optimizer_share_on_device", None)  # by a strategy that no list here has
    assert (tiers == {Tier.HOST}) == (system in OFFLOADS_ALL or (system not in PLACES_SOME and told == 0))


STOPS = ["before", "forward", "backward"]
STOPPED = [*product(["elixir", "random"], STOPS), *((s, STOPS[n % 3]) for n, s in enumerate(STRATEGIES) if s != "elixir")]


class TracedMap(mmap.mmap):
    made: list[weakref.ref[mmap.mmap]]

    def __new__(cls, *args: Any, **kwargs: Any) -> TracedMap:
        found = super().__new__(cls, *args, **kwargs)
        cls.made.append(weakref.ref(found))
        return found


@pytest.fixture
def traced_maps(monkeypatch: pytest.MonkeyPatch) -> Sequence[weakref.ref[mmap.mmap]]:
    TracedMap.made = []
    monkeypatch.setattr(mmap, "mmap", TracedMap)
    return TracedMap.made


@pytest.mark.parametrize(("system", "stop"), STOPPED)
@pytest.mark.one_in(6)
def test_close_leaves_nothing(system: str, stop: str, traced_maps: Sequence[weakref.ref[mmap.mmap]]) -> None:
    """Whatever the engine was doing. The closed engine itself is kept: it must not keep the memory."""
    threads = set(threading.enumerate())
    setup = Setup("opt", accumulate=2, clip=0.5)
    engine = engine_of(setup, system, budget_of(setup, "half"))
    run_steps(engine, setup, lambda _: None, steps=2)
    if stop != "before":
        loss = engine(input_ids=tokens(1, 1)[0, 0]).logits.sum()
        if stop != "forward":
            engine.backward(loss)
        del loss
    assert len(set(threading.enumerate()) - threads) >= 3, "void: no lanes"
    assert sum(m() is not None for m in traced_maps) >= 5, "void: no mappings"
    ours = managed(engine)
    engine.close()
    engine.close()
    gc.collect()
    assert ours.device.account.pool == 0
    assert ours.store.host.pool == 0 and ours.store.host.live == 0
    assert set(threading.enumerate()) <= threads
    assert sum(m() is not None for m in traced_maps) == 1, "the slots, which are the parameters' own now"
    for parameter in engine.module.parameters():
        assert parameter.isfinite().all() and parameter.grad is None
        parameter.data = torch.empty(0)
    gc.collect()
    assert [m for m in traced_maps if m() is not None] == []


def refusal(system: str, model: nn.Module) -> tuple[str, int, int]:
    """Tier, need and have of the refusal of a host budget too small, the device having no room for the rest; its traceback,
    which holds frames, is let go."""
    chosen, options = SYSTEMS[system]
    tight = budget_of(Setup("opt", "full"), "tight")
    try:
        start(chosen, model, settings(host_memory=1 << 16, device_memory=tight, recompute="full"), options)
    except BudgetError as error:
        return error.tier, error.need, error.have
    raise AssertionError("not refused")


@pytest.mark.parametrize("system", MANAGED)
def test_a_refusal_leaves_nothing_and_the_model_as_it_was(system: str, traced_maps: Sequence[weakref.ref[mmap.mmap]]) -> None:
    threads = set(threading.enumerate())
    model = Setup("opt").build()
    values = {n: p.detach().clone() for n, p in model.named_parameters()}
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    tier, need, have = refusal(system, model)
    assert tier == "host" and need > have
    gc.collect()
    assert set(threading.enumerate()) <= threads
    assert [m for m in traced_maps if m() is not None] == []
    assert all(torch.equal(p, values[n]) for n, p in model.named_parameters())
    assert hooks == sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    assert not any("forward" in m.__dict__ for m in model.modules()), "recomputation is still wrapped around the blocks"


@pytest.mark.parametrize("options", [{"offload": False}, {"cache": 1 << 10}], ids=str)
def test_what_was_asked_for_and_does_not_fit_ends_the_run(options: dict[str, Any]) -> None:
    """Other plans that do not fit are done without; these were the user's own wish."""
    setup, system = Setup("opt", "full"), elixir()
    given = settings(device_memory=budget_of(setup, "half"), recompute="full")
    engine = start(system, setup.build(), given, system.Options(**options))
    with pytest.raises(BudgetError):
        one_step(engine, tokens(1, 1)[0])
    engine.close()


@pytest.mark.parametrize(("system", "setup"), in_turn(MANAGED, [(setup,) for setup in SETUPS[:3]]), ids=str)
@pytest.mark.one_in(2)
def test_granules_as_on_cuda_keep_to_the_limit(system: str, setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small granules and a slab a plan: what the pool takes of the device, holes included, not only what lives in it."""
    grown: list[tuple[int, int, bool]] = []  # bytes reserved, the limit, whether something could still have been evicted

    def new_granule(self: EmulatedDevice, nbytes: int) -> torch.Tensor:
        memory = torch.empty(max(nbytes, 1 << 14), dtype=torch.uint8)
        self.meter.exempt(memory.untyped_storage())
        if started:
            residency = managed(started[0]).residency
            grown.append((self.pool.reserved_bytes + nbytes, residency.room.limit, bool(residency.room.evictable())))
        return memory

    def prepare(self: EmulatedDevice, pool_bytes: int, largest: int, others: int | None = None) -> int:
        self.drain()
        self.pool.trim()
        slab = pool_bytes + min(2 * largest, pool_bytes // 32)
        self.pool.reserve(slab)
        return slab

    started: list[Engine] = []
    monkeypatch.setattr(EmulatedDevice, "_new_granule", new_granule)
    monkeypatch.setattr(EmulatedDevice, "prepare", prepare)
    monkeypatch.setattr(EmulatedDevice, "allowance", replace(EXACT, warm_up_share=0.3))
    engine = engine_of(setup, system, budget_of(setup, "half"))
    started.append(engine)
    run_steps(engine, setup, lambda number: None)
    assert grown or system == "random", "a slab is taken when a plan comes into force"
    assert all(reserved <= limit or not evictable for reserved, limit, evictable in grown)
    engine.close()


def test_without_a_plan_there_is_room_beside_what_the_last_plan_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizer state on the device stays there: a limit below it would have every fetch evict all that may go."""
    setup = SETUPS[0]
    monkeypatch.setattr(EmulatedDevice, "allowance", replace(EXACT, warm_up_share=0.3))
    engine = engine_of(setup, "elixir", budget_of(setup, "half"))
    run_steps(engine, setup, lambda number: None)
    ours = managed(engine)
    engine.planner.learn((), None)  # type: ignore[attr-defined]
    pinned = ours.device.account.pool
    assert pinned > 0 and not ours.residency.room.evictable()
    share = int(0.3 * (ours.device.plannable_bytes - pinned))
    assert ours.residency.room.limit == pinned + min(share, 2 * ours.layout.movable_bytes) > pinned
    engine.close()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_the_host_cannot_hold_lies_on_the_device_without_holes(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its states are larger than half a granule: one in each would leave the device a hole in each."""
    setup = SETUPS[0]
    engine = engine_of(setup, strategy, AMPLE)
    most = max(stored.segment.shard_numel * 4 * 3 for stored in managed(engine).store.segments)
    need = managed(engine).store.host.live
    engine.close()

    def new_granule(self: EmulatedDevice, nbytes: int) -> torch.Tensor:
        memory = torch.empty(max(nbytes, 2 * most - 1), dtype=torch.uint8)
        self.meter.exempt(memory.untyped_storage())
        return memory

    monkeypatch.setattr(EmulatedDevice, "_new_granule", new_granule)
    engine = engine_of(setup, strategy, AMPLE, host_memory=need * 2 // 3)
    pool = managed(engine).device.pool
    assert sum(not bundle.movable for bundle in managed(engine).layout.bundles) > 1
    assert pool.reserved_bytes - pool.live_bytes < 2 * most
    engine.close()
