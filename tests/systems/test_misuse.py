"""What a user does wrong is refused in words, and what is refused leaves the engine usable."""

from __future__ import annotations

import copy
import io
import math
import pickle
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import systems
from systems.errors import BudgetError, UnsupportedError
from systems.system import Engine
from tests.systems.every import MANAGED, SYSTEMS
from tests.systems.models_plain import CASES, DIM, build
from tests.systems.models_small import tokens
from tests.systems.running import (
    RESIDENT,
    assert_equal,
    elixir,
    finished,
    one_step,
    settings,
    start,
    train,
)

LOSS = CASES["stack"].loss
BATCH = tokens(1, 1)[0]


def started(system: str, model: nn.Module | None = None, **given: Any) -> Engine:
    return start(SYSTEMS[system], build("stack") if model is None else model, settings(**given))


def assert_still_right(engine: Engine, accumulate: int = 1) -> None:
    """What follows is what a fresh resident engine does."""
    ids = tokens(3, accumulate)
    expected = train(start(RESIDENT, build("stack"), settings(accumulate=accumulate)), ids, LOSS)
    losses = [one_step(engine, batch, LOSS) for batch in ids]
    for outcome in engine.outcomes[: -len(losses)]:
        assert outcome is None, "void: steps were taken before"
    assert_equal(expected, finished(engine, losses))


@pytest.mark.parametrize("system", SYSTEMS)
def test_loss_backward_is_not_engine_backward(system: str) -> None:
    engine = started(system)
    loss = LOSS(engine, BATCH[0], 1)
    with pytest.raises(RuntimeError, match=r"call engine.backward\(loss\) instead of loss.backward\(\)"):
        loss.backward()
    assert all(p.grad is None for p in engine.module.parameters())
    assert_still_right(engine)


@pytest.mark.parametrize("system", SYSTEMS)
def test_step_before_any_micro_batch_had_its_backward(system: str) -> None:
    engine = started(system, accumulate=2)
    for _ in range(2):
        with pytest.raises(ValueError, match="^step: 0 of 2 micro-batches"):
            engine.step()
        LOSS(engine, BATCH[0], 1)
    engine.close()


@pytest.mark.parametrize("system", SYSTEMS)
def test_more_backward_passes_than_micro_batches(system: str) -> None:
    engine = started(system)
    engine.backward(LOSS(engine, BATCH[0], 1))
    extra = LOSS(engine, BATCH[0], 1)
    with pytest.raises(ValueError, match="accumulate=1"):
        engine.backward(extra)
    engine.close()


@pytest.mark.parametrize("system", MANAGED)
def test_backward_without_forward(system: str) -> None:
    engine = started(system)
    with pytest.raises(ValueError, match="call the engine first"):
        engine.backward(torch.zeros((), requires_grad=True))
    assert_still_right(engine)


@pytest.mark.parametrize("system", SYSTEMS)
def test_nothing_works_after_close(system: str) -> None:
    engine = started(system)
    one_step(engine, BATCH, LOSS)
    loss = LOSS(engine, BATCH[0], 1)
    engine.close()
    uses: list[Callable[[], Any]] = [
        lambda: LOSS(engine, BATCH[0], 1),
        lambda: engine.backward(loss),
        engine.step,
        lambda: engine.summon().__enter__(),
    ]
    for use in uses:
        with pytest.raises(ValueError, match="the engine is closed"):
            use()
    engine.close()
    assert engine.counters()["skipped_steps"] == 0 and engine.memory().device_budget_bytes


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("how", ["model", "module", "in place", "block in place", "forward"])
def test_a_compiled_model_is_refused(system: str, how: str) -> None:
    model: Any = build("stack")
    if how == "model":
        model = torch.compile(model, backend="eager")
    elif how == "module":
        model.head = torch.compile(model.head, backend="eager")
    elif how == "in place":
        model.compile(backend="eager")
    elif how == "forward":
        model.blocks[1].forward = torch.compile(model.blocks[1].forward, backend="eager")
    else:
        model.blocks[1].compile(backend="eager")
    with pytest.raises(UnsupportedError, match="torch.compile hides modules|the emulated device, which sees every operation"):
        start(SYSTEMS[system], model, settings())


@pytest.mark.parametrize("system", MANAGED)
def test_compiling_a_managed_module_is_refused(system: str) -> None:
    engine = started(system)
    module: Any = engine.module
    block = module.blocks[2]
    block.compile(backend="eager")
    with pytest.raises(UnsupportedError, match="compile neither the model, its modules nor the engine"):
        LOSS(engine, BATCH[0], 1)
    block._compiled_call_impl = None
    assert_still_right(engine)


