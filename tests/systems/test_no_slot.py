"""What a layout keeps on the device for good takes nothing of the host until the engine closes: neither states nor a slot."""

from __future__ import annotations

import gc
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel

import systems
from systems import export
from systems.errors import UnsupportedError
from systems.planning.disk_layout import buffer_bytes
from systems.planning.layout import PAGE, Layout, round_up
from systems.planning.policy.homes import host_need as planned_need
from systems.system import Engine
from tests.systems.every import WAYS
from tests.systems.models_small import tokens
from tests.systems.running import (
    RESIDENT,
    Run,
    assert_equal,
    elixir,
    host_need,
    one_step,
    settings,
    start,
    train,
    waiting,
)
from tests.systems.setups import STEPS, Setup, blocks_of, budget_of, in_turn
from tests.systems.test_memory import check_segments

SHARE = 0.7  # of the host memory that all of a model takes
PLENTY = 64 << 20  # of device memory, for any of these models

SETUPS: list[tuple[Setup, dict[str, Any]]] = [
    (Setup("opt", "full"), {}),
    (Setup("gpt2", accumulate=2, clip=0.5), {"dtype": "bf16"}),
    (Setup("opt", "full", sharing="half-frozen"), {"dtype": "fp16"}),
    (Setup("gpt2", sharing="untied", dtype="bf16"), {"nonfinite": "stop"}),
]


@cache
def reference(setup: Setup, dtype: str) -> tuple[Run, dict[str, torch.Tensor]]:
    """What it comes to, and the weights that its model is given back."""
    model = setup.build()
    given = settings(dtype=dtype, clip=setup.clip, accumulate=setup.accumulate, recompute=setup.recompute)
    run = train(start(RESIDENT, model, given), tokens(STEPS, setup.accumulate))
    return run, {name: value.clone() for name, value in model.state_dict().items()}


def asked(setup: Setup, more: dict[str, Any]) -> dict[str, Any]:
    """Settings, but for the host's budget."""
    dtype = more.get("dtype", setup.dtype)
    common = {"dtype": dtype, "clip": setup.clip, "accumulate": setup.accumulate, "recompute": setup.recompute}
    return common | {"device_memory": budget_of(setup, "above")}


def begin(model: Any, options: BaseModel, system: Any, given: dict[str, Any], host: int) -> Engine:
    return start(system, model, settings(**given, host_memory=host, log_events=True), options)


def staying(layout: Layout) -> list[int]:
    return [b.index for b in layout.bundles if not b.movable]


def slots_of(engine: Any) -> int:
    """Bytes of the slots' mapping."""
    found = engine.store._mappings.get("slots")
    return 0 if found is None else found.nbytes


def in_slots(layout: Layout) -> int:
    """Bytes of what may leave the device, in whole pages."""
    segments = [layout.segments[s] for b in layout.bundles if b.movable for s in b.segments]
    return round_up(sum(s.shard_numel for s in segments) * layout.itemsize, PAGE)


def check_host(engine: Any) -> None:
    """Before the first step: all that the host has is of bundles that may leave the device, as it was planned."""
    layout, store = engine.layout, engine.store
    kept = staying(layout)
    assert kept, "void: the host holds everything"
    assert slots_of(engine) == in_slots(layout)
    assert store.host.live == planned_need(layout, engine.planner._context) <= store.host.budget
    for index in kept:
        assert engine.bundles[index].block is not None
        assert not any(each.has_slot or each.at_home for each in engine.bundles[index].segments)
    check_segments(engine)


def peak_of_the_host(engine: Any) -> int:
    return max(event.live for event in engine.log.bytes if event.tier == "host")


def assert_same_weights(model: Any, expected: dict[str, torch.Tensor]) -> None:
    found = model.state_dict()
    assert found.keys() == expected.keys()
    assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == []


