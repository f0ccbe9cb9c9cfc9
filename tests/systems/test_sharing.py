"""Weights with several uses, initial values, and the one norm over all of them (cases C14, C21, C27)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from systems.errors import UnsupportedError
from systems.system import Engine
from tests.systems.every import MANAGED, SYSTEMS
from tests.systems.models_small import WIDTH, build, next_token_loss, tokens
from tests.systems.running import (
    RESIDENT,
    Run,
    assert_equal,
    finished,
    one_step,
    parameters_of,
    settings,
    start,
    train,
)
from tests.systems.setups import blocks_of, checkpoint_blocks, in_turn

STEPS = 3


class Towers(nn.Module):
    """Half of the small OPT with its tied head, gone through `rounds` times: a round's states are the next one's embeddings."""

    def __init__(self, rounds: int, checkpointing: str) -> None:
        super().__init__()
        self.opt, self.rounds = build("opt"), rounds
        self.opt.model.decoder.layers = self.opt.model.decoder.layers[:2]
        if checkpointing != "off":
            checkpoint_blocks(self.opt, reentrant=checkpointing == "reentrant")
        self.train()

    def forward(self, input_ids: torch.Tensor) -> Any:
        decoder, embed = self.opt.model.decoder, self.opt.get_input_embeddings()
        states = embed(input_ids)
        for _ in range(self.rounds - 1):
            states = decoder(inputs_embeds=states).last_hidden_state
        return self.opt(inputs_embeds=states)


TIGHT = ("elixir", "h3t", "random")  # these train in half of what resident takes


@cache
def towers(checkpointing: str, rounds: int) -> Run:
    accumulate = rounds  # in the twice-called tower a gradient comes up to four times a step
    asked = settings(accumulate=accumulate, clip=1.0)
    return train(start(RESIDENT, Towers(rounds, checkpointing), asked), tokens(STEPS, accumulate))


TOWERS = list(product(["off", "reentrant", "non-reentrant"], [1, 2]))


@pytest.mark.parametrize(("system", "checkpointing", "rounds"), in_turn(MANAGED, TOWERS, each=2))
@pytest.mark.one_in(5)
def test_tied_weights_in_towers_called_once_and_twice(system: str, checkpointing: str, rounds: int) -> None:
    """C14. The gradient of the tied weight is the sum over its uses; a step updates it once."""
    expected = towers(checkpointing, rounds)
    budget = int((0.5 if system in TIGHT else 0.7) * (expected.memory.device_peak_bytes or 0))
    asked = settings(accumulate=rounds, clip=1.0, device_memory=budget)
    run = train(start(SYSTEMS[system], Towers(rounds, checkpointing), asked), tokens(STEPS, rounds))
    assert_equal(expected, run)
    assert run.per_step[-1]["h2d_bytes"] > 0
    tied = run.adam["opt.model.decoder.embed_tokens.weight"]
    assert tied.steps == STEPS
    assert "opt.lm_head.weight" not in run.adam, "one parameter, one state"


@pytest.mark.parametrize(("checkpointing", "rounds"), TOWERS)
def test_the_norm_of_tied_weights_is_the_oracle_s(checkpointing: str, rounds: int) -> None:
    plain = plain_gradients(Towers(rounds, checkpointing), tokens(STEPS, rounds)[0])
    assert towers(checkpointing, rounds).norms[0] == pytest.approx(norm_of(plain), rel=1e-6)


def plain_gradients(model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    count = batch[:, :, 1:].numel()
    for micro in batch:
        next_token_loss(model, micro, count).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def norm_of(gradients: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(g.double().square().sum().item() for g in gradients.values()))


def scaled(sharing: str, scale: float = 1e4) -> nn.Module:
    """One layer's gradient is multiplied."""
    model = build("gpt2", tied=sharing == "tied")
    for parameter in blocks_of(model)[1].parameters():
        parameter.register_hook(lambda gradient: gradient * scale)
    return model


@cache
def with_one_large_gradient(sharing: str, accumulate: int) -> Run:
    return train(start(RESIDENT, scaled(sharing), settings(accumulate=accumulate, clip=1.0)), tokens(STEPS, accumulate))


SCALED = [("tied", 1), ("untied", 1), ("tied", 2)]


@pytest.mark.parametrize(("sharing", "accumulate"), SCALED)
def test_the_norm_is_the_oracle_s(sharing: str, accumulate: int) -> None:
    first = tokens(STEPS, accumulate)[0]
    oracle = norm_of(plain_gradients(scaled(sharing), first))
    assert with_one_large_gradient(sharing, accumulate).norms[0] == pytest.approx(oracle, rel=1e-6)
    assert oracle > 1e3 * norm_of(plain_gradients(scaled(sharing, 1.0), first)), "void: the scaled layer hardly shows"