def adam_with(**flags: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.AdamW(model.parameters(), **flags)


class MyAdam(torch.optim.AdamW):
    """A subclass may do anything."""


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1), "torch.optim.Adagrad is not supported: give "),
        (lambda m: MyAdam(m.parameters()), "MyAdam is not supported"),
        (adam_with(amsgrad=True), "amsgrad=True"),
        (adam_with(maximize=True), "maximize=True"),
        (adam_with(differentiable=True, foreach=False), "differentiable=True"),
        (
            lambda m: torch.optim.AdamW([*m.parameters(), nn.Parameter(torch.ones(3))]),
            "a parameter of shape .3,. that is not",
        ),
        (lambda m: torch.optim.AdamW(m.head.parameters()), "trainable but in no group of the optimizer"),
    ],
)
@pytest.mark.parametrize("system", SYSTEMS)
def test_an_optimizer_that_cannot_be_followed_is_refused(system: str, make: Any, says: str) -> None:
    model = build("stack")
    with pytest.raises(UnsupportedError, match=says):
        start(SYSTEMS[system], model, settings(optimizer=make(model)))
    values = {n: p.detach().clone() for n, p in model.named_parameters()}
    train(start(RESIDENT, model, settings()), tokens(1, 1), LOSS)  # it can still be given to somebody
    assert len(values) == len(list(model.parameters()))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("system", SYSTEMS)
def test_gradients_asked_for_where_they_are_not(system: str, accumulate: int) -> None:
    """clip_grad_norm_ would find none and say 0; a user's optimizer.step would do nothing. Both are refused instead."""
    model = build("stack")
    optimizer = torch.optim.AdamW(model.parameters())
    engine = start(SYSTEMS[system], model, settings(accumulate=accumulate))
    optimizer.zero_grad()
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) == 0, "before backward there is nothing to clip"
    for micro in tokens(1, accumulate)[0]:
        engine.backward(LOSS(engine, micro, 30 * accumulate))
        for use in (
            lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0),
            optimizer.step,
            optimizer.zero_grad,
            lambda: model.head.weight.grad,
        ):
            with pytest.raises(RuntimeError, match="clip with the argument `clip` of initialize"):
                use()
    engine.step()
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    engine.close()
    assert {type(p) for p in model.parameters()} == {nn.Parameter}, "a closed engine lets go of the parameters"


@pytest.mark.parametrize("system", MANAGED)
def test_a_gradient_that_a_hook_of_the_user_s_asks_for(system: str) -> None:
    """A hook that runs after the engine's would find None and go on in silence; one that runs before finds it."""
    model = build("stack")
    norms: list[float] = []
    handle = model.head.weight.register_post_accumulate_grad_hook(lambda p: norms.append(p.grad.norm().item()))
    engine = started(system, model)
    one_step(engine, BATCH, LOSS)
    assert len(norms) == 1 and norms[0] > 0
    handle.remove()
    handle = model.head.weight.register_post_accumulate_grad_hook(lambda p: norms.append(0.0 if p.grad is None else 1.0))
    with pytest.raises(RuntimeError, match=r"gradients are with the engine until engine\.step\(\)"):
        one_step(engine, BATCH, LOSS)
    handle.remove()
    assert one_step(engine, BATCH, LOSS) > 0
    engine.close()


@pytest.mark.parametrize("system", MANAGED)
def test_a_copy_of_the_model_would_hold_no_weights(system: str) -> None:
    """A checkpoint full of NaN shows itself only when it is wanted, so the copy is refused."""
    model = build("stack")
    engine = started(system, model)
    one_step(engine, BATCH, LOSS)
    copies = [
        model.state_dict,
        model.blocks[1].state_dict,
        lambda: copy.deepcopy(model),
        lambda: torch.save(list(model.parameters()), io.BytesIO()),
        lambda: torch.save(model, io.BytesIO()),
        lambda: pickle.dumps(model.blocks[1]),
    ]
    for take in copies:
        with pytest.raises(UnsupportedError, match=r"engine\.state_dict\(\) and engine\.save_pretrained\(folder\) have them"):
            take()
    groups = torch.optim.AdamW(model.parameters()).param_groups
    for take in (lambda: copy.deepcopy(groups), lambda: torch.save(groups, io.BytesIO())):
        with pytest.raises(UnsupportedError, match=r"\(of an optimizer's groups, take all but 'params'\)"):
            take()
    assert one_step(engine, BATCH, LOSS) > 0
    engine.close()
    for take in copies:
        take()


@pytest.mark.parametrize("system", SYSTEMS)
def test_an_engine_is_not_copied(system: str) -> None:
    with started(system) as engine:
        for take in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(UnsupportedError, match=r"not copied or pickled: systems\.save_checkpoint\(engine, folder\)"):
                take(engine)


