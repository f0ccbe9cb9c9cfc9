"""Values changed past the engine: refused by name, at once or at the engine's next call, and never lost without a word."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from systems.errors import UnsupportedError
from systems.system import Engine
from tests.systems.models_small import tokens
from tests.systems.running import RESIDENT, assert_equal, finished, managed, one_step, parameters_of, settings, start
from tests.systems.setups import SYSTEMS, in_turn

DIM = 16
ALL = {"resident": (RESIDENT, RESIDENT.Options()), **SYSTEMS}
BUDGET = 16 << 10  # of a model of 18 KiB


class Scaled(nn.Parameter):
    """A user's own class of parameters."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.ParameterDict({"in": Scaled(torch.ones(DIM))})
        self.rates = nn.Module()
        self.rates.register_buffer("table", torch.ones(3))
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = ids.to(self.scale["in"].dtype)[:, :DIM] / 256 * self.scale["in"]
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.pow(2).mean()


def started(system: str, model: nn.Module | None = None, **given: Any) -> Engine:
    chosen, options = ALL[system]
    asked = settings(device_memory=1 << 20 if system == "resident" else BUDGET, **given)
    return start(chosen, Net() if model is None else model, asked, options)


def module_of(engine: Engine) -> Any:
    return engine.module


def loss(engine: Any, ids: torch.Tensor, count: int) -> torch.Tensor:
    return engine(ids)


def steps(engine: Engine, count: int = 2, seed: int = 1) -> list[float]:
    return [one_step(engine, batch, loss) for batch in tokens(count, 1, seed=seed)]


def assert_goes_on(engine: Engine, taken: int) -> None:
    """As a resident engine that was never edited."""
    expected = started("resident")
    first = steps(expected, taken) if taken else []
    assert_equal(finished(expected, first + steps(expected, 2, seed=2)), finished(engine, first + steps(engine, 2, seed=2)))


def vector(model: Any) -> None:
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()).detach() * 0, model.parameters())


def each(change: Callable[[nn.Parameter], Any]) -> Callable[[Any], None]:
    def edit(model: Any) -> None:
        for parameter in model.parameters():
            change(parameter)

    return edit


IN_PLACE: dict[str, Callable[[Any], Any]] = {
    "clamp": each(lambda p: p.data.clamp_(-0.01, 0.01)),
    "add": each(lambda p: p.data.add_(0.5)),
    "last": lambda model: model.blocks[3].weight.data.zero_(),
    "copy": lambda model: model.blocks[1].weight.data[2].copy_(torch.ones(DIM)),
    "own class": lambda model: model.scale["in"].data.mul_(2),
}
AT_ONCE: dict[str, Callable[[Any], Any]] = {
    "set": each(lambda p: setattr(p, "data", torch.full_like(p, 0.01))),
    "other dtype": each(lambda p: setattr(p, "data", p.data.bfloat16())),
    "vector": vector,
    "set_": lambda model: model.blocks[2].weight.set_(torch.ones(DIM, DIM)),
    "to": lambda model: model.to(torch.bfloat16),
    "half": lambda model: model.blocks[1].half(),
    "device": lambda model: model.to("meta"),
}


def train_on(engine: Engine) -> None:
    steps(engine, 1)


def evaluate(engine: Engine) -> None:
    with torch.no_grad():
        engine(tokens(1, 1)[0, 0])


def save(engine: Engine) -> None:
    engine.training_state()


NEXT: dict[str, Callable[[Engine], Any]] = {
    "forward": train_on,
    "evaluation": evaluate,
    "summon": parameters_of,
    "checkpoint": save,
    "close": lambda engine: engine.close(),
}
SAMPLE = [
    (system, edit, list(NEXT)[(number + other) % len(NEXT)])
    for number, system in enumerate(ALL)
    for other, edit in enumerate(IN_PLACE)
]


@pytest.mark.parametrize(("system", "edit", "then"), SAMPLE)
@pytest.mark.one_in(2)
def test_an_edit_through_data_is_refused_at_the_next_call(system: str, edit: str, then: str) -> None:
    engine = started(system)
    steps(engine)
    IN_PLACE[edit](engine.module)
    with pytest.raises(UnsupportedError, match=r"parameter [a-z0-9.]+ was edited in place.*summon\(write=True\)"):
        NEXT[then](engine)
    engine.close()


