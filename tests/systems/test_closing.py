"""A closed engine leaves a model that works, with its values. After an error it leaves one that says what it lacks."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import systems
from systems import export
from systems.baselines import resident
from systems.errors import BudgetError, UnsupportedError
from systems.recipe.model import casts, giving_back
from systems.recipe.model.calls import Calls
from systems.recipe.model.parameter_watch import ParameterWatch
from systems.strategies.elixir.options import ElixirOptions
from systems.substrate import engine as managed_engine
from systems.substrate import handover
from systems.system import Engine
from tests.paged import paged
from tests.systems.models_plain import CASES, build
from tests.systems.models_small import tokens
from tests.systems.running import RESIDENT, elixir, managed, one_step, settings, start
from tests.systems.setups import SYSTEMS as MANAGED
from tests.systems.setups import in_turn

LOSS = CASES["stack"].loss
BATCH = tokens(1, 1)[0]
TIGHT = 260_000
SYSTEMS: dict[str, tuple[Any, Any]] = {"resident": (RESIDENT, None), **MANAGED, "pages": (paged(elixir(), 5), None)}


def begin(system: str, model: nn.Module, **given: Any) -> Engine:
    chosen, options = SYSTEMS[system]
    budget = {} if system == "resident" else {"device_memory": TIGHT}
    return start(chosen, model, settings(**budget | given), options)


def evaluated(model: Any) -> torch.Tensor:
    with torch.no_grad():
        value: torch.Tensor = LOSS(model, BATCH[0], 1)
    return value


@pytest.mark.parametrize(("system", "dtype", "unfinished"), in_turn(SYSTEMS, [("fp32", "nothing"), ("bf16", "backward")]))
@pytest.mark.one_in(3)
def test_the_model_has_its_values_again(system: str, dtype: str, unfinished: str) -> None:
    """What an unfinished step left in the slots is dropped; the host's account is empty; the model can be trained on."""
    model = build("stack")
    before, frozen = dict(model.named_parameters()), model.blocks[1].requires_grad_(False)
    runs = []
    for chosen, mine in (("resident", build("stack")), (system, model)):
        mine.blocks[1].requires_grad_(False)
        losses = []
        for _ in range(2):
            engine = begin(chosen, mine, dtype=dtype)
            losses += [one_step(engine, batch, LOSS) for batch in tokens(2, 1)]
            expected = evaluated(engine)
            if unfinished == "backward":
                engine.backward(LOSS(engine, BATCH[0], 1))
            engine.close()
            assert torch.equal(evaluated(mine), expected)
            if chosen != "resident":
                assert managed(engine).store.host.live == 0 and managed(engine).device.account.pool == 0
        runs.append((losses, {name: value.clone() for name, value in mine.state_dict().items()}))
        assert all(torch.equal(value, copy.deepcopy(mine).state_dict()[name]) for name, value in runs[-1][1].items())
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(value, runs[1][1][name]) for name, value in runs[0][1].items())
    for name, parameter in model.named_parameters():
        assert parameter is before[name] and type(parameter) is nn.Parameter and parameter.grad is None
        assert parameter.requires_grad is not any(parameter is p for p in frozen.parameters())
        assert parameter.untyped_storage().nbytes() == parameter.nbytes, "a storage of its own: it is saved alone"
    torch.save(model.state_dict(), io.BytesIO())


def test_values_outlive_the_engine() -> None:
    """Their memory is the parameters' own: neither the engine nor another parameter keeps it."""
    model = build("stack")
    engine = begin("elixir", model)
    one_step(engine, BATCH, LOSS)
    engine.close()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    del engine
    gc.collect()
    begin("random", build("stack", seed=3)).close()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.one_in(2)
def test_a_closed_engine_is_kept_by_nobody(system: str) -> None:
    """Neither by the model nor by an optimizer whose moments went with it. The parameters can be swapped meanwhile."""
    model = build("stack")
    optimizer = torch.optim.AdamW(model.parameters())
    engine = begin(system, model, optimizer=optimizer)
    one_step(engine, BATCH, LOSS)
    engine.close()
    torch.utils.swap_tensors(model.head.weight, nn.Parameter(torch.zeros_like(model.head.weight)))
    seen = weakref.ref(engine)
    del engine
    gc.collect()
    assert seen() is None and optimizer.param_groups