def test_sparse_gradients_are_refused_by_the_module_that_makes_them() -> None:
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4))
    with pytest.raises(UnsupportedError, match="module 0 makes sparse gradients, which cannot be kept: leave sparse off"):
        started("elixir", model)


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_parameters_keep_their_identity(system: str) -> None:
    model = build("stack")
    before = dict(model.named_parameters())
    engine = start(SYSTEMS[system], model, settings())
    assert all(p is before[n] and isinstance(p, nn.Parameter) for n, p in model.named_parameters())
    assert_still_right(engine)


def edit(model: Any) -> None:
    with torch.no_grad():
        model.blocks[0].up.weight.mul_(0.5)


@pytest.mark.parametrize("taken", [0, 2])
@pytest.mark.parametrize("system", SYSTEMS)
def test_editing_parameters_behind_the_engine_s_back(system: str, taken: int) -> None:
    """The engine's masters would not follow: the edit would vanish with the next update, so it is refused."""
    engine = started(system)
    for batch in tokens(taken, 1):
        one_step(engine, batch, LOSS)
    edit(engine.module)
    with pytest.raises(UnsupportedError, match=r"parameter blocks\.0\.[a-z.]+ was edited in place.*summon\(write=True\)"):
        one_step(engine, BATCH, LOSS)
    engine.close()


@pytest.mark.parametrize("system", SYSTEMS)
def test_unfreezing_a_parameter_that_has_no_state(system: str) -> None:
    model = build("frozen-trunk")
    engine = start(SYSTEMS[system], model, settings())
    one_step(engine, BATCH, LOSS)
    model.blocks[1].up.weight.requires_grad_(True)
    with pytest.raises(UnsupportedError, match=r"blocks\.1\.up\.weight was frozen when the engine was made"):
        one_step(engine, BATCH, LOSS)
    engine.close()


@pytest.mark.parametrize("system", SYSTEMS)
def test_freezing_a_parameter_stops_its_updates(system: str) -> None:
    runs = []
    for chosen in ("resident", system):
        model = build("stack")
        engine = start(SYSTEMS[chosen], model, settings())
        losses = []
        for number, batch in enumerate(tokens(4, 1)):
            if number == 2:
                model.blocks[1].requires_grad_(False)
            losses.append(one_step(engine, batch, LOSS))
        runs.append(finished(engine, losses))
    assert_equal(*runs)
    assert runs[1].adam["blocks.1.up.weight"].steps == 2 and runs[1].adam["blocks.0.up.weight"].steps == 4


@pytest.mark.parametrize("system", SYSTEMS)
def test_summon_in_the_middle_of_a_step(system: str) -> None:
    engine = started(system)
    loss = LOSS(engine, BATCH[0], 1)
    for after in (lambda: None, lambda: engine.backward(loss)):
        after()
        for take in (engine.summon, lambda: engine.summon(write=True), lambda: nullcontext(engine.training_state())):
            with pytest.raises(UnsupportedError, match="a step is in progress"):
                take().__enter__()
    engine.discard()
    with torch.no_grad():
        LOSS(engine, BATCH[0], 1)
    assert engine.training_state()
    with engine.summon(write=True):
        pass
    assert_still_right(engine)


def test_a_model_without_parameters_or_with_odd_ones() -> None:
    for model, says in (
        (nn.ReLU(), "no parameters"),
        (nn.Linear(4, 4, dtype=torch.complex64), "only dense floats of 16 bits or more train"),
    ):
        with pytest.raises(UnsupportedError, match=says):
            start(elixir(), model, settings())


