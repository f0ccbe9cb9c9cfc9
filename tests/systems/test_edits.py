"""Values changed past the engine: refused by name, at once or at the engine's next call, and never lost without a word."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from systems.errors import UnsupportedError
from systems.system import Engine
from tests.systems.models_small import tokens
from tests.systems.running import RESIDENT, assert_equal, finished, one_step, parameters_of, settings, start
from tests.systems.setups import SYSTEMS

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
        x = ids.float()[:, :DIM] / 256 * self.scale["in"]
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
    model.load_state_dict({}, strict=False)


@pytest.mark.parametrize("system", ALL)
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