@pytest.mark.parametrize(
    ("system", "setup", "more"),
    in_turn(WAYS, SETUPS, each=2),
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
@pytest.mark.one_in(7)
def test_no_bit_changes_and_the_host_has_nothing_of_what_stays(system: str, setup: Setup, more: dict[str, Any]) -> None:
    """And the budgets hold until the engine is closed and has given all weights back."""
    (chosen, options), model, given = WAYS[system], setup.build(), asked(setup, more)
    if "nonfinite" in more and "nonfinite" in type(options).model_fields:
        options = options.model_copy(update=dict(nonfinite=more["nonfinite"]))
    host = int(host_need(chosen, setup.build(), options, **given) * SHARE)
    engine: Any = begin(model, options, chosen, given, host)
    check_host(engine)
    run, weights = reference(setup, given["dtype"])

    def check(step: int, _: Engine) -> None:
        engine.drain()
        check_segments(engine)

    assert_equal(run, train(engine, tokens(STEPS, setup.accumulate), each_step=check))
    assert_same_weights(model, weights)
    assert peak_of_the_host(engine) <= host
    assert max(event.live for event in engine.log.bytes if event.tier == "device") <= given["device_memory"]
    assert engine.store.host.live == engine.device.account.pool == 0


def nbytes_of(layout: Layout, bundles: list[int]) -> int:
    """In the compute dtype."""
    return sum(layout.bundle_bytes(index) for index in bundles)


def test_closing_has_the_room_that_masters_and_moments_leave() -> None:
    """And that of inputs that waited: with them there is none for what was on the device alone."""
    setup, system = SETUPS[0][0], elixir()
    options, given = system.Options(activations="host"), asked(setup, {}) | {"device_memory": budget_of(setup, "half")}
    model, (run, weights) = setup.build(), reference(setup, "fp32")
    host = int(host_need(system, setup.build(), waiting(options), **given) * 0.8) + 80_000
    engine: Any = begin(model, options, system, given, host)
    assert_equal(run, trained(engine, setup))
    assert engine.input_slots.peak_bytes > 0, "void: the host has nothing but segments"
    need = round_up(nbytes_of(engine.layout, staying(engine.layout)), PAGE)
    assert engine.store.host.room < need, "void: there is room in any case"
    assert peak_of_the_host(engine) <= host
    engine.store.host.budget = slots_of(engine) + need  # not a page for anything else
    engine.close()
    assert_same_weights(model, weights)


def trained(engine: Any, setup: Setup) -> Run:
    """Open still."""
    close, engine.close = engine.close, lambda: None
    run = train(engine, tokens(STEPS, setup.accumulate))
    engine.close = close
    return run


@pytest.mark.parametrize("room", [0, -1, None], ids=["exact", "a page too little", "none on this machine"])
@pytest.mark.parametrize("sharing", ["tied", "half-frozen"])
@pytest.mark.parametrize("system", ["elixir write-back", "patrickstar", "random write-back"])
@pytest.mark.one_in(7)
def test_a_host_that_has_nothing(system: str, sharing: Any, room: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the model is on the device, frozen parts too. Closing takes what the values need, or says that there is not so
    much: then it is clean, and the model without weights says why."""
    setup = Setup("opt", "full", sharing=sharing)
    (chosen, options), model = WAYS[system], setup.build()
    run, weights = reference(setup, "fp32")
    engine: Any = begin(model, options, chosen, asked(setup, {}) | {"device_memory": PLENTY}, 0)
    check_host(engine)
    assert engine.store.host.live == 0 and staying(engine.layout) == [b.index for b in engine.layout.bundles]
    assert_equal(run, trained(engine, setup))
    assert engine.store.host.peak == 0
    need = round_up(nbytes_of(engine.layout, staying(engine.layout)), PAGE)
    engine.store.host.budget = need + (room or 0) * PAGE
    if room is None:
        monkeypatch.setattr(export, "free_host_memory", lambda: 100)
    engine.close()
    assert engine.store.host.live == engine.device.account.pool == 0
    if room == 0:
        assert_same_weights(model, weights)
        assert engine.store.host.peak == need
        return
    why = (
        "of host memory for weights that were on the device alone" if room else "100B are free: make room, or save a checkpoint"
    )
    with pytest.raises(RuntimeError, match=f"weights are gone: its engine could not give them back .*{why}"):
        model(tokens(1, 1)[0, 0])
    with pytest.raises(UnsupportedError, match=why):
        model.state_dict()


def test_memory_of_weights_that_were_on_the_device_is_the_parameters_own() -> None:
    setup, seen = SETUPS[0][0], list[str]()
    model = setup.build()
    engine: Any = begin(model, elixir().Options(), elixir(), asked(setup, {}) | {"device_memory": PLENTY}, 0)
    engine.store.host.budget = PLENTY
    engine.close()
    for name, parameter in model.named_parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes, "it is saved alone"
        seen.append(name)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    del engine
    gc.collect()
    assert seen and all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("system", ["elixir", "random write-back"])
def test_a_frozen_weight_that_stays_is_read_and_written_on_the_device(system: str, tmp_path: Path) -> None:
    """By summon, by a checkpoint, and by an edit past the engine, which is refused and is all that there is of it then."""
    setup = Setup("opt", "full", sharing="half-frozen")
    runs: list[Any] = []
    for chosen, options in ((RESIDENT, None), WAYS[system]):
        model: Any = setup.build()
        block: Any = blocks_of(model)[1]
        frozen = block.fc1.weight
        given = settings(recompute="full", **({} if options is None else {"device_memory": PLENTY, "host_memory": 0}))
        engine: Any = start(chosen, model, given, options)
        name = next(n for n, p in model.named_parameters() if p is frozen)
        one_step(engine, tokens(1, 1)[0])
        with engine.summon(write=True) as values:
            before = values[name].clone()
            values[name].mul_(2)
        with engine.summon() as values:
            assert torch.equal(values[name], 2 * before)
        systems.save_checkpoint(engine, tmp_path / str(len(runs)))
        one_step(engine, tokens(2, 1)[1])
        systems.load_checkpoint(engine, tmp_path / str(len(runs)))
        runs.append((one_step(engine, tokens(2, 1)[1]), engine.state_dict()))
        if options is not None:
            engine.store.host.budget = PLENTY
        with torch.no_grad():
            frozen.add_(1)
        with pytest.raises(UnsupportedError, match="was edited in place"):
            one_step(engine, tokens(1, 1)[0])
        with pytest.raises(UnsupportedError, match="being frozen it has no values but these"):
            engine.close()
        assert torch.equal(model.state_dict()[name], 2 * before + 1)
    (ours, state), (theirs, other) = runs
    assert ours == theirs and all(torch.equal(value, other[key]) for key, value in state.items())


def test_between_disk_and_device_the_host_holds_slots_and_buffers_alone(tmp_path: Path) -> None:
    """It cannot hold all slots either: for their sake some bundles are on the device whose states the disk had room for."""
    setup, system = Setup("opt", "full"), WAYS["angel-ptm"][0]
    model, (run, weights) = setup.build(), reference(setup, "fp32")
    options, given = WAYS["angel-ptm"][1], asked(setup, {}) | {"device_memory": PLENTY, "disk": tmp_path}
    whole = 4 * sum(p.numel() for p in model.parameters()) + 16 * 1024  # and what pads them
    engine: Any = begin(model, options, system, given, whole)
    layout = engine.layout
    check_host(engine)
    assert layout.on_disk and not any(b.movable and b.index not in layout.on_disk for b in layout.bundles)
    assert engine.store.host.live == in_slots(layout) + buffer_bytes(layout)
    assert_equal(run, trained(engine, setup))
    assert engine.store.host.room < nbytes_of(layout, staying(layout)), "void: closing has room beside the buffers"
    engine.close()
    assert_same_weights(model, weights)
    assert peak_of_the_host(engine) <= whole