class OnPurposeError(Exception):
    pass


@pytest.mark.parametrize("system", SYSTEMS)
def test_after_an_error_nothing_is_given_back_and_the_first_error_stands(system: str) -> None:
    model = build("stack")
    engine = begin(system, model)
    one_step(engine, BATCH, LOSS)
    with pytest.raises(OnPurposeError), engine:
        raise OnPurposeError
    for use in (model, model.blocks[1], copy.deepcopy(model)):
        with pytest.raises(RuntimeError, match=r"weights are gone: an error ended its engine: .*call systems\.load_checkpoint"):
            use(torch.zeros(1, 48))
    with pytest.raises(UnsupportedError, match=r"weights are gone: an error ended its engine: .*call systems\.load_checkpoint"):
        model.state_dict()
    for lost in (model, model.blocks[1], copy.deepcopy(model)):
        with pytest.raises(UnsupportedError, match="weights are gone: an error ended its engine"):
            torch.save(lost, io.BytesIO())
    with pytest.raises(UnsupportedError, match="the model was given to an engine before"):
        begin(system, model)


def test_an_error_while_closing_does_not_hide_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = begin("elixir", build("stack"))
    monkeypatch.setattr(engine, "_let_go", lambda: 1 / 0)
    with pytest.raises(OnPurposeError), engine:
        raise OnPurposeError
    monkeypatch.undo()
    engine._let_go()  # type: ignore[attr-defined]


def test_an_update_that_failed_behind_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody drained, and so was told: closing says it, and the forward."""
    model = build("stack")
    engine = begin("elixir", model)
    one_step(engine, BATCH, LOSS)
    engine.drain()
    monkeypatch.setattr(managed(engine).device.host_kernel, "update", lambda *_, **__: 1 / 0)
    told = False
    try:
        one_step(engine, BATCH, LOSS)
    except ZeroDivisionError:  # in time
        told = True
    with contextlib.nullcontext() if told else pytest.raises(ZeroDivisionError):
        engine.close()
    with pytest.raises(RuntimeError, match="could not give them back .division by zero."):
        evaluated(model)


@pytest.mark.parametrize("room", [True, False])
def test_weights_that_lie_in_pieces(room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are copied into one; where the host has no room for that, closing is clean and the forward says why."""
    model = build("stack")
    engine = begin("elixir", model)
    one_step(engine, BATCH, LOSS)
    expected, store, whole = evaluated(engine), managed(engine).store, handover.slot_pieces
    monkeypatch.setattr(handover, "slot_pieces", lambda store, values, number: list(whole(store, values, number)[0].split(7)))
    if not room:
        store.host.budget = store.slot_bytes + 100
    engine.close()
    if room:
        assert torch.equal(evaluated(model), expected)
    else:
        with pytest.raises(RuntimeError, match="of host memory for weights that lie in pieces, 100B are there"):
            evaluated(model)


def test_an_engine_that_did_not_end_its_updates_gives_nothing_back() -> None:
    model = build("stack")
    engine = start(elixir(), model, settings(device_memory=TIGHT), ElixirOptions(nonfinite="stop"))
    one_step(engine, BATCH, LOSS)
    engine.backward(LOSS(engine, BATCH[0], 1))  # which updates
    with pytest.raises(RuntimeError, match="parameters belong to two steps"):
        engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="parameters belong to two steps"):
        evaluated(model)


