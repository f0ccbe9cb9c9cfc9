"""Calls of a managed model that come past the engine: counted, given room, and nothing is left of them, whatever they raise."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from systems.errors import OutOfMemoryError
from systems.recipe.model.parameters import ManagedParameter
from systems.system import Engine
from tests.systems.models_plain import Stack, features, squared_error
from tests.systems.models_small import tokens
from tests.systems.running import RESIDENT, Run, assert_equal, finished, one_step, settings, start, train
from tests.systems.setups import SYSTEMS, in_turn

ALL = {"resident": (RESIDENT, None), **SYSTEMS}
TIGHT = 250_000  # bytes; training needs more than twice as many where nothing moves
IDS = tokens(4, 1)
INPUT = features(IDS[0, 0])


class Parts(nn.Module):
    """A model with an encoder, which is no unit: its blocks are."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Stack()
        self.tail = nn.Linear(48, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tail(self.encoder(x))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)


def parts() -> nn.Module:
    torch.manual_seed(0)
    return Parts()


CALLS: Mapping[str, Callable[[Any], torch.Tensor]] = MappingProxyType(
    {
        "model": lambda model: model(INPUT),
        "forward": lambda model: model.forward(INPUT),
        "method": lambda model: model.encode(INPUT),
        "encoder": lambda model: model.encoder(INPUT),
        "block": lambda model: model.encoder.blocks[2](INPUT),
        "block's forward": lambda model: model.encoder.blocks[2].forward(INPUT),
        "unit": lambda model: model.tail(INPUT),
    }
)


@cache
def reference() -> Run:
    return train(start(RESIDENT, parts(), settings()), IDS, squared_error)


def started(system: str, model: nn.Module, budget: int = TIGHT, **given: Any) -> Engine:
    chosen, options = ALL[system]
    return start(chosen, model, settings(**({} if system == "resident" else {"device_memory": budget}), **given), options)


def account(engine: Any) -> Any:
    return engine.device.account


def left(engine: Any) -> tuple[Any, ...]:
    """What a call might leave: bytes, modes, holds, bundles that it fetched or drove away."""
    residency = getattr(engine, "residency", None)
    held = None if residency is None else [dict(m.holds) for m in residency.bundles]
    there = None if residency is None else residency.resident()
    return account(engine).live, len(_get_current_dispatch_mode_stack()), held, there, torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("system", ALL)
@pytest.mark.one_in(2)
def test_a_call_past_the_engine_is_one_of_the_engine_s(system: str) -> None:
    """However it is made and with whatever of autograd: right, within the budget, and nothing of training changes."""
    plain, losses = parts(), []
    model = parts()
    with started(system, model) as engine:
        for step, batch in enumerate(IDS):
            for call in CALLS.values() if step in (0, 2) else ():
                before = left(engine)
                for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
                    with mode():
                        got = call(model)
                    if step == 0:
                        with torch.no_grad():
                            assert torch.equal(got, call(plain))
                    assert account(engine).live > before[0], "its output is counted"
                    del got
                    assert left(engine) == before
            losses.append(one_step(engine, batch, squared_error))
        assert_equal(reference(), finished(engine, losses))
        memory = engine.memory()
        assert (memory.device_peak_bytes or 0) <= (memory.device_budget_bytes or 0)


class BrokenError(Exception):
    pass


@pytest.mark.parametrize(("system", "broken"), in_turn(ALL, [(BrokenError,), (KeyboardInterrupt,)]))
@pytest.mark.one_in(2)
def test_nothing_is_left_of_a_call_that_breaks_off(system: str, broken: type[BaseException]) -> None:
    """At any depth, in the forward itself and in hooks before and after it; in no step, and in one."""
    model: Any = parts()

    def break_off(*_: Any) -> None:
        raise broken

    with started(system, model) as engine:
        losses = [one_step(engine, batch, squared_error) for batch in IDS[:2]]
        before = left(engine)
        for point in (model.tail, model.encoder.blocks[3], model.encoder.blocks[1].norm, model.encoder):
            for register in (point.register_forward_pre_hook, point.register_forward_hook):
                handle = register(break_off)
                for call in (model, model.forward, model.encoder, model.encoder.forward):
                    within = {model.tail: (model, model.forward), model.encoder: (model, model.forward)}
                    if call not in within.get(point, (call,)):
                        continue
                    for mode in (torch.no_grad, torch.enable_grad):
                        with pytest.raises(broken), mode():
                            call(INPUT)
                        assert left(engine) == before
                handle.remove()
        losses += [one_step(engine, batch, squared_error) for batch in IDS[2:]]
        assert_equal(reference(), finished(engine, losses))