@pytest.mark.parametrize(("system", "sharing", "accumulate"), in_turn(MANAGED, SCALED))
@pytest.mark.one_in(3)
def test_the_norm_and_the_factor_are_told(system: str, sharing: str, accumulate: int) -> None:
    """C27. One layer's gradient is scaled by 1e4; weights are on both tiers; tied weights count once."""
    expected = with_one_large_gradient(sharing, accumulate)
    budget = int(0.6 * (expected.memory.device_peak_bytes or 0))
    engine = start(SYSTEMS[system], scaled(sharing), settings(device_memory=budget, accumulate=accumulate, clip=1.0))
    run = train(engine, tokens(STEPS, accumulate), each_step=check_tiers if system == "elixir" else None)
    assert_equal(expected, run)
    for outcome in run.engine.outcomes:
        assert outcome.norm is not None
        assert outcome.norm * outcome.clip_factor == pytest.approx(1.0, rel=1e-5), "the norm after clipping"


def check_tiers(step: int, engine: Engine) -> None:
    tiers = {s.tier.value for s in engine.store.segments}  # type: ignore[attr-defined]
    assert step == 0 or tiers == {"device", "host"}


def custom() -> nn.Module:
    """C21: normal with a standard deviation of 0.02, a constant, one from numpy, one not contiguous."""
    model = build("opt")
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02, generator=generator)
        blocks = blocks_of(model)
        blocks[0].fc1.bias.fill_(0.125)  # type: ignore[union-attr, operator]
        values = np.linspace(-1.0, 1.0, WIDTH * WIDTH, dtype=np.float32).reshape(WIDTH, WIDTH)
        blocks[1].self_attn.k_proj.weight = nn.Parameter(torch.from_numpy(values))  # type: ignore[union-attr]
        blocks[2].self_attn.q_proj.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator).t())  # type: ignore[union-attr]
    return model


@pytest.mark.parametrize(("system", "dtype"), in_turn(SYSTEMS, [("fp32",), ("bf16",)]))
@pytest.mark.one_in(2)
def test_a_user_s_initial_values_arrive_bit_for_bit(system: str, dtype: str) -> None:
    truth = {n: p.detach().clone() for n, p in custom().named_parameters()}
    itemsize = 4 if dtype == "fp32" else 2
    model, seen = custom(), {}

    def look(module: nn.Module, args: Any) -> None:
        seen.update({n: p.detach().clone() for n, p in module.named_parameters()})

    block = blocks_of(model)[1]
    block.register_forward_pre_hook(look)
    with start(SYSTEMS[system], model, settings(dtype=dtype)) as engine:
        assert_same(parameters_of(engine), truth)
        one_step(engine, tokens(1, 1)[0])
    prefix = "model.decoder.layers.1."
    assert len(seen) > 10
    for name, value in seen.items():
        assert value.element_size() == itemsize
        assert torch.equal(value, truth[prefix + name].to(value.dtype)), f"{name} as computed with"


@cache
def custom_run() -> Run:
    return train(start(RESIDENT, custom(), settings()), tokens(STEPS, 1))


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.one_in(2)
def test_values_for_a_model_on_the_meta_device_are_asked_for_by_name(system: str) -> None:
    """The same as for a model that has them: filled in once a parameter, tied ones under their first name."""
    truth = {n: p.detach().clone() for n, p in custom().named_parameters()}
    asked: list[str] = []

    def fill(name: str, out: torch.Tensor) -> None:
        asked.append(name)
        out.copy_(truth[name])

    with torch.device("meta"):
        model = build("opt")
    lazy = train(start(SYSTEMS[system], model, settings(initial_weights=fill)), tokens(STEPS, 1))
    assert sorted(asked) == sorted(truth)
    assert_equal(custom_run(), lazy)


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_model_without_values_is_told_to_give_weights(system: str) -> None:
    """Named is the argument that the caller has; a checkpoint that would be loaded next does not stand for it."""
    with torch.device("meta"):
        model = build("opt")
    with pytest.raises(UnsupportedError, match="has no values .* give a folder that has them with `weights`, also where"):
        start(SYSTEMS[system], model, settings())


def assert_same(values: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> None:
    assert values.keys() == truth.keys()
    assert all(torch.equal(value, truth[name]) for name, value in values.items())


Edit = Callable[[dict[str, torch.Tensor]], None]


def halve(values: dict[str, torch.Tensor]) -> None:
    for value in values.values():
        value.mul_(0.5)


@cache
def halved_on_the_way(system: str) -> Run:
    engine = start(SYSTEMS[system], build("gpt2"), settings(dtype="bf16"))
    losses = []
    for number, batch in enumerate(tokens(4, 1)):
        losses.append(one_step(engine, batch))
        before = parameters_of(engine)
        with engine.summon() as values:
            halve(values)
        assert_same(parameters_of(engine), before)
        if number == 1:
            with engine.summon(write=True) as values:
                halve(values)
            halve(before)
            assert_same(parameters_of(engine), before)
    return finished(engine, losses)


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.one_in(2)
def test_values_written_under_summon_are_trained_on(system: str) -> None:
    """Whatever is on the device at the time; without write=True a change is dropped."""
    assert_equal(halved_on_the_way("resident"), halved_on_the_way(system))