@pytest.mark.parametrize(("system", "told"), in_turn(SYSTEMS, [(False,), (True,)]))
def test_a_state_that_is_half_updated_is_told_once(system: str, told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C says nothing of it: the next call does, or closing, were it by the end of a `with` block."""
    model = build("stack")
    engine: Any = begin(system, model)
    monkeypatch.setattr(engine.control, "record", lambda outcome, **_: (_ for _ in ()).throw(KeyboardInterrupt))
    half = pytest.raises(RuntimeError, match="parameters belong to two steps")
    with contextlib.nullcontext() if told else half, engine:
        with pytest.raises(KeyboardInterrupt):
            one_step(engine, BATCH, LOSS)
        if told:
            with half:
                evaluated(engine)
    with pytest.raises(RuntimeError, match="weights are gone: .*parameters belong to two steps"):
        evaluated(model)


@pytest.mark.parametrize("system", SYSTEMS)
def test_nothing_is_gathered_for_a_model_that_shall_keep_nothing(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("stack")
    engine = begin(system, model)
    one_step(engine, BATCH, LOSS)
    for owner, name in ((managed_engine, "values_in_slots"), (resident, "on_the_host")):
        monkeypatch.setattr(owner, name, lambda *_: pytest.fail("values were gathered"))
    engine.close(keep=False)
    engine.close()
    with pytest.raises(RuntimeError, match=r"weights are gone: .* closed with keep=False: .*call systems\.load_checkpoint"):
        evaluated(model)
    with pytest.raises(UnsupportedError, match="closed with keep=False"):
        model.state_dict()
    if system != "resident":
        assert managed(engine).store.host.live == 0 and managed(engine).device.account.pool == 0


def test_values_on_a_device_that_the_host_has_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under resident. Closing is clean, and the forward says why; those that are on the host already need none."""
    here, there = torch.ones(30), torch.ones(30, device="meta")
    monkeypatch.setattr(export, "free_host_memory", lambda: 100)
    assert giving_back.on_the_host([here, here])[0] is here
    with pytest.raises(BudgetError) as short:
        giving_back.on_the_host([here, there])
    assert (short.value.tier, short.value.need, short.value.have) == ("host", 120, 100)
    model = build("stack")
    engine = begin("resident", model)
    one_step(engine, BATCH, LOSS)
    monkeypatch.setattr(resident, "data_of", lambda parameter: torch.empty(parameter.shape, device="meta"))
    engine.close()
    assert sum(parameter.nbytes for parameter in model.parameters()) == 0
    with pytest.raises(RuntimeError, match=r"100B are free: make room, or save a checkpoint before\): build the model anew"):
        evaluated(model)


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("place", [(Calls, "attach"), (ParameterWatch, "accept"), (casts, "_Conversion")])
@pytest.mark.one_in(2)
def test_a_start_that_fails_after_the_values_were_taken(
    system: str, place: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its second attempt at what it does to the model, or its first: the model is as it was, and so are its modules."""
    model = build("stack")
    before = [(set(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    whole, made = getattr(*place), list[None]()

    def fail(*given: Any, **named: Any) -> Any:
        made.append(None)
        if len(made) == 2 or place[1] == "accept":
            raise OnPurposeError
        return whole(*given, **named)

    monkeypatch.setattr(*place, fail)
    with pytest.raises(OnPurposeError):
        begin(system, model)
    monkeypatch.undo()
    assert [(set(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == before
    assert all(type(p) is nn.Parameter and "_watched" not in vars(p) for p in model.parameters())
    assert torch.equal(evaluated(model), evaluated(build("stack"))), "it is as it was"
    begin(system, model).close()


@pytest.mark.parametrize("system", SYSTEMS)
def test_buffers_and_hooks_are_as_before(system: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._state_dict_pre_hooks) for m in model.modules()]
    with begin(system, model) as engine:
        engine.backward(engine(torch.randn(4, 8)).sum())
        engine.step()
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._state_dict_pre_hooks) for m in model.modules()]
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    assert model[1].num_batches_tracked == 2


def test_ranks_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    told = "WORLD_SIZE is 2, so this process is one of several, but RANK and .* are not set: start"
    for system in ("elixir", "resident", "torch-ddp"):
        with pytest.raises(UnsupportedError, match=told):
            systems.initialize(build("stack"), system=system, device="cpu", device_memory="8MiB")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    with pytest.raises(UnsupportedError, match="roundpipe runs on one rank so far: start one process"):
        systems.initialize(build("stack"), system="roundpipe", device="cpu", device_memory="8MiB")