@pytest.mark.parametrize("system", ALL)
def test_an_edit_between_backward_and_step(system: str) -> None:
    engine = started(system)
    engine.backward(engine(tokens(1, 1)[0, 0]))
    module_of(engine).blocks[0].weight.data.zero_()
    with pytest.raises(UnsupportedError, match=r"blocks\.0\.weight was edited in place"):
        engine.step()
    engine.close()


@pytest.mark.parametrize("system", ALL)
def test_summon_with_write_is_the_way_out(system: str) -> None:
    """What was edited past the engine is gone, wherever it went; the NaNs that stand for absent weights are whole again."""
    engine = started(system)
    losses = steps(engine)
    each(lambda p: p.data.fill_(7.0))(engine.module)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="was edited in place"):
            train_on(engine)
    with engine.summon(write=True) as values:
        expected = started("resident")
        assert losses == steps(expected)
        for name, value in parameters_of(expected).items():
            values[name].copy_(value)
    assert_equal(finished(expected, steps(expected, 2, seed=2)), finished(engine, steps(engine, 2, seed=2)))


@pytest.mark.parametrize("system", ALL)
def test_other_values_are_refused_at_once(system: str) -> None:
    """And leave nothing half done: buffers are as they were, and training goes on."""
    engine = started(system)
    steps(engine)
    for edit in AT_ONCE.values():
        with pytest.raises(UnsupportedError, match=r"parameter [a-z0-9.]+ (was given other values|is with the engine)"):
            edit(engine.module)
    table = module_of(engine).rates.table
    assert table.dtype == torch.float32 and not table.is_meta
    assert_goes_on(engine, 2)


def nothing(model: Any) -> None:
    model.to(torch.float32).to("cpu").float()
    for parameter in model.parameters():
        parameter.data = parameter.data
        parameter.set_(parameter)


@pytest.mark.parametrize("system", ALL)
@pytest.mark.one_in(2)
def test_what_changes_nothing_is_let_through(system: str) -> None:
    engine = started(system)
    steps(engine)
    nothing(engine.module)
    assert_goes_on(engine, 2)


@pytest.mark.parametrize("system", ALL)
def test_a_parameter_replaced_by_another_is_refused(system: str) -> None:
    """Layers that a library makes anew: the engine would train what nobody reads. More of it: test_structure.py."""
    engine = started(system)
    module_of(engine).blocks[1] = nn.Linear(DIM, DIM)
    with pytest.raises(UnsupportedError, match=r"parameter blocks\.1\.weight was replaced by another"):
        train_on(engine)
    engine.close()


@pytest.mark.parametrize("system", ALL)
def test_a_state_dict_is_refused_before_any_of_it_is_loaded(system: str) -> None:
    """By every module that has parameters below; one of buffers alone is the model's own. A copy is free."""
    engine = started(system)
    steps(engine)
    model, saved = module_of(engine), Net().state_dict()
    saved["rates.table"] = torch.zeros(3)
    others: dict[str, Any] = {"blocks.1": nn.Linear(DIM, DIM), "scale": Net().scale, "blocks": Net().blocks}
    loads = [(model, saved), *((model.get_submodule(name), other.state_dict()) for name, other in others.items())]
    loads += [
        (model, {"rates.table": torch.zeros(3)}),
        (nn.ModuleDict({"model": model}), {"model." + n: v for n, v in saved.items()}),
    ]
    for module, values in loads:
        for how in ({}, {"strict": False}, {"assign": True}):
            with pytest.raises(UnsupportedError, match=r"load_state_dict\(\): .* before initialize, .*summon\(write=True\)"):
                module.load_state_dict(values, **how)
    assert model.rates.table.eq(1).all()
    model.rates.load_state_dict({"table": torch.ones(3)})
    if system == "resident":
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            copied.load_state_dict(saved)
    assert_goes_on(engine, 2)
    model.load_state_dict(saved)


@pytest.mark.parametrize("system", ALL)
def test_the_names_of_summon_are_those_of_a_state_dict(system: str) -> None:
    engine, other = started(system), Net()
    assert isinstance(other.scale["in"], nn.Parameter)
    nn.init.normal_(other.scale["in"])
    with engine.summon(write=True) as values:
        for name, value in other.state_dict().items():
            values[name].copy_(value)
    engine.close()
    assert_equal_values(engine, other.state_dict())


def assert_equal_values(engine: Engine, expected: dict[str, torch.Tensor]) -> None:
    found = engine.module.state_dict()
    assert found.keys() == expected.keys()
    assert not [name for name, value in found.items() if not torch.equal(value, expected[name])]


