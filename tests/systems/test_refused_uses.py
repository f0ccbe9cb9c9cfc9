"""What would end in an error that explains nothing, or lose something small in silence: right, or refused by name."""

from __future__ import annotations

import copy
import io
import pickle
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import systems
from systems.errors import HiddenUseError, UnsupportedError
from systems.recipe.step.in_progress import is_running
from tests.systems.models_small import tokens
from tests.systems.running import assert_equal, finished
from tests.systems.test_structure import ALL, DIM, Net, loss, started, steps

BATCH = tokens(1, 1)[0, 0]
MANAGED = [name for name in ALL if name != "resident"]


# ---- modules and calls that hide weights


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("system", ALL)
def test_a_scripted_module_with_weights_is_refused(system: str) -> None:
    for make in (lambda: torch.jit.script(nn.Linear(DIM, DIM)), lambda: nn.Sequential(torch.jit.script(nn.Linear(DIM, DIM)))):
        model = Net()
        model.blocks = nn.ModuleList([make(), make()])
        with pytest.raises(UnsupportedError, match=r"module blocks\.0(\.0)? is scripted or traced and takes no hooks"):
            started(system, model)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_scripted_module_without_weights_is_used_as_it_is() -> None:
    runs = []
    for system in ("resident", "elixir"):
        model = Net()
        model.act = torch.jit.script(nn.Tanh())
        engine = started(system, model)
        runs.append(finished(engine, steps(engine)))
    assert_equal(*runs)


