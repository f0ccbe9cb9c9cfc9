"""A torch optimizer's state goes both ways: what torch keeps of it, the engine trains on with, and the other way round."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import systems
from systems.errors import BudgetError, UnsupportedError
from systems.strategies.elixir.options import ElixirOptions
from systems.system import Engine
from tests.systems.models_plain import CASES, build
from tests.systems.models_small import tokens
from tests.systems.running import RESIDENT, AdamState, adam_states, elixir, one_step, parameters_of, settings, start
from tests.systems.setups import SYSTEMS as MANAGED
from tests.systems.setups import in_turn

LOSS = CASES["stack"].loss
BATCH = tokens(1, 1)[0]
SYSTEMS: dict[str, tuple[Any, Any]] = {"resident": (RESIDENT, None), **MANAGED}
State = dict[str, Any]


def adam(model: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def begin(system: str, model: nn.Module, optimizer: torch.optim.Optimizer, **given: Any) -> Engine:
    chosen, options = SYSTEMS[system]
    budget = {} if system == "resident" else {"device_memory": 260_000}
    return start(chosen, model, settings(optimizer=optimizer, **budget | given), options)


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    for batch in ids:
        LOSS(model, batch[0], batch[:, :, 1:].numel()).backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """In plain PyTorch; one block is frozen, so that its parameters have no state."""
    model = build("stack")
    model.blocks[1].requires_grad_(False)
    optimizer = adam(model)
    plain(model, optimizer, tokens(4, 1)[:steps])
    return model, optimizer


def close_to(one: State, other: State, tolerance: float = 1e-6) -> bool:
    """Keys, shapes and step counts equal, moments as near as this project's Adam is to torch's."""
    assert one["param_groups"] == other["param_groups"] and one["state"].keys() == other["state"].keys()
    for number, mine in one["state"].items():
        theirs = other["state"][number]
        assert list(mine) == list(theirs) == ["step", "exp_avg", "exp_avg_sq"]
        assert mine["step"].dtype == torch.float32 and torch.equal(mine["step"], theirs["step"])
        for part in ("exp_avg", "exp_avg_sq"):
            assert mine[part].dtype == torch.float32 and mine[part].shape == theirs[part].shape
            if not torch.allclose(mine[part], theirs[part], rtol=tolerance * 100, atol=tolerance):
                return False
    return True


@pytest.mark.parametrize(("system", "how"), in_turn(SYSTEMS, [("load_state_dict",), ("initialize",)]))
@pytest.mark.one_in(2)
def test_from_torch_to_an_engine_and_back(system: str, how: str) -> None:
    """Two steps in plain PyTorch, two in an engine: as near to four in PyTorch as an engine's own four would be."""
    model, optimizer = trained(2)
    whole, of_whole = trained(4)
    if how == "load_state_dict":
        saved, optimizer = copy.deepcopy(optimizer.state_dict()), adam(model)
    with begin(system, model, optimizer) as engine:
        if how == "load_state_dict":
            optimizer.load_state_dict(saved)
        assert not optimizer.state, "no second copy is kept"
        for batch in tokens(4, 1)[2:]:
            one_step(engine, batch, LOSS)
        found = optimizer.state_dict()
        assert not optimizer.state
        assert close_to(found, of_whole.state_dict())
        torch.save(found, io.BytesIO())
    assert all(torch.allclose(p, q, atol=1e-6) for p, q in zip(model.parameters(), whole.parameters(), strict=True))