def replace(model: Any) -> None:
    """Past setattr, which would be refused."""
    model.blocks[1]._parameters["weight"] = nn.Parameter(torch.zeros(DIM, DIM))


def turn(model: Any) -> None:
    with torch.no_grad():
        model.blocks[2].weight.t_()


@pytest.mark.parametrize(("system", "told"), in_turn(ALL, [(False,), (True,)]))
@pytest.mark.one_in(2)
def test_closing_gives_the_trained_values_whatever_was_edited(system: str, told: bool) -> None:
    """In the middle of a step, too. It is said, once; what was said by a failure before stands."""
    expected = started("resident", dtype="bf16")
    steps(expected)
    expected.close()
    for edit in (IN_PLACE["clamp"], turn, replace):
        engine = started(system, dtype="bf16")
        steps(engine)
        engine.backward(engine(tokens(1, 1)[0, 0]))
        edit(engine.module)
        if told:
            with pytest.raises(UnsupportedError, match="was edited in place|was replaced"):
                engine.step()
            engine.close()
        else:
            with pytest.raises(UnsupportedError, match="(was edited in place|was replaced).*has given the model its trained"):
                engine.close()
        assert_equal_values(engine, expected.module.state_dict())
        told = not told


@pytest.mark.parametrize("system", ALL)
def test_a_frozen_parameter_of_which_there_are_no_other_values(system: str) -> None:
    """All else is as it was trained, and it is said, even where the edit was refused before."""
    model: Any = Net()
    model.blocks[0].requires_grad_(False)
    before = model.blocks[0].weight.detach().clone()
    engine = started(system, model)
    steps(engine)
    trained = {name: value.clone() for name, value in engine.state_dict().items()}
    model.blocks[0].weight.data.add_(1)
    with pytest.raises(UnsupportedError, match=r"blocks\.0\.weight was edited in place"):
        train_on(engine)
    if system == "resident" or managed(engine).residency.writes_back:
        with pytest.raises(UnsupportedError, match=r"blocks\.0\.weight was edited.*no values but these.*all else as it was"):
            engine.close()
        trained["blocks.0.weight"] = model.state_dict()["blocks.0.weight"]
    else:
        engine.close()
        assert torch.equal(model.blocks[0].weight, before)
    assert_equal_values(engine, trained)


@pytest.mark.parametrize("system", ALL)
def test_a_model_without_weights_takes_none(system: str) -> None:
    engine = started(system)
    engine.close(keep=False)
    with pytest.raises(UnsupportedError, match="weights are gone: .*build the model anew"):
        engine.module.load_state_dict(Net().state_dict(), assign=True)


@pytest.mark.parametrize("flag", ["swap_module_params", "overwrite_module_params"])
def test_torch_s_other_ways_to_convert_are_refused(flag: str) -> None:
    engine = started("elixir")
    switch = getattr(torch.__future__, f"set_{flag}_on_conversion")
    switch(True)
    try:
        with pytest.raises(UnsupportedError, match="set to replace or swap parameters"):
            module_of(engine).to("cpu")
        with pytest.raises(RuntimeError, match="swap"):
            torch.utils.swap_tensors(module_of(engine).blocks[0].weight, nn.Parameter(torch.ones(DIM, DIM)))
    finally:
        switch(False)
    assert_goes_on(engine, 0)


@pytest.mark.parametrize("system", ALL)
def test_a_closed_engine_lets_go_of_the_model_s_ways(system: str) -> None:
    model = Net()
    kinds = [type(p) for p in model.parameters()]
    started(system, model).close()
    assert [type(p) for p in model.parameters()] == kinds and Scaled in kinds
    assert not any("_apply" in vars(module) for module in model.modules())
    model.to(torch.bfloat16)


def test_a_copy_of_a_resident_model_is_free() -> None:
    """An average of the weights is kept in one."""
    engine = started("resident")
    other = copy.deepcopy(module_of(engine)).half()
    other.blocks[0].weight.data = torch.zeros(DIM, DIM)
    assert other.rates.table.dtype == torch.float16
    assert module_of(engine).blocks[0].weight.dtype == torch.float32
    assert_goes_on(engine, 0)


def test_an_error_on_the_way_out_is_the_one_that_is_told() -> None:
    engine = started("elixir")

    def edit_and_fail() -> None:
        with engine:
            module_of(engine).blocks[0].weight.data.zero_()
            raise KeyError

    with pytest.raises(KeyError):
        edit_and_fail()