def test_the_public_function_says_what_is_wrong_in_one_line() -> None:
    given: dict[str, Any] = {"device": "cpu", "dtype": "fp32", "host_memory": "1GiB", "device_memory": "8MiB"}
    for changes, kind, says in (
        ({"system": "elxir"}, ValueError, "did you mean elixir"),
        ({"options": {"prefech": 3}}, ValueError, "prefech"),
        ({"options": {"prefetch": -1}}, ValueError, "prefetch"),
        ({"system": "resident", "disk": "."}, ValueError, "disk: resident keeps no states on a disk"),
        ({"device_memory": "8 apples"}, ValueError, "8 apples"),
        ({"device_memory": "4KiB"}, BudgetError, "`device_memory`"),
        ({"recompute": (7,)}, ValueError, "there is no block 7: the model has blocks 0 to 3"),
    ):
        with pytest.raises(kind, match=says) as caught:
            systems.initialize(build("stack"), **(given | changes))
        assert "\n" not in str(caught.value)
    with systems.initialize(build("stack"), **given) as engine:
        assert one_step(engine, BATCH, LOSS) > 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"device": "tpu"}, "device is 'tpu': give 'cuda', 'cpu' for the emulated one, or such a torch.device"),
        ({"dtype": "fp8"}, "dtype is 'fp8'"),
        ({"dtype": torch.float64}, "dtype is torch.float64: give 'bf16' or torch.bfloat16, "),
        ({"dtype": ["fp32"]}, "dtype is ['fp32']"),
        ({"device": torch.device("meta")}, "device is device(type='meta')"),
        ({"device": 0}, "device is 0"),
        ({"device": "cpu:1"}, "device is 'cpu:1'"),
        ({"device_memory": -5}, "device_memory is -5: give a whole number of at least 0"),
        ({"device_memory": 4e7}, "device_memory is 40000000.0"),
        ({"host_memory": math.nan}, "host_memory is nan"),
        ({"accumulate": 0}, "accumulate is 0: give a whole number of at least 1"),
        ({"accumulate": 1.5}, "accumulate is 1.5"),
        ({"clip": math.nan}, "clip is nan: give the finite norm"),
        ({"clip": -1.0}, "clip is -1.0"),
        ({"clip": None}, "clip is None"),
        ({"recompute": "some"}, "recompute is 'some': give 'none' or 'full'"),
        *[({"recompute": each}, f"recompute is {each!r}: give 'none', 'full' or numbers") for each in (True, None, 3, 0.5)],
        ({"options": ["prefetch=4"]}, "options is list: give a dict"),
        ({"model": 5}, "model is int: give a torch.nn.Module"),
    ],
)
@pytest.mark.parametrize("system", ["resident", "elixir"])
def test_an_argument_of_another_kind_is_refused_by_name(system: str, given: dict[str, Any], said: str) -> None:
    arguments: dict[str, Any] = {"model": nn.Linear(4, 4), "device": "cpu", "device_memory": "8MiB", "dtype": "fp32"} | given
    with pytest.raises(ValueError, match=re.escape(said)):
        systems.initialize(system=system, **arguments)


def test_a_budget_beyond_every_machine_is_only_a_budget() -> None:
    engine, expected = started("elixir", device_memory=1 << 60), started("resident")
    assert one_step(engine, BATCH, LOSS) == one_step(expected, BATCH, LOSS)
    assert engine.memory().device_budget_bytes == 1 << 60
    engine.close()
    expected.close()


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_model_is_one_engine_s_at_a_time(system: str) -> None:
    """Its values are where the engine keeps them: a second engine would train something else."""
    model = build("stack")
    engine = started(system, model)
    with pytest.raises(UnsupportedError, match="the model was given to an engine before"):
        started(system, model)
    with pytest.raises(UnsupportedError, match="module 0 was given to an engine before"):
        started(system, nn.Sequential(model, nn.Linear(4, 4)))
    assert one_step(engine, BATCH, LOSS) > 0
    engine.close()
    with started(system, model) as again:
        assert one_step(again, BATCH, LOSS) > 0


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_module_without_values_may_be_in_many_models(system: str) -> None:
    """A library has one activation for all models that it makes: they train beside each other as each does alone."""
    shared = nn.GELU()

    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(DIM, DIM), shared, nn.Linear(DIM, DIM))

    def trained(*engines: Any) -> list[list[float]]:
        return [[one_step(engine, BATCH, LOSS) for engine in engines] for _ in range(3)]

    alone = []
    for seed in (0, 1):
        with started(system, model(seed)) as engine:
            alone.append([loss for [loss] in trained(engine)])
    with started(system, model(0)) as first, started(system, model(1)) as second:
        assert [list(each) for each in zip(*trained(first, second), strict=True)] == alone


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_model_that_was_refused_can_be_given_again(system: str) -> None:
    model = build("stack")
    with pytest.raises(BudgetError):
        started(system, model, device_memory=4096, host_memory=4096)
    with started(system, model) as engine:
        assert one_step(engine, BATCH, LOSS) > 0


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("averages", [True, False])
def test_a_batch_norm_with_averages_needs_fp32(system: str, averages: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, track_running_stats=averages))
    if averages:
        with pytest.raises(UnsupportedError, match=r"parameter 1\.weight is of a batch norm.*use dtype fp32"):
            started(system, model, dtype="bf16")
    dtype = torch.float32 if averages else torch.bfloat16
    with started(system, model, dtype="fp32" if averages else "bf16") as engine:
        engine.backward(engine(torch.ones(4, 8, dtype=dtype)).float().sum())
        engine.step()