@cache
def one_after_the_other(*names: str) -> tuple[list[float], dict[str, torch.Tensor], dict[str, AdamState]]:
    """Four steps, through torch from each system to the next: losses, and what is left."""
    model, losses, saved, values = build("stack"), list[float](), None, dict[str, torch.Tensor]()
    states: dict[str, AdamState] = {}
    for name, ids in zip(names, tokens(4, 1).chunk(len(names)), strict=True):
        optimizer = adam(model)
        engine = begin(name, model, optimizer, dtype="bf16")
        if saved is not None:
            with engine.summon(write=True) as weights:
                weights.update(values)
            optimizer.load_state_dict(torch.load(saved))
        losses += [one_step(engine, batch, LOSS) for batch in ids]
        engine.drain()
        saved = io.BytesIO()
        torch.save(optimizer.state_dict(), saved)
        saved.seek(0)
        values, states = parameters_of(engine), adam_states(engine)
        engine.close()
    return losses, values, states


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.one_in(3)
def test_through_torch_and_into_another_engine_no_bit_changes(system: str) -> None:
    """bf16 weights: torch itself would cast the moments to that. Pickled between; resident without a break is the same."""
    expected = one_after_the_other("resident")
    for names in (("resident", system), (system, "resident")):
        losses, values, states = one_after_the_other(*names)
        assert losses == expected[0]
        assert all(torch.equal(value, values[name]) for name, value in expected[1].items())
        for name, (first, second, steps) in expected[2].items():
            theirs = states[name]
            assert torch.equal(first, theirs.exp_avg) and torch.equal(second, theirs.exp_avg_sq) and steps == theirs.steps


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.one_in(4)
def test_a_schedule_goes_on_from_a_checkpoint_as_the_readme_says(system: str, tmp_path: Path) -> None:
    """Rates that the schedule makes of the last ones, and betas that the loop has changed: no bit differs."""
    runs: list[tuple[list[float], dict[str, torch.Tensor]]] = []
    for parts in ((4,), (2, 4)):
        losses, begun, saved = list[float](), 0, None
        for until in parts:
            model = build("stack")
            optimizer = adam(model)
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5)
            with begin(system, model, optimizer) as engine:
                if saved is not None:
                    systems.load_checkpoint(engine, tmp_path / "kept")
                    for group, theirs in zip(optimizer.param_groups, saved["groups"], strict=True):
                        group.update(theirs, params=group["params"])
                    schedule.load_state_dict(saved["schedule"])
                for number in range(begun, until):
                    if number == 1:
                        optimizer.param_groups[0]["betas"] = (0.8, 0.9)
                    losses.append(one_step(engine, tokens(4, 1)[number], LOSS))
                    schedule.step()
                systems.save_checkpoint(engine, tmp_path / "kept")
                groups = [{**group, "params": None} for group in optimizer.param_groups]
                torch.save({"groups": groups, "schedule": schedule.state_dict()}, tmp_path / "loop")
                begun, saved = until, torch.load(tmp_path / "loop")
                values = parameters_of(engine)
        runs.append((losses, values))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(value, runs[1][1][name]) for name, value in runs[0][1].items())


def test_states_on_a_disk(tmp_path: Any) -> None:
    model, optimizer = trained(2)
    saved = copy.deepcopy(optimizer.state_dict())
    with begin("elixir", model, adam(model), device_memory=400_000, host_memory=420_000, disk=tmp_path) as engine:
        assert engine.memory().disk_peak_bytes
        theirs: torch.optim.Optimizer = engine.settings.optimizer  # type: ignore[assignment]
        theirs.load_state_dict(saved)
        engine._states._room = lambda wanted: 1 << 30  # type: ignore[attr-defined]
        assert close_to(theirs.state_dict(), saved, tolerance=0.0)


def spoiled(part: str, change: Callable[[Any], Any]) -> Callable[[State], None]:
    def spoil(saved: State) -> None:
        entry = saved["state"][0]
        entry[part] = change(entry[part])

    return spoil


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (
            spoiled("exp_avg", lambda t: t[:-1]),
            r"blocks\.0\.norm\.weight has exp_avg of shape \(47,\), the parameter's is \(48,\)",
        ),
        (spoiled("exp_avg", lambda t: t * torch.nan), "has a exp_avg that is not finite"),
        (spoiled("exp_avg_sq", lambda t: -t), "has a negative exp_avg_sq"),
        (spoiled("step", lambda t: t + 0.5), "has the step count 2.5: give a whole number"),
        (spoiled("step", lambda t: t - 7), "has the step count -5.0"),
        (spoiled("max_exp_avg_sq", lambda t: t), "has max_exp_avg_sq, of amsgrad=True"),
        (spoiled("momentum_buffer", lambda t: t), "torch's AdamW and Adam keep step, exp_avg and exp_avg_sq"),
        (lambda saved: saved["state"].update({999: saved["state"][0]}), "has the state of a parameter that is not the model's"),
        (lambda saved: saved["state"].update({6: saved["state"][0]}), "of parameter blocks.1.norm.weight, which is frozen"),
        (lambda saved: saved["param_groups"][0].update(amsgrad=True), r"AdamW\(amsgrad=True\) is not supported"),
    ],
)
def test_a_state_that_cannot_be_taken_is_refused_by_name(spoil: Callable[[State], None], says: str) -> None:
    model, optimizer = trained(2)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0].setdefault("max_exp_avg_sq", None) if "max_exp" in says else None
    saved["state"][0].setdefault("momentum_buffer", None) if "torch's AdamW" in says else None
    spoil(saved)
    fresh = adam(model, lr=5e-4)
    with begin("elixir", model, fresh) as engine:
        with pytest.raises(UnsupportedError, match=says) as caught:
            fresh.load_state_dict(saved)
        assert "\n" not in str(caught.value)
        assert fresh.param_groups[0]["lr"] == 5e-4 and fresh.state_dict()["state"] == {}, "nothing was changed"
        assert one_step(engine, BATCH, LOSS) > 0


