"""Names that mean other parameters than at initialize: refused before the next step and wherever values go by names."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import systems
from systems.errors import UnsupportedError
from systems.recipe.model.structure import Structure
from systems.system import Engine
from tests.systems.models_small import tokens
from tests.systems.running import assert_equal, finished
from tests.systems.test_edits import ALL, DIM, loss, steps
from tests.systems.test_edits import started as started_with


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.stem = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.act: nn.Module = nn.Tanh()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.stem(ids.float()[:, :DIM] / 256)
        for block in self.blocks:
            x = x + self.act(block(x))
        return x.pow(2).mean()


def started(system: str, model: nn.Module | None = None, **given: Any) -> Engine:
    return started_with(system, Net() if model is None else model, **given)


def swap(model: Any) -> None:
    model.blocks = nn.ModuleList([model.blocks[1], model.blocks[0], model.blocks[2]])


def wrap(model: Any) -> None:
    model.blocks[2] = nn.Sequential(model.blocks[2])


def other(model: Any) -> None:
    model.stem = nn.Linear(DIM, DIM)


def delete(model: Any) -> None:
    del model.blocks[0].bias


def add(model: Any) -> None:
    model.extra = nn.Linear(DIM, DIM)


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def parametrize(model: Any) -> None:
    nn.utils.parametrize.register_parametrization(model.blocks[1], "weight", Doubled())


LATER: dict[str, tuple[Callable[[Any], None], str]] = {
    "swap": (swap, r"parameter blocks\.0\.weight is blocks\.1\.weight of initialize now"),
    "wrap": (wrap, r"parameter blocks\.2\.weight is gone since initialize, and blocks\.2\.0\.weight is new"),
    "other": (other, r"parameter stem\.weight was replaced by another"),
    "delete": (delete, r"parameter blocks\.0\.bias is gone since initialize"),
    "add": (add, r"parameter extra\.weight is new since initialize"),
    "parametrize": (parametrize, r"parameter blocks\.1\.weight is gone since initialize, and blocks\.1\.parametrizations\."),
}
CALLS: dict[str, Callable[[Engine, Path], Any]] = {
    "state_dict": lambda engine, folder: engine.state_dict(),
    "summon": lambda engine, folder: engine.summon().__enter__(),
    "summon write": lambda engine, folder: engine.summon(write=True).__enter__(),
    "save": lambda engine, folder: systems.save_checkpoint(engine, folder / "checkpoint"),
    "forward": lambda engine, folder: loss(engine, tokens(1, 1)[0, 0], 1),
}


def sampled(changes: Iterable[str], share: int) -> list[Any]:
    """Each system with some of them, and with the others in the long tests."""
    return [
        pytest.param(system, change, marks=() if (number + place) % share == 0 else pytest.mark.slow)
        for number, system in enumerate(ALL)
        for place, change in enumerate(changes)
    ]


@pytest.mark.parametrize(("system", "change"), sampled(LATER, 3))
def test_a_changed_structure_is_refused_wherever_names_count(system: str, change: str, tmp_path: Path) -> None:
    engine = started(system)
    steps(engine)
    make, says = LATER[change]
    make(engine.module)
    for call in CALLS.values():
        with pytest.raises(UnsupportedError, match=says) as caught:
            call(engine, tmp_path)
        assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())
    engine.close()
    assert all(p.isfinite().all() and type(p) is nn.Parameter for p in engine.module.parameters())
    assert not any("register_parameter" in vars(module) for module in engine.module.modules())


@pytest.mark.parametrize("system", ALL)
def test_a_step_is_not_trained_with_another_structure(system: str) -> None:
    engine = started(system)
    steps(engine)
    engine.backward(loss(engine, tokens(1, 1)[0, 0], 1))
    swap(engine.module)
    with pytest.raises(UnsupportedError, match=r"blocks\.0\.weight is blocks\.1\.weight"):
        engine.step()
    swap(engine.module)
    assert len(engine.outcomes) == 2
    steps(engine)
    engine.close()


def prune_first(model: Any) -> None:
    prune.l1_unstructured(model.blocks[0], "weight", 0.5)


def assign(model: Any) -> None:
    model.blocks[0].weight = nn.Parameter(torch.zeros(DIM, DIM))


def no_bias(model: Any) -> None:
    model.stem.bias = None


def new(model: Any) -> None:
    model.register_parameter("new", nn.Parameter())


def norm(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.blocks[1])


AT_ONCE: dict[str, Callable[[Any], None]] = {
    "prune": prune_first,
    "assign": assign,
    "no bias": no_bias,
    "new": new,
    "norm": norm,
}


@pytest.mark.parametrize(("system", "change"), sampled(AT_ONCE, 4))
def test_what_registers_a_parameter_is_refused_at_once(system: str, change: str) -> None:
    """Pruning would rank the NaNs of an absent weight. Nothing was changed: training goes on."""
    engine, expected = started(system), started("resident")
    losses, theirs = steps(engine), steps(expected)
    says = r"parameter [a-z0-9_.]+ is (registered while the engine is open|with the engine, and another)"
    with pytest.raises(UnsupportedError, match=says):
        AT_ONCE[change](engine.module)
    assert_equal(finished(expected, theirs + steps(expected)), finished(engine, losses + steps(engine)))


@pytest.mark.parametrize("system", ALL)
def test_what_changes_no_name_of_a_parameter_is_let_through(system: str) -> None:
    runs = []
    for chosen in ("resident", system):
        engine = started(chosen)
        model: Any = engine.module
        losses = steps(engine)
        model.act, model.blocks[1].weight = nn.Sequential(nn.Tanh()), model.blocks[1].weight
        model.register_parameter("none", None)
        assert engine.state_dict().keys() == dict(model.named_parameters()).keys()
        runs.append(finished(engine, losses + steps(engine)))
    assert_equal(*runs)


def test_a_copy_of_a_resident_model_may_be_changed() -> None:
    engine = started("resident")
    other, names = copy.deepcopy(engine.module), dict(engine.module.named_parameters()).keys()
    for change in (prune_first, no_bias, swap, wrap):
        change(other)
    steps(engine)
    assert engine.state_dict().keys() == names != dict(other.named_parameters()).keys()
    engine.close()


def test_looking_at_the_structure_costs_little_a_unit() -> None:
    """Once a step; the bound is far above what it takes (0.7 microseconds a module) for a machine that is busy."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.ReLU()) for _ in range(50)))
    structure = Structure(model, list(model.parameters()), dict(model.named_parameters()))
    took = []
    for _ in range(20):
        began = time.perf_counter()
        assert structure.changed() is None
        took.append(time.perf_counter() - began)
    structure.end()
    assert min(took) / 50 < 50e-6


# ---- one parameter in two models


@pytest.mark.parametrize("system", ALL)
def test_a_parameter_of_an_open_engine_is_not_given_to_another(system: str) -> None:
    """The first engine goes on as if nothing had been; a frozen one that is carried along counts, too."""
    one, two = Net(), Net(1)
    two.stem.weight = one.stem.weight
    engine, expected = started(system, one), started("resident")
    losses, theirs = steps(engine), steps(expected)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"parameter stem\.weight was given to an engine before, in another model"):
            started(system, two)
    assert type(two.stem.bias) is nn.Parameter and two.stem.bias.isfinite().all()
    assert_equal(finished(expected, theirs + steps(expected)), finished(engine, losses + steps(engine)))
    with started(system, two) as later:
        steps(later)


@pytest.mark.parametrize("system", ALL)
def test_a_carried_parameter_of_an_open_engine_is_not_given_to_another(system: str) -> None:
    one, two = Net(), Net(1)
    one.codes = two.codes = nn.Parameter(torch.arange(4), requires_grad=False)
    with started(system, one), pytest.raises(UnsupportedError, match=r"parameter codes was given to an engine before"):
        started(system, two)
    started(system, two).close()