@pytest.mark.parametrize("system", SYSTEMS)
def test_room_that_is_not_there_is_said_as_the_engine_says_it(system: str) -> None:
    model: Any = parts()
    with started(system, model) as engine:
        losses = [one_step(engine, batch, squared_error) for batch in IDS[:2]]
        before, others = left(engine), account(engine).other
        for call in (model, model.encoder, model.tail):
            with pytest.raises(OutOfMemoryError, match="out of device memory"), torch.no_grad():
                call(INPUT.repeat(1000, 1))
            assert left(engine)[1:3] == before[1:3] and account(engine).other == others
        losses += [one_step(engine, batch, squared_error) for batch in IDS[2:]]
        assert_equal(reference(), finished(engine, losses))


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_loss_of_the_model_itself_is_refused_in_words(system: str) -> None:
    model: Any = parts()
    with started(system, model, budget=1 << 30) as engine:
        loss = model(INPUT).sum()
        with pytest.raises(ValueError, match="call the engine first"):
            engine.backward(loss)
        for combined in (False, True):
            more = squared_error(engine, IDS[0, 0], 1)
            with pytest.raises(RuntimeError, match=r"made by calling the model itself: call the engine instead"):
                engine.backward(loss + more if combined else loss)
            loss = model(INPUT).sum()
        losses = [one_step(engine, batch, squared_error) for batch in IDS]
        assert_equal(reference(), finished(engine, losses))


@cache
def with_a_module_s_own_output(system: str) -> Run:
    def loss(model: Any, micro: torch.Tensor, count: int) -> torch.Tensor:
        inside: Any = model.module
        return squared_error(model, micro, count) + inside.tail(inside.encoder.blocks[1](INPUT)).square().mean()

    return train(started(system, parts(), budget=400_000), IDS, loss)


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.one_in(2)
def test_a_module_called_within_a_step_is_part_of_it(system: str) -> None:
    """A loss may be made of what the engine returned and of a module's own output."""
    assert_equal(with_a_module_s_own_output("resident"), with_a_module_s_own_output(system))


def test_a_copy_of_resident_s_model_is_the_copy_s_own() -> None:
    """An average of weights is often one: its calls are not counted, and it lives on."""
    model = parts()
    with started("resident", model) as engine:
        average: Any = copy.deepcopy(model)
        with torch.no_grad():
            expected = average(INPUT)
        one_step(engine, IDS[0], squared_error)
        before = left(engine)
        with torch.no_grad():
            assert not torch.equal(model(INPUT), expected)
            for call in (average, average.forward, average.encoder.blocks[0]):
                call(INPUT)
            assert torch.equal(average(INPUT), expected) and left(engine) == before
    with torch.no_grad():
        assert torch.equal(average(INPUT), expected)


def copied_forward(model: nn.Module) -> Any:
    forward: Any = copy.deepcopy(model.forward)
    return forward.__self__


def saved(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    assert b"systems.substrate" not in file.getvalue(), "it is read where there is no engine"
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(("take", "recompute"), in_turn([copy.deepcopy, saved, copied_forward], [("none",), ("full",)]))
@pytest.mark.one_in(2)
def test_a_copy_of_resident_s_model_is_the_model(take: Callable[[nn.Module], Any], recompute: str) -> None:
    """Whole, with a `forward` that a module was given itself; it can be compiled, trained and given to another engine."""
    model: Any = parts()
    model.tail.forward = functools.partial(scaled, model.encoder.blocks[1])
    with torch.no_grad():
        plain = model(INPUT)
    with started("resident", model, recompute=recompute) as engine:
        for inside in (True, False):
            copied = take(model)
            assert {type(p) for p in nn.ModuleList([copied]).parameters()} <= {nn.Parameter, ManagedParameter}
            assert copied.tail.forward.args == (copied.encoder.blocks[1],)
            with torch.no_grad():
                assert torch.equal(copied(INPUT), plain)
                assert inside or torch.equal(torch.compile(copied, backend="eager")(INPUT), plain)
            if inside:
                engine.backward(engine(INPUT).sum())
                engine.discard()
    with started("elixir", copied, recompute=recompute, budget=400_000) as engine:
        one_step(engine, IDS[0], squared_error)
    assert model.tail.forward.func is copied.tail.forward.func is scaled and "forward" not in vars(model.encoder.blocks[0])


def scaled(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return 2 * block(x)


@pytest.mark.parametrize("system", ALL)
@pytest.mark.one_in(2)
def test_a_block_s_own_forward_is_there_after_the_engine(system: str) -> None:
    model: Any = parts()
    own = model.encoder.blocks[1].forward = functools.partial(scaled, model.tail)
    with started(system, model, recompute="full", budget=400_000) as engine:
        one_step(engine, IDS[0], squared_error)
    assert model.encoder.blocks[1].forward is own and "forward" not in vars(model.encoder.blocks[0])


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=4, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=None, pad_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).eval()


def generated(model: Any, use_cache: bool) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        found: torch.Tensor = model.generate(IDS[0, 0] % 64, max_new_tokens=4, do_sample=True, use_cache=use_cache)
    return found


@pytest.mark.parametrize("system", ALL)
@pytest.mark.one_in(2)
def test_generate_finds_room_and_the_same_tokens(system: str) -> None:
    expected, model = [generated(gpt2(), use_cache) for use_cache in (True, False)], gpt2()
    with started(system, model, budget=230_000) as engine:
        before = left(engine)
        for tokens_then, use_cache in zip(expected, (True, False), strict=True):
            assert torch.equal(generated(model, use_cache), tokens_then)
            assert left(engine) == before
        memory = engine.memory()
        assert 0 < (memory.device_peak_bytes or 0) <= (memory.device_budget_bytes or 0)
        assert system == "resident" or engine.counters()["h2d_bytes"] > 0, "void: nothing moved"