@pytest.mark.parametrize("system", ["resident", "elixir"])
def test_where_the_state_cannot_be_had_it_is_refused(system: str) -> None:
    model = build("stack")
    optimizer = adam(model)
    engine = begin(system, model, optimizer)
    one_step(engine, BATCH, LOSS)
    saved = optimizer.state_dict()
    loss = LOSS(engine, BATCH[0], 1)
    engine.backward(loss)
    for use in (optimizer.state_dict, lambda: optimizer.load_state_dict(saved)):
        with pytest.raises(UnsupportedError, match=r"optimizer\.[a-z_]+\(\): a step is in progress"):
            use()
    engine.discard()
    engine._states._room = lambda wanted: 1000  # type: ignore[attr-defined]
    with pytest.raises(BudgetError, match=r"needs .* of host memory for the moments, 1000B are left .*save_checkpoint"):
        optimizer.state_dict()
    assert not optimizer.state
    engine.close()
    model(torch.ones(1, 48)).sum().backward()
    for use in (optimizer.state_dict, lambda: optimizer.load_state_dict(saved), optimizer.step):
        with pytest.raises(UnsupportedError, match=r"went with the engine that is closed: make a new optimizer"):
            use()
    with pytest.raises(UnsupportedError, match="make a new optimizer"):
        begin(system, model, optimizer)
    fresh = adam(model)
    with begin(system, model, fresh):
        fresh.load_state_dict(saved)


def test_a_groups_own_state_resets_what_has_none() -> None:
    """As in torch: what is loaded is all there is."""
    model = build("stack")
    optimizer = adam(model)
    empty = optimizer.state_dict()
    with begin("elixir", model, optimizer) as engine:
        one_step(engine, BATCH, LOSS)
        optimizer.load_state_dict(empty)
        engine.drain()
        assert {(state.steps, bool(state.exp_avg.any())) for state in adam_states(engine).values()} == {(0, False)}


def test_hyperparameters_that_change_between_backward_and_step() -> None:
    """nonfinite=stop has used the old ones: the step is refused, and can be taken once they are set back. Else they count."""
    runs = []
    for chosen, options, refuses in (
        (RESIDENT, None, False),
        (elixir(), None, False),
        (elixir(), ElixirOptions(nonfinite="stop"), True),
    ):
        model = build("stack")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with start(chosen, model, settings(optimizer=optimizer, device_memory=None), options) as engine:
            for name, value in (("lr", 1e-2), ("betas", (0.8, 0.9)), ("eps", 1e-4), ("weight_decay", 0.5)):
                before = optimizer.param_groups[0][name]
                engine.backward(LOSS(engine, BATCH[0], 30))
                optimizer.param_groups[0][name] = value
                if refuses:
                    with pytest.raises(UnsupportedError, match=rf"^step: {name} of parameter group 0 .* changed after"):
                        engine.step()
                    with pytest.raises(UnsupportedError, match="discard: backward has updated weights already"):
                        engine.discard()
                    optimizer.param_groups[0][name] = before
                engine.step()
            runs.append(parameters_of(engine))
    assert all(torch.equal(value, runs[1][name]) for name, value in runs[0].items())
    assert not all(torch.equal(value, runs[2][name]) for name, value in runs[0].items()), "void: nothing was changed"


def test_the_rate_of_an_engine_without_an_optimizer() -> None:
    with start(elixir(), build("stack"), settings(), ElixirOptions(nonfinite="stop")) as engine:
        engine.backward(LOSS(engine, BATCH[0], 30))
        engine.set_lr(0.5)
        with pytest.raises(UnsupportedError, match=r"^step: lr \(0.0001 to 0.5\) changed after backward"):
            engine.step()
        engine.set_lr(1e-4)
        engine.step()


@pytest.mark.parametrize("system", ["resident", "elixir"])
def test_groups_are_looked_at_again(system: str) -> None:
    """Parameters may be added and moved; what is not the model's is refused, and the step can then be taken without it."""
    model = build("stack")
    optimizer = torch.optim.AdamW([{"params": model.blocks.parameters()}, {"params": model.head.parameters(), "lr": 0.0}])
    with begin(system, model, optimizer) as engine:
        before = parameters_of(engine)
        one_step(engine, BATCH, LOSS)
        assert torch.equal(parameters_of(engine)["head.weight"], before["head.weight"])
        optimizer.param_groups[0]["params"] += optimizer.param_groups.pop()["params"]
        one_step(engine, BATCH, LOSS)
        assert not torch.equal(parameters_of(engine)["head.weight"], before["head.weight"])
        engine.backward(LOSS(engine, BATCH[0], 30))
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 5))]})
        with pytest.raises(UnsupportedError, match=r"group 1 of the optimizer has a parameter of shape \(3, 5\)"):
            engine.step()
        del optimizer.param_groups[1]
        engine.step()
    assert len(engine.outcomes) == 3