class Sparse(Net):
    """Reads a table so that its gradient says only where it is not zero."""

    def __init__(self, read: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.table, self.read = nn.Parameter(torch.ones(10, DIM)), read

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + self.read(self.table).sum()


def embedded(table: torch.Tensor) -> torch.Tensor:
    return nn.functional.embedding(torch.tensor([1, 3]), table, sparse=True)


def gathered(table: torch.Tensor) -> torch.Tensor:
    return torch.gather(table, 0, torch.zeros(1, DIM, dtype=torch.int64), sparse_grad=True)


@pytest.mark.parametrize("system", ALL)
def test_a_sparse_gradient_is_refused_by_name(system: str) -> None:
    for read in (embedded, gathered):
        engine = started(system, Sparse(read))
        value = loss(engine, BATCH, 1)
        with pytest.raises(HiddenUseError, match="parameter table has a sparse gradient, which cannot be kept: leave off"):
            engine.backward(value)
        module: Any = engine.module
        module.read = lambda table: table[1]
        steps(engine, 1)
        engine.close()


class Transformed(Net):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.stem(ids.float()[:, :DIM] / 256)
        for block in self.blocks:
            x = torch.func.vjp(block, x)[0]
        return x.pow(2).mean()


@pytest.mark.parametrize("system", MANAGED)
def test_a_module_under_a_transform_is_refused(system: str) -> None:
    with (
        started(system, Transformed()) as engine,
        pytest.raises(UnsupportedError, match=r"a transform of torch\.func"),
    ):
        loss(engine, BATCH, 1)


# ---- inference mode


@pytest.mark.parametrize("system", ALL)
@pytest.mark.one_in(2)
def test_within_inference_mode_nothing_is_initialized_and_all_else_is_as_outside(system: str, tmp_path: Path) -> None:
    with torch.inference_mode(), pytest.raises(UnsupportedError, match=r"torch\.inference_mode\(\) is on"):
        started(system)
    runs = []
    for mode in (torch.inference_mode, torch.enable_grad):
        model = Net()
        model.register_buffer("seen", torch.ones(3))
        engine = started(system, model)
        losses = steps(engine)
        value = loss(engine, BATCH, 1)
        with mode():
            engine.backward(value)
            engine.step()
            with engine.summon(write=True) as values:
                values["stem.weight"].mul_(0.5)
                values["seen"].add_(1)
            with engine.summon() as values:
                assert values["seen"].tolist() == [2, 2, 2]
            kept = engine.state_dict()
            systems.save_checkpoint(engine, tmp_path / "checkpoint")
        assert not any(tensor.is_inference() for tensor in kept.values())
        losses += steps(engine)
        with mode():
            runs.append(finished(engine, losses))
        assert not any(p.is_inference() for p in model.parameters())
        model(BATCH).backward()
    assert_equal(*runs)


# ---- closing at a bad moment


@pytest.mark.parametrize("system", ALL)
def test_an_engine_is_not_closed_while_weights_are_lent_or_a_pass_runs(system: str) -> None:
    """And goes on, with its weights."""
    engine, expected = started(system), started("resident")
    model: Any = engine.module
    losses, theirs = steps(engine), steps(expected)

    def summoned() -> None:
        with engine.summon(write=True) as values:
            values["stem.weight"].zero_()
            engine.close()

    with pytest.raises(ValueError, match=r"summon\(write=True\) is open"):
        summoned()

    def close(*given: Any) -> None:
        engine.close()

    def with_gradient(*given: Any) -> None:
        given[-1].register_hook(close)

    for hook, use in (
        (close, lambda: loss(engine, BATCH, 1)),
        (close, lambda: model(BATCH)),
        (with_gradient, lambda: engine.backward(loss(engine, BATCH, 1))),
    ):
        handle = model.blocks[1].register_forward_hook(hook)
        with pytest.raises(ValueError, match="close: a pass of this engine is running"):
            use()
        handle.remove()
    with engine.summon():
        pass
    assert_equal(finished(expected, theirs + steps(expected)), finished(engine, losses + steps(engine)))


@pytest.mark.parametrize("system", ALL)
def test_an_engine_is_not_closed_by_another_thread_while_its_pass_runs(system: str) -> None:
    """A device's backward pass has a thread of its own, in which hooks run; what such a thread asks is told apart from what
    Ctrl-C left."""
    engine, expected = started(system), started("resident")
    told: list[str] = []

    def refused() -> None:
        with pytest.raises(ValueError, match="close: a pass of this engine is running") as error:
            engine.close()
        told.append(str(error.value))

    def elsewhere(*given: Any) -> None:
        thread = threading.Thread(target=refused)
        thread.start()
        thread.join()

    losses, theirs = steps(engine), steps(expected)
    made = loss(engine, BATCH, 1)
    made.register_hook(elsewhere)
    engine.backward(made)
    engine.step()
    losses.append(made.item())
    assert len(told) == 1
    assert_equal(finished(expected, theirs + steps(expected, 1)), finished(engine, losses))


def test_stacks_of_other_threads_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11 may end the process over it: they change meanwhile."""
    engine = started("resident")
    monkeypatch.setattr(sys, "_current_frames", lambda: pytest.fail("stacks of all threads"))
    assert not is_running(engine, None) and not is_running(engine, threading.get_ident())
    assert is_running(engine, threading.get_ident() + 1)
    engine.close()


@pytest.mark.parametrize("system", ALL)
def test_a_refusal_in_the_midst_of_a_pass_costs_nothing_of_it(system: str) -> None:
    """A hook asks for what only lies between steps, is refused, and goes on."""
    engine, expected = started(system), started("resident")
    model: Any = engine.module
    said: list[str] = []

    def ask(*given: Any) -> None:
        for what in (engine.state_dict, engine.training_state):
            with pytest.raises(UnsupportedError, match="a step is in progress") as refused:
                what()
            said.append(str(refused.value))

    losses = steps(engine)
    for hook in (ask, lambda *given: given[-1].register_hook(ask)):
        handle = model.blocks[1].register_forward_hook(lambda *given, hook=hook: hook(*given) and None)
        losses += steps(engine, 1)
        handle.remove()
    assert len(said) == 4
    theirs = steps(expected) + steps(expected, 1) + steps(expected, 1)
    assert_equal(finished(expected, theirs), finished(engine, losses))


# ---- copies of an optimizer


@pytest.mark.parametrize("system", ALL)
def test_a_copy_of_the_optimizer_would_have_no_moments(system: str) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    engine = started(system, model, optimizer=optimizer)
    steps(engine)
    copies: list[Callable[[], Any]] = [
        lambda: copy.deepcopy(optimizer),
        lambda: copy.copy(optimizer),
        lambda: torch.save(optimizer, io.BytesIO()),
        lambda: pickle.dumps(optimizer),
    ]
    for take in copies:
        with pytest.raises(UnsupportedError, match=r"would have none: optimizer\.state_dict\(\) has them"):
            take()
    assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))
    engine.close()
    for take in copies:
        with pytest.raises(UnsupportedError, match="the moments of this optimizer went with the engine that is closed"):
            take()
    unused = torch.optim.AdamW(model.parameters())
    started(system, model, optimizer=unused).close()
    assert copy.deepcopy(unused).param_groups
